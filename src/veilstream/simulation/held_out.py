"""Accuracy on held-out clients: those that a model of its round would meet, and never learns from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.learning.tasks import Sample, Task
from veilstream.plans.plan import Plan
from veilstream.simulation.noise_source import noise_place_of
from veilstream.simulation.records import ExpectedRecords
from veilstream.streams.pool import PoolStream, Stream

CACHE_FLOATS = 2_500_000  # activations that a CPU's caches hold while models are evaluated


class HeldOut:
    """Held-out clients of every seed; without drift, all rounds have the same ones."""

    def __init__(self, plan: Plan, task: Task, stream: Stream, seeds: Sequence[int], expected: ExpectedRecords) -> None:
        import jax

        self._plan, self._stream, self._seeds, self._expected = plan, stream, tuple(seeds), expected
        self._on_host = noise_place_of(plan) == "host"
        self._drawn: dict[int, Sample] = {}
        self._count_right = jax.jit(partial(_count_right, task))

    def accuracy(self, published: Any, round_: int) -> NDArray[np.float64]:
        """Of published models (methods, seeds, d) before a round, (methods, seeds)."""
        import jax

        round_ = min(round_, self._plan.learning.rounds - 1)
        together = self._together(len(published))
        accuracy = np.empty(published.shape[:2])
        for s, seed in enumerate(self._seeds):
            held_out = self._clients(seed, round_)
            size = len(held_out.target)
            with jax.default_matmul_precision("highest"):
                right = sum(
                    np.asarray(
                        self._count_right(
                            published[:, s],
                            held_out.features[first : first + together],
                            held_out.target[first : first + together],
                        )
                    )
                    for first in range(0, size, together)
                )
            accuracy[:, s] = right / size
        return accuracy

    def _together(self, methods: int) -> int:
        # A prediction takes about a quarter of what a gradient does.
        each = methods * max(1, self._expected.details.workspace // 4)
        eighth = self._plan.run.memory_mib * 2**20 // 32  # of the budget, in floats
        room = CACHE_FLOATS if self._on_host else eighth
        return max(50, min(eighth, room) // each)

    def _clients(self, seed: int, round_: int) -> Sample:
        import jax.numpy as jnp

        if self._plan.data.drift != "none":
            return self._draw(seed, round_)
        which = 0 if isinstance(self._stream, PoolStream) else seed
        if which not in self._drawn:
            drawn = self._draw(which, 0)
            self._drawn[which] = Sample(jnp.asarray(drawn.features), jnp.asarray(drawn.target))
        return self._drawn[which]

    def _draw(self, seed: int, round_: int) -> Sample:
        drawn = self._stream.held_out(seed, self._plan.data.held_out, round_)
        self._expected.check_held_out(drawn, seed, round_)
        return drawn


def _count_right(task: Task, models: Any, features: Any, target: Any) -> Any:
    import jax

    return jax.vmap(lambda model: (task.predict(model, features) == target).sum())(models)
