"""Clients of a simulation: what a stream is, and one over a fixed pool (MNIST, tables).

A learner whose share of the pool is used up meets no one from then on: index -1, ``present`` 0. Its steps
go on with a zero gradient and their noise, because a client who came twice would not be protected as
promised, and a learner that fell silent would show that its clients have run out. The same holds for the place
of a client whose record cannot be used, where the order of a stream has such places (`may_be_empty`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError, PrivacyError
from veilstream.records.sample import Sample
from veilstream.streams.splits import Split

Array = NDArray[Any]
Int32s = NDArray[np.int32]

_ORDER, _HELD_OUT = 1, 3


class Stream(Protocol):
    """Where a simulation's clients come from: a function of (seed, round), asked in any order."""

    @property
    def provenance(self) -> str:
        """Where the data come from, for the run folder."""

    def round(self, seed: int, round_: int) -> Sample:
        """The round's clients.

        Args:
            seed: which of the run's seeds.
            round_: from 0.

        Returns:
            Features (n, clients, ...), targets (n, clients), for n learners that meet local_steps x
            clients_per_step clients each; ``present`` is 0 where a learner meets no one.

        """

    def held_out(self, seed: int, count: int, round_: int) -> Sample:
        """Other clients, to measure on.

        Args:
            seed: which of the run's seeds.
            count: how many; fewer may come.
            round_: as of which round, where the world drifts.

        Returns:
            Features (count, ...), targets (count,).

        """


class ClientsMet(NamedTuple):
    """Per learner: clients met, places that stay empty, clients of its share never met."""

    met: Int32s
    absent: Int32s
    unused: Int32s


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolStream:
    """Clients of a fixed pool, each met at most once by one learner, in an order from the seed."""

    learners: int
    rounds: int
    per_round: int
    features: Array
    """The pool: one client a row, of any shape and numeric type."""
    targets: Array
    held_features: Array
    """Others, for measuring only."""
    held_targets: Array
    split: Split
    provenance: str
    """Where the data come from, for the run folder."""
    may_be_empty: ClassVar[bool] = False
    """Whether -1 in an order is a place with nobody in it; else it is an error."""

    def __post_init__(self) -> None:
        for name in ("learners", "rounds", "per_round"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(name, value, "a whole number of at least 1", "try 10")
        _check_rows("features", self.features, "targets", self.targets)
        _check_rows("held_features", self.held_features, "held_targets", self.held_targets)
        if self.features.shape[1:] != self.held_features.shape[1:]:
            raise InputError(
                "held_features",
                self.held_features.shape,
                f"rows of shape {self.features.shape[1:]} as in the pool",
                "prepare both alike",
            )

    def indices(self, seed: int, first: int, count: int) -> Int32s:
        """Who is met in ``count`` rounds from ``first`` on: (count, learners, per_round), or -1."""
        if first < 0 or count < 0 or first + count > self.rounds:
            raise InputError(
                "rounds", (first, first + count), f"rounds from 0 to {self.rounds}", "make a stream of more rounds"
            )
        begin, end = first * self.per_round, (first + count) * self.per_round
        places = np.full((self.learners, end - begin), -1, np.int32)
        for row, order in zip(places, self._order(seed), strict=True):
            met = order[begin:end]
            row[: len(met)] = met
        return places.reshape(self.learners, count, self.per_round).swapaxes(0, 1).copy()

    def round(self, seed: int, round_: int) -> Sample:
        """The round's clients; a place without one has zero features, target 0 and present 0."""
        chosen = self.indices(seed, round_, 1)[0]
        absent = chosen < 0
        features, targets = self.features[chosen], self.targets[chosen]  # -1 takes the last row
        features[absent] = 0
        targets[absent] = 0
        return Sample(features, targets, (~absent).astype(np.float32))

    def held_out(self, seed: int, count: int, round_: int) -> Sample:
        """The first ``count`` of the held-out clients, or all, in one order for all seeds."""
        if count < 1:
            raise InputError("count", count, "at least 1 held-out client", "try 1000")
        chosen = self._held_order[:count]
        return Sample(self.held_features[chosen], self.held_targets[chosen])

    def clients_met(self, seed: int) -> ClientsMet:
        """How far each learner's share of the pool reaches."""
        places = self.rounds * self.per_round
        orders = self._order(seed)
        shares = np.array([(order >= 0).sum() for order in orders], np.int64)
        met = np.array([(order[:places] >= 0).sum() for order in orders], np.int64)
        return ClientsMet(met.astype(np.int32), (places - met).astype(np.int32), (shares - met).astype(np.int32))

    def _order(self, seed: int) -> list[Int32s]:
        """Each learner's share in order of meeting; checked, because the promise rests on it."""
        if seed not in self._orders:
            order = self.split(self.targets, self.learners, np.random.default_rng([seed, _ORDER]))
            if len(order) != self.learners:
                raise InputError(
                    "split", self.split, f"one share for each of {self.learners} learners", f"it gave {len(order)}"
                )
            everyone = np.concatenate(order)
            if self.may_be_empty:
                everyone = everyone[everyone != -1]
            if len(everyone) and not 0 <= everyone.min() <= everyone.max() < len(self.targets):
                raise InputError(
                    "split",
                    self.split,
                    f"indices from 0 to {len(self.targets) - 1}",
                    f"it gave {everyone.min()} to {everyone.max()}",
                )
            if len(np.unique(everyone)) != len(everyone):
                raise PrivacyError(
                    f"{self.split!r} has a client met twice, and the noise protects those who "
                    "take part once (give each index to one learner, one time)"
                )
            self._orders[seed] = order
        return self._orders[seed]

    @cached_property
    def _orders(self) -> dict[int, list[Int32s]]:
        return {}  # of this stream alone: a cache of the class would keep its pool alive

    @cached_property
    def _held_order(self) -> Array:
        """Mixed, since the first and the last of a data set are seldom alike (MNIST's are not)."""
        return np.random.default_rng(_HELD_OUT).permutation(len(self.held_targets))


def _check_rows(name: str, features: Array, other: str, targets: Array) -> None:
    if targets.ndim != 1 or not len(targets):
        raise InputError(other, targets.shape, "one target for each client", "pass a flat array")
    if features.ndim < 1 or len(features) != len(targets):
        raise InputError(
            name, features.shape, f"one row for each of {len(targets)} targets", f"make {name} and {other} equally long"
        )
    for label, values in ((name, features), (other, targets)):
        if values.dtype.kind not in "biuf":
            raise InputError(label, str(values.dtype), "real numbers", "convert them first")
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise InputError(label, "nan or infinity", "finite numbers", "leave such clients out")
