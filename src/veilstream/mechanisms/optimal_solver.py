"""The best factorization of prefix sums, certified: eq-ABC with weights on the rows.

For row weights u (sum of squares of B weighted by u) and X = CᵀC, the problem

    minimise  tr(AᵀUA·X⁻¹)   over X ≻ 0 with diag X <= 1

has the optimum X = V^-½ (V^½ AᵀUA V^½)^½ V^-½ for the multipliers v that make diag X = 1. Every
v > 0 gives a lower bound, (Σ_i v_i X_ii)² / Σ_i v_i, so the gap is free. Under

    objective "mean":    u = 1
    objective "max":     u = v reversed; the dual of the minimax problem is the largest nuclear
                         norm of U^½ A V^½, and it is symmetric under time reversal
    objective "rounds":  u = 1 at round ends, `interior_weight` elsewhere

the same iteration v <- v ∘ diag X solves all three, with Anderson acceleration on log v, started
from the solution at half the horizon.

Nothing dense is needed. K = (V^½ AᵀUA V^½)⁻¹ is tridiagonal and K^-½ is a short sum of resolvents
(Hale, Higham and Trefethen 2008, "Computing A^α, log(A), and related matrix functions by contour
integrals"): X = Σ_m ω_m (D U⁻¹ Dᵀ + s_m² V)⁻¹ with D = A⁻¹. Each resolvent is the covariance of a
Markov chain, eliminated in O(T) by e <- s²v + e/(1 + u·e): sums and quotients of positive
numbers, no cancellation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import SolverError
from veilstream.mechanisms.markov import BackwardChains

Floats = NDArray[np.float64]
RowWeights = Callable[[Floats], Floats]

_POLES = 40
_MEMORY = 8
_ITERATIONS = 400
_ROUNDING = 1e-12
_LARGEST_LOG = 300.0
_PROVED_GAP = 1e-5


@dataclass(frozen=True, eq=False)
class Optimum:
    """Multipliers, row weights, and how far from the optimum they provably are at most."""

    multipliers: Floats  # v
    row_weights: Floats  # u
    lower_bound: float  # No factorization with columns of norm <= 1 has a smaller weighted mean of ‖b‖²
    gap: float  # (upper - lower) / lower, before rounding to a program


def resolvents(low: float, high: float) -> tuple[Floats, Floats]:
    """Shifts s_m² and weights ω_m with K^-½ = Σ ω_m (K + s_m²)⁻¹ for a spectrum in [low, high].

    40 of them, and more for a wide spectrum: the relative error is about 4·exp(-2π²·poles /
    (ln(high/low) + 3)), which stays below 1e-9.
    """
    from scipy.special import ellipj, ellipkm1

    modulus = low / high
    if not 0.0 < modulus <= 1.0:
        raise FloatingPointError(f"a spectrum from {low:g} to {high:g}")
    half = max(_POLES // 2, int(np.ceil(0.56 * (3.0 - np.log(modulus)))))
    poles = 2 * half
    quarter = ellipkm1(modulus)
    # Only the lower half: near the quarter period cn is lost in rounding, and there
    # sn/cn (K - p) = cn/(k'·sn) (p) and dn/cn² (K - p) = dn/(k'·sn²) (p), with k'² = low/high.
    points = (np.arange(half) + 0.5) * quarter / poles
    sn, cn, dn, _ = ellipj(points, 1.0 - modulus)
    shifts: Floats = np.append(low * (sn / cn) ** 2, (high * (cn / sn) ** 2)[::-1])
    scaled = np.append(dn / cn**2, (dn / sn**2)[::-1] / np.sqrt(modulus))
    weights: Floats = 2.0 * quarter * np.sqrt(low) / (np.pi * poles) * scaled
    return shifts, weights


def overshoot(low: float, high: float) -> float:
    """By how much, relatively, the sum of resolvents is above K^-½ at most, on [low, high].

    The error ripples between equal extremes; the ends are two of them, and a grid finds the rest.
    What rounding may add to a trace is in it.
    """
    shifts, weights = resolvents(low, high)
    x = np.geomspace(low, high, 20 * len(shifts) + 1)
    x[0], x[-1] = low, high
    ratio = np.sqrt(x) * (weights / (x[:, None] + shifts)).sum(axis=1)
    return 1.05 * max(float(ratio.max()) - 1.0, 0.0) + _ROUNDING


def _spectrum_bounds(u: Floats, v: Floats) -> tuple[float, float]:
    """Bounds on the eigenvalues of K = V^-½ D U⁻¹ Dᵀ V^-½."""
    # High: Gershgorin. Low: 1 / trace(K⁻¹), with trace(V A^T U A) = Σ_j v_j Σ_{i>=j} u_i.
    resist = 1.0 / np.maximum(u, np.finfo(float).tiny)
    diagonal = resist.copy()
    diagonal[1:] += resist[:-1]
    high = float((2.0 * diagonal / v).max())
    low = 1.0 / float(v @ np.cumsum(u[::-1])[::-1])
    return low, high


def chains_of(u: Floats, v: Floats) -> BackwardChains:
    """X as the covariance of a weighted sum of Markov chains."""
    shifts, weights = resolvents(*_spectrum_bounds(u, v))
    T, m = len(v), len(shifts)
    decay = np.zeros((T, m))
    fresh = np.zeros((T, m))
    e = shifts * v[0]
    for t in range(1, T):
        shrink = 1.0 / (1.0 + u[t - 1] * e)
        decay[t] = shrink
        fresh[t] = u[t - 1] * shrink
        e = shifts * v[t] + e * shrink
    start = u[T - 1] / (1.0 + u[T - 1] * e)
    return BackwardChains(np.sqrt(weights), start, decay, fresh)


def _diagonal(u: Floats, v: Floats) -> Floats:
    chains = chains_of(u, v)
    power = chains.weights**2
    T = len(v)
    diagonal = np.empty(T)
    variance = chains.start
    for t in range(T - 1, -1, -1):
        diagonal[t] = power @ variance
        variance = chains.decay[t] ** 2 * variance + chains.fresh[t]
    return diagonal


class Problem(Protocol):
    """A workload at one horizon: what the fixed point asks of it."""

    def row_weights(self, v: Floats) -> Floats:
        """U: weights of the rows, for these multipliers."""

    def diagonal(self, u: Floats, v: Floats) -> Floats:
        """Diag X."""

    def overshoot(self, u: Floats, v: Floats) -> float:
        """By how much, relatively, the trace of V·X can be above the true one at most."""


@dataclass(frozen=True, eq=False)
class PrefixProblem:
    """Prefix sums, with weights on the rows that may depend on the multipliers."""

    weights_of: RowWeights

    def row_weights(self, v: Floats) -> Floats:  # noqa: D102
        return self.weights_of(v)

    def diagonal(self, u: Floats, v: Floats) -> Floats:  # noqa: D102
        return _diagonal(u, v)

    def overshoot(self, u: Floats, v: Floats) -> float:  # noqa: D102
        return overshoot(*_spectrum_bounds(u, v))


def solve(
    horizon: int,
    problem: Callable[[int], Problem],
    *,
    multiple_of: int = 1,
    tolerance: float = 1e-9,
    tick: Callable[[int], None] = lambda _: None,
) -> Optimum:
    """Certified optimum of ``problem(T)``, started from that of half the horizon, a multiple of ``multiple_of``."""
    v = np.ones(1)
    horizons = [horizon]
    while horizons[-1] > 16 * multiple_of:
        horizons.append((horizons[-1] // multiple_of + 1) // 2 * multiple_of)
    optimum = None
    for T in reversed(horizons):
        # Boundary layers are self-similar: relative position carries v from T/2 to T.
        old = (np.arange(len(v)) + 0.5) / len(v)
        new = (np.arange(T) + 0.5) / T
        v = np.exp(np.interp(new, old, np.log(v))) * len(v) / T
        last = horizon == T
        optimum = _fixed_point(v, problem(T), tolerance if last else 1e-5, tick)
        v = optimum.multipliers
    assert optimum is not None
    optimum = _proved(optimum, problem(horizon))
    if not optimum.gap <= _PROVED_GAP:
        raise SolverError(
            f"optimal({horizon}): duality gap {optimum.gap:.2e} after {_ITERATIONS} iterations, "
            f"wanted <= {_PROVED_GAP:g} (`buffered` or `toeplitz_normalised` need no certificate, "
            "and `veilstream plan` shows what they cost; a larger interior_weight helps too)"
        )
    return optimum


def _proved(found: Optimum, problem: Problem) -> Optimum:
    """The same with a bound from which all that the trace can have too much is taken."""
    excess = problem.overshoot(found.row_weights, found.multipliers)
    return Optimum(
        found.multipliers,
        found.row_weights,
        found.lower_bound / (1.0 + excess) ** 2,
        (1.0 + found.gap) * (1.0 + excess) ** 2 - 1.0,
    )


def _fixed_point(v: Floats, problem: Problem, tolerance: float, tick: Callable[[int], None]) -> Optimum:
    """Anderson-accelerated v <- v ∘ diag X on log v."""
    x = np.log(v)
    points: list[Floats] = []
    residuals: list[Floats] = []
    best: Optimum | None = None
    for _ in range(_ITERATIONS):
        if np.abs(x).max() > _LARGEST_LOG:  # never so without a best one before
            break
        v = np.exp(x)
        u = problem.row_weights(v)
        with np.errstate(all="ignore"):  # what comes of it is looked at
            diagonal = problem.diagonal(u, v)
        if not (np.isfinite(diagonal) & (diagonal > 0.0)).all():
            if best is None:
                raise FloatingPointError("the first step leaves the range of floats")
            break
        trace = float(v @ diagonal)
        lower = trace**2 / float(v.sum() * u.sum())
        gap = float(diagonal.max()) * float(v.sum()) / trace - 1.0
        if best is None or gap < best.gap:
            best = Optimum(v, u, lower, gap)
        tick(len(v))
        if gap <= tolerance:
            break
        residual = np.log(diagonal)
        points.append(x)
        residuals.append(residual)
        del points[: -_MEMORY - 1], residuals[: -_MEMORY - 1]
        step = x + residual
        if len(residuals) > 1:
            dr = np.diff(np.array(residuals), axis=0).T
            dx = np.diff(np.array(points), axis=0).T
            mix, *_ = np.linalg.lstsq(dr, residual, rcond=1e-12)
            step = step - (dx + dr) @ mix
        x = step
    assert best is not None
    return best
