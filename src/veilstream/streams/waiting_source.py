"""Records that wait in memory, in a bounded queue, for a round to take them.

The queue stays open between rounds. A round is begun when at least the minimum of people wait, and
takes records until it is full or its window ends; the window runs from when the round was asked
for, so that neither the wait for the minimum nor who comes shows in how long it takes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from veilstream.records.admission import Answer
from veilstream.streams.intake import MayTake, Observe, Offered, Wanted

CAPACITY = 4096
"""Records that wait at most."""
_AT_ONCE = 256


class WaitingRecord:
    """A record in the queue, and who is told what became of it."""

    __slots__ = ("answered", "offered")

    def __init__(self, offered: Offered, answered: Callable[[Answer | None], None] = lambda _: None) -> None:
        self.offered = offered
        self.answered = answered
        """Called once: with the answer when it is stored, or with None if it was not taken."""


class WaitingSource:
    """A queue of records that outlives rounds; who fills it is the subclasses' affair.

    Args:
        patience_s: how long a round waits for people, from when it was asked for.
        capacity: how many records wait at most.

    """

    def __init__(self, patience_s: float, capacity: int = CAPACITY) -> None:
        self.window_s = patience_s
        """While it has people, a learner's reply leaves at a time that does not tell of them."""
        self._capacity = capacity
        self._changed = threading.Condition()
        self._queue: deque[WaitingRecord] = deque()
        self._until: float | None = None
        self._open = self._no_more = self._closed = False
        self.told_without_a_round = 0
        """Records of people who may not take part again that were answered before a round."""

    @property
    def is_open(self) -> bool:
        """Whether a round takes records now."""
        return self._open

    @property
    def waiting(self) -> int:
        """How many records wait."""
        return len(self._queue)

    # --- filling it ------------------------------------------------------------------------------

    def put(self, records: list[WaitingRecord]) -> bool:
        """Have all of these wait, in order; False, and none of them, where there is no room."""
        with self._changed:
            if self._closed or len(self._queue) + len(records) > self._capacity:
                return False
            self._queue += records
            self._changed.notify_all()
        return True

    def withdraw(self, records: Iterable[WaitingRecord]) -> None:
        """Take out those that still wait: they are answered with None."""
        asked = set(map(id, records))
        with self._changed:
            gone = [record for record in self._queue if id(record) in asked]
            self._queue = deque(record for record in self._queue if id(record) not in asked)
            self._changed.notify_all()
        _answer_none(gone)

    def release(self) -> None:
        """Nobody who waits now is going to be taken."""
        with self._changed:
            gone, self._queue = self._queue, deque()
            self._changed.notify_all()
        _answer_none(gone)

    def close(self) -> None:
        """Take no more records; a round that waits for some goes on without."""
        with self._changed:
            self._closed = True
        self.release()

    # --- what a daemon asks ----------------------------------------------------------------------

    def ready(self, minimum: int, most: int, may_take: MayTake) -> bool:
        """Whether at least so many people wait who can be taken; waits for them in the window.

        Somebody who cannot be taken is told "taken" where one more person would have begun the
        round: what a caller hears then does not say whether that person took part before.
        """
        self._until = time.monotonic() + self.window_s
        if minimum <= 0:
            return True
        can: dict[WaitingRecord, bool] = {}
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._over or any(r not in can for r in self._queue),
                    max(0.0, self._until - time.monotonic()),
                )
                fresh = [r for r in self._queue if r not in can]
            for record in fresh:  # outside: it asks the learner, and callers must not wait for that
                can[record] = may_take(record.offered.tag)
            with self._changed:  # whoever has left meanwhile does not count
                people = {r.offered.tag for r in self._queue if can.get(r)}
                if len(people) >= minimum:
                    return True
                told = []
                if len(people) + 1 >= minimum:
                    told = [r for r in self._queue if can.get(r) is False]
                    self._queue = deque(r for r in self._queue if can.get(r) is not False)
                    self.told_without_a_round += len(told)
            for record in told:
                record.answered(Answer.TAKEN)
            if not fresh:
                self._until = None
                return False

    def serve(self, round_: int, observe: Observe, wanted: Wanted) -> None:
        """Whoever waits, and whoever comes while the window is open."""
        until, self._until = self._until, None
        until = time.monotonic() + self.window_s if until is None else until
        self._open = True
        try:
            while most := min(wanted(), _AT_ONCE):
                with self._changed:
                    self._changed.wait_for(lambda: self._over or self._queue, max(0.0, until - time.monotonic()))
                    group = [self._queue.popleft() for _ in range(min(most, len(self._queue)))]
                    self._changed.notify_all()
                if not group:
                    return
                self._hand_over(group, observe)
        finally:
            self._open = False

    def _hand_over(self, group: list[WaitingRecord], observe: Observe) -> None:
        try:
            answers = observe([record.offered for record in group])
        except BaseException:
            _answer_none(group)
            raise
        for record, answer in zip(group, answers, strict=False):
            record.answered(answer)
        _answer_none(group[len(answers) :])

    @property
    def _over(self) -> bool:
        return self._closed or self._no_more


def _answer_none(records: Iterable[WaitingRecord]) -> None:
    for record in records:
        record.answered(None)
