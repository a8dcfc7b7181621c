"""Same randomness, neighbouring data: transcripts differ by what theory predicts, or by a leak.

With the same noise in both worlds, Y - A_R·G is the same noise prefix twice, up to `ROUNDING` units
for each step at which the worlds differ. The audit works G out on its own (`clipped_by_hand`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError

Integers = NDArray[np.int64]

ROUNDING = 2
"""Units of the grid: 2⁻²⁰ of the clip norm or less of the noise each."""


@dataclass(frozen=True)
class Differencing:
    """Of two transcripts under the same draws."""

    messages: int
    differing_steps: int
    moved_units: int
    """How far the canary really moved a number of the transcript."""
    unexplained_units: int
    """How far a number moved that theory does not explain."""
    same_shape: bool
    """As many messages, of the same sizes."""

    @property
    def alarm(self) -> bool:
        """Something but the predicted image of the gradients moved."""
        return not self.same_shape or self.unexplained_units > ROUNDING * self.differing_steps


def difference(
    first: Integers,
    second: Integers,
    known_first: Integers,
    known_second: Integers,
    *,
    differing_steps: int,
    sizes: tuple[Sequence[int], Sequence[int]],
) -> Differencing:
    """Compare (R, d) messages, in units of the grid, and the gradients known to be in them."""
    if first.shape != second.shape:
        return Differencing(len(first), differing_steps, 0, 0, False)
    if known_first.shape != first.shape or known_second.shape != second.shape:
        raise InputError("known", known_first.shape, f"shape {first.shape}", "one row a message")
    moved = np.abs(second - first).max(initial=0)
    left = np.abs((second - known_second) - (first - known_first)).max(initial=0)
    return Differencing(len(first), differing_steps, int(moved), int(left), list(sizes[0]) == list(sizes[1]))


def clipped_by_hand(raw: NDArray[np.floating], clip_norm: float, step: float, gamma: float | None = None) -> Integers:
    """The gradient that should have been used, in units of the grid; written apart from `clip`.

    With a ``gamma`` it is g / (|g| + gamma), which needs no clipping to norm one.
    In float64, so up to a unit or two beside the deployed result, which is exact in its norm.
    """
    values = np.asarray(raw, np.float64)
    if not np.isfinite(values).all():
        return np.zeros(values.shape, np.int64)
    largest = float(np.abs(values).max(initial=0.0))
    if largest == 0.0:
        return np.zeros(values.shape, np.int64)
    norm = largest * float(np.sqrt(((values / largest) ** 2).sum()))
    factor = min(1.0, clip_norm / norm) if gamma is None else min(1.0, clip_norm) / (norm + gamma)
    units: Integers = np.trunc(values * factor / step).astype(np.int64)
    return units


def told_by_hand(
    raw: NDArray[np.floating], metrics: Sequence[str], right: bool, *, clip_norm: float, width: float, step: float
) -> Integers:
    """Telemetry's coordinates that should have been used, in units of the grid.

    Written apart from `privacy.telemetry`. The audit's clients are ``right`` or wrong, and their
    losses beyond the cap if they are right, else 0.
    """
    values = np.asarray(raw, np.float64)
    with np.errstate(all="ignore"):
        longer = not float(np.sqrt((values**2).sum())) <= clip_norm
    yes = {"accuracy": right, "loss": right, "clipped": longer, "present": True}
    half = int(width / 2 / step)
    return np.array([half if yes[name] else -half for name in metrics], np.int64)
