"""How often one client may take part: the rule behind the plan's promise, decided here for everyone.

A deployed learner asks it of its ledger, a simulation and `data check` of `VisitsInMemory`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from veilstream.mechanisms.participation import Participation

MOST_TOGETHER = 256
"""Clients that a deployed learner stores in one write at most; a step has no more."""


MOST_AT_ONCE = 512
"""Clients of an epoch with a secret order that are written down in one write, before the first round."""


class PastVisits(NamedTuple):
    """A client's visits so far, under one tag."""

    epoch: int  # of the last visit
    step: int  # of the last visit; -1 for a client carried over from a lost store
    times: int  # in that epoch
    epochs: int = 1  # in how many epochs
    first_epoch: int | None = None  # None for `epoch`


class Epochs(NamedTuple):
    """The epoch that runs, and in how many one person may take part."""

    now: int = 0
    a_person: int = 1
    alike_since: int = 0  # the first of the epochs up to now that were begun on the same terms


Spent = Literal["other epoch", "too often", "too soon"]


FIRST = Epochs()


def spent(past: Iterable[PastVisits], step: int, allowed: Participation, epochs: Epochs = FIRST) -> Spent | None:
    """Why a client may not take this step; None if it may.

    A client takes part in as many epochs as ``epochs`` allows, of those on the same terms: the promise over several
    is worked out for that case alone. One whose earlier epochs are not known is in none again.
    """
    visits = list(past)
    for visit in visits:
        earlier = visit.epochs - (visit.epoch == epochs.now)
        first = visit.epoch if visit.first_epoch is None else visit.first_epoch
        if visit.step < 0 or earlier >= epochs.a_person or (earlier and first < epochs.alike_since):
            return "other epoch"
    here = [visit for visit in visits if visit.epoch == epochs.now]
    if sum(visit.times for visit in here) >= allowed.times:
        return "too often"
    if any(step - visit.step < allowed.min_separation for visit in here):
        return "too soon"
    return None


class VisitsInMemory:
    """Counts visits for one learner in one epoch; a deployed learner's are in its ledger."""

    def __init__(self, allowed: Participation) -> None:
        self._allowed = allowed
        self._past: dict[str | bytes, PastVisits] = {}

    def take(self, client: str | bytes, step: int) -> Spent | None:
        """Count a visit at this step, or say why the client may not take it."""
        past = self._past.get(client)
        if past is None:
            self._past[client] = PastVisits(0, step, 1)
            return None
        why = spent((past,), step, self._allowed)
        if why is None:
            self._past[client] = PastVisits(0, step, past.times + 1)
        return why
