"""Banded factorizations: C, or its inverse, has few diagonals.

A C with b bands makes columns b or more steps apart orthogonal, so a client who returns k times at
least b steps apart costs exactly √k: the mechanism for repeated participation (Choquette-Choo et
al. 2023, "(Amplified) Banded Matrix Factorization"). A banded C⁻¹ needs only the last b draws as
its state, and its C is positive and decreasing (Kalinin et al. 2025, banded-inverse square root).

With more bands than steps between two visits, columns of neighbouring visits overlap: a lower error
against a higher sensitivity. Coefficients are then tuned for both at once, among those that fall,
for which the left-most pattern is the worst (`participation`), and so is the number of bands. A banded
inverse is tuned among those whose C falls, too.

All are Toeplitz with coefficients tuned for the horizon; where columns of visits do not overlap,
they are then scaled to norm one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from veilstream.mechanisms.checks import checked_horizon, positive_integer
from veilstream.mechanisms.factorization import Factorization, normalised
from veilstream.mechanisms.participation import Participation, as_participation, left_most_sum
from veilstream.mechanisms.steps import ConstantSteps

Floats = NDArray[np.float64]

_BANDS = 16
_MOST_BANDS = 64  # of those that are chosen; a state is as long


def banded(
    horizon: int,
    bands: int | None = None,
    *,
    inverse: bool = False,
    participation: Participation | tuple[int, int] | None = None,
    normalise: bool | None = None,
) -> Factorization:
    """Toeplitz C with ``bands`` diagonals, or with so many in its inverse, tuned for mean error.

    Args:
        horizon: number of steps T = R·τ.
        bands: number of diagonals, the main one included. None is 16; for a banded C and people who
            return, the number up to 64 that has the least error for them.
        inverse: whether C⁻¹ rather than C is banded.
        participation: what to tune for. A banded C with bands <= separation is best for all k
            at once; one with more is tuned for k and the separation.
        normalise: scale columns to norm one. Default: yes, except where columns of two visits
            overlap: a banded inverse that is tuned for repeated participation, and a banded C
            with more bands than the separation.

    Returns:
        The factorization, with its noise program. `sensitivity` of a banded C is exact at any
        horizon for bands <= 2·separation, and for any separation where columns are as they are.

    Raises:
        InputError: for a value that the rules exclude, or a participation that does not fit.

    """
    T = checked_horizon(horizon)
    part = as_participation(participation)
    part.check_horizon(T)
    if bands is None and not inverse and part.times > 1:
        tried = (_banded(T, b, part, normalise) for b in _bandwidths(T, part))
        return min(tried, key=lambda f: f.mean_error(part))
    b = min(positive_integer("bands", _BANDS if bands is None else bands, "try 16"), T)
    if not inverse:
        return _banded(T, b, part, normalise)
    kernel = _tune_inverse(T, b) if part.times == 1 else _tune_falling_inverse(T, b, part)
    plain = Factorization("banded_inverse", T, _moving_average(kernel))
    if normalise is None:
        normalise = part.times == 1
    return normalised(plain, plain.name) if normalise else plain


def banded_inverse(
    horizon: int, bands: int | None = None, *, participation: Participation | tuple[int, int] | None = None
) -> Factorization:
    """`banded` with ``inverse=True``, under a name of its own for plans.

    Args:
        horizon: as for `banded`.
        bands: diagonals of C⁻¹; None is 16.
        participation: as for `banded`.

    """
    return banded(horizon, bands, inverse=True, participation=participation)


def _banded(T: int, b: int, part: Participation, normalise: bool | None) -> Factorization:
    overlap = part.times > 1 and b > part.min_separation
    kernel = _tune_overlapping(T, b, part) if overlap else _tune_banded(T, b)
    plain = Factorization("banded", T, _recursion(kernel))
    plain.bandwidth = b
    if normalise is None:
        normalise = not overlap
    return normalised(plain, "banded") if normalise else plain


def _bandwidths(T: int, part: Participation) -> list[int]:
    """Numbers of bands worth trying: up to the separation more cost no sensitivity; beyond it they may."""
    apart = part.min_separation
    most = min(_MOST_BANDS, T)
    return [min(apart, most), *sorted({min(apart * 2**i, most) for i in range(1, 7)} - {apart})]


def _shift_register(size: int) -> tuple[Floats, Floats]:
    """Transition and entry of a state that remembers the last ``size`` inputs, newest first."""
    return np.eye(size, k=-1), np.eye(size)[0] if size else np.zeros(0)


def _recursion(c: Floats) -> ConstantSteps:
    """N with C = Toeplitz(c): w = (z - Σ c_i·w_{t-i}) / c_0. The state is the last increments."""
    register, newest = _shift_register(len(c) - 1)
    output = -c[1:] / c[0]
    return ConstantSteps(register + np.outer(newest, output), newest / c[0], output, 1.0 / c[0])


def _moving_average(n: Floats) -> ConstantSteps:
    """N = Toeplitz(n). The state is the last draws."""
    register, newest = _shift_register(len(n) - 1)
    return ConstantSteps(register, newest, n[1:].copy(), float(n[0]))


def _inverse_series(kernel: Floats, T: int) -> Floats:
    """First T coefficients of 1 / kernel."""
    from scipy.signal import lfilter

    impulse = np.zeros(T)
    impulse[0] = 1.0
    series: Floats = lfilter([1.0], kernel, impulse)
    return series


def _correlate(x: Floats, y: Floats, count: int) -> Floats:
    """Σ_t x_t·y_{t-i} for i < count."""
    return np.array([x[i:] @ y[: len(y) - i] for i in range(count)])


def _square_root(T: int, sign: float) -> Floats:
    """Coefficients of (1-x)^(sign·½), starting point of both searches."""
    j = np.arange(1, T)
    return np.concatenate([[1.0], np.cumprod((j - 1.0 - sign * 0.5) / j)])


def _minimise(value_and_gradient: Callable[[Floats], tuple[float, Floats]], start: Floats) -> Floats:
    from scipy.optimize import minimize

    if len(start) == 0:
        return start
    found = minimize(
        value_and_gradient, start, jac=True, method="L-BFGS-B", options={"maxiter": 2000, "ftol": 1e-13, "gtol": 1e-9}
    )
    best: Floats = found.x
    return best


def _row_error(c: Floats, T: int) -> tuple[float, Floats]:
    """Mean ‖b_s‖² of C = Toeplitz(c), and its derivatives by c; infinite where it diverges."""
    from scipy.signal import lfilter

    share = 1.0 - np.arange(T) / T  # how often coefficient t of B appears, per row
    with np.errstate(over="ignore", invalid="ignore"):
        B = np.cumsum(_inverse_series(c, T))
        row = float(share @ B**2)
        if not np.isfinite(row) or row > 1e12:
            return np.inf, np.zeros(len(c))
        # B = A/c, so dB/dc_i = -(B/c) shifted by i.
        slope = lfilter([1.0], c, B)
        return row, -2.0 * _correlate(share * B, slope, len(c))


def _tune_banded(T: int, b: int) -> Floats:
    """c_0 = 1 and the c_i that minimise ‖c‖²·mean‖b_s‖²."""

    def objective(tail: Floats) -> tuple[float, Floats]:
        c = np.concatenate([[1.0], tail])
        row, by_row = _row_error(c, T)
        if row == np.inf:
            return 1e6, np.zeros(len(tail))
        column = c @ c
        return float(np.log(column * row)), 2.0 * tail / column + by_row[1:] / row

    return np.concatenate([[1.0], _minimise(objective, _square_root(b, -1.0)[1:])])


def _tune_overlapping(T: int, b: int, part: Participation) -> Floats:
    """c_0 = 1 and the falling c_i = c_{i-1}·σ(u_i) that minimise sensitivity²·mean‖b_s‖² for people who return."""

    def coefficients(u: Floats) -> tuple[Floats, Floats]:
        ratio = 1.0 / (1.0 + np.exp(-np.clip(u, -30.0, 30.0)))
        return np.concatenate([[1.0], np.cumprod(ratio)]), ratio

    def objective(u: Floats) -> tuple[float, Floats]:
        c, ratio = coefficients(u)
        row, by_row = _row_error(c, T)
        if row == np.inf:
            return 1e6, np.zeros(len(u))
        total = left_most_sum(np.concatenate([c, np.zeros(T - b)]), part)
        column = float(total @ total)
        by_column = 2.0 * left_most_sum(total[::-1], part)[::-1][:b]
        by_c = by_column / column + by_row / row
        # ln c_i is the sum of ln σ(u_1..i), and d ln σ(u) = 1 - σ(u).
        by_log = np.cumsum((by_c * c)[:0:-1])[::-1]
        return float(np.log(column * row)), by_log * (1.0 - ratio)

    start = _square_root(b, -1.0)
    first = start[1:] / start[:-1]
    return coefficients(_minimise(objective, np.log(first / (1.0 - first))))[0]


def _tune_inverse(T: int, b: int) -> Floats:
    """With n_0 = 1, the n_i that minimise ‖c‖²·mean‖b_s‖²."""
    from scipy.signal import lfilter

    share = 1.0 - np.arange(T) / T

    def objective(tail: Floats) -> tuple[float, Floats]:
        n = np.concatenate([[1.0], tail])
        with np.errstate(over="ignore", invalid="ignore"):
            c = _inverse_series(n, T)
            column = c @ c
            B = np.full(T, n.sum())
            B[:b] = np.cumsum(n)
            row = share @ B**2
            if not np.isfinite(column) or column > 1e12:
                return 1e6, np.zeros(len(tail))
            # C = 1/n, so dC/dn_i = -C² shifted by i.
            d_column = -2.0 * _correlate(c, lfilter([1.0], n, c), b)[1:]
            d_row = 2.0 * np.cumsum((share * B)[::-1])[::-1][1:b]
        return float(np.log(column * row)), d_column / column + d_row / row

    return np.concatenate([[1.0], _minimise(objective, _square_root(b, 1.0)[1:])])


def _tune_falling_inverse(T: int, b: int, part: Participation) -> Floats:
    """The n = 1/C that minimises sensitivity²·mean‖b_s‖² for people who return, among those whose C falls.

    Coefficients of B = n/(1-x), which are constant from b-1 on, are 1 and log-convex. So 1/B = (1-x)·C is 1 less a
    series without negative coefficients (Kaluza 1928), C falls and stays positive, and the left-most pattern is the
    worst. ln B_j = -Σ_m min(j, m)·e^(u_m) for u without bounds.
    """
    from scipy.signal import lfilter

    share = 1.0 - np.arange(T) / T

    def convex(u: Floats) -> tuple[Floats, Floats]:
        bend = np.exp(np.clip(u, -40.0, 5.0))
        slope = -np.cumsum(bend[::-1])[::-1]
        return np.exp(np.concatenate([[0.0], np.cumsum(slope)])), bend

    def objective(u: Floats) -> tuple[float, Floats]:
        B, bend = convex(u)
        n = np.diff(B, prepend=0.0)
        c = _inverse_series(n, T)
        total = left_most_sum(c, part)
        column = float(total @ total)
        by_n = -2.0 * _correlate(total, left_most_sum(lfilter([1.0], n, c), part), b)
        by_column = by_n - np.append(by_n[1:], 0.0)
        whole = np.append(B, np.full(T - b, B[-1]))
        row = float(share @ whole**2)
        by_row = 2.0 * share[:b] * B
        by_row[-1] += 2.0 * B[-1] * share[b:].sum()
        by_log = ((by_column / column + by_row / row) * B)[1:]
        by_slope = np.cumsum(by_log[::-1])[::-1]
        return float(np.log(column * row)), -np.cumsum(by_slope) * bend

    slope = np.diff(np.log(np.cumsum(_square_root(b, 1.0))))
    start = np.log(-np.append(slope, 0.0)[:-1] + np.append(slope[1:], 0.0))
    return np.diff(convex(_minimise(objective, start))[0], prepend=0.0)
