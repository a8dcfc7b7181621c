"""Which learners are connected, since when one takes no part and why, and for whom a round still waits.

Whether a learner is connected depends on machines and networks alone. A round waits `grace_s` for one whose
connection has ended, counted once from that moment, so a learner that is away for a day costs the other learners a
few seconds of it. One that has not been seen since the server started is waited for as long as a round may last,
since learners may start later than their server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

NOT_SEEN = "not connected since the server started"
LOST = "its connection ended"
NO_CLIENTS = "too few clients wait there"
REFUSES = "it cannot take part"


@dataclass(frozen=True)
class Absence:
    """Why a learner takes no part, in one of few phrases of ours, and since when (Unix time)."""

    since: float
    why: str


@dataclass
class Changes:
    """What a look at the connections has found."""

    away: list[str] = field(default_factory=list)
    """Learners that rounds no longer wait for."""
    back: list[tuple[str, float]] = field(default_factory=list)
    """Those of them that are connected again, and how many seconds they were away."""


class Attendance:
    """Who is connected, by the last `look`."""

    def __init__(
        self,
        learners: Iterable[str],
        grace_s: float,
        first_s: float,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``first_s``: how long to wait for a learner that has not been seen yet."""
        self._names, self._grace_s, self._first_s = sorted(learners), grace_s, first_s
        self._clock, self._wall = clock, wall
        self._gone_at: dict[str, float] = {}
        self._seen: set[str] = set()
        self._away: set[str] = set()
        self._absences: dict[str, Absence] = {}

    @property
    def away(self) -> frozenset[str]:
        """Learners whose connection ended longer than the grace ago."""
        return frozenset(self._away)

    @property
    def absences(self) -> dict[str, Absence]:
        """Everyone who takes no part now, why, and since when."""
        return dict(self._absences)

    def look(self, connected: Collection[str]) -> Changes:
        """Take note of who is connected now."""
        now, found = self._clock(), Changes()
        for name in self._names:
            if name in connected:
                self._seen.add(name)
                gone_at = self._gone_at.pop(name, now)
                if self._absences.get(name, Absence(0.0, "")).why in (LOST, NOT_SEEN):
                    del self._absences[name]
                if name in self._away:
                    self._away.discard(name)
                    found.back.append((name, now - gone_at))
                continue
            if name not in self._gone_at:
                self._gone_at[name] = now
                self.absent(name, LOST if name in self._seen else NOT_SEEN)
            wait_s = self._grace_s if name in self._seen else max(self._grace_s, self._first_s)
            if name not in self._away and now - self._gone_at[name] >= wait_s:
                self._away.add(name)
                found.away.append(name)
        return found

    def absent(self, name: str, why: str) -> None:
        """A learner takes no part, for this reason; the same reason again keeps its time."""
        known = self._absences.get(name)
        if known is None or known.why != why:
            self._absences[name] = Absence(self._wall(), why)

    def took_part(self, name: str) -> None:
        """Its message counts."""
        self._absences.pop(name, None)
