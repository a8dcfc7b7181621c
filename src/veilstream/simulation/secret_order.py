"""A simulation under a secret order: which record is used at which step, as a deployed learner would choose.

Every record that a learner would meet in a known order has a tag, its place in that order. Its step is the keyed choice
of `records.secret_order`, under a secret that follows from seed and learner. Steps then have none, one or many
records; arrays have room for the most, and the rest of a step is nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.learning.tasks import Sample
from veilstream.plans.plan import Plan
from veilstream.records.secret_order import chosen_steps, simulated_secret, simulated_tag
from veilstream.simulation.records import ExpectedRecords, clients_of
from veilstream.streams.pool import PoolStream, Stream

Int64s = NDArray[np.int64]


def steps_of_records(secret: bytes, records: int, steps: int, window: int | None, per_step: int) -> Int64s:
    """At which step each of a learner's first records is used; -1 for those that an epoch with windows does not reach.

    Args:
        secret: the learner's, of the epoch.
        records: how many it would meet in a known order.
        steps: T, of the epoch.
        window: steps of a window whose records are used in the next; None for the whole epoch.
        per_step: how many arrive in a step.

    """
    tags = [simulated_tag(position) for position in range(records)]
    if window is None:
        return chosen_steps(secret, tags, steps)
    arrived = np.arange(records) // (window * per_step)
    chosen = (arrived + 1) * window + chosen_steps(secret, tags, window)
    return np.where(chosen < steps, chosen, -1)


def most_in_a_step(per_step: int) -> int:
    """About how many records the fullest of many steps has: for memory, not for arrays."""
    return per_step + 6 * int(np.sqrt(per_step)) + 8


def check_enough_records(plan: Plan, stream: Stream) -> None:
    """Refuse a secret order over fewer records than steps (`InputError`)."""
    if plan.order != "secret" or not isinstance(stream, PoolStream):
        return
    fewest, steps = int(stream.clients_met(plan.run.first_seed).met.min()), plan.steps_of_epoch
    if fewest < steps:
        raise InputError(
            "privacy.order",
            "secret",
            f"at least as many records as steps: a learner has {fewest:,}, an epoch {steps:,} steps",
            f'learning.rounds = {max(1, fewest // plan.learning.local_steps)}, or order = "known"',
        )


class SecretOrder:
    """Clients of a simulation's rounds, by the steps that they chose."""

    def __init__(self, plan: Plan, stream: Stream, seeds: Sequence[int], expected: ExpectedRecords) -> None:
        self._stream = stream
        learning = plan.learning
        self._shape = learning.rounds, len(seeds), learning.learners
        self._steps = learning.local_steps
        per_round, steps = expected.per_round, plan.steps_of_epoch
        records = learning.rounds * per_round
        chosen = np.array(
            [
                [
                    steps_of_records(
                        simulated_secret(seed, learner), records, steps, plan.window, learning.clients_per_step
                    )
                    for learner in range(learning.learners)
                ]
                for seed in seeds
            ]
        )
        self.places = _fullest(chosen, steps)
        """Records for which every step has room."""
        if isinstance(stream, PoolStream):
            order = np.stack([stream.indices(seed, 0, learning.rounds) for seed in seeds], axis=1)
            self._pool = self._dealt(order, chosen, steps, nobody=-1)
            return
        size = records * len(seeds) * learning.learners * int(np.prod(expected.details.features_shape or (1,))) * 8
        if size > plan.run.memory_mib * 2**20:
            raise InputError(
                "run.memory_mib",
                plan.run.memory_mib,
                f"at least {size // 2**20 + 1} beside a secret order: records of all rounds are mixed",
                "raise it, or take fewer rounds or seeds",
            )
        met = clients_of(stream, seeds, 0, learning.rounds, expected)
        places = np.arange(records, dtype=np.int32).reshape(learning.rounds, 1, 1, per_round)
        everywhere = np.broadcast_to(places, (learning.rounds, len(seeds), learning.learners, per_round))
        self._pool = self._dealt(everywhere, chosen, steps, nobody=-1)
        self._records = [None if leaf is None else _by_learner(np.asarray(leaf)) for leaf in met]

    def clients(self, first: int, count: int) -> Any:
        """What `Block.run` takes for some rounds: places in the pool, or a `Sample`; nobody where a step has room."""
        places = self._pool[first : first + count]
        if isinstance(self._stream, PoolStream):
            return places
        there = places >= 0
        at = np.where(there, places, 0)
        _, seeds, learners = self._shape
        seed, learner = np.ogrid[:seeds, :learners]
        features, targets, present = (
            None if leaf is None else leaf[seed[None, ..., None], learner[None, ..., None], at]
            for leaf in self._records
        )
        held = there if present is None else there & (present > 0)
        return Sample(features, targets, held.astype(np.float32))

    def _dealt(self, order: NDArray[Any], chosen: Int64s, steps: int, nobody: int) -> NDArray[np.int32]:
        """(rounds, seeds, n, places of a round): who is used in each round, from who would be met in a known one."""
        rounds, seeds, learners = self._shape
        table = np.full((seeds, learners, steps, self.places), nobody, np.int32)
        for s in range(seeds):
            for learner in range(learners):
                own = chosen[s, learner]
                sorted_by_step = np.argsort(own, kind="stable")
                sorted_by_step = sorted_by_step[own[sorted_by_step] >= 0]
                at = own[sorted_by_step]
                place = np.arange(len(at)) - np.searchsorted(at, at)
                table[s, learner, at, place] = order[:, s, learner].reshape(-1)[sorted_by_step]
        by_round = table.reshape(seeds, learners, rounds, self._steps * self.places)
        return np.ascontiguousarray(by_round.transpose(2, 0, 1, 3))


def _fullest(chosen: Int64s, steps: int) -> int:
    rows = chosen.reshape(-1, chosen.shape[-1])
    return max(1, *(int(np.bincount(row[row >= 0], minlength=steps).max()) for row in rows))


def _by_learner(leaf: NDArray[Any]) -> NDArray[Any]:
    """(rounds, seeds, n, clients, ...) as (seeds, n, all clients, ...)."""
    moved = np.moveaxis(leaf, 0, 2)
    return moved.reshape(*moved.shape[:2], -1, *moved.shape[4:])
