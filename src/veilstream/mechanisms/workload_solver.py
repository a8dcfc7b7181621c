"""The best factorization of a workload, certified; `optimal_solver` for maps other than sums.

For H = Σ_rows WᵀUW, all of `optimal_solver` holds with H in the place of AᵀUA: the optimum is
X = V^-½ (V^½ H V^½)^½ V^-½, and (tr (V^½ H V^½)^½)² / (Σu·Σv) bounds every factorization from below
for any v > 0. With K = (V^½ H V^½)⁻¹ again X = Σ_m ω_m (H⁻¹ + s_m²·V)⁻¹, and no inverse is formed:

- H is the covariance of y_t = b_tᵀζ_t, where ζ runs backwards, ζ_{t-1} = F_tᵀζ_t + Σ_c √u·ε·e_c
  (F, b and the coordinates c of the `LinearSystem`);
- (H⁻¹ + s²V)⁻¹ is the covariance of y *given* that every y_t was seen with precision s²v_t. Such a
  posterior is a Markov chain too. E_t, what the steps up to t tell about ζ_t, is carried
  forwards as a root R with E = RᵀR. In the coordinates of a row, u enters as one factor of
  R's first row: no difference of nearly equal numbers.

One pass costs O(T·poles·n³), n <= 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from veilstream.mechanisms.linear_system import LinearSystem
from veilstream.mechanisms.markov import BlockChains
from veilstream.mechanisms.optimal_solver import resolvents

__all__ = ["MatrixProblem", "WorkloadProblem"]

Floats = NDArray[np.float64]

_POLES = 64


@dataclass(frozen=True, eq=False)
class WorkloadProblem:
    """A workload at one horizon, as `optimal_solver.solve` takes it."""

    system: LinearSystem

    def row_weights(self, v: Floats) -> Floats:
        """All of them, row after row."""
        return np.concatenate([row.weights for row in self.system.rows])

    def diagonal(self, u: Floats, v: Floats) -> Floats:
        """Diag X."""
        chains = self.chains(v)
        diagonal = np.empty(len(v))
        covariance = chains.start
        for t in range(len(v) - 1, -1, -1):
            w = chains.weights[t]
            diagonal[t] = np.einsum("mi,mij,mj->", w, covariance, w)
            if t:
                D = chains.decay[t]
                covariance = D @ covariance @ D.transpose(0, 2, 1) + chains.fresh[t]
        return diagonal

    def chains(self, v: Floats) -> BlockChains:
        """X as the covariance of a weighted sum of Markov chains."""
        F, b = self.system.transition, self.system.entry
        shifts, weights = resolvents(*self._spectrum_bounds(v), _POLES)
        T, n = b.shape
        m = len(shifts)
        decay, fresh = np.zeros((T, m, n, n)), np.zeros((T, m, n, n))
        seen = np.sqrt(np.outer(v, shifts))  # s·√v of every step and pole
        R = np.zeros((m, n, n))
        start = np.zeros((m, n, n))
        for t in range(T):
            stacked = np.empty((m, n + 1, n))
            stacked[:, :n] = R @ F[t].T
            stacked[:, n] = seen[t][:, None] * b[t]
            R, shrink, added = self._outputs(t, stacked)
            if t + 1 < T:
                decay[t + 1] = shrink @ F[t + 1].T
                fresh[t + 1] = added
            else:
                start = added
        looked_at = np.sqrt(weights)[None, :, None] * b[:, None, :]
        return BlockChains(looked_at, start, decay, fresh)

    def _outputs(self, t: int, root: Floats) -> tuple[Floats, Floats, Floats]:
        """What the rows of step t do: R after them, how ζ is drawn in, and what is added to it."""
        m, _, n = root.shape
        shrink = np.broadcast_to(np.eye(n), (m, n, n))
        added = np.zeros((m, n, n))
        R = root
        for row in self.system.rows:
            u, c = float(row.weights[t]), row.coordinate
            order = [c, *(i for i in range(n) if i != c)]
            R = _triangular(R[:, :, order])
            factor = 1.0 / (1.0 + u * R[:, 0, 0] ** 2)
            pull = np.zeros((m, n))
            pull[:, order] = (-u * factor * R[:, 0, 0])[:, None] * R[:, 0]
            pull[:, c] = factor
            here = np.repeat(np.eye(n)[None], m, axis=0)
            here[:, c] = pull
            # Rows act one after the other: what this one adds, those before it draw in.
            entered = np.zeros((m, n, n))
            entered[:, c, c] = u * factor
            added = added + shrink @ entered @ shrink.transpose(0, 2, 1)
            shrink = shrink @ here
            R[:, 0] *= np.sqrt(factor)[:, None]
            R = R[:, :, np.argsort(order)]
        return R, shrink, added

    def _spectrum_bounds(self, v: Floats) -> tuple[float, float]:
        """Bounds on the eigenvalues of K = (V^½ H V^½)⁻¹."""
        largest, inverse = self._traces
        return 1.0 / float(v @ largest), float((inverse / v).sum())

    @cached_property
    def _traces(self) -> tuple[Floats, Floats]:
        """Diag H, and a bound on diag H⁻¹: of the map back from the first row alone."""
        F, b, rows = self.system.transition, self.system.entry, self.system.rows
        T, n = b.shape
        gram = np.zeros((n, n))
        diagonal = np.empty(T)
        for t in range(T - 1, -1, -1):
            for row in rows:
                gram[row.coordinate, row.coordinate] += row.weights[t]
            diagonal[t] = b[t] @ gram @ b[t]
            gram = F[t].T @ gram @ F[t]
        # H >= WᵀUW of the row of x, which is looked at after every step.
        c = next(row for row in rows if row.weights.all())
        back = np.empty(T)
        covariance = np.zeros((n, n))
        for t in range(T):
            now = F[t][c.coordinate]
            lead = b[t, c.coordinate]
            variance = 1.0 / c.weights[t]
            back[t] = (variance + now @ covariance @ now) / lead**2
            gain = b[t] / lead
            keep = F[t] - np.outer(gain, now)
            covariance = keep @ covariance @ keep.T + variance * np.outer(gain, gain)
        return diagonal, back


@dataclass(frozen=True, eq=False)
class MatrixProblem:
    """A workload given as a matrix: the same from dense singular values."""

    matrix: Floats

    def row_weights(self, v: Floats) -> Floats:
        """All alike."""
        return np.ones(len(v))

    def diagonal(self, u: Floats, v: Floats) -> Floats:
        """Diag X."""
        return np.einsum("tj,tj->j", *(self._root(v),) * 2)

    def _root(self, v: Floats) -> Floats:
        """Z with ZᵀZ = X."""
        from scipy.linalg import svd

        root = np.sqrt(v)
        _, size, basis = svd(self.matrix * root, check_finite=False)
        Z: Floats = np.sqrt(size)[:, None] * basis / root
        return Z

    def strategy_matrix(self, v: Floats) -> Floats:
        """C, lower triangular with CᵀC = X."""
        R = np.linalg.qr(self._root(v)[:, ::-1], mode="r")
        C: Floats = R[::-1, ::-1]
        return C * np.sign(C.diagonal())[:, None]


def _triangular(stacked: Floats) -> Floats:
    """R of a QR factorization of each (rows, n), with n rows: Householder, all at once."""
    A = stacked.copy()
    _, rows, n = A.shape
    for j in range(min(n, rows - 1)):
        x = A[:, j:, j]
        length = np.sqrt(np.einsum("mi,mi->m", x, x))
        w = x.copy()
        w[:, 0] += np.copysign(length, x[:, 0])
        norm = np.einsum("mi,mi->m", w, w)
        scale = 2.0 / np.where(norm > 0.0, norm, 1.0)
        A[:, j:, j:] -= (scale[:, None] * w)[:, :, None] * (w[:, None, :] @ A[:, j:, j:])
        A[:, j + 1 :, j] = 0.0
    reduced: Floats = A[:, :n]
    return reduced
