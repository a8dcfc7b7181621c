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
from veilstream.mechanisms.optimal_solver import overshoot, resolvents

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class WorkloadProblem:
    """A workload at one horizon, as `optimal_solver.solve` takes it."""

    system: LinearSystem

    def row_weights(self, v: Floats) -> Floats:
        """All of them, row after row."""
        return np.concatenate([row.weights for row in self.system.rows])

    def diagonal(self, u: Floats, v: Floats) -> Floats:
        """Diag X."""
        posterior = self._posterior(v)
        diagonal = np.empty(len(v))
        # The covariance as a root as well: y is a small difference of large numbers of ζ.
        root = _triangular(posterior.fresh[-1].transpose(0, 2, 1))
        for t in range(len(v) - 1, -1, -1):
            y = root @ self.system.entry[t]
            diagonal[t] = posterior.weights @ np.einsum("mi,mi->m", y, y)
            if t:
                moved = root @ posterior.decay[t].transpose(0, 2, 1)
                fresh = posterior.fresh[t - 1].transpose(0, 2, 1)
                root = _triangular(np.concatenate([moved, fresh], axis=1))
        return diagonal

    def overshoot(self, u: Floats, v: Floats) -> float:
        """By how much the quadrature can exceed the true trace."""
        return overshoot(*self._spectrum_bounds(v))

    def chains(self, v: Floats) -> BlockChains:
        """X as the covariance of a weighted sum of Markov chains."""
        posterior = self._posterior(v)
        covariance = posterior.fresh @ posterior.fresh.transpose(0, 1, 3, 2)
        seen = np.sqrt(posterior.weights)[None, :, None] * self.system.entry[:, None, :]
        fresh = np.concatenate([np.zeros_like(covariance[:1]), covariance[:-1]])
        return BlockChains(seen, covariance[-1], posterior.decay, fresh)

    def _posterior(self, v: Floats) -> _Posterior:
        F, b = self.system.transition, self.system.entry
        shifts, weights = resolvents(*self._spectrum_bounds(v))
        T, n = b.shape
        m = len(shifts)
        decay = np.zeros((T, m, n, n))
        fresh = np.zeros((T, m, n, max(n, len(self.system.rows))))
        seen = np.sqrt(np.outer(v, shifts))  # s·√v of every step and pole
        R = np.zeros((m, n, n))
        for t in range(T):
            stacked = np.empty((m, n + 1, n))
            stacked[:, :n] = R @ F[t].T
            stacked[:, n] = seen[t][:, None] * b[t]
            R, shrink = self._outputs(t, stacked, fresh[t])
            if t + 1 < T:
                decay[t + 1] = shrink @ F[t + 1].T
        return _Posterior(weights, decay, fresh)

    def _outputs(self, t: int, root: Floats, fresh: Floats) -> tuple[Floats, Floats]:
        """R after the rows of step t, and how ζ is drawn in; a column of ``fresh`` takes what each row adds to ζ."""
        m, _, n = root.shape
        shrink = np.broadcast_to(np.eye(n), (m, n, n))
        R = root
        for i, row in enumerate(self.system.rows):
            u, c = float(row.weights[t]), row.coordinate
            order = [c, *(j for j in range(n) if j != c)]
            R = _triangular(R[:, :, order])
            factor = 1.0 / (1.0 + u * R[:, 0, 0] ** 2)
            pull = np.zeros((m, n))
            pull[:, order] = (-u * factor * R[:, 0, 0])[:, None] * R[:, 0]
            pull[:, c] = factor
            here = np.repeat(np.eye(n)[None], m, axis=0)
            here[:, c] = pull
            # Rows act one after the other: what this one adds, those before it draw in.
            fresh[:, :, i] = shrink[:, :, c] * np.sqrt(u * factor)[:, None]
            shrink = shrink @ here
            R[:, 0] *= np.sqrt(factor)[:, None]
            R = R[:, :, np.argsort(order)]
        return R, shrink

    def _spectrum_bounds(self, v: Floats) -> tuple[float, float]:
        """Bounds on the eigenvalues of K = (V^½ H V^½)⁻¹."""
        largest, inverse = self._traces
        # Back from x, a gradient is a sum of at most three of its values, and x_t is in at most
        # three of them: no row of K has more than nine entries, none above the largest on the
        # diagonal. A tight bound keeps the shifts small, and with them what rounding costs.
        entries = inverse / v
        return 1.0 / float(v @ largest), min(float(entries.sum()), 9.0 * float(entries.max()))

    @cached_property
    def _traces(self) -> tuple[Floats, Floats]:
        """Diag H, and a bound on diag H⁻¹: of the map back from the last row alone."""
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
        c = rows[-1]
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
class _Posterior:
    """ζ of every pole as a chain that runs backwards."""

    weights: Floats  # ω, (m,)
    decay: Floats  # (T, m, n, n); row t leads from t to t-1, row 0 is not used
    fresh: Floats  # (T, m, n, columns): a root of the covariance of what enters at t


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
