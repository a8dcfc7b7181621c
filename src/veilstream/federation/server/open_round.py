"""The server's state of a round in flight; none of it is saved."""

from __future__ import annotations

from dataclasses import dataclass, field

from veilstream.federation.keys.identity import PrivateKey
from veilstream.federation.protocol.fold import ClosedRound
from veilstream.federation.protocol.messages import Request, digest

_ASKED = 16  # requests to one node that may still be answered: it may never answer any


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

    head: bytes
    at: float
    node: str


@dataclass
class Enrolling:
    """A node that has been asked who it is."""

    asked: dict[str, Request] = field(default_factory=dict)
    """The newest requests by their hashes; any of them may be answered."""
    again_at: float = 0.0

    def ask(self, request: Request, key: PrivateKey) -> bytes:
        """The request as it is sent; from now on it may be answered."""
        sent = request.sign(key)
        self.asked[digest(sent)] = request
        if len(self.asked) > _ASKED:
            del self.asked[next(iter(self.asked))]  # the oldest
        return sent


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
    published: int | None = None
    """After how many rounds the model was published that the body ends with; None: it holds x^r alone."""
    scan_at: float = 0.0
    """Time of the next scan for learners to ask."""
    judge_at: float = 0.0
    """Time of the next check whether the round is complete."""
    asked: dict[str, Asked] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
