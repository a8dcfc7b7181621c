"""All seeds, learners and methods at once: Algorithm 1 mapped over arrays.

The same `local_round` and `server_update` as everywhere, compiled over a block of rounds. Noise
comes from the mechanisms' own streams, one per (method, seed), so a seed's noise does not depend on
which others run beside it. Memory is bounded by the block (`run.memory_mib`), not by the horizon;
the block changes nothing in the numbers but float32 rounding.

What is measured here (losses and accuracies on clients' data) is an oracle's view, for simulation:
a deployed learner never sends it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from veilstream.engines.build import Prepared, Stream, main_method, stream_of, task_of
from veilstream.engines.plan import Plan
from veilstream.errors import InputError
from veilstream.learning.algorithm import Rule, local_round, server_update
from veilstream.learning.tasks import Sample, Task
from veilstream.mechanisms import NoiseStream

if TYPE_CHECKING:
    from jax import Array

__all__ = ["METRICS", "Progress", "Simulation", "clients_of"]

Float32s = NDArray[np.float32]

METRICS = ("loss", "accuracy", "noise", "distance")
"""Per round: prequential loss and accuracy of x^r on the round's clients, norm of the noise in the
averaged release, distance of x^r to the noise-free x^r."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands."""

    round: int
    accuracy: float | None
    """Prequential, over the last block, of the main method."""


def noise_seed(seed: int, mechanism: str) -> int:
    """Seed of one mechanism's draws in one run; simulation only, as all seeds are.

    Methods that differ in budget, accounting or step size share their draws, so that they differ
    in nothing else.
    """
    return int.from_bytes(hashlib.sha256(f"{seed}/{mechanism}".encode()).digest()[:16], "big")


def clients_of(stream: Stream, seeds: Sequence[int], first: int, count: int) -> Sample:
    """Clients of some rounds, as features (rounds, seeds, n, clients, d) and targets."""
    drawn = [[stream.round(seed, r) for seed in seeds] for r in range(first, first + count)]
    features = np.array([[s.features for s in row] for row in drawn])
    targets = np.array([[s.target for s in row] for row in drawn])
    if not (np.isfinite(features).all() and np.isfinite(targets).all()):
        raise InputError(
            "data", f"rounds {first} to {first + count - 1}", "finite features and targets",
            "repair the stream; nothing was learned from these rounds",
        )  # fmt: skip
    return Sample(features, targets)


@dataclass
class _Group:
    """Methods of one shape, and where they stand."""

    methods: list[int]
    prepared: list[Prepared]
    start: Any  # x⁰, (methods, seeds, d)
    noise: list[list[NoiseStream | None]]  # [method][seed]
    run_block: Callable[..., Any] = field(repr=False)


class Simulation:
    """A plan in motion: `advance` runs the next block of rounds."""

    def __init__(self, plan: Plan, prepared: Sequence[Prepared], seeds: Sequence[int]) -> None:
        self.plan = plan
        self.task = task_of(plan)
        self.stream = stream_of(plan)
        self.seeds = tuple(seeds)
        self._prepared = list(prepared)
        R = plan.learning.rounds
        shape = (len(self._prepared), len(self.seeds), R)
        self.history: dict[str, Float32s] = {m: np.full(shape, np.nan, np.float32) for m in METRICS}
        self.evaluated = [r for r in range(R + 1) if r % plan.run.evaluate_every == 0 or r == R]
        self.held_out_accuracy = np.full((*shape[:2], len(self.evaluated)), np.nan, np.float32)
        self._steady_held_out: dict[int, Sample] = {}
        self._groups = [self._group(indices) for indices in self._shapes()]
        # Round and models move together, in one assignment: an interrupt finds either both or none.
        self._position: tuple[int, list[Any]] = (0, [group.start for group in self._groups])
        self.block_rounds = self._rounds_per_block()

    def _shapes(self) -> Iterator[list[int]]:
        by_shape: dict[tuple[int, int, bool], list[int]] = {}
        for index, prepared in enumerate(self._prepared):
            by_shape.setdefault(prepared.shape, []).append(index)
        yield from by_shape.values()

    def _group(self, indices: list[int]) -> _Group:
        import jax
        import jax.numpy as jnp

        members = [self._prepared[i] for i in indices]
        n, d = self.plan.learning.learners, self.task.dim
        start = jnp.broadcast_to(self.task.init(), (len(indices), len(self.seeds), d))
        streams = [[self._noise_stream(p, seed, n * d) for seed in self.seeds] for p in members]
        noise_free = next((i for i, p in enumerate(members) if p.factorization is None), None)
        run_block = jax.jit(partial(_run_block, self.task, members[0].rule, noise_free))
        return _Group(indices, members, start, streams, run_block)

    @staticmethod
    def _noise_stream(prepared: Prepared, seed: int, dim: int) -> NoiseStream | None:
        if prepared.factorization is None:
            return None
        chosen = noise_seed(seed, prepared.factorization.name)
        return prepared.factorization.noise(std=prepared.noise_std, dim=dim, seed=chosen)

    def _rounds_per_block(self) -> int:
        """As many rounds as the budget holds, noise and clients; at least fifty blocks a run."""
        learning, d = self.plan.learning, self.task.dim
        clients = learning.local_steps * learning.clients_per_step
        per_learner = max(len(g.methods) * g.prepared[0].steps for g in self._groups) + 3 * clients
        floats = len(self.seeds) * learning.learners * d * per_learner
        allowed = self.plan.run.memory_mib * 2**20 // (4 * floats)
        return int(max(1, min(-(-learning.rounds // 50), allowed)))

    @property
    def round(self) -> int:
        """How many rounds have been run."""
        return self._position[0]

    @property
    def done(self) -> bool:
        """Whether every round has been run."""
        return self.round >= self.plan.learning.rounds

    def advance(self) -> Progress:
        """Run the next block of rounds."""
        first, R = self.round, self.plan.learning.rounds
        count = min(self.block_rounds, R - first)
        clients = clients_of(self.stream, self.seeds, first, count)
        models = [
            self._advance_group(group, x, clients, first, count)
            for group, x in zip(self._groups, self._position[1], strict=True)
        ]
        self._position = (first + count, models)
        accuracy = None
        if self.task.classifies:
            main = main_method(self._prepared)
            accuracy = float(self.history["accuracy"][main, :, first : first + count].mean())
        return Progress(first + count, accuracy)

    def _advance_group(self, group: _Group, x: Any, clients: Sample, first: int, count: int) -> Any:
        """Models after the block; what was measured goes into the history on the way."""
        steps, per_step, _ = group.prepared[0].shape
        shape = (*clients.target.shape[:3], steps, per_step)
        shaped = Sample(clients.features.reshape(*shape, -1), clients.target.reshape(shape))
        sizes = self._step_sizes(group, first, count)
        noise = self._noise(group, count)
        x, measured, released = group.run_block(x, shaped, noise, *sizes)
        span = slice(first, first + count)
        for name in METRICS:
            values = np.moveaxis(np.asarray(measured[name]), 0, -1)
            self.history[name][group.methods, :, span] = values
        self._evaluate(group, np.asarray(released), np.asarray(x), first, count)
        return x

    def _step_sizes(self, group: _Group, first: int, count: int) -> tuple[Float32s, Float32s]:
        """η and η̃ of each round and method, (count, methods)."""
        rounds = 1.0 + np.arange(first, first + count)
        both = []
        for p in group.prepared:
            local = p.plan.step_size * rounds**-p.plan.step_decay
            both.append((local, local * (p.plan.server_step_size * p.steps)))
        sizes = np.array(both, np.float32)  # (methods, 2, count)
        return sizes[:, 0].T, sizes[:, 1].T

    def _noise(self, group: _Group, count: int) -> Float32s:
        """(count, methods, seeds, steps, n, d)."""
        steps = group.prepared[0].steps
        n, d = self.plan.learning.learners, self.task.dim
        out = np.zeros((count, len(group.methods), len(self.seeds), steps, n, d), np.float32)

        for m, streams in enumerate(group.noise):
            for i, stream in enumerate(streams):
                if stream is not None:
                    out[:, m, i] = stream.take(count * steps).reshape(count, steps, n, d)
        return out

    def _evaluate(
        self, group: _Group, released: Float32s, last: Float32s, first: int, count: int
    ) -> None:
        """Held-out accuracy of x^r for the rounds that are looked at, and of the last model.

        Held-out clients are those that a model of round r would meet: under drift, of round r.
        """
        if not self.task.classifies:
            return
        R = self.plan.learning.rounds
        for column, r in enumerate(self.evaluated):
            if first <= r < first + count or r == first + count == R:
                models = last if r == first + count else released[r - first]
                for s, seed in enumerate(self.seeds):
                    held_out = self._held_out(seed, min(r, R - 1))
                    right = [
                        np.asarray(self.task.predict(model, held_out.features)) == held_out.target
                        for model in models[:, s]
                    ]
                    self.held_out_accuracy[group.methods, s, column] = np.mean(right, axis=1)

    def _held_out(self, seed: int, round_: int) -> Sample:
        """Without drift, every round has the same ones: drawn once."""
        if self.plan.data.drift != "none":
            return self.stream.held_out(seed, self.plan.data.held_out, round_)
        if seed not in self._steady_held_out:
            drawn = self.stream.held_out(seed, self.plan.data.held_out, 0)
            self._steady_held_out[seed] = drawn
        return self._steady_held_out[seed]

    def models(self) -> Float32s:
        """The models released last, (methods, seeds, d)."""
        shape = (len(self._prepared), len(self.seeds), self.task.dim)
        models: Float32s = np.empty(shape, np.float32)
        for group, x in zip(self._groups, self._position[1], strict=True):
            models[group.methods] = np.asarray(x)
        return models

    # --- checkpoints -----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Arrays from which `restore` goes on to the same numbers."""
        round_, held = self._position
        models = {f"x{i}": np.asarray(x) for i, x in enumerate(held)}
        return {
            "round": np.array(round_),
            "held_out_accuracy": self.held_out_accuracy,
            **models,
            **{f"history_{name}": values for name, values in self.history.items()},
        }

    def restore(self, state: Any) -> None:
        """Continue from a checkpoint: noise streams are run forward to where they stood."""
        import jax.numpy as jnp

        round_ = int(state["round"])
        self._position = (
            round_, [jnp.asarray(state[f"x{i}"]) for i in range(len(self._groups))]
        )  # fmt: skip
        self.held_out_accuracy[...] = state["held_out_accuracy"]
        for name in METRICS:
            self.history[name][...] = state[f"history_{name}"]
        for group in self._groups:
            passed = round_ * group.prepared[0].steps
            for row in group.noise:
                for stream in row:
                    if stream is not None:
                        _skip(stream, passed)


def _skip(stream: NoiseStream, count: int) -> None:
    while count:
        now = min(count, 256)
        stream.take(now)
        count -= now


def _run_block(
    task: Task,
    rule: Rule,
    noise_free: int | None,
    x: Array,
    clients: Sample,
    noise: Array,
    step_size: Array,
    effective_step_size: Array,
) -> tuple[Array, dict[str, Array], Array]:
    """A block of rounds: final models, what was measured, and the models that were released."""
    import jax
    import jax.numpy as jnp

    learner = partial(local_round, task, rule)
    # noise is (steps, n, d) for one method and seed: learners are its second axis
    learners = jax.vmap(learner, in_axes=(None, 0, 1, None))
    seeds = jax.vmap(learners, in_axes=(0, 0, 0, None))
    methods = jax.vmap(seeds, in_axes=(0, None, 0, 0))
    update = jax.vmap(
        jax.vmap(partial(server_update, rule), in_axes=(0, 0, None)), in_axes=(0, 0, 0)
    )

    def losses(params: Array, samples: Sample) -> tuple[Array, Array]:
        flat = Sample(
            samples.features.reshape(-1, samples.features.shape[-1]), samples.target.reshape(-1)
        )
        loss = jax.vmap(task.loss, in_axes=(None, 0))(params, flat).mean()
        if not task.classifies:
            return loss, jnp.nan
        return loss, (task.predict(params, flat.features) == flat.target).mean()

    measure = jax.vmap(jax.vmap(losses, in_axes=(0, 0)), in_axes=(0, None))

    def one_round(x: Array, inputs: tuple[Sample, Array, Array, Array]) -> tuple[Array, Any]:
        clients, noise, eta, effective = inputs
        loss, accuracy = measure(x, clients)
        releases = methods(x, clients, noise, eta)
        injected = noise.mean(axis=(2, 3))
        apart = x - x[noise_free] if noise_free is not None else jnp.full_like(x, jnp.nan)
        measured = {
            "loss": loss,
            "accuracy": accuracy,
            "noise": jnp.sqrt((injected**2).sum(axis=-1)),
            "distance": jnp.sqrt((apart**2).sum(axis=-1)),
        }
        return update(x, releases, effective), (measured, x)

    x, (measured, released) = jax.lax.scan(
        one_round, x, (clients, noise, step_size, effective_step_size)
    )
    return x, measured, released
