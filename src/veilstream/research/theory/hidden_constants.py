"""The constants that O() hides in thm-up, lem-u-IID, coro and the supplement's eq-sc-dyn.

Each function gives four factors: a bound's term is at most its factor times the rate's term. The
factors know the losses (L, α, μ, σ), the start and ε/ln(1/δ), and nothing else: not R, τ, n, η,
η_g, d, B_g or C_R. They are for the paper's noise (the Toeplitz factorization at lem-priv-analy's
variance; independent noise for lem-u-IID), η̃ within the statement's limit, and R·τ >= 2: at R·τ = 1
the printed ln(Rτ) is 0, the noise is not, and no constant exists.

Three facts carry the noise, beside the bounds themselves:

- 1/ρ = (1 + sqrt(1 + ε/ln(1/δ)))²·ln(1/δ)/ε². The paper reads it as O(ln(1/δ)/ε²), which needs
  ε = O(ln(1/δ)): the factor is 4 for small ε and grows with ε/ln(1/δ).
- κ(T) = Σ_{j<T} h(j)², the squared norm of the first column of C and of the last row of B, has
  κ(T)/ln T falling from T = 2 on: h(T)²/ln(1 + 1/T) <= (T+1)/(πT), by h(T)² < 1/(πT), is less than
  κ(T)/ln T >= 1/π + (1 - ln(3/2)/π)/ln T, by h(j)² > 1/(π(j + ½)). So κ(T) <= κ(2)/ln(2)·ln T.
- At η̃ <= 1/(10L·max(1, ln Rτ)), coro's local noise, of order (η̃·ln Rτ)², is at most 1/(10L) times
  the order η̃·ln Rτ that is printed.
"""

from __future__ import annotations

import math

from veilstream.research.theory.bounds import RegretTerms
from veilstream.research.theory.constants import Constants
from veilstream.research.theory.rates import checked_budget

_KAPPA_2 = 1.25  # κ(2) = h(0)² + h(1)²
_NORMS = (_KAPPA_2 / math.log(2)) ** 2  # Largest κ(T)²/(ln T)² over T >= 2
_NORMS_STATIC = _KAPPA_2**2 / math.log(2)  # Largest κ(T)²/(max(1, ln T)·ln T) over T >= 2; T = 3 has 1.60


def main_theorem_constants(constants: Constants, *, epsilon: float, delta: float) -> RegretTerms:
    """Factors from `main_theorem_rate` to `dynamic_regret_bound`, for every η̃ <= α/(8L).

    Args:
        constants: of the losses; of the run only R·τ >= 2 matters.
        epsilon: of the budget.
        delta: of the budget.

    Returns:
        One factor a term.

    """
    c, noise = constants, _noise(epsilon, delta)
    L, alpha = c.smoothness, c.alpha
    weight = (5 * alpha / (24 * L) + 1 / c.mu) / alpha  # η̃ + θ <= α/(8L) + α/(12L)
    released = 24 * L * (1 + c.regularity) / alpha**2
    return RegretTerms(
        initial=c.initial_distance_squared / alpha,
        drift=4 * L**2 * weight,
        noise=noise * _NORMS * max(released, 16 * L**2 * weight),
        environment=(12 * L + alpha * c.mu) / alpha**2,
    )


def strongly_convex_constants(constants: Constants, *, epsilon: float, delta: float) -> RegretTerms:
    """Factors from `main_theorem_rate` to `dynamic_regret_bound_strongly_convex`: eq-sc-dyn.

    For every η̃ <= 1/(8L), at θ = 1/(12L).

    Args:
        constants: of the losses; of the run only R·τ >= 2 matters.
        epsilon: of the budget.
        delta: of the budget.

    Returns:
        One factor a term.

    """
    c, noise = constants, _noise(epsilon, delta)
    L = c.smoothness
    weight = 5 / (24 * L) + 1 / (2 * c.mu)
    return RegretTerms(
        initial=c.initial_distance_squared,
        drift=4 * L**2 * weight,
        noise=noise * _NORMS * max(12 * L, 16 * L**2 * weight),
        environment=L,
    )


def independent_noise_constants(constants: Constants, *, epsilon: float, delta: float) -> RegretTerms:
    """Factors from `independent_noise_rate` to `dynamic_regret_bound_independent`.

    For every η̃ <= α/(8L); all contain the 6/5 that the printed proof lacks at the limit.

    Args:
        constants: of the losses.
        epsilon: of the budget.
        delta: of the budget.

    Returns:
        One factor a term.

    """
    c, noise = constants, _noise(epsilon, delta)
    L, alpha, correction = c.smoothness, c.alpha, 6 / 5
    weight = 4 * L**2 * (alpha / (4 * L) + 1 / c.mu) / alpha
    return RegretTerms(
        initial=correction * c.initial_distance_squared / alpha,
        drift=correction * weight,
        noise=correction * noise * max(2 / alpha, weight),
        environment=correction * (12 * L + alpha * c.mu) / alpha**2,
    )


def static_regret_constants(constants: Constants, *, epsilon: float, delta: float) -> RegretTerms:
    """Factors from `static_regret_rate` to `static_regret_bound`: coro, with its constants.

    For every η̃ <= 1/(10L·max(1, ln Rτ)), at θ = η̃·max(1, ln Rτ). The environment's factor is 5L²,
    divided by ln 2 for the sake of R·τ = 2, the only horizon where max(1, ln Rτ) is not ln(Rτ).

    Args:
        constants: of the losses; of the run only R·τ >= 2 matters.
        epsilon: of the budget.
        delta: of the budget.

    Returns:
        One factor a term.

    """
    c, noise = constants, _noise(epsilon, delta)
    L = c.smoothness
    weight = 1 / (5 * L) + 1 / (2 * c.mu)  # η̃ + θ <= 2/(10L)
    return RegretTerms(
        initial=c.initial_distance_squared,
        drift=4 * L**2 * weight,
        noise=noise * _NORMS_STATIC * max(1.0, 1.6 * L * weight),
        environment=5 * L**2 / math.log(2),
    )


def _noise(epsilon: float, delta: float) -> float:
    """V² over ‖c‖²·B_g²·ln(1/δ)/(nε²): 8 for small ε, more for larger ones."""
    epsilon, log_delta = checked_budget(epsilon, delta)
    return 2 * (1 + math.sqrt(1 + epsilon / log_delta)) ** 2
