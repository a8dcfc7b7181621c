"""How the audit's clients come: by every entry point of production, in every number, and again.

A learner's promise does not depend on how its clients were handed over, so every transcript has the
same law whatever `Way` its rounds were served in. What clients should have added is the audit's own
account (`Unkind.known`), not the learner's.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from veilstream.deployment.learner import Learner
from veilstream.learning.tasks import Sample
from veilstream.mechanisms.participation import ONCE
from veilstream.plans.plan import Plan
from veilstream.streams.intake import Offered


class Way(enum.Enum):
    """In which a round's clients come."""

    GROUP = "all in one call"
    SINGLE = "one call each"
    SPLIT = "some in a call, one alone, the others in a call"
    SHORT = "half of them: the other steps are empty"
    EMPTY = "nobody"
    AGAIN = "in one call, each twice, with some of earlier rounds and epochs"
    UNUSABLE = "in one call, some with records that cannot be used"


POINTS = ("step-computed", "step-stored", "step-witnessed", "message-computed", "message-stored", "pinned")
"""Where a learner is killed: before and after each of a round's commits."""


class Guests(Protocol):
    """A task whose records the audit makes."""

    def sample(self, client: int) -> Sample:
        """The record of a client."""

    def useless(self, client: int) -> Sample:
        """A record of the same person that must not be used."""


def ways(rounds: int, seed: int, only: Sequence[Way] = tuple(Way)) -> list[Way]:
    """A way for every round: all of them before any comes again, in an order of chance."""
    rng = np.random.default_rng([seed, 7])
    order: list[Way] = []
    while len(order) < rounds:
        order += [only[i] for i in rng.permutation(len(only))]
    return order[:rounds]


class Visitors:
    """Clients by their numbers, from 0; nobody comes twice unless a way says so."""

    def __init__(self, plan: Plan, task: Any, first: int = 0) -> None:
        self._task: Guests = task
        self._once = plan.participation == ONCE
        self._told = plan.telemetry is not None
        self._next = first
        self._first = first
        self._earlier: list[tuple[int, int]] = []  # the first and the last of every round: both have been used
        self.offered: list[Offered] = []
        """Of the round that is being served."""
        self.left_out = 0
        """Places that stayed empty though enough people came: somebody who is named took none."""
        self.used_again = 0
        """Places of people who may take none any more."""

    def begin_round(self) -> None:
        """Nobody has been offered yet."""
        if self.offered:
            self._earlier.append((self._first, self._next - 1))
        self._first, self.offered = self._next, []

    def new(self) -> Offered:
        """Someone who never came before."""
        client, self._next = self._next, self._next + 1
        offered = Offered(f"client {client}", self._task.sample(client))
        self.offered.append(offered)
        return offered

    def serve(
        self,
        way: Way,
        observe: Callable[[Iterable[Offered]], Any],
        wanted: Callable[[], int],
        one: Callable[[Offered], Any] | None = None,
    ) -> None:
        """Offer a round's clients in this way; ``one`` takes a single client, where there is such a call."""
        alone = one or (lambda offered: observe([offered]))
        count = wanted()
        if way is Way.EMPTY or count == 0:
            return
        if way is Way.SINGLE:
            while wanted():
                alone(self.new())
        elif way is Way.SHORT:
            observe([self.new() for _ in range(count // 2)])
        elif way is Way.SPLIT:
            observe([self.new() for _ in range(count // 2)])
            if wanted():  # a step that a call leaves short is over
                alone(self.new())
            observe([self.new() for _ in range(wanted())])
        elif way is Way.AGAIN and self._once:
            before = self._earlier
            known = {*before[0], *before[len(before) // 2], *before[-1]} if before else set()
            again = [self._again(client) for client in sorted(known)]
            observe(again)
            self.used_again += count - wanted()
            observe([*again, *self._twice(wanted())])
            self.left_out += wanted()
        elif way is Way.UNUSABLE and not self._told:
            observe(self._some_useless(count))
            self.left_out += wanted()
        else:
            observe([self.new() for _ in range(count)])
            self.left_out += wanted()

    def _twice(self, count: int) -> list[Offered]:
        both: list[Offered] = []
        for _ in range(count):
            first = self._next
            both += [self.new(), self._again(first)]
        return both

    def _some_useless(self, count: int) -> list[Offered]:
        records: list[Offered] = []
        for k in range(count):
            offered = self.new()
            if k % 3 == min(1, count - 1):  # takes its place, and adds nothing
                offered = Offered(offered.tag, Sample(np.array(np.nan), 0.0))
            records.append(offered)
        return records

    def _again(self, client: int) -> Offered:
        return Offered(f"client {client}", self._task.useless(client))


class Killed(BaseException):
    """A learner's process ended at one of `POINTS`."""


def kill_at(learner: Learner, point: str) -> None:
    """End the learner the next time it gets there: the ledger keeps what it had committed."""

    def reached(here: str) -> None:
        if here == point:
            raise Killed(point)

    vars(learner.ledger)["reached"] = reached  # in place of the one that does nothing


def serve_learner(visitors: Visitors, way: Way, learner: Learner) -> None:
    """By the learner's own calls."""
    visitors.serve(
        way,
        learner.take_many,
        lambda: learner.clients_wanted,
        lambda offered: learner.observe(offered.tag, offered.sample),
    )
