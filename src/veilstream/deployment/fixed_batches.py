"""Which records are in which step of a training loop, decided once: the same batches in every pass, or secretly.

A record then returns exactly once a pass, so many steps later, which is what several passes cost least for
(`veilstream.mechanisms.participation`). The order depends on nothing that a record says: it is that of the
indices, or drawn from the operating system.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.epoch_records import most_of_a_round
from veilstream.errors import InputError
from veilstream.mechanisms import Participation
from veilstream.mechanisms.checks import positive_integer
from veilstream.records.secret_order import chosen_steps

Int64s = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class FixedBatches:
    """A pass over all records, cut into batches, and how often it is made."""

    order: Int64s
    """Every record's index once."""
    batch_size: int
    passes: int
    clients: Sequence[Hashable] | None = None
    """Whose record each index is; None where each is someone's of their own."""

    @classmethod
    def made(
        cls, records: int, batch_size: int, passes: int, *, shuffled: bool, clients: Sequence[Hashable] | None = None
    ) -> Self:
        """Batches of ``records`` records; those of one client as far apart as they can be.

        Raises:
            InputError: for clients with several records that would meet in one batch, or numbers that are none.

        """
        count = positive_integer("records", records, "a dataset with records")
        size = min(positive_integer("batch_size", batch_size, "try 32"), count)
        times = positive_integer("passes", passes, "how often the script goes over its loader")
        order = np.arange(count)
        if shuffled:
            np.random.Generator(np.random.PCG64(secrets.randbits(128))).shuffle(order)
        if clients is not None:
            if len(clients) != count:
                raise InputError("client", f"{len(clients)} names", f"{count}, one a record", "name every record")
            order = _spread(order, clients)
        made = cls(order, size, times, clients)
        made.participation.check_horizon(made.horizon)
        return made

    @property
    def a_pass(self) -> int:
        """Batches, so steps, of one pass."""
        return -(-len(self.order) // self.batch_size)

    @property
    def horizon(self) -> int:
        """Steps of all passes."""
        return self.passes * self.a_pass

    def batch(self, step: int) -> Int64s:
        """Indices of a step's records."""
        first = step % self.a_pass * self.batch_size
        return self.order[first : first + self.batch_size]

    def names(self, indices: Int64s) -> list[bytes]:
        """Who these records are of, as the ledger is told."""
        return names_of(indices, self.clients)

    def filled(self, step: int) -> Int64s:
        """As `batch`: how long it is, everybody may know."""
        return self.batch(step)

    @property
    def participation(self) -> Participation:
        """How often one client takes part, and how far apart, from the order itself."""
        if self.clients is None:
            return Participation(self.passes, self.a_pass if self.passes > 1 else 1)
        steps: dict[Hashable, list[int]] = {}
        for place, index in enumerate(self.order):
            steps.setdefault(self.clients[index], []).append(place // self.batch_size)
        most = max(len(each) for each in steps.values())
        apart = [b - a for each in steps.values() for a, b in itertools.pairwise(each)]
        if self.passes > 1:
            apart += [self.a_pass - each[-1] + each[0] for each in steps.values()]
        least = min(apart, default=1)
        if least < 1:
            raise InputError(
                "client",
                f"{most} records of one client",
                "no two records of one client in one batch",
                "smaller batches, or one record (or one mean of records) a client",
            )
        return Participation(most * self.passes, least)


@dataclass(frozen=True, eq=False)
class SecretBatches:
    """One pass in which every record's step is drawn by itself, uniformly, as only this site knows."""

    steps: Int64s
    """By index."""
    batch_size: int
    horizon: int
    clients: Sequence[Hashable] | None = None

    @classmethod
    def made(cls, secret: bytes, records: int, batch_size: int, clients: Sequence[Hashable] | None = None) -> Self:
        """Steps of ``batch_size`` records on average, by a secret of the ledger's."""
        horizon = -(-records // batch_size)
        names = names_of(np.arange(records), clients)
        return cls(chosen_steps(secret, names, horizon), batch_size, horizon, clients)

    @property
    def width(self) -> int:
        """Records that a step's work is filled up to, so that time says nothing of how many there are."""
        return most_of_a_round(len(self.steps), self.horizon)

    def batch(self, step: int) -> Int64s:
        """Indices of a step's records."""
        return np.flatnonzero(self.steps == step)

    def filled(self, step: int) -> Int64s:
        """The same with indices behind them whose gradients are computed and dropped."""
        own = self.batch(step)
        return np.concatenate([own, np.zeros(max(0, self.width - len(own)), np.int64)])


def names_of(indices: Int64s, clients: Sequence[Hashable] | None) -> list[bytes]:
    """Who these records are of, as the ledger is told."""
    if clients is None:
        return [b"record %d" % index for index in indices]
    return [b"client " + repr(clients[index]).encode() for index in indices]


def _spread(order: Int64s, clients: Sequence[Hashable]) -> Int64s:
    """Everyone's first record, then everyone's second, and so on, in one order of clients: those with most first.

    Two records of a client are then as far apart as there are clients with that many records.
    """
    of: dict[Hashable, list[int]] = {}
    for index in order:
        of.setdefault(clients[index], []).append(int(index))
    groups = sorted(of.values(), key=len, reverse=True)
    most = len(groups[0])
    return np.array([each[k] for k in range(most) for each in groups if k < len(each)])
