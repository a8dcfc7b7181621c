"""MF (iii): the Toeplitz square root of the prefix sums, C = B (eq-exmp-iii).

C has the generating function (1-x)^-½ (coefficients h(j) = (1 - 1/(2j))·h(j-1)), so N = C⁻¹ has
(1-x)^½ = 1 - Σ_j c_j x^j with c_j > 0. The c_j are moments,

    c_j = ∫ λ^(j-1) dμ(λ),   dμ = π⁻¹ sqrt((1-λ)/λ) dλ on (0, 1),

so a quadrature rule for μ is a recurrence: one decaying state per node. `relaxation` takes a fine
rule (exact to rounding) and drops, by balanced truncation over the horizon, all that the
increments cannot show. The system is symmetric and stays so: decays in (0, 1), weights > 0.

The closed bounds that the paper quotes for ‖c‖² lie below the true values at every T (at T = 4000
3.5690 against 3.7063); nothing here uses them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from veilstream.mechanisms.checks import checked_horizon
from veilstream.mechanisms.factorization import Factorization, normalised
from veilstream.mechanisms.steps import ConstantSteps
from veilstream.mechanisms.workload import Workload, check_workload

Floats = NDArray[np.float64]

_EXACT = 1e-9


def toeplitz(horizon: int, *, workload: Workload | None = None) -> Factorization:
    """Square-root Toeplitz factorization, exact to float32: C = B, ‖c_0‖² = Σ h(j)².

    Args:
        horizon: number of steps T = R·τ.
        workload: what is published, if not prefix sums. Of it only the forgetting is taken: with ρ
            a step, C is the square root of Σ ρ^j x^j, its coefficients h(j)·ρ^j.

    Returns:
        The factorization, with its noise program.

    Raises:
        InputError: for a horizon that is not a whole number from 1, or a workload of another one.

    """
    T = checked_horizon(horizon)
    decays, weights = relaxation(T, _EXACT)
    if workload is not None:
        check_workload(workload, T)
        rate = workload.forgetting_per_step
        # (1-ρx)^½ has the coefficients c_j·ρ^j = Σ (w·ρ)·(λ·ρ)^(j-1).
        decays, weights = rate * decays, rate * weights
    return Factorization("toeplitz", T, exponential_sum(decays, weights))


def toeplitz_normalised(horizon: int, *, workload: Workload | None = None) -> Factorization:
    """`toeplitz` with every column of C scaled to norm one: better in max and in mean error.

    Args:
        horizon: number of steps T = R·τ.
        workload: as for `toeplitz`.

    Returns:
        The factorization, with its noise program.

    Raises:
        InputError: as for `toeplitz`.

    """
    return normalised(toeplitz(horizon, workload=workload), "toeplitz_normalised")


def exponential_sum(decays: Floats, weights: Floats) -> ConstantSteps:
    """Steps of N with the kernel 1, -Σ w, -Σ w·λ, -Σ w·λ², ...; states have a long-run variance of one."""
    scale = np.sqrt(-np.expm1(2.0 * np.log(np.maximum(decays, 1e-300))))
    return ConstantSteps(np.diag(decays), scale, -weights / scale, 1.0)


def relaxation(horizon: int, tolerance: float, order: int | None = None) -> tuple[Floats, Floats]:
    """As few decays λ and weights w as suffice for Σ w·λ^(j-1) = c_j, j < horizon, or exactly ``order`` of them.

    ``tolerance`` is relative to the largest Hankel singular value.
    """
    if horizon == 1:
        return np.zeros(0), np.zeros(0)
    # λ = 1/(1+e^-y); the integrand decays like e^(y/2) and e^(-3y/2), trapezoid error e^(-2π²/h).
    y = np.arange(-72.0, 30.0 + 2.0 * np.log10(horizon), 0.5)
    rate = np.logaddexp(0.0, -y)  # -ln λ
    decay = np.exp(-rate)
    weight = 0.5 / np.pi * np.exp(-0.5 * rate - 1.5 * np.logaddexp(0.0, y))
    root = np.sqrt(weight)
    pair = rate[:, None] + rate
    gramian = np.outer(root, root) * np.expm1(-(horizon - 1) * pair) / np.expm1(-pair)
    value, vector = np.linalg.eigh(gramian)
    if order is None:
        order = max(1, int((value > tolerance * value[-1]).sum()))
    basis = vector[:, -min(order, horizon - 1) :]
    reduced, mode = np.linalg.eigh(basis.T @ (decay[:, None] * basis))
    return np.clip(reduced, 0.0, None), (mode.T @ (basis.T @ root)) ** 2
