"""How the main theorem scales (thm-up), and the step sizes that follow from the bounds."""

from __future__ import annotations

import math

from veilstream.errors import InputError
from veilstream.mechanisms.checks import positive_integer, positive_number
from veilstream.theory import RegretTerms
from veilstream.theory.constants import Constants
from veilstream.theory.shared_terms import local_spread, released_noise

__all__ = [
    "advised_step_size",
    "correlated_beats_independent",
    "main_theorem_rate",
    "step_size_scaling",
]


# --- rates and step sizes --------------------------------------------------------------------


def main_theorem_rate(constants: Constants, *, epsilon: float, delta: float) -> RegretTerms:
    """The expression inside O() of thm-up (eq-27-11), with every hidden constant set to one.

    A rate says how terms scale, never how large they are. It reads ε and δ instead of the noise:
    the theorem puts in the Toeplitz factorization's row and column norms, O(ln Rτ) each.

    Args:
        constants: of the losses and the run.
        epsilon: of the budget.
        delta: of the budget.

    Returns:
        The terms.

    Raises:
        InputError: for a budget that the rules exclude.

    """
    c, eta_tilde = constants, constants.effective_step_size
    epsilon = positive_number("epsilon", epsilon, "lower means more private; try 1")
    delta = positive_number("delta", delta, "try 1e-6")
    if delta >= 1:
        raise InputError("delta", delta, "< 1", "try 1e-6")
    log_steps = math.log(c.rounds * c.local_steps)
    privacy = c.dim * c.gradient_bound**2 * math.log(1 / delta) / epsilon**2
    share = 1 + c.learners / c.server_step_size**2
    return RegretTerms(
        initial=1 / (c.rounds * eta_tilde),
        drift=(eta_tilde * c.gradient_bound / c.server_step_size) ** 2,
        noise=share * (eta_tilde * log_steps / c.local_steps) ** 2 * privacy / c.learners,
        environment=c.path_variation / c.rounds,
    )


def advised_step_size(constants: Constants) -> float:
    """η̃ in (0, α/(8L)] that minimises `dynamic_regret_bound`, at fixed η_g and τ.

    ``constants.step_size`` is ignored; the η to use is the answer over η_g·τ. As a function of η̃
    the bound is p/η̃ + q·η̃² + s·η̃³ + a constant, convex, with its minimum where
    3s·η̃⁴ + 2q·η̃³ = p. It is the best step for a worst case: real losses often bear more.

    Args:
        constants: of the losses, the run and its noise.

    Returns:
        η̃.

    Raises:
        InputError: where the start is an optimum.

    """
    c = constants
    if not c.initial_distance_squared:
        raise InputError(
            "initial_distance_squared",
            c.initial_distance_squared,
            "> 0",
            "at an optimum the bound only falls as the step shrinks, and no step is best",
        )
    local = sum(local_spread(c)) / (c.alpha * c.effective_step_size**2)
    p = c.initial_distance_squared / (c.alpha * c.rounds)
    q = released_noise(c) + (c.alpha / (12 * c.smoothness) + 1 / c.mu) * local
    s = local
    # Newton from the right on a convex increasing function: it comes down to the root and stops.
    step: float = min((p / (2 * q)) ** (1 / 3), (p / (3 * s)) ** (1 / 4))
    for _ in range(100):
        lower = step - (3 * s * step**4 + 2 * q * step**3 - p) / (
            12 * s * step**3 + 6 * q * step**2
        )
        if not lower < step:
            break
        step = lower
    return min(step, c.alpha / (8 * c.smoothness))


def step_size_scaling(*, rounds: int, local_steps: int) -> float:
    """R^(-1/3)·(ln Rτ)^(-2/3): how thm-up lets η̃ shrink with the horizon. A scale, not a step.

    Args:
        rounds: R.
        local_steps: τ.

    Returns:
        The scale.

    Raises:
        InputError: for a single step, where ln(Rτ) is 0.

    """
    R = positive_integer("rounds", rounds, "R, try 1000")
    tau = positive_integer("local_steps", local_steps, "τ, try 4")
    if R * tau == 1:
        raise InputError("rounds", rounds, ">= 2 when local_steps = 1", "ln(Rτ) is 0 there")
    return float(R ** (-1 / 3) * math.log(R * tau) ** (-2 / 3))


def correlated_beats_independent(
    *, rounds: int, local_steps: int, learners: int, server_step_size: float
) -> float:
    """The η̃ up to which thm-up is below lem-u-IID: τ/((1 + n/η_g²)·(ln Rτ)²).

    Sufficient, not necessary, and a comparison of two O() with every constant set to one. Report
    it; never choose a mechanism or a step by it: in the paper's own logistic regression it says
    0.0028, where 0.4 works. Infinite for a single step.

    Args:
        rounds: R.
        local_steps: τ.
        learners: n.
        server_step_size: η_g.

    Returns:
        η̃.

    Raises:
        InputError: for a value that the rules exclude.

    """
    R = positive_integer("rounds", rounds, "R, try 1000")
    tau = positive_integer("local_steps", local_steps, "τ, try 4")
    n = positive_integer("learners", learners, "n, try 10")
    eta_g = positive_number("server_step_size", server_step_size, "η_g, try 1")
    log_steps = math.log(R * tau)
    return tau / ((1 + n / eta_g**2) * log_steps**2) if log_steps else math.inf
