"""How the bounds scale: what stands inside O() in thm-up, lem-u-IID and coro, and step sizes.

A rate says how terms scale, never how large they are: every hidden constant is one.
`veilstream.research.theory.hidden_constants` has constants with which rates become bounds.
"""

from __future__ import annotations

import math
from typing import Literal

from veilstream.errors import InputError
from veilstream.mechanisms.checks import positive_integer, positive_number
from veilstream.research.theory.bounds import RegretTerms, local_spread, released_noise
from veilstream.research.theory.constants import Constants

Statement = Literal["thm-up", "lem-u-IID", "coro"]


def main_theorem_rate(constants: Constants, *, epsilon: float, delta: float) -> RegretTerms:
    """The expression inside O() of thm-up (eq-27-11), with every hidden constant set to one.

    The theorem puts in the Toeplitz factorization's row and column norms, O(ln Rτ) each, so it
    reads ε and δ instead of the noise. The supplement's strongly convex case has the same rate
    (eq-sc-dyn). At η̃ = `step_size_scaling` the terms are those of the theorem's second display.

    Args:
        constants: of the losses and the run.
        epsilon: of the budget.
        delta: of the budget.

    Returns:
        The terms.

    """
    c, eta_tilde = constants, constants.effective_step_size
    log_steps = math.log(c.rounds * c.local_steps)
    return _rate(
        c,
        noise=_local_share(c) * (eta_tilde * log_steps / c.local_steps) ** 2,
        privacy=privacy_price(c, epsilon, delta),
        environment=1.0,
    )


def independent_noise_rate(constants: Constants, *, epsilon: float, delta: float) -> RegretTerms:
    """The expression inside O() of lem-u-IID: fresh noise in every step.

    At η̃ = ``step_size_scaling(..., statement="lem-u-IID")`` = R^(-1/2) the supplement prints a
    second form that has lost η̃n/η_g². That part falls faster in R, but it is the larger one as
    long as n/η_g² > R^(1/2); it stays here.

    Args:
        constants: of the losses and the run.
        epsilon: of the budget.
        delta: of the budget.

    Returns:
        The terms.

    """
    c, eta_tilde = constants, constants.effective_step_size
    share = 1 + eta_tilde * c.learners / c.server_step_size**2
    return _rate(c, noise=share * eta_tilde / c.local_steps, privacy=privacy_price(c, epsilon, delta), environment=1.0)


def static_regret_rate(constants: Constants, *, epsilon: float, delta: float) -> RegretTerms:
    """The expression inside O() of coro's proof, at θ = η̃·ln(Rτ) and any η̃ <= 1/(10L·ln(Rτ)).

    At η̃ = ``step_size_scaling(..., statement="coro")`` = (R·ln Rτ)^(-1/2) the terms are those that
    coro prints. Its (ln Rτ)^(1/2)/R^(3/2) for the environment is for a C_R that stays bounded; in
    general C_R grows like R, and the term falls like ((ln Rτ)/R)^(1/2).

    Args:
        constants: of the losses and the run.
        epsilon: of the budget.
        delta: of the budget.

    Returns:
        The terms.

    """
    c, eta_tilde = constants, constants.effective_step_size
    step = eta_tilde * math.log(c.rounds * c.local_steps)
    return _rate(
        c, noise=_local_share(c) * step / c.local_steps**2, privacy=privacy_price(c, epsilon, delta), environment=step
    )


def privacy_price(constants: Constants, epsilon: float, delta: float) -> float:
    """d·B_g²·ln(1/δ)/(nε²): what every rate charges for privacy."""
    c, (epsilon, log_delta) = constants, checked_budget(epsilon, delta)
    return c.dim * c.gradient_bound**2 * log_delta / (c.learners * epsilon**2)


def checked_budget(epsilon: float, delta: float) -> tuple[float, float]:
    """ε and ln(1/δ), after the rules for them."""
    epsilon = positive_number("epsilon", epsilon, "lower means more private; try 1")
    delta = positive_number("delta", delta, "try 1e-6")
    if delta >= 1:
        raise InputError("delta", delta, "< 1", "try 1e-6")
    return epsilon, -math.log(delta)


def _local_share(c: Constants) -> float:
    """1 + n/η_g²: noise of the released model, and of the local ones."""
    return 1 + c.learners / c.server_step_size**2


def _rate(c: Constants, *, noise: float, privacy: float, environment: float) -> RegretTerms:
    eta_tilde = c.effective_step_size
    return RegretTerms(
        initial=1 / (c.rounds * eta_tilde),
        drift=(eta_tilde * c.gradient_bound / c.server_step_size) ** 2,
        noise=noise * privacy,
        environment=environment * c.path_variation / c.rounds,
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
        lower = step - (3 * s * step**4 + 2 * q * step**3 - p) / (12 * s * step**3 + 6 * q * step**2)
        if not lower < step:
            break
        step = lower
    return min(step, c.alpha / (8 * c.smoothness))


def step_size_scaling(*, rounds: int, local_steps: int, statement: Statement = "thm-up") -> float:
    """How a statement lets η̃ shrink with the horizon. A scale, not a step.

    R^(-1/3)·(ln Rτ)^(-2/3) for thm-up and the supplement's strongly convex case, R^(-1/2) for
    lem-u-IID, (R·ln Rτ)^(-1/2) for coro. Each makes the start cost as much as the noise.

    Args:
        rounds: R.
        local_steps: τ.
        statement: "thm-up", "lem-u-IID" or "coro".

    Returns:
        The scale.

    Raises:
        InputError: for a single step, where ln(Rτ) is 0, or an unknown statement.

    """
    R = positive_integer("rounds", rounds, "R, try 1000")
    tau = positive_integer("local_steps", local_steps, "τ, try 4")
    if statement == "lem-u-IID":
        return float(R**-0.5)
    if R * tau == 1:
        raise InputError("rounds", rounds, ">= 2 when local_steps = 1", "ln(Rτ) is 0 there")
    if statement == "thm-up":
        return float(R ** (-1 / 3) * math.log(R * tau) ** (-2 / 3))
    if statement == "coro":
        return float((R * math.log(R * tau)) ** -0.5)
    names = "'thm-up', 'lem-u-IID' or 'coro'"
    raise InputError("statement", statement, names, "the label of the statement in the paper")


def correlated_beats_independent(*, rounds: int, local_steps: int, learners: int, server_step_size: float) -> float:
    """The η̃ up to which thm-up is below lem-u-IID: τ/((1 + n/η_g²)·(ln Rτ)²); infinite for a single step.

    Sufficient, not necessary, and a comparison of two O() with every constant set to one. Report
    it; never choose a mechanism or a step by it: in the paper's own logistic regression it says
    0.0028, where 0.4 works.

    Args:
        rounds: R.
        local_steps: τ.
        learners: n.
        server_step_size: η_g.

    Returns:
        η̃.

    """
    R = positive_integer("rounds", rounds, "R, try 1000")
    tau = positive_integer("local_steps", local_steps, "τ, try 4")
    n = positive_integer("learners", learners, "n, try 10")
    eta_g = positive_number("server_step_size", server_step_size, "η_g, try 1")
    log_steps = math.log(R * tau)
    return tau / ((1 + n / eta_g**2) * log_steps**2) if log_steps else math.inf


def drift_exceeds_noise(constants: Constants, *, epsilon: float, delta: float) -> float:
    """The τ, not rounded, from which thm-up's drift term is above its noise term, at fixed η·η_g and Rτ.

    The drift term τ²η²B_g² grows with τ and the noise term does not depend on it. They meet at
    τ = ln(Rτ)·sqrt((n + η_g²)·d·ln(1/δ)/n)/ε, whatever η and B_g are. As every rate it says nothing
    about size: docs/reproduction.md has what was measured.

    Args:
        constants: of the losses and the run.
        epsilon: of the budget.
        delta: of the budget.

    Returns:
        τ, not rounded.

    """
    rate = main_theorem_rate(constants, epsilon=epsilon, delta=delta)
    return constants.local_steps * math.sqrt(rate.noise / rate.drift)
