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
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.mechanisms.checks import positive_number

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
                "telemetry.metrics",
                list(self.metrics),
                f"one or more of {', '.join(METRIC_NAMES)}, each once",
                'metrics = ["accuracy"]',
            )
        if not _is_traced(self.width):
            width = positive_number("telemetry width", self.width, "try 0.3·clip_norm")
            object.__setattr__(self, "width", width)
        loss_cap = positive_number("telemetry.loss_cap", self.loss_cap, "try 1")
        object.__setattr__(self, "loss_cap", loss_cap)

    def release_norm(self, clip_norm: float) -> float:
        """R: the largest norm of a client's vector, rounded up."""
        norm = math.hypot(float(clip_norm), *[0.5 * self.width] * len(self.metrics)) * _ROUND_UP
        if not math.isfinite(norm):
            raise InputError(
                "clip_norm",
                clip_norm,
                f"finite with telemetry of width {self.width:g} beside it",
                "another clip norm; try 1",
            )
        return norm

    def on_grid(self, step: float) -> Telemetry:
        """With the width that coordinates have once they are rounded towards zero to a grid."""
        units = math.trunc(0.5 * self.width / step)
        if units < 1:
            raise InputError(
                "telemetry width", self.width, f"at least twice the grid's step, {step:g}", "a larger telemetry.scale"
            )
        return replace(self, width=2.0 * units * step)

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


def _is_traced(number: Any) -> bool:
    """Whether JAX holds it: a number that has no value yet, inside what is being compiled."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(number, jax.core.Tracer)


def _numpy_of(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return np
    import jax.numpy as jnp

    return jnp
