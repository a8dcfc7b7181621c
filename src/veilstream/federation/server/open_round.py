"""The server's state of a round in flight; none of it is saved."""

from __future__ import annotations

from dataclasses import dataclass, field

from veilstream.federation.protocol.fold import ClosedRound


@dataclass(frozen=True)
class Standing:
    """Where the run stands, for those who watch it."""

    round: int
    rounds: int
    answered: tuple[str, ...]
    missing: tuple[str, ...]
    closed: ClosedRound | None = None
    """The round that has just been closed; None while one is open."""
    seconds: float = 0.0


@dataclass
class Asked:
    """What a learner has been asked in this round."""

    at: float
    node: str


@dataclass
class Place:
    """Where a learner sits in the transport."""

    node: str
    daemon: str


@dataclass
class OpenRound:
    """A round in flight."""

    began: float
    scan_at: float = 0.0
    """Time of the next scan for learners to ask."""
    judge_at: float = 0.0
    """Time of the next check whether the round is complete."""
    asked: dict[str, Asked] = field(default_factory=dict)
