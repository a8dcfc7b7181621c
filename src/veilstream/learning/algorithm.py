"""Algorithm 1, once: one local step, one local round, one server update (eq-comp-alg).

Simulation maps these functions over seeds, learners and methods. A deployed learner and its server
clip, round and sum on whole numbers, where rounding is part of the promise; `step_size`, `moved` and
`next_model` they take from here, with NumPy arrays instead of JAX's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from veilstream.errors import InputError
from veilstream.learning.class_weights import ClassWeights
from veilstream.learning.client_metrics import metric_values
from veilstream.learning.tasks import Sample, Task
from veilstream.privacy.telemetry import Telemetry, extended
from veilstream.privacy.traced_clipping import clip_traced

if TYPE_CHECKING:
    from jax import Array

LARGE = 10_000  # Parameters from which on a step is worth more than the overhead of a compiled loop


@dataclass(frozen=True)
class StepRule:
    """What a step does besides following the gradient."""

    clip_norm: Any  # B_g: every client's gradient is clipped to it, always. A number, or a traced one.
    projection_radius: float | None = None
    """Keep models in this ball around zero: post-processing, so no cost in privacy."""
    unit_steps: bool = False  # Scale each step's mean gradient to length one (Gao et al. 2018); for noise-free methods.
    gamma: float | None = None  # Clip g / (|g| + gamma) of every client instead of its gradient g; None for g itself
    telemetry: Telemetry | None = None  # What every client contributes beside its gradient; it moves no model
    weights: ClassWeights | None = None  # What a client's gradient counts, by its label; None for all alike
    together: float | None = None  # What a step's sum is divided by; None for how many clients it has room for

    def __post_init__(self) -> None:
        known = isinstance(self.clip_norm, float | int | np.floating)
        if known and not 1e-15 <= self.clip_norm <= 1e15:
            raise InputError("clip_norm", self.clip_norm, "in [1e-15, 1e15]", "try 1")
        if self.projection_radius is not None and not self.projection_radius > 0.0:
            raise InputError("projection_radius", self.projection_radius, "> 0", "None for none")


_TINY = 1e-30


def without_tiny(values: Any) -> Any:
    """Zero for what is far too small to matter.

    Products with denormal numbers take a hundred times as long, so a server that chose a large weight could read a
    label from the time of a step.
    """
    return values * (np.abs(values) >= _TINY)


def step_size(size: float, decay: float, round_: Any) -> Any:
    """η of a round, or of many: it falls like (1 + round)^-decay."""
    return size * (1.0 + round_) ** -decay


def moved(x: Any, direction: Any, size: Any, projection_radius: float | None) -> Any:
    """X - size·direction, kept in the ball; of NumPy or JAX arrays."""
    after = x - size * direction
    if projection_radius is None:
        return after
    if isinstance(after, np.ndarray):
        xp: Any = np
    else:
        import jax.numpy as xp
    length = xp.sqrt((after**2).sum())
    return after * xp.minimum(1.0, projection_radius / xp.where(length > 0.0, length, 1.0))


def next_model(
    x: Any,
    direction: Any,
    size: Any,
    projection_radius: float | None = None,
    *,
    start: Any = None,
    forgetting: Any = 1.0,
) -> Any:
    """x^{r+1} = x⁰ + forgetting·(x - x⁰) - size·direction; without a ``start`` x⁰ this is `moved`, to the bit."""
    if start is not None:
        x = start + forgetting * (x - start)
    return moved(x, direction, size, projection_radius)


def local_step(
    task: Task, rule: StepRule, z: Array, clients: Sample, noise: Array, step_size: Array, begun: Array | None = None
) -> tuple[Array, Array]:
    """Next local model and the noisy gradient that led to it, with noisy telemetry behind it.

    ``clients`` has a leading axis: usually one client, or several whose clipped gradients are
    averaged (then one client moves the average by at most 2·clip_norm / clients). With
    ``rule.together`` their sum is divided by that number, however many there are. A client that is
    not present counts as a zero gradient; its noise stays. ``begun`` is the model that the round
    began with, which telemetry is about.
    """
    import jax
    import jax.numpy as jnp

    gradients = jax.vmap(task.gradient, in_axes=(None, 0))(z, clients)
    weights = None if rule.weights is None else rule.weights.of(clients.target)[:, None]
    if weights is not None and rule.gamma is None:
        gradients, weights = weights * gradients, None
    vectors, told = clip_traced(gradients, rule.clip_norm, rule.gamma, weights), rule.telemetry
    if told is not None:
        x = z if begun is None else begun
        metrics = partial(metric_values, told, task, x, clip_norm=rule.clip_norm)
        vectors = extended(vectors, jax.vmap(metrics)(clients, gradients), told)
    vector = _mean(vectors, clients.present, rule.together)
    if rule.unit_steps:
        gradient = vector[: len(z)]
        length = jnp.sqrt((gradient**2).sum())
        gradient = gradient / jnp.where(length > 0.0, length, 1.0)
        vector = gradient if told is None else jnp.concatenate([gradient, vector[len(z) :]])
    noisy = vector + noise
    direction = noisy if told is None else noisy[: len(z)]
    return moved(z, direction, step_size, rule.projection_radius), noisy


def local_round(task: Task, rule: StepRule, x: Array, clients: Sample, noise: Array, step_size: Array) -> Array:
    """ĝ of one learner: the average of its τ noisy gradients, with telemetry's behind it.

    ``clients`` and ``noise`` have the τ steps as their first axis. The noisy gradients are summed
    as they are: recovering them as (x - z)/(ητ) would cancel in float32.
    """
    import jax
    import jax.numpy as jnp

    if noise.shape[0] == 1:
        # No scan: learners then share x, and a compiler can share their work on it.
        first = jax.tree.map(lambda leaf: leaf[0], clients)
        return local_step(task, rule, x, first, noise[0], step_size, x)[1]

    def body(carry: tuple[Array, Array], step: tuple[Sample, Array]) -> tuple[tuple[Array, Array], None]:
        z, total = carry
        z, noisy = local_step(task, rule, z, step[0], step[1], step_size, x)
        return (z, total + noisy), None

    tau = noise.shape[0]
    unroll = tau if tau <= 4 and x.shape[-1] >= LARGE else 1
    nothing = jnp.zeros_like(x if rule.telemetry is None else noise[0])
    (_, total), _ = jax.lax.scan(body, (x, nothing), (clients, noise), unroll=unroll)
    return total / noise.shape[0]


def server_update(rule: StepRule, x: Array, releases: Array, effective_step_size: Array, **memory: Any) -> Array:
    """x^{r+1} from the releases of all enrolled learners (first axis), weight 1/n; ``memory`` is `next_model`'s."""
    after: Array = next_model(x, _mean(releases), effective_step_size, rule.projection_radius, **memory)
    return after


def _mean(vectors: Array, present: Array | None = None, together: float | None = None) -> Array:
    """Mean over the first axis, absent ones as zero; a product, since a compiler repeats the work behind a mean.

    With ``together`` the sum is divided by that number instead.
    """
    import jax.numpy as jnp

    weights = jnp.ones(len(vectors), vectors.dtype) if present is None else present
    count = len(vectors) if together is None else together
    if len(vectors) == 1 and count == 1:
        return weights[0] * vectors[0]
    return jnp.matmul(weights / count, vectors, precision="highest")
