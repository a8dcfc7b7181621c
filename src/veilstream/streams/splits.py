"""Splits of a pool of clients among learners; each gives a client to exactly one learner.

``split(labels, learners, rng)`` returns one array of pool indices per learner, in the order of meeting.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError

Int32s = NDArray[np.int32]
Array = NDArray[Any]


class Split(Protocol):
    """A way to deal the clients of a pool to learners."""

    def __call__(self, labels: Array, learners: int, rng: np.random.Generator) -> list[Int32s]:
        """Pool indices for each learner in the order of meeting, no index twice."""


@dataclass(frozen=True)
class EvenSplit:
    """Everyone at random: learners differ by at most one client and by nothing else."""

    def __call__(self, labels: Array, learners: int, rng: np.random.Generator) -> list[Int32s]:
        """Deal a shuffled pool."""
        _check(labels, learners)
        return np.array_split(_shuffled(np.arange(len(labels)), rng), learners)


@dataclass(frozen=True)
class PaperSplit:
    """The paper's: half of the pool evenly at random, of the rest all of class l (from 0) to learner l."""

    def __call__(self, labels: Array, learners: int, rng: np.random.Generator) -> list[Int32s]:
        """Halve a shuffled pool, deal one half evenly and the other by class."""
        _check(labels, learners)
        classes = np.unique(labels)
        if not np.array_equal(classes, np.arange(learners)):
            raise InputError(
                "learners",
                learners,
                f"one learner for each class from 0 on, and the labels have {len(classes)} classes"
                f" from {classes.min()} to {classes.max()}",
                "change the number of learners, or split by dirichlet",
            )
        order = _shuffled(np.arange(len(labels)), rng)
        even, rest = np.split(order, [len(order) // 2])
        return [
            _shuffled(np.concatenate([part, rest[labels[rest] == label]]), rng)
            for label, part in enumerate(np.array_split(even, learners))
        ]


@dataclass(frozen=True)
class DirichletSplit:
    """Each class is shared out in proportions from a symmetric Dirichlet distribution; a pool may be empty."""

    alpha: float = 0.5

    def __post_init__(self) -> None:
        if not 1e-3 <= self.alpha <= 1e6:  # beyond, the draws lose their precision
            raise InputError("alpha", self.alpha, "a number from 0.001 to 1e6", "try 0.5; lower is more unequal")

    def __call__(self, labels: Array, learners: int, rng: np.random.Generator) -> list[Int32s]:
        """Cut each shuffled class at the proportions drawn for it."""
        _check(labels, learners)
        pools: list[list[Int32s]] = [[] for _ in range(learners)]
        for label in np.unique(labels):
            members = _shuffled(np.flatnonzero(labels == label), rng)
            shares = rng.dirichlet(np.full(learners, self.alpha))
            cuts = np.rint(np.cumsum(shares)[:-1] * len(members)).astype(np.intp)
            for pool, part in zip(pools, np.split(members, cuts), strict=True):
                pool.append(part)
        return [_shuffled(np.concatenate(pool), rng) for pool in pools]


@dataclass(frozen=True, eq=False)
class WriterSplit:
    """All that one person wrote goes to one learner; pools differ by at most what one person wrote.

    A client is still one image: this does not make the person the unit that is protected.
    """

    writers: Array = field(repr=False)
    """Who wrote each of the pool's images."""
    in_order: bool = False
    """Meet one writer after another, each in the pool's order, rather than all mixed."""

    def __call__(self, labels: Array, learners: int, rng: np.random.Generator) -> list[Int32s]:
        """Deal whole writers."""
        _check(labels, learners)
        if self.writers.shape != labels.shape:
            raise InputError(
                "writers",
                self.writers.shape,
                f"one writer for each of {len(labels)} labels",
                "pass the writers of this very pool",
            )
        _, counts = np.unique(self.writers, return_counts=True)
        if learners > len(counts):
            raise InputError(
                "learners",
                learners,
                f"at most one for each of {len(counts)} writers",
                "take fewer learners, or split evenly",
            )
        runs = np.split(np.argsort(self.writers, kind="stable"), np.cumsum(counts)[:-1])
        pools: list[list[Array]] = [[] for _ in range(learners)]
        least = [(0, learner) for learner in range(learners)]
        for writer in rng.permutation(len(runs)):
            size, learner = least[0]
            heapq.heapreplace(least, (size + len(runs[writer]), learner))
            pools[learner].append(runs[writer])
        whole = [np.concatenate(pool).astype(np.int32) for pool in pools]
        return whole if self.in_order else [_shuffled(pool, rng) for pool in whole]


def _shuffled(indices: Array, rng: np.random.Generator) -> Int32s:
    mixed: Int32s = rng.permutation(indices).astype(np.int32)
    return mixed


def _check(labels: Array, learners: int) -> None:
    if labels.ndim != 1 or not len(labels):
        raise InputError("labels", labels.shape, "one label for each client", "pass a flat array")
    if learners < 1:
        raise InputError("learners", learners, "at least 1", "try 10")
