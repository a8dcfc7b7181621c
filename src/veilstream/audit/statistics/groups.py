"""A few coordinates of one kind, pooled over runs: is their noise there, and nothing else.

A release has many coordinates of the gradient and a few of telemetry. Among 100,000 others a
coordinate with half its noise does not show, so telemetry's are judged by themselves, all runs of
an audit together. W is the residuals whitened by the claimed law (N numbers, standard normal if
the code is correct), K the contributions that the audit worked out by hand, whitened alike:

* ‖W‖² is χ² with N degrees of freedom: too little noise, or too much;
* ⟨K, W⟩/‖K‖ is standard normal: clients add f times what they should shifts it by (f - 1)·‖K‖;
* cells of single messages have the probabilities of a rounded Gaussian (`cells`), where a message
  was seen a thousand times or more.

Contributions are known to the unit and noise is rounded to one, so a residual is at most half a
unit of the grid beside the noise. Both tests allow for that: p-values are then not too small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2, norm

from veilstream.audit.statistics.cells import CellCounts, CellLaw, cell_fit
from veilstream.audit.statistics.check import Check
from veilstream.audit.statistics.coordinates import whitened
from veilstream.audit.statistics.law import Law

Integers = NDArray[np.int64]

_ENOUGH = 1000  # draws of a message, for its cells
_ROUNDING = 0.5  # units of the grid


class CoordinateGroup:
    """Sums over all residuals of the group; runs come one after the other, in any number."""

    def __init__(self, name: str, law: Law, grid: float, *, messages: Iterable[int] = ()) -> None:
        assert law.root is not None
        assert law.covariance is not None
        self._name, self._law, self._grid = name, law, grid
        self._numbers = 0
        self._squares = self._along = self._known_squares = 0.0
        self._worst_rounding = float(np.linalg.norm(np.linalg.inv(law.root), 2))
        stds = {m: math.sqrt(law.covariance[m, m]) / grid for m in sorted(messages)}
        self._cells = {m: CellCounts(std) for m, std in stds.items() if CellLaw.covers(std)}
        self._unlooked = {m: std for m, std in stds.items() if m not in self._cells}

    def add(self, units: Integers, known: Integers) -> None:
        """Count (R, n) residuals, and what was taken off for clients; in units of the grid."""
        white = whitened(np.multiply(units, self._grid, dtype=np.float64), self._law)
        told = whitened(np.multiply(known, self._grid, dtype=np.float64), self._law)
        self._numbers += white.size
        self._squares += float((white**2).sum())
        self._along += float((told * white).sum())
        self._known_squares += float((told**2).sum())
        for message, counts in self._cells.items():
            counts.add(units[message])

    def checks(self) -> list[Check]:
        """Noise; contributions, where there were any; cells, where they were asked for."""
        slack = self._worst_rounding * _ROUNDING * self._grid * math.sqrt(self._numbers)
        return [self._noise(slack), *self._contributions(slack), *self._cell_checks()]

    def _noise(self, slack: float) -> Check:
        length = math.sqrt(self._squares)
        little = float(chi2.cdf((length + slack) ** 2, self._numbers))
        much = float(chi2.sf(max(0.0, length - slack) ** 2, self._numbers))
        return Check(
            f"noise of {self._name}",
            min(1.0, 2.0 * min(little, much)),
            f"{self._numbers:,} numbers have {self._squares / self._numbers:.4g} of their variance",
            "these coordinates have too little noise, or too much",
        )

    def _contributions(self, slack: float) -> list[Check]:
        if self._known_squares == 0.0:
            return []
        size = math.sqrt(self._known_squares)
        z = self._along / size
        times, error = 1.0 + z / size, 1.0 / size
        return [
            Check(
                f"contributions to {self._name}",
                min(1.0, 2.0 * float(norm.sf(max(0.0, abs(z) - slack)))),
                f"clients add {times:.4g} +- {error:.2g} times what they should",
                "clients add more than their bound allows, or other than they should",
            )
        ]

    def _cell_checks(self) -> list[Check]:
        checks = []
        for message, counts in self._cells.items():
            if counts.draws < _ENOUGH:
                words = f"NOT LOOKED AT: {counts.draws} draws, {_ENOUGH} are needed"
                checks.append(Check(f"cells of {self._name}, message {message + 1}", 1.0, words, ""))
                continue
            check = cell_fit(counts).check(message + 1)
            name = f"cells of {self._name}, message {message + 1}"
            checks.append(Check(name, check.p, check.figure, check.means))
        for message, std in self._unlooked.items():
            words = f"NOT LOOKED AT: their standard deviation is {std:.3g} units of the grid"
            checks.append(Check(f"cells of {self._name}, message {message + 1}", 1.0, words, ""))
        return checks
