"""Predictions from labels alone, in the units of the models'; the noisy count chooses its releases as they do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from experiments.protocol.measure import ANY, World
from numpy.typing import NDArray

from veilstream.plans.clients import stream_of
from veilstream.privacy import Budget
from veilstream.simulation.label_rules import RulesFigures, last_label, learners_share, majority, noisy_count
from veilstream.streams.pool import PoolStream


@dataclass(frozen=True)
class LabelWorld:
    """The labels of a world."""

    world: World

    def labels(self, seed: int, clients: int) -> tuple[NDArray[np.intp], int]:
        """(rounds, learners, clients of a round) with -1 for nobody, and how many labels there are."""
        plan = self.world.plan((clients, 1 if self.world.separation is None else clients), [ANY])
        stream = self.world.stream or stream_of(plan)
        rounds = plan.learning.rounds
        if isinstance(stream, PoolStream):
            known = np.unique(stream.targets)
            order = PoolStream.indices(_cut(stream, rounds, clients), seed, 0, rounds)
            return np.where(order >= 0, np.searchsorted(known, stream.targets[order]), -1), len(known)
        met = np.stack([stream.round(seed, r).target for r in range(rounds)])
        return np.searchsorted([-1.0, 1.0], met), 2

    def without_noise(self, seed: int) -> dict[str, RulesFigures]:
        """The rules that protect nobody, record by record."""
        labels, classes = self.labels(seed, self._finest)
        return {
            "majority": majority(labels, classes),
            "learner's share": learners_share(labels, classes),
            "last label": last_label(labels, classes),
        }

    def held_out(self, seed: int) -> float:
        """Accuracy of the commonest label on held-out clients; NaN where there are none."""
        if self.world.tables["data"]["kind"] == "table":
            return math.nan
        plan = self.world.plan((self._finest, 1), [ANY])
        stream = self.world.stream or stream_of(plan)
        held = stream.held_out(seed, plan.data.held_out, 0).target
        labels, classes = self.labels(seed, self._finest)
        known = np.unique(held)
        return float(np.mean(held == known[np.bincount(labels[labels >= 0], minlength=classes).argmax()]))

    @property
    def _finest(self) -> int:
        return 4 if self.world.stream is None and self.world.separation is None else 1

    def noisy(self, seed: int, clients: int, epsilon: float) -> RulesFigures:
        """The noisy count at a budget, released after every ``clients`` clients."""
        labels, classes = self.labels(seed, clients)
        budget = Budget(epsilon, self.world.tables["privacy"]["delta"])
        plan = self.world.plan((clients, 1 if self.world.separation is None else clients), [ANY])
        return noisy_count(
            labels, classes, budget, seed, participation=plan.participation, local_steps=plan.learning.local_steps
        )

    def sizes(self) -> Iterator[int]:
        """All sizes of a release."""
        size = self._finest
        while size <= self.world.total:
            yield size
            size *= 2


def _cut(stream: PoolStream, rounds: int, clients: int) -> PoolStream:
    return replace(stream, rounds=rounds, per_round=clients)
