"""How a round's increments become one direction: their mean, or a centre that outliers move less.

The mean is Algorithm 1: correlated noise cancels in it over time, and a lost message is made good
exactly. A trimmed mean or a median, coordinate by coordinate, is not linear, so neither holds any
more: it costs accuracy (docs/tried.md has it measured) for some resistance to learners that
lie within bounds. None of them costs privacy: all are functions of releases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class Combine:
    """``kind`` is "mean", "trimmed" or "median"; ``trim`` the share cut off at each end."""

    kind: str = "mean"
    trim: float = 0.1

    @property
    def is_mean(self) -> bool:
        """Whether a sum is enough: what it is made of need not be kept."""
        return self.kind == "mean"

    def __call__(self, increments: Sequence[NDArray[np.signedinteger]], n: int) -> NDArray[np.float64]:
        """The direction in units of the grid: a centre of those that answered, times their share.

        ``n`` counts all learners, so that weights stay 1/n whoever answers.
        """
        total = np.zeros(len(increments[0]), np.float64)
        if self.is_mean:
            exact = np.zeros(len(total), np.int64)
            for increment in increments:
                exact += increment
            return exact / n
        m = len(increments)
        width = max(1, _CHUNK_BYTES // (8 * m))
        for first in range(0, len(total), width):
            here = slice(first, first + width)
            rows = np.sort(np.stack([increment[here] for increment in increments]), axis=0)
            total[here] = self._centre(rows.astype(np.float64))
        return total * (m / n)

    def _centre(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of sorted rows."""
        m = len(rows)
        cut = (m - 1) // 2 if self.kind == "median" else min(int(self.trim * m), (m - 1) // 2)
        centre: NDArray[np.float64] = rows[cut : m - cut].mean(axis=0)
        return centre
