"""The best C with bands no wider than the steps between two visits, for people who return, certified.

Columns of such a C that one person can meet are orthogonal, so k visits cost exactly √k. With X = CᵀC and
M = AᵀUA the error is tr(M X⁻¹), convex in X over X_ii = 1, X_ij = 0 for |i-j| >= b (Choquette-Choo et al. 2023,
"(Amplified) Banded Matrix Factorization", minimise the same). C with unit columns is searched by its gradient.

The certificate: for any W ⪰ 0 with W_ij = 0 for 0 < |i-j| < b, every such X has
tr(M X⁻¹) >= 2·tr (M^½ W M^½)^½ - tr(W), and the best multiple of W gives (tr (M^½ W M^½)^½)² / tr(W).
At the optimum X⁻¹MX⁻¹ is such a W.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_KEPT_PAIRS = 30  # of steps and gradients that the search remembers


def best_banded(M: Floats, bands: int, start: Floats, tick: Callable[[int], None]) -> tuple[Floats, float]:
    """C with unit columns that minimises tr(M (CᵀC)⁻¹), and a value that no C of so many bands is below.

    Args:
        M: what errors of prefix sums count, AᵀUA.
        bands: number of diagonals, the main one included.
        start: a C to begin at; what is outside the bands is left out.
        tick: called once an iteration.

    """
    from scipy.linalg import solve_triangular
    from scipy.optimize import minimize

    T = len(M)
    identity = np.eye(T)
    rows, columns = np.nonzero(np.tri(T) - np.tri(T, k=-bands))

    def matrix(entries: Floats) -> tuple[Floats, Floats]:
        C = np.zeros((T, T))
        C[rows, columns] = entries
        norms = np.sqrt((C**2).sum(axis=0))
        return C / norms, norms

    def objective(entries: Floats) -> tuple[float, Floats]:
        C, norms = matrix(entries)
        N = solve_triangular(C, identity, lower=True, check_finite=False)
        seen = M @ N
        value = float((N * seen).sum())
        # d tr(NᵀMN) = -2 tr(NᵀMN dC N); then without what would only change a column's norm.
        slope = (-2.0 * (N.T @ seen) @ N.T)[rows, columns]
        unit = C[rows, columns]
        along = np.bincount(columns, weights=slope * unit, minlength=T)
        return float(np.log(value)), (slope - along[columns] * unit) / norms[columns] / value

    found = minimize(
        objective,
        start[rows, columns],
        jac=True,
        method="L-BFGS-B",
        callback=lambda _: tick(1),
        options={"maxiter": 3000, "maxcor": _KEPT_PAIRS, "ftol": 1e-15, "gtol": 1e-10},
    )
    C, _ = matrix(found.x)
    return C, _lower_bound(M, C, bands)


def _lower_bound(M: Floats, C: Floats, bands: int) -> float:
    from scipy.linalg import solve_triangular

    T = len(M)
    N = solve_triangular(C, np.eye(T), lower=True)
    inverse = N @ N.T
    W = inverse @ M @ inverse
    distance = np.abs(np.subtract.outer(np.arange(T), np.arange(T)))
    W[(distance > 0) & (distance < bands)] = 0.0
    sizes, vectors = np.linalg.eigh(W)
    sizes -= min(0.0, float(sizes[0]))  # a shift of W's diagonal keeps it among those that count
    root = vectors * np.sqrt(sizes)
    power, axes = np.linalg.eigh(M)
    half = np.sqrt(np.maximum(power, 0.0))[:, None] * axes.T
    return float(np.linalg.svd(half @ root, compute_uv=False).sum() ** 2 / sizes.sum())
