"""A sharper look at cells: whether they follow the lattice of float32, as rounded products do.

`cells` needs no guess at what is wrong, and pays for it: N·η² must exceed some √(2·K). The best
known way of going wrong can be looked for directly. If normals are float32 numbers y, multiplied
once more in float32 by a factor f, a cell is reached by as many y as happen to fall into it. With
the spacing of y as its mass, cell c gets

    1 + r_c = f·Σ { spacing(y) : round(fl32(f·y)) = c }

times what it should have: a pattern that anyone can work out. The counts' correlation with it,

    Z = Σ_c n_c·(r_c - r̄) / √(N·Σ_c p_c·(r_c - r̄)²),   r̄ = Σ_c p_c·r_c,

is standard normal under the Gaussian law, and about √(N·η²) where the pattern is real: 10⁶ draws
show what single cells show at 3·10⁸.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from veilstream.audit.statistics.cells import CellCounts, CellLaw
from veilstream.audit.statistics.check import Check
from veilstream.errors import InputError

Floats = NDArray[np.float64]

_SMALL = 2.0**-6  # of a standard deviation: below, float32 is finer than matters
_CHUNK = 1 << 20
_MANTISSA = 1 << 23


def float32_pattern(law: CellLaw, factor: float) -> Floats:
    """r_c of the cells from -half to half, for float32 normals times a float32 ``factor``."""
    f = np.float32(factor)
    if not 0.0 < abs(float(f)) < math.inf:
        raise InputError("factor", factor, "a number that float32 can hold, not zero", "try 1")
    f = abs(f)  # the normals are symmetric, rounding is too; ties are not, and are done for both
    half = law.half
    low, high = _SMALL * law.std / float(f), (half + 1.0) / float(f)
    mass = np.zeros(2 * half + 3)
    binade = math.floor(math.log2(low))
    while math.ldexp(1.0, binade) < high:
        spacing = math.ldexp(1.0, binade - 23)
        for first in range(0, _MANTISSA, _CHUNK):
            start = math.ldexp(1.0 + first / _MANTISSA, binade)
            if start > high:
                break
            y = (start + spacing * np.arange(_CHUNK)).astype(np.float32)
            image = (f * y).astype(np.float64)
            for signed in (image, -image):
                cell = np.floor(signed + 0.5).astype(np.int64)
                np.clip(cell, -half - 1, half + 1, out=cell)
                base = int(cell.min())
                seen = np.bincount(cell - base)
                at = base + half + 1
                mass[at : at + len(seen)] += seen * (spacing * float(f))
        binade += 1
    pattern: Floats = mass[1:-1] - 1.0
    cells = np.abs(np.arange(-half, half + 1))
    pattern[(cells <= math.ldexp(1.0, math.floor(math.log2(low))) * float(f) + 2) | (cells >= half)] = 0.0
    return pattern


@dataclass(frozen=True)
class LatticeFit:
    """How well counts follow a pattern that they should not know."""

    draws: int
    z: float
    pattern_eta_squared: float
    """η² of cells that follow the pattern in full."""
    share: float
    """How much of it is in the counts: 0 for the Gaussian, 1 for the pattern; with its error."""
    share_error: float

    @property
    def p(self) -> float:
        """Two-sided."""
        return 2.0 * float(ndtr(-abs(self.z)))

    def check(self, message: int) -> Check:
        """For the report; messages count from 1."""
        return Check(
            f"float32 lattice in message {message}",
            self.p,
            f"{self.draws:.3g} draws: {self.share:.2f} +- {self.share_error:.2f} of the pattern "
            f"(eta^2 = {self.pattern_eta_squared:.1e}), z = {self.z:.1f}",
            "the numbers that are sent follow the lattice of float32: cells have other "
            "probabilities than a rounded Gaussian's",
        )


def lattice_fit(seen: CellCounts, factor: float) -> LatticeFit | None:
    """Correlate counts with the pattern; None where it is too faint to be of use to anyone."""
    law, draws = seen.law, seen.draws
    p, n = law.probabilities[1:-1], seen.counts[1:-1]
    pattern = float32_pattern(law, factor)
    mean = float(p @ pattern)
    strength = float(p @ pattern**2) - mean**2
    if strength * draws < 1e-6:
        return None
    moved = float(n @ pattern) - draws * mean
    z = moved / math.sqrt(draws * strength)
    share = moved / (draws * strength)
    return LatticeFit(draws, z, strength, share, 1.0 / math.sqrt(draws * strength))
