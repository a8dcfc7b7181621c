"""Buffered linear Toeplitz (BLT) noise: k decaying buffers, tuned for the horizon.

N = C⁻¹ has the kernel 1, -Σ w, -Σ w·λ, ... with w > 0 and 0 < λ < 1. Its inverse is of the same
kind, C = 1 + Σ a·θ^(j-1), where θ are the eigenvalues of diag(λ) + √w·√wᵀ and a the squared
projections of √w on the eigenvectors: never through polynomial roots. While θ < 1, C is positive
and decreasing. Sensitivity and error are then finite geometric sums, O(k²) at any horizon, and the
parameters are found by minimising the larger of them (McMahan, Xu and Zhang 2024, "A Hassle-free
Algorithm for Private Learning in Practice", optimise the same family by other means).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from veilstream.mechanisms import solution_cache
from veilstream.mechanisms.checks import checked_horizon, positive_integer
from veilstream.mechanisms.factorization import Factorization, normalised
from veilstream.mechanisms.toeplitz import exponential_sum, relaxation
from veilstream.progress import progress

__all__ = ["buffered"]

Floats = NDArray[np.float64]

_STARTS = 6


def buffered(
    horizon: int, buffers: int = 5, *, normalise: bool = True, cache: bool = True
) -> Factorization:
    """BLT with ``buffers`` states, columns scaled to norm one unless ``normalise`` is False.

    C is exact for the recurrence that runs: the parameters are an approximation to the best
    Toeplitz matrix, the mechanism is not an approximation to anything.

    Args:
        horizon: number of steps T = R·τ.
        buffers: k, how many state vectors the noise has.
        normalise: scale columns of C to norm one.
        cache: keep the tuned parameters in the user's cache directory.

    Returns:
        The factorization, with its noise program.

    Raises:
        InputError: for a horizon or a number of buffers that is not a whole number from 1.

    """
    T = checked_horizon(horizon)
    k = positive_integer("buffers", buffers, "2 to 8 are useful")
    k = min(k, max(1, T - 1))

    def solution() -> dict[str, Floats]:
        with progress(f"buffered({T}, {k}): tuning", total=_STARTS) as tick:
            decays, weights = _tune(T, k, tick)
        return {"decays": decays, "weights": weights}

    recipe = {"mechanism": "buffered", "version": 1, "horizon": T, "buffers": k}
    found = solution_cache.load_or_solve(recipe, {"decays": 1, "weights": 1}, solution, use=cache)
    plain = Factorization("buffered", T, exponential_sum(found["decays"], found["weights"]))
    return normalised(plain, "buffered") if normalise else plain


def _geometric(rates: Floats, count: int) -> tuple[Floats, Floats]:
    """G_pq = Σ_{j<count} e^(-j·s) at s = rates_p + rates_q, and dG/ds."""
    s = rates[:, None] + rates
    safe = np.where(s == 0.0, 1.0, s)
    top, bottom = np.expm1(-count * safe), np.expm1(-safe)
    total = top / bottom
    slope = (np.exp(-safe) * total - count * np.exp(-count * safe)) / bottom
    at_zero = s == 0.0
    limit = -0.5 * count * (count - 1.0)
    return np.where(at_zero, float(count), total), np.where(at_zero, limit, slope)


def _log_error(parameters: Floats, T: int) -> tuple[float, Floats]:
    """Log of max error at sensitivity one, of the plain Toeplitz matrix, and its gradient.

    ``parameters`` are the logs of the rates -ln λ and of the weights w.
    """
    k = len(parameters) // 2
    with np.errstate(over="ignore"):
        rate, weight = np.exp(parameters[:k]), np.exp(parameters[k:])
    decay, r = np.exp(-rate), np.sqrt(weight)
    outside = 1e3, np.zeros(2 * k)
    if not np.isfinite(weight).all() or weight.max() > 1e3:
        return outside
    theta, U = np.linalg.eigh(np.diag(decay) + np.outer(r, r))
    if not theta[-1] < 1.0 or not theta[0] > 0.0:
        return outside

    # ‖c_0‖² = 1 + Σ a_p a_q G(-ln θ_p - ln θ_q), a = g², g = Uᵀr
    g = U.T @ r
    a = g**2
    G, dG = _geometric(-np.log(theta), T - 1)
    column = 1.0 + a @ G @ a
    by_a = 2.0 * (G @ a)
    by_theta = -2.0 * a * (dG @ a) / theta
    # First-order perturbation of eigenvalues and eigenvectors.
    apart = theta[:, None] - theta
    np.fill_diagonal(apart, 1.0)
    mixing = 2.0 * (by_a * g)[:, None] * g / apart
    np.fill_diagonal(mixing, by_theta)
    by_matrix = U @ (0.5 * (mixing + mixing.T)) @ U.T
    column_by_rate = by_matrix.diagonal() * -decay
    column_by_weight = (by_matrix @ r + U @ (by_a * g)) / r

    # ‖b_{T-1}‖² with b_j = rest + Σ reach·λ^j, reach = w/(1-λ), rest = 1 - Σ reach
    gain = -1.0 / np.expm1(-rate)
    terms = np.append(weight * gain, 1.0 - weight @ gain)
    G, dG = _geometric(np.append(rate, 0.0), T)
    row = terms @ G @ terms
    by_term = 2.0 * (G @ terms)
    by_reach = by_term[:-1] - by_term[-1]
    row_by_rate = 2.0 * (terms * (dG @ terms))[:-1] - by_reach * weight * decay * gain**2
    row_by_weight = by_reach * gain

    by_rate = column_by_rate / column + row_by_rate / row
    by_weight = column_by_weight / column + row_by_weight / row
    gradient = np.concatenate([by_rate * rate, by_weight * weight])
    return float(np.log(column) + np.log(row)), gradient


def _spread(T: int, k: int) -> Floats:
    """Starting point: log-spaced rates, each with the weight of its part of the square root."""
    decays, weights = relaxation(T, 1e-13)
    fine = np.log(-np.log(np.clip(decays, 1e-9, 1.0 - 1e-15)))
    centres = np.linspace(np.log(2.0), np.log(0.5 / T), k)
    nearest = np.abs(fine[:, None] - centres).argmin(axis=1)
    total = np.bincount(nearest, weights, minlength=k)
    return np.concatenate([centres, np.log(0.9 * np.maximum(total, 1e-12))])


def _truncated(T: int, k: int) -> Floats:
    """Starting point: the square root itself, cut down to k states."""
    decays, weights = relaxation(T, 0.0, order=k)
    rates = -np.log(np.clip(decays, 1e-6, 1.0 - 0.05 / T))
    start: Floats = np.log(np.concatenate([rates, np.maximum(weights, 1e-12)]))
    return start


def _tune(T: int, k: int, tick: Callable[[int], None]) -> tuple[Floats, Floats]:
    """Multistart minimisation."""
    from scipy.optimize import minimize

    if T == 1:
        return np.array([0.5]), np.array([1e-12])
    rng = np.random.default_rng(0)  # tuning only; no noise comes from here
    starts = [_truncated(T, k), _spread(T, k)]
    while len(starts) < _STARTS:
        starts.append(starts[len(starts) % 2] + 0.3 * rng.standard_normal(2 * k))
    best, best_value = starts[0], np.inf
    for guess in starts:
        while _log_error(guess, T)[0] >= 1e3:
            guess[k:] -= 0.1
        found = minimize(
            _log_error, guess, args=(T,), jac=True, method="BFGS",
            options={"gtol": 1e-9, "maxiter": 1500},
        )  # fmt: skip
        if found.fun < best_value:
            best, best_value = found.x, found.fun
        tick(1)
    return np.exp(-np.exp(best[:k])), np.exp(best[k:])
