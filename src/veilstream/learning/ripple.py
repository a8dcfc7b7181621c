"""A nonconvex task for which the paper's nonconvex bounds can be checked, constants included."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veilstream.learning.task_kind import Target, TaskKind
from veilstream.learning.tasks import FromLoss, Sample, jax_numpy

if TYPE_CHECKING:
    from jax import Array


class Ripple(FromLoss):
    """A nonconvex loss that satisfies asm-noncvx: Σ_j h(x_j - θ_j), h(u) = (u² + 3·sin² u)/2.

    The client's features are θ. Where the clients of a round share θ, so do the minimiser and the
    constants: h'' runs from -2 to 4 (L = 4, weakly convex with 2), and

        u·h'(u) >= alpha·h(u) + mu/2·u²   for all u, with alpha = 0.35 and mu = 0.2.

    (h itself is half of the classic example u² + 3·sin² u of a function that is not convex and
    satisfies the Polyak-Łojasiewicz inequality; Karimi, Nutini and Schmidt 2016.)

    Args:
        dim: parameters, and numbers of one client's features.

    """

    classifies = False
    smoothness = 4.0
    alpha = 0.35
    mu = 0.2

    def __init__(self, dim: int) -> None:
        self.dim, self.features_shape = dim, (dim,)

    def loss(self, params: Array, sample: Sample) -> Array:
        """Loss of one client."""
        jnp = jax_numpy()
        u = params - sample.features
        value: Array = 0.5 * (u**2 + 3.0 * jnp.sin(u) ** 2).sum()
        return value

    def predict(self, params: Array, features: Array) -> Array:
        """The parameters themselves: the estimate of θ."""
        return params


KINDS = (
    TaskKind(
        name="ripple",
        make=lambda setting: Ripple(setting.features),
        data=("ripple",),
        target=Target.NOTHING,
        comparator="veilstream.research.comparators:ripple",
    ),
)
