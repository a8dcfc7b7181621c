"""Columns of C as numbers, for an accounting that needs more of them than their norms (`privacy.secret_order`).

Only a C without negative entries has them. What float32 programs leave below zero or outside a band is
rounding: it is cut off, and its size is kept, so that a promise can charge it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.mechanisms import analysis
from veilstream.mechanisms.factorization import Factorization

Floats = NDArray[np.float64]

DENSE_COLUMNS = 4096
"""The longest horizon for which columns are kept whole; longer ones need bands."""
_ROUNDING = 2e-6  # the largest part of a column that can come from float32 blocks
_LITTLE = 1e-7  # part of a column, less than float32 blocks may differ by
_UNIT = 2.0**-30  # entries are whole multiples, so that machines agree on them
_SHORT = 512  # up to so many steps columns are kept whole
_FEW = 128  # up to so many steps a band saves no time


@dataclass(frozen=True, eq=False)
class Columns:
    """Columns of a lower-triangular C >= 0: row i of ``entries`` is column i from its diagonal down."""

    entries: Floats
    """(T, width); zero beyond the last step."""

    @classmethod
    def of_products(cls, products: Floats) -> Columns:
        """Lower-triangular columns with these inner products, a positive definite matrix."""
        C = np.linalg.cholesky(products[::-1, ::-1]).T[::-1, ::-1]
        T = len(C)
        entries = np.zeros((T, T))
        for j in range(T):
            entries[j, : T - j] = C[j:, j]
        return cls(entries)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.entries)

    @cached_property
    def norms_squared(self) -> Floats:
        """‖c_j‖² of each."""
        squares: Floats = (self.entries**2).sum(axis=1)
        return squares

    @cached_property
    def mean(self) -> Floats:
        """(1/T)·Σ_j c_j."""
        total = np.zeros(self.count + self.entries.shape[1])
        for i, diagonal in enumerate(self.entries.T):
            total[i : i + self.count] += diagonal
        mean: Floats = total[: self.count] / self.count
        return mean

    @cached_property
    def digest(self) -> str:
        """Of the numbers."""
        shape = repr(self.entries.shape).encode()
        return hashlib.sha256(shape + np.ascontiguousarray(self.entries, "<f8").tobytes()).hexdigest()

    def trimmed(self) -> tuple[Columns, float]:
        """Without what rounding left beyond a band, where that is little, and the norm of the most that is cut off."""
        largest = self.entries.max(axis=0)
        reach = 1 + int(np.flatnonzero(largest > _ROUNDING * largest.max())[-1])
        cut = float(np.sqrt((self.entries[:, reach:] ** 2).sum(axis=1).max()))
        if reach == self.reach or cut > _LITTLE * float(largest.max()):
            return self, 0.0
        kept = self.entries.copy()
        kept[:, reach:] = 0.0
        return Columns(kept), cut

    def add(self, draws: Floats, chosen: NDArray[np.int64], times: float) -> None:
        """Add ``times`` the chosen column to each row of ``draws``, in place."""
        width, T = self.entries.shape[1], self.count
        if width == T:
            draws += times * self._whole.T[chosen]
            return
        at = chosen[:, None] + np.arange(width)
        inside = at < T
        rows = np.broadcast_to(np.arange(len(draws))[:, None], at.shape)
        draws[rows[inside], at[inside]] += times * self.entries[chosen][inside]

    def products(self, draws: Floats) -> Floats:
        """⟨c_j, x⟩ for each row x of ``draws`` and every j."""
        width, T = self.reach, self.count
        if 2 * width > T or T <= _FEW:
            return draws @ self._whole
        if width == 1:
            return draws * self.entries[:, 0]
        found = np.empty((len(draws), T))
        for first, part in self._parts:
            found[:, first : first + part.shape[1]] = draws[:, first : first + len(part)] @ part
        return found

    @cached_property
    def reach(self) -> int:
        """Entries of a column up to its last that is not zero, at most: so many steps apart, columns do not overlap."""
        return 1 + int(np.flatnonzero(self.entries.any(axis=0))[-1])

    @cached_property
    def _whole(self) -> Floats:
        return self._dense(0, self.count, self.count)

    @cached_property
    def _parts(self) -> list[tuple[int, Floats]]:
        """C in pieces of some columns each, with the rows that these reach."""
        width, T = self.reach, self.count
        length = max(width, 64)
        cuts = range(0, T, length)
        return [(first, self._dense(first, min(first + length, T), min(first + length + width, T))) for first in cuts]

    def _dense(self, first: int, end: int, last_row: int) -> Floats:
        dense = np.zeros((last_row - first, end - first))
        for i, diagonal in enumerate(self.entries[first:end].T):
            reach = min(end - first, last_row - first - i)
            if reach > 0:
                dense[np.arange(reach) + i, np.arange(reach)] = diagonal[:reach]
        return dense


def columns_of(factorization: Factorization) -> tuple[Columns, float]:
    """Columns of a mechanism's C in one form for all block lengths, and how far any of its own is from that, as a norm.

    Raises:
        InputError: where C has a negative entry, or is too long to be looked at whole.

    """
    width = _width_of(factorization)
    own, beyond = _entries(factorization, width)
    stepwise, _ = _entries(factorization.with_block_length(1), width)
    kept = np.round(np.maximum(stepwise, 0.0) / _UNIT) * _UNIT
    apart = float(np.sqrt(((own - kept) ** 2).sum(axis=1).max())) + beyond
    least = float(own.min())
    if least < -_ROUNDING * float(np.abs(own).max()) or not apart < 50.0 * _ROUNDING * float(np.abs(own).max()):
        raise InputError(
            "mechanism",
            factorization.name,
            f"a C without negative entries beside a secret order (its least is {least:.3g}): with one, two steps at "
            "which a record may be used can cancel each other, and the promise is not proved",
            'mechanism = "banded", or privacy.order = "known"',
        )
    return Columns(kept), apart


def _width_of(factorization: Factorization) -> int:
    T, band = factorization.horizon, factorization.bandwidth
    if factorization.name == "independent":
        band = 1
    if T > _SHORT and band is not None and 2 * band < T:
        return band
    if T > DENSE_COLUMNS:
        raise InputError(
            "mechanism",
            factorization.name,
            f"one with bands beside a secret order and more than {DENSE_COLUMNS:,} steps: here there are {T:,}",
            'mechanism = "banded"',
        )
    return T


def _entries(factorization: Factorization, width: int) -> tuple[Floats, float]:
    T, program = factorization.horizon, factorization.program
    if width < T:
        return analysis.band_entries(program, width)
    C = analysis.strategy_matrix(program)
    entries = np.zeros((T, T))
    for j in range(T):
        entries[j, : T - j] = C[j:, j]
    return entries, 0.0
