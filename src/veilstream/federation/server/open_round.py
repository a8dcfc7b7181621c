"""What the server remembers of a conversation while it lasts; nothing of it is kept."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from veilstream.federation.protocol.fold import ClosedRound

_ASKED = 16  # requests to one node that may still be answered: it may never answer any


@dataclass(frozen=True)
class Standing:
    """For whoever watches."""

    round: int
    rounds: int
    answered: tuple[str, ...]
    missing: tuple[str, ...]
    closed: ClosedRound | None = None
    """The round that has just been closed; None while one is open."""
    seconds: float = 0.0
    """Of that round."""


@dataclass
class Asked:
    """What a learner has been asked in this round."""

    head: bytes
    at: float
    node: str


@dataclass
class Enrolling:
    """A node that has been asked who it is."""

    asked: deque[str] = field(default_factory=lambda: deque(maxlen=_ASKED))
    """Hashes of the newest requests; any of them may be answered."""
    again_at: float = 0.0


@dataclass
class Place:
    """Where a learner sits in the transport."""

    node: str
    daemon: str


@dataclass
class OpenRound:
    """A round in flight."""

    began: float
    body: bytes = b""
    """What all learners are sent."""
    hashed_body: str = ""
    scan_at: float = 0.0
    """When it is next looked through all learners for those to be asked."""
    judge_at: float = 0.0
    """When it is next looked through them for whether all are in that will come."""
    asked: dict[str, Asked] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    """Who has no clients now."""
