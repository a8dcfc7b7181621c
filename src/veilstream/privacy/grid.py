"""The grid on which a deployed learner's numbers live: whole multiples of a power of two.

Floating-point sums of a gradient and noise give the gradient away in their low-order bits. Here
both are whole numbers before they are added:

* the clipped gradient is rounded *towards zero* onto the grid, which cannot lengthen it; its norm
  is then checked again, in integers, with no rounding anywhere;
* the *prefix* of the correlated noise is rounded *to nearest*; what a step adds is the difference
  of two such prefixes.

Sums of gradients lie on the grid, so (sum of gradients) + round(noise prefix) is exactly
round((sum of gradients) + (noise prefix)): post-processing of a Gaussian release, *if the noise
before rounding is Gaussian*. Support and density both count. That every cell can be reached from
every gradient is not enough; each must be reached with the Gaussian's probability, or a public
table of cell probabilities tells gradients apart, a little in every coordinate. `grid_noise` gives
the cells exactly that law, whatever the grid, and `noise_law` says what is left.

The grid is 2^-20 of the clip norm, or 2^-18 of the noise's standard deviation where that is coarser
(both rounded to a power of two): fine enough that rounding costs no accuracy, coarse enough that
64-bit sums hold whole runs.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NewType

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError, PrivacyError
from veilstream.mechanisms.checks import positive_number
from veilstream.privacy.clipping import Clipped, checked_clip_norm

Int64s = NDArray[np.int64]

OnGrid = NewType("OnGrid", NDArray[np.int64])
"""Clipped gradients in units of the grid, each norm checked in integers. Made by `Grid.gradient`."""

_CHUNK = 1 << 20
_SURELY_WITHIN = 1e-9
"""Pairwise float64 sums of squares err by less than this share, below 2^40 numbers."""
LARGEST = 2.0**62


_FINEST = 2.0**31


@dataclass(frozen=True)
class Grid:
    """Multiples of ``step``, for gradients clipped to ``clip_norm``."""

    step: float
    clip_norm: float

    def __post_init__(self) -> None:
        positive_number("step", self.step, "a power of two")
        if math.frexp(self.step)[0] != 0.5:
            raise InputError("step", self.step, "a power of two", "use grid_for")
        checked_clip_norm(self.clip_norm)
        if self.clip_norm / self.step > _FINEST:
            raise InputError("step", self.step, "at least 2^-31 of the clip norm", "use grid_for")

    def gradient(self, clipped: Clipped, clients_per_step: int = 1) -> OnGrid:
        """A client's share of a step, rounded towards zero.

        The share is 1 / ``clients_per_step``, the plan's number, however many clients came. A share that
        exceeds clip_norm / clients_per_step then is a defect, and is refused.
        """
        exact = np.asarray(clipped, np.float64)
        # Division by a power of two is exact; by another number it rounds by far less than clipping leaves free.
        whole = np.divide(exact, self.step * clients_per_step)
        np.trunc(whole, out=whole)
        units: Int64s = np.empty(whole.shape, np.int64)
        with np.errstate(invalid="ignore"):  # what is not finite is refused below
            np.copyto(units, whole, casting="unsafe")
        squares = float(np.multiply(whole, whole, out=whole).sum())
        if not math.isfinite(squares):
            raise PrivacyError("a clipped gradient is not finite: nothing was released")
        bound, square, nearly = _bound(self.clip_norm, self.step, clients_per_step)
        if not squares <= nearly and _square_norm(units, bound) > square:  # decided in integers
            raise PrivacyError("a clipped gradient exceeds its norm: nothing was released")
        return OnGrid(units)

    def value(self, units: NDArray[np.int64]) -> NDArray[np.float32]:
        """What whole numbers stand for."""
        return (units * self.step).astype(np.float32)


@functools.lru_cache(maxsize=64)
def _bound(clip_norm: float, step: float, clients_per_step: int) -> tuple[Fraction, Fraction, float]:
    """The longest share in units of the grid, its square, and what a float64 sum of squares is surely within."""
    bound = Fraction(clip_norm) / (Fraction(step) * clients_per_step)
    return bound, bound * bound, float(bound * bound) * (1.0 - _SURELY_WITHIN)


def _square_norm(units: Int64s, bound: Fraction) -> int:
    """Exact sum of squares, in chunks that cannot overflow; stops at an entry beyond the bound."""
    if len(units) and int(np.abs(units).max()) > bound:
        return math.ceil(bound * bound) + 1
    total = 0
    for first in range(0, units.size, _CHUNK):  # entries are below 2^31, a chunk's sum below 2^82:
        part = units[first : first + _CHUNK]
        high, low = np.divmod(np.abs(part), 1 << 16)
        total += int((high * high).sum()) << 32
        total += int((high * low).sum()) << 17
        total += int((low * low).sum())
    return total


def grid_for(clip_norm: float, noise_std: float, clients_per_step: int = 1) -> Grid:
    """The grid of a learner with this clip norm and noise, on which one client's share of a step is rounded."""
    bound = checked_clip_norm(clip_norm)
    std = positive_number("noise_std", noise_std, "take it from veilstream.calibrate")
    fine = math.floor(math.log2(bound / clients_per_step)) - 20
    coarse = math.ceil(math.log2(std)) - 18
    step = math.ldexp(1.0, max(fine, coarse))
    if bound / step > _FINEST:
        raise InputError(
            "clients_per_step",
            clients_per_step,
            f"so few that a step's noise is at least 2^-13 of the clip norm (it is {std / bound:.2g} of it)",
            "fewer clients a step, in more steps",
        )
    return Grid(step, bound)
