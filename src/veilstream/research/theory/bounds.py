"""What the paper promises about regret, in numbers: every bound with its constants written out.

The letters are the paper's: η̃ = η·η_g·τ, V² = V_i²/n, ‖B_R‖_F² the squared row norms of B summed
over round ends. Bounds are for the regret divided by the number of steps R·τ, in expectation over
the noise. The derivations were redone. Where the printed constants are too small for their own
proof, the function says so and uses the ones that follow; where they are only loose, they stay.

How to read the assumptions:

- asm-smooth prints a one-sided inequality, but the proofs bound ‖∇f(z) - ∇f(x)‖ by L‖z - x‖:
  L must be a Lipschitz constant of every client's gradient.
- asm-Bg and asm-noncvx exclude each other once some point is further than 2·B_g/μ from the
  optima. The proofs need B_g only along the trajectory: max over r, t, i of E‖∇f(z_i^{r,t})‖² is
  enough. They know nothing of clipping: a bound covers a run in which clipping never acts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from veilstream.mechanisms.checks import positive_number
from veilstream.research.theory.constants import STEP_SLACK, Constants


@dataclass(frozen=True, kw_only=True)
class RegretTerms:
    """A bound or rate for Reg/(R·τ), split by what causes it."""

    initial: float  # Starting away from the optimum
    drift: float  # Local models leaving the released one between rounds, by their gradients
    noise: float  # Privacy: noise in the released models, and noise that moves the local models
    environment: float  # Optima that move from round to round

    @property
    def total(self) -> float:
        """The sum of the four."""
        return self.initial + self.drift + self.noise + self.environment


@dataclass(frozen=True, kw_only=True)
class Bound(RegretTerms):
    """A proved bound, and the condition on the step size that its proof needs."""

    condition: str  # The condition, with its numbers
    holds: bool  # Whether it is met. If not, the four numbers bound nothing.


def dynamic_regret_bound(constants: Constants) -> Bound:
    """Dynamic regret with correlated noise: the right-hand side of lem-u.

    With θ = α/(12L), and E‖z - x^r‖² <= η²(2τ²B_g² + 8·max‖b‖²·d·V_i²) for the local models
    (eq-18), the terms are::

        initial      ‖x⁰ - x*‖²/(αRη̃)
        drift        (η̃ + θ + 1/μ)·2L²η²·2τ²B_g²/α
        noise        24L(1+σ)η̃²·‖B_R‖_F²·dV²/(α²Rτ²) + (η̃ + θ + 1/μ)·2L²η²·8·max‖b‖²·d·V_i²/α
        environment  (12L + αμ)·C_R/(α²R)

    Guarantees: the printed constants follow from the appendix, step by step, if η̃ <= α/(8L).
    They are loose in two places: the last round's row of B counts though its noise reaches no
    model that is judged, and the local models count at τ = 1 though they do not move there.

    Args:
        constants: of the losses, the run and its noise.

    Returns:
        The bound, term by term, and whether the proof's condition on the step size holds.

    """
    c, eta_tilde = constants, constants.effective_step_size
    weight = (eta_tilde + c.alpha / (12 * c.smoothness) + 1 / c.mu) / c.alpha
    drift, local_noise = local_spread(c)
    return _up_to_step_limit(
        c,
        initial=c.initial_distance_squared / (c.alpha * c.rounds * eta_tilde),
        drift=weight * drift,
        noise=released_noise(c) * eta_tilde**2 + weight * local_noise,
        environment=environment_term(c),
    )


def dynamic_regret_bound_independent(constants: Constants) -> Bound:
    """Dynamic regret when every step adds fresh N(0, V_i²) noise: the proof of lem-u-IID.

    ``row_norms_squared`` is not used: the noise of a round is a plain sum, E‖ξ^r‖² = d·V_i²/(nτ)
    (the text drops d there, not in what follows). With the printed constants::

        initial      ‖x⁰ - x*‖²/(αRη̃)
        drift        (2η̃ + 1/μ)·4L²η²·τ²B_g²/α
        noise        2η̃·dV²/(ατ) + (2η̃ + 1/μ)·4L²η²·τ·d·V_i²/α
        environment  (12L + αμ)·C_R/(α²R)

    Corrected: the proof leaves the regret with the factor 2α - 8Lη̃ - 2Lθ, bounds that below by
    α/2, then divides by α. At θ = α/(12L) the factor is 11α/6 - 8Lη̃: at least α, as printed, for
    η̃ <= 5α/(48L), but only 5α/6 at η̃ = α/(8L). Here every term is multiplied by
    α/min(α, 11α/6 - 8Lη̃), which is between 1 and 6/5.

    Args:
        constants: of the losses, the run and its noise.

    Returns:
        The bound, term by term, and whether the proof's condition on the step size holds.

    """
    c, eta_tilde = constants, constants.effective_step_size
    left = 11 / 6 - 8 * c.smoothness * eta_tilde / c.alpha
    correction = 1 / min(1.0, max(left, 5 / 6))
    weight = (2 * eta_tilde + 1 / c.mu) * 4 * c.smoothness**2 * c.step_size**2 / c.alpha
    released = 2 * eta_tilde * c.dim * c.noise_variance / (c.alpha * c.local_steps)
    local_noise = c.local_steps * c.dim * c.noise_std**2
    initial = c.initial_distance_squared / (c.alpha * c.rounds * eta_tilde)
    return _up_to_step_limit(
        c,
        initial=correction * initial,
        drift=correction * weight * c.local_steps**2 * c.gradient_bound**2,
        noise=correction * (released + weight * local_noise),
        environment=correction * environment_term(c),
    )


def dynamic_regret_bound_strongly_convex(constants: Constants, theta: float | None = None) -> Bound:
    """Dynamic regret for strongly convex losses: the supplement's app-sc-dynamic (eq-sc-dynm).

    ``constants.mu`` is the modulus of strong convexity; α and σ play no part, since every optimum
    is a single point. The supplement stops at O(); the constants that it carries are::

        initial      ‖x⁰ - x*‖²/(Rη̃)
        drift        (η̃ + θ + 1/(2μ))·2L²η²·2τ²B_g²
        noise        η̃²·‖B_R‖_F²·dV²/(θRτ²) + (η̃ + θ + 1/(2μ))·2L²η²·8·max‖b‖²·d·V_i²
        environment  L·C_R/R

    Proof, a round. With x* the overall optimum, Δ the mean of ∇f(z) - ∇f(x^r) over the round and
    g^r = ∇f^r(x^r) + Δ, x_ξ^{r+1} = x_ξ^r - η̃g^r gives::

        ‖x_ξ^{r+1} - x*‖² - ‖x_ξ^r - x*‖² = η̃²‖g‖² - 2η̃⟨g, x_ξ^r - x^r⟩ - 2η̃⟨g, x^r - x*⟩

    Young on the second term adds η̃θ‖g‖² + (η̃/θ)‖x_ξ^r - x^r‖². Strong convexity between x^r and
    x* bounds the third by -2η̃(f^r(x^r) - f^r(x*)) - η̃μ‖x^r - x*‖² for its part in ∇f^r(x^r) and,
    by Young, (η̃/μ)‖Δ‖² + η̃μ‖x^r - x*‖² for its part in Δ: the squares cancel. With
    ‖g‖² <= 2‖Δ‖² + 2‖∇f^r(x^r)‖² and ‖∇f^r(x)‖² <= 2L(f^r(x) - f^r*) the regret keeps the factor
    2 - 4L(η̃ + θ) >= 1, ‖Δ‖² the factor 2(η̃ + θ) + 1/μ, and 2(f^r(x*) - f^r*) <= L‖x* - x_r*‖² is
    what the round's own optimum costs. Every f^r(x^r) - f^r* is at least 0, so what exceeds 1 of
    the factor can be dropped round by round.

    The printed condition, η̃ + 3θ/2 <= 1/(4L) (eqtheta with α = 1), is more than this needs and
    stays. Beside `dynamic_regret_bound` at α = 1 the environment costs L instead of 12L + μ: still
    C_R/R, as the supplement says.

    Args:
        constants: of the losses, the run and its noise.
        theta: θ; 1/(12L), the paper's, where it is left out.

    Returns:
        The bound, term by term, and whether the proof's condition on the step size holds.

    """
    L = constants.smoothness
    theta = 1 / (12 * L) if theta is None else theta
    theta = positive_number("theta", theta, "leave it out for the paper's 1/(12L)")
    return _strongly_convex(constants, theta, environment=L)


def static_regret_bound(constants: Constants, theta: float | None = None) -> Bound:
    """Regret against the best fixed model, for strongly convex losses: the proof of coro.

    ``constants.mu`` is the modulus of strong convexity; α and σ play no part. The proof stops at
    O(); it carries the terms of `dynamic_regret_bound_strongly_convex`, but 2L²·(η̃ + 3θ/2)·C_R/R for
    the environment, if η̃ + 3θ/2 <= 1/(4L) (eqtheta with α = 1). θ trades noise against the
    environment; the proof takes θ = η̃·ln(Rτ).

    Corrected: the telescoped distances are printed with the wrong sign. η̃ <= 1/(10L·ln(Rτ)) gives
    eqtheta only if ln(Rτ) >= 1, so the default here is θ = η̃·max(1, ln(Rτ)). And a round's
    f^r(x^r) - f^r(x*) can be negative, so its factor 2 - 4L(η̃ + 3θ/2) >= 1 may be dropped only
    after summing over rounds, where the claim is empty when the sum is negative.

    Args:
        constants: of the losses, the run and its noise.
        theta: θ; η̃·max(1, ln(Rτ)) where it is left out.

    Returns:
        As for `dynamic_regret_bound`.

    """
    c, eta_tilde = constants, constants.effective_step_size
    if theta is None:
        theta = eta_tilde * max(1.0, math.log(c.rounds * c.local_steps))
    theta = positive_number("theta", theta, "leave it out for the paper's η̃·ln(Rτ)")
    # What 4L·c_VII takes from the regret's factor 2 comes back as this much of f^r(x*) - f^r*.
    environment = 2 * c.smoothness**2 * (eta_tilde + 1.5 * theta)
    return _strongly_convex(c, theta, environment=environment)


def local_spread(c: Constants) -> tuple[float, float]:
    """2L² times eq-18, the bound on E‖z - x^r‖²: the part of B_g and the part of the noise."""
    scale = 2 * (c.smoothness * c.step_size) ** 2
    gradients = scale * 2 * (c.local_steps * c.gradient_bound) ** 2
    return gradients, scale * 8 * c.max_row_norm_squared * c.dim * c.noise_std**2


def released_noise(c: Constants) -> float:
    """What x^r - x_ξ^r costs in lem-u, over η̃²."""
    spread = c.round_row_norms_squared * c.dim * c.noise_variance / c.local_steps**2
    return 24 * c.smoothness * (1 + c.regularity) * spread / (c.alpha**2 * c.rounds)


def environment_term(c: Constants) -> float:
    """(1/θ + μ)·C_R/(αR) at θ = α/(12L)."""
    return (12 * c.smoothness + c.alpha * c.mu) * c.path_variation / (c.alpha**2 * c.rounds)


def _up_to_step_limit(c: Constants, *, initial: float, drift: float, noise: float, environment: float) -> Bound:
    """A bound whose proof takes θ = α/(12L) and therefore η̃ <= α/(8L)."""
    limit = c.alpha / (8 * c.smoothness)
    return Bound(
        initial=initial,
        drift=drift,
        noise=noise,
        environment=environment,
        condition=f"η̃ <= α/(8L): {c.effective_step_size:.6g} <= {limit:.6g}",
        holds=c.effective_step_size <= limit * STEP_SLACK,
    )


def _strongly_convex(c: Constants, theta: float, *, environment: float) -> Bound:
    """A bound of the supplement's strongly convex case; ``environment`` is the factor of C_R/R."""
    eta_tilde = c.effective_step_size
    spent, limit = eta_tilde + 1.5 * theta, 1 / (4 * c.smoothness)
    weight = eta_tilde + theta + 1 / (2 * c.mu)
    drift, local_noise = local_spread(c)
    released = c.round_row_norms_squared * c.dim * c.noise_variance / c.local_steps**2
    return Bound(
        initial=c.initial_distance_squared / (c.rounds * eta_tilde),
        drift=weight * drift,
        noise=eta_tilde**2 * released / (theta * c.rounds) + weight * local_noise,
        environment=environment * c.path_variation / c.rounds,
        condition=f"η̃ + 3θ/2 <= 1/(4L): {spent:.6g} <= {limit:.6g}",
        holds=spent <= limit * STEP_SLACK,
    )
