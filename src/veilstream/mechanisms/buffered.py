"""Buffered linear Toeplitz (BLT) noise: k decaying buffers, tuned for the horizon.

N = C⁻¹ has the kernel 1, -Σ w, -Σ w·λ, ... with w > 0 and 0 < λ < 1. Its inverse is of the same
kind, C = 1 + Σ a·θ^(j-1), where θ are the eigenvalues of diag(λ) + √w·√wᵀ and a the squared
projections of √w on the eigenvectors: never through polynomial roots. While θ < 1, C is positive
and decreasing. Sensitivity and error are then finite geometric sums, O(k²) at any horizon, and the
parameters are found by minimising the larger of them (McMahan, Xu and Zhang 2024, "A Hassle-free
Algorithm for Private Learning in Practice", optimise the same family by other means).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError, UnknownName
from veilstream.mechanisms import solution_cache
from veilstream.mechanisms.checks import checked_horizon, positive_integer
from veilstream.mechanisms.factorization import Factorization, normalised
from veilstream.mechanisms.participation import Participation, as_participation, left_most_sum
from veilstream.mechanisms.toeplitz import exponential_sum, relaxation
from veilstream.mechanisms.workload import Workload, check_workload
from veilstream.progress import progress

Floats = NDArray[np.float64]

OBJECTIVES = ("max", "mean")
_STARTS = 6
_NEAR_ZERO = 0.05  # of s·T: below, the closed form loses digits and a series of so many terms has them all
_TERMS = 8
BUFFERED_LIMIT = 4096  # Longest horizon for which buffers are tuned for a workload


def buffered(
    horizon: int,
    buffers: int = 5,
    *,
    normalise: bool | None = None,
    objective: str = "max",
    workload: Workload | None = None,
    participation: Participation | tuple[int, int] | None = None,
    cache: bool = True,
) -> Factorization:
    """BLT with ``buffers`` states, tuned for the horizon.

    C is exact for the recurrence that runs: the parameters are an approximation to the best
    Toeplitz matrix, the mechanism is not an approximation to anything.

    Args:
        horizon: number of steps T = R·τ.
        buffers: k, how many state vectors the noise has.
        normalise: scale columns of C to norm one. Default: yes, except where it is tuned for people
            who return, whose columns overlap.
        objective: tune for the largest error of a prefix sum ("max") or for the mean ("mean").
        workload: what is published, if not prefix sums, for horizons up to 4096; the buffers are
            then tuned for the mean error of it, without an objective.
        participation: tune for people who take part so often, so far apart; C is then positive and
            decreasing, and its sensitivity exact at any horizon.
        cache: keep the tuned parameters in the user's cache directory.

    Returns:
        The factorization, with its noise program.

    Raises:
        InputError: for a horizon or a number of buffers that is not a whole number from 1, or a
            workload that does not fit.

    """
    T = checked_horizon(horizon)
    k = positive_integer("buffers", buffers, "2 to 8 are useful")
    k = min(k, max(1, T - 1))
    recipe: dict[str, object] = {"mechanism": "buffered", "version": 1, "horizon": T, "buffers": k}
    if objective not in OBJECTIVES:
        raise UnknownName("objective", str(objective), OBJECTIVES)
    if workload is not None:
        _check_workload(workload, T)
    if workload is not None and not workload.plain:
        if objective != "max":
            raise InputError("objective", objective, "left out beside a workload", "the workload says what counts")
        recipe["workload"] = workload.as_dict()
    if objective != "max":
        recipe["objective"] = objective
    part = as_participation(participation)
    part.check_horizon(T)
    if part.times > 1:
        recipe["participation"] = [part.times, part.min_separation]
    if normalise is None:
        normalise = part.times == 1

    def solution() -> dict[str, Floats]:
        with progress(f"buffered({T}, {k}): tuning", total=_STARTS) as tick:
            decays, weights = _tune(T, k, _Objective.of(T, objective, workload, part), tick)
        return {"decays": decays, "weights": weights}

    found = solution_cache.load_or_solve(recipe, {"decays": 1, "weights": 1}, solution, use=cache)
    plain = Factorization("buffered", T, exponential_sum(found["decays"], found["weights"]))
    return normalised(plain, "buffered") if normalise else plain


def _check_workload(workload: Workload, T: int) -> None:
    check_workload(workload, T)
    if T > BUFFERED_LIMIT and not workload.plain:
        raise InputError(
            "workload",
            f"{T} steps",
            f"at most {BUFFERED_LIMIT} steps for buffered",
            "`optimal`, or `toeplitz` with its forgetting",
        )


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


@dataclass(frozen=True, eq=False)
class _Slopes:
    """A value and its derivatives by the rates -ln λ and the weights w."""

    value: float
    by_rate: Floats
    by_weight: Floats


Sums = Callable[[Floats], tuple[Floats, Floats]]
"""Weighted Σ_j e^(-j·s) at s = rates_p + rates_q, and its derivative by s."""
RowError = Callable[[Floats, Floats, Floats], _Slopes]
"""Error of the plain Toeplitz matrix at noise one, from rates, decays and weights."""
ColumnNorm = Callable[[Floats, Floats], tuple[float, Floats, Floats]]
"""Sensitivity² of C = 1 + Σ a·θ^(j-1), from θ and a, with its derivatives by a and by θ."""


@dataclass(frozen=True, eq=False)
class _Objective:
    """What is minimised: the product of both."""

    column: ColumnNorm
    row: RowError

    @classmethod
    def of(cls, T: int, objective: str, workload: Workload | None, part: Participation) -> _Objective:
        column: ColumnNorm = lambda theta, a: _one_column(T, theta, a)  # noqa: E731
        if part.times > 1:
            column = lambda theta, a: _returning(T, part, theta, a)  # noqa: E731
        return cls(column, _row_error(T, objective, workload))


def _one_column(T: int, theta: Floats, a: Floats) -> tuple[float, Floats, Floats]:
    """‖c_0‖² = 1 + Σ a_p a_q G(-ln θ_p - ln θ_q)."""
    G, dG = _geometric(-np.log(theta), T - 1)
    column = 1.0 + float(a @ G @ a)
    return column, 2.0 * (G @ a), -2.0 * a * (dG @ a) / theta


def _returning(T: int, part: Participation, theta: Floats, a: Floats) -> tuple[float, Floats, Floats]:
    """‖Σ c_j‖² over the left-most pattern, which is the worst where C falls."""
    power = np.arange(T - 1)[:, None]
    terms = np.exp(power * np.log(theta))
    total = left_most_sum(np.append(1.0, terms @ a), part)
    pull = 2.0 * left_most_sum(total[::-1], part)[::-1][1:]
    by_theta = a * ((power * terms).T @ pull) / theta
    return float(total @ total), terms.T @ pull, by_theta


def _row_error(T: int, objective: str, workload: Workload | None) -> RowError:
    # Toeplitz noise cannot tell round ends from the inside of a round.
    if workload is None or workload.plain:
        sums = (lambda rates: _geometric(rates, T)) if objective == "max" else _falling_sums(T)
        return lambda rate, decay, weight: _prefix_rows(sums, rate, decay, weight)
    return _mean_row(workload)


def _falling_sums(T: int) -> Sums:
    """Σ_{j<T} (1-j/T)·e^(-j·s), since coefficient j of B is in T-j rows, and its derivative by s."""
    j = np.arange(T, dtype=np.float64)
    moments = [float(((1.0 - j / T) * j**m).sum()) for m in range(_TERMS + 1)]

    def sums(rates: Floats) -> tuple[Floats, Floats]:
        s = rates[:, None] + rates
        near = s * T < _NEAR_ZERO
        safe = np.where(near, 1.0, s)
        q, u, rest = np.exp(-safe), -np.expm1(-safe), -np.expm1(-T * safe)
        top, bottom = T * u - q * rest, T * u**2
        slope_of_top = T * q + q * rest - T * q * np.exp(-T * safe)
        far = top / bottom, (slope_of_top - top / bottom * 2.0 * T * u * q) / bottom
        series = [np.zeros_like(s), np.zeros_like(s)]
        for m in range(_TERMS):
            series[0] += moments[m] * (-s) ** m / math.factorial(m)
            series[1] -= moments[m + 1] * (-s) ** m / math.factorial(m)
        return np.where(near, series[0], far[0]), np.where(near, series[1], far[1])

    return sums


def _prefix_rows(sums: Sums, rate: Floats, decay: Floats, weight: Floats) -> _Slopes:
    """‖b_{T-1}‖², or the mean row, by ``sums``: b_j = rest + Σ reach·λ^j, reach = w/(1-λ), rest = 1 - Σ reach."""
    gain = -1.0 / np.expm1(-rate)
    terms = np.append(weight * gain, 1.0 - weight @ gain)
    G, dG = sums(np.append(rate, 0.0))
    row = terms @ G @ terms
    by_term = 2.0 * (G @ terms)
    by_reach = by_term[:-1] - by_term[-1]
    by_rate = 2.0 * (terms * (dG @ terms))[:-1] - by_reach * weight * decay * gain**2
    return _Slopes(float(row), by_rate, by_reach * gain)


def _mean_row(workload: Workload) -> RowError:
    """Weighted mean of ‖w_s·N‖² over the workload's rows: νᵀMν, M_ij = Σ_s H_{s+i,s+j}, for H = Σ WᵀUW."""
    system = workload.system()
    M = system.gram() / system.total_weight
    T = len(M)
    for lag in range(T):
        sums = np.cumsum(np.diagonal(M, lag)[::-1])[::-1]
        M[np.arange(T - lag), np.arange(lag, T)] = sums
        M[np.arange(lag, T), np.arange(T - lag)] = sums
    power = np.arange(T - 1)[:, None]

    def error(rate: Floats, decay: Floats, weight: Floats) -> _Slopes:
        terms = np.exp(-power * rate)
        kernel = np.append(1.0, -(terms @ weight))
        pull = M @ kernel
        slope = 2.0 * pull[1:]
        by_rate = weight * ((power * terms).T @ slope)
        return _Slopes(float(kernel @ pull), by_rate, -(terms.T @ slope))

    return error


def _log_error(parameters: Floats, objective: _Objective) -> tuple[float, Floats]:
    """Log of an error at sensitivity one, and its gradient by the logs of the rates -ln λ and of the weights w."""
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

    g = U.T @ r
    column, by_a, by_theta = objective.column(theta, g**2)
    # First-order perturbation of eigenvalues and eigenvectors.
    apart = theta[:, None] - theta
    np.fill_diagonal(apart, 1.0)
    mixing = 2.0 * (by_a * g)[:, None] * g / apart
    np.fill_diagonal(mixing, by_theta)
    by_matrix = U @ (0.5 * (mixing + mixing.T)) @ U.T
    column_by_rate = by_matrix.diagonal() * -decay
    column_by_weight = (by_matrix @ r + U @ (by_a * g)) / r

    row = objective.row(rate, decay, weight)
    by_rate = column_by_rate / column + row.by_rate / row.value
    by_weight = column_by_weight / column + row.by_weight / row.value
    gradient = np.concatenate([by_rate * rate, by_weight * weight])
    return float(np.log(column) + np.log(row.value)), gradient


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


def _tune(T: int, k: int, objective: _Objective, tick: Callable[[int], None]) -> tuple[Floats, Floats]:
    from scipy.optimize import minimize

    if T == 1:
        return np.array([0.5]), np.array([1e-12])
    rng = np.random.default_rng(0)  # tuning only; no noise comes from here
    starts = [_truncated(T, k), _spread(T, k)]
    while len(starts) < _STARTS:
        starts.append(starts[len(starts) % 2] + 0.3 * rng.standard_normal(2 * k))
    best, best_value = starts[0], np.inf
    for guess in starts:
        while _log_error(guess, objective)[0] >= 1e3:
            guess[k:] -= 0.1
        found = minimize(
            _log_error, guess, args=(objective,), jac=True, method="BFGS", options={"gtol": 1e-9, "maxiter": 1500}
        )
        if found.fun < best_value:
            best, best_value = found.x, found.fun
        tick(1)
    return np.exp(-np.exp(best[:k])), np.exp(best[k:])
