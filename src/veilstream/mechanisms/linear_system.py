"""A causal linear map of the gradients, as a recurrence with few states.

    q_t = transition_t · q_{t-1} + entry_t · g_t,    q_{-1} = 0

Some coordinates of q are looked at, each with a weight at every step: `OutputRow`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class OutputRow:
    """One coordinate of the state, and how much its error counts at each step."""

    coordinate: int
    weights: Floats  # (T,), >= 0


@dataclass(frozen=True, eq=False)
class LinearSystem:
    """What a workload is made of; the first row is what is published."""

    transition: Floats  # (T, n, n)
    entry: Floats  # (T, n)
    rows: tuple[OutputRow, ...]

    @property
    def horizon(self) -> int:
        """T."""
        return len(self.entry)

    @property
    def order(self) -> int:
        """n, numbers of the state."""
        return int(self.entry.shape[1])

    @property
    def total_weight(self) -> float:
        """Of all rows at all steps."""
        return float(sum(row.weights.sum() for row in self.rows))

    def matrix(self, coordinate: int) -> Floats:
        """(T, T): this coordinate after every step, from the gradients."""
        T, n = self.entry.shape
        W = np.zeros((T, T))
        q = np.zeros((n, T))
        for t in range(T):
            q = self.transition[t] @ q
            q[:, t] += self.entry[t]
            W[t] = q[coordinate]
        return W

    def gram(self) -> Floats:
        """H = Σ_rows WᵀUW, dense."""
        H = np.zeros((self.horizon, self.horizon))
        for row in self.rows:
            W = self.matrix(row.coordinate)
            H += W.T @ (row.weights[:, None] * W)
        return H
