"""How much a client's gradient counts, by its label: numbers up to 1 that the plan names, public.

A label that is rare would otherwise hardly be given: a model that says "no" to all is right for 97 of 100. With
weights in inverse proportion to the labels' shares, labels count alike, and the label that a model gives is the one
that is likelier than its share. A weight is applied to a gradient (after g / (|g| + gamma), where a method normalises)
before it is clipped. It only shortens it, so no promise changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ClassWeights:
    """A weight for each label, in the plan's order."""

    weights: tuple[float, ...]
    signed: bool  # two labels are -1 and +1; otherwise labels are 0, 1, 2, ...

    @classmethod
    def of_shares(cls, shares: Sequence[float], *, signed: bool) -> ClassWeights:
        """Weights under which labels of these shares count alike; the rarest has weight 1."""
        least = min(shares)
        return cls(tuple(least / share for share in shares), signed)

    def of(self, targets: Any) -> Any:
        """The weight of each target, as float32; of NumPy or JAX arrays. What is no label counts as the nearest one."""
        table = np.asarray(self.weights, np.float32)
        if isinstance(targets, np.ndarray | np.generic | float | int):
            places = np.asarray(targets) > 0 if self.signed else np.nan_to_num(np.asarray(targets, np.float64))
            return table[np.clip(places.astype(np.int64), 0, len(table) - 1)]
        import jax.numpy as jnp

        places = targets > 0 if self.signed else targets
        return jnp.asarray(table)[jnp.clip(places.astype(jnp.int32), 0, len(table) - 1)]
