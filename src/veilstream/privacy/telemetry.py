"""Telemetry: a few bounded numbers beside a client's gradient, as further coordinates of it.

A client contributes e = (g, c_1, ..., c_m): its clipped gradient, ‖g‖ <= B_g, and for every metric
a value v in [0, 1] as the coordinate c = (v - 1/2)·w, in [-w/2, w/2]. A step without a client
contributes the zero vector, as it does without telemetry. Hence

    ‖e‖ <= R = √(B_g² + m·(w/2)²)                                   (`Telemetry.release_norm`)

and neighbours are apart by at most 2R = √((2·B_g)² + m·w²) where one client's record is replaced,
by at most R where it is zeroed out: calibration takes R for B_g and nothing else changes. `present`
is counted like the others, so the bound also holds where "nobody came" takes a client's place.

Simulation extends arrays (`extended`), a deployed learner whole numbers
(`gradient_types.extend_on_grid`); both by `Telemetry.coordinates`. What a sum of coordinates says
of the metrics is `Telemetry.averages`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError

__all__ = ["METRIC_NAMES", "Telemetry", "extended"]

METRIC_NAMES = ("accuracy", "loss", "clipped", "present")
"""accuracy: was the prediction of the round's model right. loss: of that model, cut at a cap.
clipped: was the gradient longer than the clip norm. present: was a client there."""

_ROUND_UP = 1.0 + 1e-15


@dataclass(frozen=True)
class Telemetry:
    """Which metrics a client contributes, and how wide their coordinates are."""

    metrics: tuple[str, ...]
    width: Any
    """w, in the units of gradients. A number; inside a compiled simulation a traced one."""
    loss_cap: float = 1.0
    """The loss from which on all losses count alike."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.metrics if name not in METRIC_NAMES]
        if unknown or not self.metrics or len(set(self.metrics)) < len(self.metrics):
            raise InputError(
                "telemetry.metrics", list(self.metrics),
                f"one or more of {', '.join(METRIC_NAMES)}, each once", 'metrics = ["accuracy"]',
            )  # fmt: skip
        known = isinstance(self.width, float | int)
        if known and not (math.isfinite(self.width) and self.width > 0.0):
            raise InputError("telemetry width", self.width, "finite and > 0", "try 0.3·clip_norm")
        if not (math.isfinite(self.loss_cap) and self.loss_cap > 0.0):
            raise InputError("telemetry.loss_cap", self.loss_cap, "finite and > 0", "try 1")

    def release_norm(self, clip_norm: float) -> float:
        """R: the largest norm of a client's vector, rounded up."""
        whole = math.fsum([clip_norm**2, *[0.25 * self.width**2] * len(self.metrics)])
        return math.sqrt(whole) * _ROUND_UP

    def price(self, clip_norm: float) -> float:
        """How much more noise the same budget needs: R/B_g - 1."""
        return self.release_norm(clip_norm) / clip_norm - 1.0

    def coordinates(self, values: Any) -> Any:
        """(v - 1/2)·w of values along the last axis; of NumPy or JAX arrays.

        Guarantees: every result is within [-w/2, w/2], whatever the value; what is no number counts
        as 0.
        """
        xp = _numpy_of(values)
        held = xp.where(values > 0.0, xp.minimum(values, 1.0), 0.0)  # NaN is not > 0
        return (held - 0.5) * self.width

    def averages(self, sums: NDArray[np.float64], steps: float) -> NDArray[np.float64]:
        """What sums of coordinates over so many steps say of each metric, along the last axis.

        A step without a client counts as half-way, since its coordinates are zero; but as 0 for
        `present`. A loss is in its own units.
        """
        mean = np.asarray(sums, np.float64) / (steps * self.width)
        averages: NDArray[np.float64] = mean * self._units + self._at_zero
        return averages

    def deviations(self, std: float, steps: float) -> NDArray[np.float64]:
        """Standard deviation of `averages` where that of each sum is ``std``, for each metric."""
        spread: NDArray[np.float64] = std / (steps * self.width) * self._units
        return spread

    @property
    def _units(self) -> NDArray[np.float64]:
        units = {"loss": self.loss_cap, "present": 2.0}
        return np.array([units.get(name, 1.0) for name in self.metrics])

    @property
    def _at_zero(self) -> NDArray[np.float64]:
        zeros = {"loss": 0.5 * self.loss_cap, "present": 0.0}
        return np.array([zeros.get(name, 0.5) for name in self.metrics])


def extended(gradients: Any, values: Any, telemetry: Telemetry) -> Any:
    """(g, c_1, ..., c_m): clipped gradients with the coordinates of their metrics behind them.

    Vectors are along the last axis; of NumPy or JAX arrays.
    """
    coordinates = telemetry.coordinates(values).astype(gradients.dtype)
    return _numpy_of(gradients).concatenate([gradients, coordinates], axis=-1)


def _numpy_of(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return np
    import jax.numpy as jnp

    return jnp
