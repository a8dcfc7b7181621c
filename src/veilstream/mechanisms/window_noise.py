"""How much noise a sum over some of the steps carries: the variance of b_{hi} - b_{lo}.

The noise in a sum of the steps lo, ..., hi - 1 is what the program puts out there. With P the
covariance of its state before step lo,

    variance = uᵀ·P·u + Σ_s (feed_s + entry_sᵀ·u_s)²,        u_{s} = output_s + F_sᵀ·u_{s+1},

u gathered backwards from u_hi = 0: what the state before the window still does to its sum, and what
the window's own draws do. O((hi - lo)·k²), and O(k³) a step to bring P forward, which is done once.
Exact for every mechanism, in float64; no dense matrix is formed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.mechanisms.factorization import Factorization

Floats = NDArray[np.float64]


class WindowNoise:
    """Variances of sums of one mechanism's increments, at noise one; kept once computed."""

    def __init__(self, mechanism: Factorization) -> None:
        stepwise = mechanism.with_block_length(1)
        self._program = stepwise.program
        k = self._program.state_size
        self._covariances: dict[int, Floats] = {0: np.zeros((k, k))}
        self._known: dict[tuple[int, int], float] = {}

    def variance(self, first: int, end: int) -> float:
        """Of the sum of the steps ``first``, ..., ``end`` - 1; `InputError` for steps that do not exist."""
        if not 0 <= first <= end <= self._program.horizon:
            raise InputError(
                "steps", (first, end), f"0 <= first <= end <= {self._program.horizon}", "steps that the mechanism has"
            )
        if (first, end) not in self._known:
            self._known[first, end] = self._computed(first, end)
        return self._known[first, end]

    def _computed(self, first: int, end: int) -> float:
        k = self._program.state_size
        later, total = np.zeros(k), 0.0
        for step in range(end - 1, first - 1, -1):
            M = self._program.matrix(step).astype(np.float64)
            total += float(M[0, k] + M[1:, k] @ later) ** 2
            later = M[0, :k] + M[1:, :k].T @ later
        return total + float(later @ self._covariance(first) @ later)

    def _covariance(self, step: int) -> Floats:
        """Of the state before a step."""
        k = self._program.state_size
        at = max(known for known in self._covariances if known <= step)
        covariance = self._covariances[at]
        for s in range(at, step):
            M = self._program.matrix(s).astype(np.float64)
            covariance = M[1:, :k] @ covariance @ M[1:, :k].T + np.outer(M[1:, k], M[1:, k])
        self._covariances[step] = covariance
        return covariance
