"""Where a deployed learner's clients come from: what a source is, and people who call.

A source offers clients, one at a time. It is asked before a round whether enough of them are there
(`ClientSource.ready`), so that a learner does not spend its noise on nobody. Records are consumed
before they are used: one that is lost costs a little accuracy, one that is used twice would cost
privacy. A table has a bookmark for that (`veilstream.streams.table_source`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from veilstream.learning.admission import Answer
from veilstream.learning.tasks import Sample

__all__ = [
    "AlwaysReady",
    "ClientSource",
    "LiveSource",
    "MayTake",
    "Observe",
    "Offered",
    "SourceBookmark",
    "Wanted",
]


@dataclass(frozen=True)
class SourceBookmark:
    """How far a source has been read, in its own words; a learner stores it and gives it back."""

    source: str
    """Which source: a learner may read several, one after the other."""
    text: str


class Offered(NamedTuple):
    """A record as a source hands it over."""

    tag: str | bytes
    """Whose it is: the same whenever the same person comes."""
    sample: Sample
    bookmark: SourceBookmark | None = None
    """Where the source stands behind it."""


class Observe(Protocol):
    """How a source hands a client over."""

    def __call__(
        self, tag: str | bytes, sample: Sample, bookmark: SourceBookmark | None = None
    ) -> Answer:
        """``bookmark`` is where the source stands behind this record."""


Wanted = Callable[[], int]
"""How many more clients the round can take."""
MayTake = Callable[[str | bytes], bool]
"""Whether a client could take a step now, as far as the promise goes."""


class ClientSource(Protocol):
    """What a daemon asks for clients."""

    def ready(self, minimum: int, most: int, may_take: MayTake) -> bool:
        """Whether at least so many clients wait who can be taken; asked before a round begins.

        Args:
            minimum: how many there must be.
            most: how many the round can take: a source that reads ahead needs no more.
            may_take: leaves people out who took part as often as they may.

        """

    def serve(self, round_: int, observe: Observe, wanted: Wanted) -> None:
        """Offer clients for this round until no more are wanted, or none comes."""


class AlwaysReady:
    """Of a source that cannot tell beforehand whether anybody comes: every round is begun."""

    def ready(self, minimum: int, most: int, may_take: MayTake) -> bool:
        """Whatever is asked."""
        return True


class LiveSource(AlwaysReady):
    """People who call: each waits until a learner takes its data, and nothing is put by."""

    def __init__(self, patience_s: float) -> None:
        self.window_s = patience_s
        self._turn = threading.Lock()  # one caller at a time
        self._changed = threading.Condition()
        self._offer: tuple[str | bytes, Any] | None = None
        self._answer: Answer | None = None
        self._open = False

    @property
    def is_open(self) -> bool:
        """Whether a learner is waiting for someone now."""
        return self._open

    def offer(self, tag: str | bytes, sample: Any, timeout_s: float = 10.0) -> Answer | None:
        """Answer to a caller; None if no learner is waiting for anyone now."""
        with self._turn, self._changed:
            if not self._open:
                return None
            self._offer, self._answer = (tag, sample), None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._answer or not self._open, timeout_s)
            answer, self._offer, self._answer = self._answer, None, None
            return answer

    def serve(self, round_: int, observe: Observe, wanted: Wanted) -> None:
        """Whoever calls within the plan's patience."""
        until = time.monotonic() + self.window_s
        with self._changed:
            self._open = True
            try:
                while wanted():
                    left = until - time.monotonic()
                    if not self._changed.wait_for(lambda: self._offer is not None, max(left, 0.0)):
                        return
                    assert self._offer is not None
                    (tag, sample), self._offer = self._offer, None
                    self._answer = observe(tag, sample)
                    del sample
                    self._changed.notify_all()
            finally:
                self._open = False
                self._changed.notify_all()
