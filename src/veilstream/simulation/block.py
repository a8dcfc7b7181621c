"""A block of rounds as one compiled function: Algorithm 1 mapped over methods, seeds and learners.

Losses and accuracies on clients' data are an oracle's view, for simulation only: a deployed learner
never sends them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from veilstream.learning.algorithm import StepRule, local_round, server_update
from veilstream.learning.class_weights import ClassWeights
from veilstream.learning.tasks import Sample, Task
from veilstream.privacy.telemetry import Telemetry

if TYPE_CHECKING:
    from jax import Array

METRICS = ("loss", "accuracy", "noise", "distance")
"""Per round: prequential loss and accuracy, on the round's clients, of the model that was published
before it (x^r, or the average where a method publishes one); norm of the noise in the averaged
release; distance of x^r to that of the same method without noise."""


class ModelArrays(NamedTuple):
    """Models of all methods and seeds, (methods, seeds, d) each."""

    current: Any  # x^r, that learners start from
    average: Any  # What a method publishes: x^r, or a weighted average of x¹..x^r
    start: Any  # x⁰ of methods that forget; else (methods, seeds, 0)


class Schedule(NamedTuple):
    """Numbers of each round, (rounds, methods) each but the last two."""

    step_size: Any
    """Of a local step. (rounds, methods, seeds, n) where every learner has its own: steps that fall
    do so with the rounds that a learner took part in."""
    effective_step_size: Any
    blend: Any  # Weight of the newest model in the average; 1 is no averaging
    slot: Any  # (rounds,): where to keep what is published before the round; -1 is nowhere
    weights: Any = None  # (rounds, seeds, n): what each learner's release counts, in units of 1/n; None is 1 each


@dataclass(frozen=True)
class Block:
    """The constants of methods of one shape, and the compiled block."""

    task: Task
    steps: int
    clients: int
    unit_steps: bool
    gamma: float | None  # Of normalised gradients; None where gradients are clipped as they are
    projection_radius: float | None
    learners: int
    twin: tuple[int | None, ...]  # For each method, the same method without noise, if there is one
    mechanism_of: tuple[int, ...]  # Which of the mechanisms each method takes its noise from
    keep: int  # How many published models of a block are kept at most
    forgetting: tuple[float, ...] = ()  # Of each method, where they forget
    weights: ClassWeights | None = None  # What a client's gradient counts, by its label
    telemetry: tuple[Telemetry, ...] = ()
    """Of each method, where clients contribute any; the same metrics, each with its own width."""
    together: float | None = None  # What a step's sum is divided by; None for `clients`

    @property
    def telemetry_count(self) -> int:
        """Coordinates of a release behind those of the model."""
        return len(self.telemetry[0].metrics) if self.telemetry else 0

    def run(
        self,
        models: ModelArrays,
        clients: Any,
        noise: tuple[Array, ...],
        schedule: Schedule,
        clip_norm: Array,
        noise_std: Array,
        pool: Sample | None,
    ) -> tuple[ModelArrays, dict[str, Array], Array]:
        """Models after the rounds, what was measured, and the published models that were kept.

        ``clients`` is a `Sample` of arrays (rounds, seeds, n, clients of a round, ...), or such an
        array of places in the ``pool``, -1 for none. ``noise`` has one array (rounds, steps, seeds,
        n·(d + telemetry)) a mechanism, at standard deviation one.
        """
        import jax
        import jax.numpy as jnp

        def one_round(carry: tuple[ModelArrays, Array], now: Any) -> tuple[Any, dict[str, Array]]:
            models, kept = carry
            here, noise, schedule = now
            kept = jax.lax.cond(schedule.slot >= 0, lambda: kept.at[schedule.slot].set(models.average), lambda: kept)
            met = here if pool is None else _look_up(pool, here)
            models, measured = self._round(models, met, noise, schedule, clip_norm, noise_std)
            return (models, kept), measured

        kept = jnp.zeros((self.keep, *models.average.shape), models.average.dtype)
        inputs = (clients, noise, schedule)
        if len(schedule.slot) == 1:  # without a loop a compiler can spread the work over cores
            only = jax.tree.map(lambda leaf: leaf[0], inputs)
            (models, kept), figures = one_round((models, kept), only)
            return models, jax.tree.map(lambda leaf: leaf[None], figures), kept
        (models, kept), measured = jax.lax.scan(one_round, (models, kept), inputs)
        return models, measured, kept

    def _round(
        self,
        models: ModelArrays,
        clients: Sample,
        unit_noise: tuple[Array, ...],
        schedule: Schedule,
        clip_norm: Array,
        noise_std: Array,
    ) -> tuple[ModelArrays, dict[str, Array]]:
        import jax
        import jax.numpy as jnp

        x = models.current
        loss, accuracy = self._measure(models.average, clients)
        noise = self._noise(unit_noise, noise_std, x)

        def learner(x: Array, met: Sample, noise: Array, eta: Array, clip_norm: Array, width: Array) -> Array:
            told = replace(self.telemetry[0], width=width) if self.telemetry else None
            rule = StepRule(
                clip_norm, self.projection_radius, self.unit_steps, self.gamma, told, self.weights, self.together
            )
            return local_round(self.task, rule, x, met, noise, eta)

        widths = jnp.array([t.width for t in self.telemetry] or [0.0] * len(x), x.dtype)
        step_size, size = schedule.step_size, schedule.effective_step_size
        by_seed = None if step_size.ndim == 1 else 0
        by_learner = None if step_size.ndim < 3 else 0
        # For one method noise is (steps, seeds, n, d).
        learners = jax.vmap(learner, in_axes=(None, 0, 1, by_learner, None, None))
        seeds = jax.vmap(learners, in_axes=(0, 0, 1, by_seed, None, None))
        methods = jax.vmap(seeds, in_axes=(0, None, 0, 0, 0, 0))
        releases = methods(x, self._by_step(clients), noise, step_size, clip_norm, widths)
        if schedule.weights is not None:
            releases = schedule.weights[:, :, None] * releases
        releases, told = releases[..., : x.shape[-1]], releases[..., x.shape[-1] :]
        after = self._update(models, releases, size)
        measured = {
            "loss": loss,
            "accuracy": accuracy,
            "noise": self._noise_norm(unit_noise, noise_std, x, schedule.weights),
            "distance": self._distance(x),
        }
        if self.telemetry:
            measured["telemetry"] = told.mean(axis=2)
        blend = schedule.blend[:, None, None]
        average = (1.0 - blend) * models.average + blend * after
        return ModelArrays(after, average, models.start), measured

    def _update(self, models: ModelArrays, releases: Array, size: Array) -> Array:
        import jax
        import jax.numpy as jnp

        rule, x = StepRule(1.0, self.projection_radius), models.current
        memory, constants = {}, {}
        if self.forgetting:
            memory["start"] = models.start
            constants["forgetting"] = jnp.array(self.forgetting, x.dtype)

        def one(x: Array, releases: Array, size: Array, memory: Any, constants: Any) -> Array:
            return server_update(rule, x, releases, size, **memory, **constants)

        seeds = jax.vmap(one, in_axes=(0, 0, None, 0, None))
        moved: Array = jax.vmap(seeds)(x, releases, size, memory, constants)
        return moved

    def _distance(self, x: Array) -> Array:
        """Of every method's models to its twin's, (methods, seeds); NaN where it has none."""
        import jax.numpy as jnp

        there = np.array([j is not None for j in self.twin])
        other = np.array([j or 0 for j in self.twin])
        apart = jnp.sqrt(((x - x[other]) ** 2).sum(axis=-1))
        return jnp.where(there[:, None], apart, jnp.nan)

    def _by_step(self, clients: Sample) -> Sample:
        """(seeds, n, steps, clients of a step, ...)."""
        import jax

        def split(leaf: Array) -> Array:
            return leaf.reshape(*leaf.shape[:2], self.steps, self.clients, *leaf.shape[3:])

        return jax.tree.map(split, clients)  # type: ignore[no-any-return]

    def _noise(self, unit: tuple[Array, ...], std: Array, x: Array) -> Array:
        """(methods, steps, seeds, n, d and telemetry)."""
        import jax.numpy as jnp

        shape = (self.steps, x.shape[1], self.learners, x.shape[2] + self.telemetry_count)
        if not unit:
            return jnp.zeros((len(x), *shape), x.dtype)
        which = np.array(self.mechanism_of)
        every = jnp.stack([made.reshape(shape) for made in unit])
        return every[which] * std.reshape(-1, *[1] * len(shape))

    def _noise_norm(self, unit: tuple[Array, ...], std: Array, x: Array, counted: Array | None) -> Array:
        """Norm of the noise in the averaged release that the model takes, (methods, seeds)."""
        import jax.numpy as jnp

        if not unit:
            return jnp.zeros(x.shape[:2], x.dtype)
        shape = (self.steps, x.shape[1], self.learners, x.shape[2] + self.telemetry_count)
        weights = jnp.full(self.learners, 1.0 / (self.learners * self.steps), x.dtype)
        norms = []
        for noise in unit:
            each_learner = noise.reshape(shape)[..., : x.shape[2]]
            if counted is not None:
                each_learner = counted[:, :, None] * each_learner
            mean = jnp.matmul(weights, each_learner, precision="highest").sum(axis=0)
            norms.append(jnp.sqrt((mean**2).sum(axis=-1)))
        return jnp.stack(norms)[np.array(self.mechanism_of)] * std[:, None]

    def _measure(self, x: Array, clients: Sample) -> tuple[Array, Array]:
        import jax
        import jax.numpy as jnp

        def losses(params: Array, met: Sample) -> tuple[Array, Array]:
            flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), met)
            weight = flat.present if flat.present is not None else jnp.ones(len(flat.target))
            total = weight.sum()  # nobody there: 0/0, not a number
            each = jax.vmap(self.task.loss, in_axes=(None, 0))(params, flat)
            loss = (each * weight).sum() / total
            if not self.task.classifies:
                return loss, jnp.nan
            right = self.task.predict(params, flat.features) == flat.target
            return loss, (right * weight).sum() / total

        both = jax.vmap(jax.vmap(losses, in_axes=(0, 0)), in_axes=(0, None))
        measured: tuple[Array, Array] = both(x, clients)
        return measured


def _look_up(pool: Sample, places: Array) -> Sample:
    import jax.numpy as jnp

    present = places >= 0
    at = jnp.where(present, places, 0)
    return Sample(pool.features[at], pool.target[at], present.astype(jnp.float32))
