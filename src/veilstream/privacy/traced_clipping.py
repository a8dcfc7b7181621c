"""Clipping inside JAX: float32, traceable, for simulation and compiled learners.

The same promise as `veilstream.clip`, without float64: sums of squares are taken in short runs, the
worst that float32 summation can do to them is bounded, and the scale is lowered by that much.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jax import Array


_RUN = 256


def clip_traced(
    gradients: Array, clip_norm: float | Array, gamma: float | None = None, weights: Array | None = None
) -> Array:
    """Scale each float32 vector along the last axis to norm at most ``clip_norm``.

    Guarantees: the exact norm of each result is at most ``clip_norm``; a vector with an entry that
    is not finite becomes zero. Unlike `veilstream.clip`, a vector within some 1e-5 of the bound is
    scaled too, and bounds must lie in [1e-15, 1e15]. With ``gamma``, g / (|g| + gamma) is clipped
    instead of g; that times ``weights``, if there are any.
    """
    import jax.numpy as jnp

    if gamma is not None:
        gradients = _normalised(gradients, gamma)
    if weights is not None:
        gradients = weights * gradients
    dim = gradients.shape[-1]
    finite = jnp.isfinite(gradients).all(axis=-1, keepdims=True)
    x = jnp.where(finite, gradients, 0.0)
    unit, largest = _scaled_to_one(x)
    square = unit * unit
    terms = 1
    while square.shape[-1] > 1:
        run = min(_RUN, square.shape[-1])
        padded = -(-square.shape[-1] // run) * run - square.shape[-1]
        square = jnp.pad(square, [(0, 0)] * (square.ndim - 1) + [(0, padded)])
        square = square.reshape(*square.shape[:-1], -1, run).sum(axis=-1)
        terms += run
    norm = largest * jnp.sqrt(square) if dim else largest
    # Each of `terms` additions, and a dozen other roundings, errs by at most one unit.
    slack = (terms + 12) * float(np.finfo(np.float32).eps)
    inside = (norm * (1.0 + slack) <= clip_norm) & (largest <= clip_norm)
    root = jnp.sqrt(square) if dim else jnp.ones_like(largest)
    scaled = unit * (clip_norm * (1.0 - slack) / jnp.where(inside, 1.0, root))
    return jnp.where(inside, x, scaled)


def _scaled_to_one(x: Array) -> tuple[Array, Array]:
    """Each vector divided by its largest entry, and that entry's size."""
    import jax.numpy as jnp

    largest = jnp.abs(x).max(axis=-1, keepdims=True, initial=0.0)
    # A compiler divides by multiplying with the reciprocal, which vanishes or overflows for extreme
    # numbers; powers of two bring them near one first, exactly.
    shift = jnp.where(largest > 2.0**40, 2.0**-64, jnp.where(largest < 2.0**-40, 2.0**64, 1.0))
    near_one = largest * shift
    return (x * shift) / jnp.where(near_one > 0.0, near_one, 1.0), largest


def _normalised(gradients: Array, gamma: float) -> Array:
    """Return g / (|g| + gamma), up to rounding; a vector that is not finite as it is."""
    import jax.numpy as jnp

    finite = jnp.isfinite(gradients).all(axis=-1, keepdims=True)
    unit, largest = _scaled_to_one(jnp.where(finite, gradients, 0.0))
    root = jnp.sqrt((unit * unit).sum(axis=-1, keepdims=True))
    # |g| + gamma over the largest entry; the inner minimum keeps the product in range.
    length = jnp.minimum(largest, 1e30)
    scaled = unit * (length / (length * root + gamma))
    return jnp.where(finite, scaled, gradients)
