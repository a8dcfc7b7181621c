"""Records that wait in memory, in a bounded queue, for a round to take them.

A round begins when at least the minimum of people wait, and takes records until it is full or its window
ends. The window starts when the server asks for the round, so the reply's time shows neither the wait for
the minimum nor who comes.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

from veilstream.records.admission import Answer
from veilstream.records.sample import Sample
from veilstream.streams.intake import MayTake, Observe, Offered, Wanted

CAPACITY = 4096  # records that wait at most
_AT_ONCE = 256


class WaitingRecord:
    """A record in the queue, and a callback for its answer."""

    __slots__ = ("answered", "offered")

    def __init__(self, offered: Offered, answered: Callable[[Answer | None], None] = lambda _: None) -> None:
        self.offered = offered
        self.answered = answered  # called once, when the record is stored; with None if it was not taken


class WaitingSource:
    """A queue of records that outlives rounds; subclasses fill it."""

    _nobody_hears = False  # whether records have no caller, so that those who may not come again can go at once

    def __init__(self, patience_s: float, capacity: int = CAPACITY) -> None:
        self.window_s = patience_s  # the learner's reply waits for its end, so that its time says nothing of the people
        self._capacity = capacity
        self._changed = threading.Condition()
        self._queue: deque[WaitingRecord] = deque()
        self._until: float | None = None
        self._open = self._no_more = self._closed = False
        self.together = 1  # clients of one step; fewer are taken only when the window ends
        self.visits_a_round = 1  # records of one person that a round may take
        self.least_at_last: int | None = None  # of people who begin a round once no others can come; None: as ever
        self.told_without_a_round = 0  # records of people who may not take part again, answered before a round

    @property
    def is_open(self) -> bool:
        """Whether a round takes records now."""
        return self._open

    @property
    def waiting(self) -> int:
        """How many records wait."""
        return len(self._queue)

    def put(self, records: list[WaitingRecord]) -> bool:
        """Queue all of these, in order; False, and none of them, if there is no room."""
        with self._changed:
            if self._closed or len(self._queue) + len(records) > self._capacity:
                return False
            self._queue += records
            self._changed.notify_all()
        return True

    def withdraw(self, records: Iterable[WaitingRecord]) -> None:
        """Take out those that still wait, and answer them with None."""
        asked = set(map(id, records))
        with self._changed:
            gone = [record for record in self._queue if id(record) in asked]
            self._queue = deque(record for record in self._queue if id(record) not in asked)
            self._changed.notify_all()
        _answer_none(gone)

    def release(self) -> None:
        """Answer everyone who waits with None."""
        with self._changed:
            gone, self._queue = self._queue, deque()
            self._changed.notify_all()
        _answer_none(gone)

    def close(self) -> None:
        """Take no more records; a round that waits for some goes on without."""
        with self._changed:
            self._closed = True
        self.release()

    def ready(self, minimum: int, most: int, may_take: MayTake) -> bool:
        """Whether enough people wait who can be taken; waits for them in the window.

        Somebody who cannot be taken is told "taken" (or "refused", by the record alone) if one more person
        would have begun the round: the answer then does not say whether that person took part before.
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
            with self._changed:  # those who have left meanwhile do not count
                visits = Counter(r.offered.tag for r in self._queue if can.get(r))
                waiting = sum(min(count, self.visits_a_round) for count in visits.values())
                last = self.least_at_last if self._no_more_can_come else None
                if waiting >= (minimum if last is None else last):
                    return True
                told = []
                if waiting + 1 >= minimum or self._nobody_hears:
                    told = [r for r in self._queue if can.get(r) is False]
                    self._queue = deque(r for r in self._queue if can.get(r) is not False)
                    self.told_without_a_round += len(told)
                    self._changed.notify_all()  # there is room
            for record in told:
                record.answered(Answer.REFUSED if record.offered.sample is None else Answer.TAKEN)
            if not fresh:
                self._until = None
                return False

    def serve(self, round_: int, observe: Observe, wanted: Wanted) -> None:
        """Take those who wait, and those who come while the window is open."""
        until, self._until = self._until, None
        until = time.monotonic() + self.window_s if until is None else until
        self._open = True
        try:
            while most := min(wanted(), max(_AT_ONCE, self.together)):
                with self._changed:
                    full = self._changed.wait_for(
                        lambda: self._over or len(self._queue) >= self.together, max(0.0, until - time.monotonic())
                    )
                    waiting = min(most, len(self._queue))
                    if full and not self._over:  # whole steps; the others wait for more
                        waiting -= waiting % self.together
                    group = [self._queue.popleft() for _ in range(waiting)]
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

    @property
    def _no_more_can_come(self) -> bool:
        """Whether waiting for others is in vain."""
        return False


class LiveSource(WaitingSource):
    """People who call. A restart forgets those who wait; none of them was told "taken"."""

    def offer(self, tag: str | bytes, sample: Sample | None, timeout_s: float = 10.0) -> Answer | None:
        """Wait for the answer to one record; None where it was not taken: no room, or no round in that time."""
        done = threading.Event()
        found: list[Answer | None] = []

        def answered(answer: Answer | None) -> None:
            found.append(answer)
            done.set()

        record = WaitingRecord(Offered(tag, sample), answered)
        if not self.put([record]):
            return None
        if not done.wait(timeout_s):
            self.withdraw([record])
            done.wait()  # a round that has it just now answers soon
        return found[0]


def _answer_none(records: Iterable[WaitingRecord]) -> None:
    for record in records:
        record.answered(None)
