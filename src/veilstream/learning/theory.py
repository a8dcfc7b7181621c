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
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.mechanisms.checks import positive_integer, positive_number

__all__ = [
    "Bound",
    "Constants",
    "GrowthConstants",
    "Terms",
    "advised_step_size",
    "assumption_constants",
    "correlated_beats_independent",
    "dynamic_regret_bound",
    "dynamic_regret_bound_independent",
    "main_theorem_rate",
    "quasi_strong_convexity",
    "static_regret_bound",
    "step_size_scaling",
]

_SLACK = 1.0 + 1e-12
"""Forgives the last bits when a step size sits exactly on its limit."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Constants:
    """What the bounds depend on: the losses, the run and its noise."""

    smoothness: float
    """L: Lipschitz constant of every client's gradient (asm-smooth)."""
    regularity: float
    """σ: how far the projection onto the optima moves with the point, squared (asm-regular);
    0 for a single optimum, 1 for a convex set of them."""
    alpha: float
    """α: how much of the loss a step towards the nearest optimum gains (asm-noncvx)."""
    mu: float
    """μ: the quadratic part of the same assumption; the modulus when losses are strongly convex."""
    gradient_bound: float
    """B_g: largest norm of a client's gradient (asm-Bg)."""
    dim: int
    """d: number of parameters."""
    learners: int
    """n."""
    local_steps: int
    """τ: steps in a round."""
    rounds: int
    """R."""
    step_size: float
    """η: of the local steps."""
    server_step_size: float
    """η_g."""
    path_variation: float
    """C_R: squared distances from each round's optimum to the overall one, summed over rounds."""
    initial_distance_squared: float
    """E‖x⁰ - x*‖² to the nearest overall optimum."""
    noise_std: float = 0.0
    """V_i: what one learner adds; the V of the bounds is V_i/√n."""
    row_norms_squared: NDArray[np.float64] | None = None
    """‖b_s‖² of the R·τ rows of B, as `Factorization.row_norms_squared` computes them.
    None when there is no noise, or when it is independent."""

    def __post_init__(self) -> None:
        _set(self, "smoothness", positive_number, "L, the Lipschitz constant of the gradients")
        _set(self, "regularity", _non_negative, "σ; 0 for a single optimum, 1 for a convex set")
        _set(self, "alpha", positive_number, "1 for quasi strongly convex losses")
        _set(self, "mu", positive_number, "assumption_constants derives it from other conditions")
        _set(self, "gradient_bound", positive_number, "B_g, the norm that gradients stay below")
        _set(self, "dim", positive_integer, "the number of model parameters")
        _set(self, "learners", positive_integer, "n, try 10")
        _set(self, "local_steps", positive_integer, "τ, try 4")
        _set(self, "rounds", positive_integer, "R, try 1000")
        _set(self, "step_size", positive_number, "η; advised_step_size gives η·η_g·τ")
        _set(self, "server_step_size", positive_number, "η_g, try 1")
        _set(self, "path_variation", _non_negative, "C_R; 0 when the optimum does not move")
        _set(self, "initial_distance_squared", _non_negative, "the squared distance, not its root")
        _set(self, "noise_std", _non_negative, "take it from veilstream.calibrate; 0 for no noise")
        if self.alpha * self.mu > self.smoothness * _SLACK:
            raise InputError(
                "mu",
                self.mu,
                f"<= L/α = {self.smoothness / self.alpha:.6g}",
                "no L-smooth loss satisfies asm-noncvx with a larger one",
            )
        if self.row_norms_squared is not None:
            rows = _row_norms(self.row_norms_squared, self.rounds * self.local_steps)
            object.__setattr__(self, "row_norms_squared", rows)

    @property
    def effective_step_size(self) -> float:
        """η̃ = η·η_g·τ: how far the released model moves along a round's mean gradient."""
        return self.step_size * self.server_step_size * self.local_steps

    @property
    def noise_variance(self) -> float:
        """V² = V_i²/n: of the learners' averaged noise. It exists only in the analysis."""
        return self.noise_std**2 / self.learners

    @property
    def round_row_norms_squared(self) -> float:
        """‖B_R‖_F²: squared row norms of B summed over the ends of the rounds; 0 without noise."""
        return float(self._noise_rows()[self.local_steps - 1 :: self.local_steps].sum())

    @property
    def max_row_norm_squared(self) -> float:
        """Largest squared row norm of B over all steps; 0 without noise."""
        return float(self._noise_rows().max())

    def _noise_rows(self) -> NDArray[np.float64]:
        if self.row_norms_squared is not None:
            return self.row_norms_squared
        if self.noise_std > 0:
            raise InputError(
                "row_norms_squared",
                None,
                "the squared row norms of B when noise_std > 0",
                "factorization.row_norms_squared(), or dynamic_regret_bound_independent",
            )
        return np.zeros(self.rounds * self.local_steps)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """A bound or rate for Reg/(R·τ), split by what causes it."""

    initial: float
    """Starting away from the optimum."""
    drift: float
    """Local models leaving the released one between rounds, by their gradients."""
    noise: float
    """Privacy: noise in the released models, and noise that moves the local models."""
    environment: float
    """Optima that move from round to round."""

    @property
    def total(self) -> float:
        """The sum of the four."""
        return self.initial + self.drift + self.noise + self.environment


@dataclass(frozen=True, kw_only=True)
class Bound(Terms):
    """A proved bound, and the condition on the step size that its proof needs."""

    condition: str
    """The condition, with its numbers."""
    holds: bool
    """Whether it is met. If not, the four numbers bound nothing."""


# --- bounds ----------------------------------------------------------------------------------


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
    """
    c, eta_tilde = constants, constants.effective_step_size
    weight = (eta_tilde + c.alpha / (12 * c.smoothness) + 1 / c.mu) / c.alpha
    drift, local_noise = _local_spread(c)
    return _up_to_step_limit(
        c,
        initial=c.initial_distance_squared / (c.alpha * c.rounds * eta_tilde),
        drift=weight * drift,
        noise=_released_noise(c) * eta_tilde**2 + weight * local_noise,
        environment=_environment(c),
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
        environment=correction * _environment(c),
    )


def static_regret_bound(constants: Constants, theta: float | None = None) -> Bound:
    """Regret against the best fixed model, for strongly convex losses: the proof of coro.

    ``constants.mu`` is the modulus of strong convexity; α and σ play no part. The proof stops at
    O(); the constants that it carries are::

        initial      ‖x⁰ - x*‖²/(Rη̃)
        drift        (η̃ + θ + 1/(2μ))·2L²η²·2τ²B_g²
        noise        η̃²·‖B_R‖_F²·dV²/(θRτ²) + (η̃ + θ + 1/(2μ))·2L²η²·8·max‖b‖²·d·V_i²
        environment  2L²·(η̃ + 3θ/2)·C_R/R

    if η̃ + 3θ/2 <= 1/(4L) (eqtheta with α = 1). θ trades noise against the environment; the
    proof takes θ = η̃·ln(Rτ).

    Corrected: the telescoped distances are printed with the wrong sign. η̃ <= 1/(10L·ln(Rτ)) gives
    eqtheta only if ln(Rτ) >= 1, so the default here is θ = η̃·max(1, ln(Rτ)). And a round's
    f^r(x^r) - f^r(x*) can be negative, so its factor 2 - 4L(η̃ + 3θ/2) >= 1 may be dropped only
    after summing over rounds, where the claim is empty when the sum is negative.
    """
    c, eta_tilde = constants, constants.effective_step_size
    if theta is None:
        theta = eta_tilde * max(1.0, math.log(c.rounds * c.local_steps))
    theta = positive_number("theta", theta, "leave it out for the paper's η̃·ln(Rτ)")
    spent, limit = eta_tilde + 1.5 * theta, 1 / (4 * c.smoothness)
    weight = eta_tilde + theta + 1 / (2 * c.mu)
    drift, local_noise = _local_spread(c)
    released = c.round_row_norms_squared * c.dim * c.noise_variance / c.local_steps**2
    return Bound(
        initial=c.initial_distance_squared / (c.rounds * eta_tilde),
        drift=weight * drift,
        noise=eta_tilde**2 * released / (theta * c.rounds) + weight * local_noise,
        environment=2 * c.smoothness**2 * spent * c.path_variation / c.rounds,
        condition=f"η̃ + 3θ/2 <= 1/(4L): {spent:.6g} <= {limit:.6g}",
        holds=spent <= limit * _SLACK,
    )


# --- rates and step sizes --------------------------------------------------------------------


def main_theorem_rate(constants: Constants, *, epsilon: float, delta: float) -> Terms:
    """The expression inside O() of thm-up (eq-27-11), with every hidden constant set to one.

    A rate says how terms scale, never how large they are. It reads ε and δ instead of the noise:
    the theorem puts in the Toeplitz factorization's row and column norms, O(ln Rτ) each.
    """
    c, eta_tilde = constants, constants.effective_step_size
    epsilon = positive_number("epsilon", epsilon, "lower means more private; try 1")
    delta = positive_number("delta", delta, "try 1e-6")
    if delta >= 1:
        raise InputError("delta", delta, "< 1", "try 1e-6")
    log_steps = math.log(c.rounds * c.local_steps)
    privacy = c.dim * c.gradient_bound**2 * math.log(1 / delta) / epsilon**2
    share = 1 + c.learners / c.server_step_size**2
    return Terms(
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
    """
    c = constants
    if not c.initial_distance_squared:
        raise InputError(
            "initial_distance_squared",
            c.initial_distance_squared,
            "> 0",
            "at an optimum the bound only falls as the step shrinks, and no step is best",
        )
    local = sum(_local_spread(c)) / (c.alpha * c.effective_step_size**2)
    p = c.initial_distance_squared / (c.alpha * c.rounds)
    q = _released_noise(c) + (c.alpha / (12 * c.smoothness) + 1 / c.mu) * local
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
    """R^(-1/3)·(ln Rτ)^(-2/3): how thm-up lets η̃ shrink with the horizon. A scale, not a step."""
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
    """
    R = positive_integer("rounds", rounds, "R, try 1000")
    tau = positive_integer("local_steps", local_steps, "τ, try 4")
    n = positive_integer("learners", learners, "n, try 10")
    eta_g = positive_number("server_step_size", server_step_size, "η_g, try 1")
    log_steps = math.log(R * tau)
    return tau / ((1 + n / eta_g**2) * log_steps**2) if log_steps else math.inf


# --- where α and μ come from -----------------------------------------------------------------


class GrowthConstants(NamedTuple):
    """The pair (α, μ) with which asm-noncvx holds."""

    alpha: float
    mu: float


def quasi_strong_convexity(modulus: float) -> GrowthConstants:
    """Quasi strongly convex losses satisfy asm-noncvx as they are: α = 1, μ the modulus."""
    return GrowthConstants(1.0, positive_number("modulus", modulus, "μ_QSC"))


def assumption_constants(
    *,
    quadratic_growth: float | None = None,
    polyak_lojasiewicz: float | None = None,
    error_bound: float | None = None,
    weak_convexity: float = 0.0,
    smoothness: float,
    alpha: float,
    as_printed: bool = False,
) -> GrowthConstants:
    """(α, μ) for losses that are weakly convex and meet one growth condition: cor:weakcvx.

    Give exactly one of: c_QG with c/2·dist² <= f - f*; c_PL with c·(f - f*) <= ‖∇f‖²/2; c_EB with
    c·dist <= ‖∇f‖. They become one c = c_QG = c_PL/2 = c_EB²/(2L), and any
    α in (0, (c - μ_WC)/L) will do.

    Corrected: adding the two inequalities of the proof gives μ/2 = (c - μ_WC - αL)/2, and
    asm-noncvx has that half in front of μ already, so μ = c - μ_WC - αL. ``as_printed=True``
    gives the paper's half of it: valid, and looser in every bound. c_PL/2 is cautious too, since
    Polyak-Łojasiewicz gives quadratic growth with c_PL itself: pass that as ``quadratic_growth``.
    """
    L = positive_number("smoothness", smoothness, "L")
    weak = _non_negative("weak_convexity", weak_convexity, "0 for convex losses")
    alpha = positive_number("alpha", alpha, "below (c - μ_WC)/L")
    conditions = {
        "quadratic_growth": quadratic_growth,
        "polyak_lojasiewicz": polyak_lojasiewicz,
        "error_bound": error_bound,
    }
    given = {name: value for name, value in conditions.items() if value is not None}
    if len(given) != 1:
        names = ", ".join(conditions)
        raise InputError("conditions", sorted(given), f"exactly one of {names}", "the one known")
    ((name, value),) = given.items()
    constant = positive_number(name, value, "its constant in the definition before lem:equi")
    if constant > L * _SLACK:
        raise InputError(name, value, f"<= smoothness = {L:.6g}", "no L-smooth loss has more")
    c = {
        "quadratic_growth": constant,
        "polyak_lojasiewicz": constant / 2,
        "error_bound": constant**2 / (2 * L),
    }[name]
    if weak >= c:
        rule = f"< c = {c:.6g}, the quadratic growth that {name} gives"
        raise InputError("weak_convexity", weak_convexity, rule, "find α and μ directly")
    mu = c - weak - alpha * L
    if mu <= 0:
        raise InputError("alpha", alpha, f"< (c - μ_WC)/L = {(c - weak) / L:.6g}", "try half of it")
    return GrowthConstants(alpha, mu / 2 if as_printed else mu)


# --- parts that bounds share -----------------------------------------------------------------


def _up_to_step_limit(
    c: Constants, *, initial: float, drift: float, noise: float, environment: float
) -> Bound:
    """A bound whose proof takes θ = α/(12L) and therefore η̃ <= α/(8L)."""
    limit = c.alpha / (8 * c.smoothness)
    return Bound(
        initial=initial,
        drift=drift,
        noise=noise,
        environment=environment,
        condition=f"η̃ <= α/(8L): {c.effective_step_size:.6g} <= {limit:.6g}",
        holds=c.effective_step_size <= limit * _SLACK,
    )


def _local_spread(c: Constants) -> tuple[float, float]:
    """2L² times eq-18, the bound on E‖z - x^r‖²: the part of B_g and the part of the noise."""
    scale = 2 * (c.smoothness * c.step_size) ** 2
    gradients = scale * 2 * (c.local_steps * c.gradient_bound) ** 2
    return gradients, scale * 8 * c.max_row_norm_squared * c.dim * c.noise_std**2


def _released_noise(c: Constants) -> float:
    """What x^r - x_ξ^r costs in lem-u, over η̃²."""
    spread = c.round_row_norms_squared * c.dim * c.noise_variance / c.local_steps**2
    return 24 * c.smoothness * (1 + c.regularity) * spread / (c.alpha**2 * c.rounds)


def _environment(c: Constants) -> float:
    """(1/θ + μ)·C_R/(αR) at θ = α/(12L)."""
    return (12 * c.smoothness + c.alpha * c.mu) * c.path_variation / (c.alpha**2 * c.rounds)


# --- checks ----------------------------------------------------------------------------------


def _set(
    c: Constants, field: str, check: Callable[[str, object, str], float], way_out: str
) -> None:
    object.__setattr__(c, field, check(field, getattr(c, field), way_out))


def _non_negative(field: str, value: object, way_out: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InputError(field, value, "a finite number >= 0", way_out)
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise InputError(field, value, "a finite number >= 0", way_out)
    return number


def _row_norms(values: object, steps: int) -> NDArray[np.float64]:
    """A read-only float64 copy with one squared norm per step."""
    way_out = "factorization.row_norms_squared() at the horizon R·τ"
    try:
        rows = np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError("row_norms_squared", values, "an array of numbers", way_out) from None
    if rows.shape != (steps,):
        rule = f"one number for each of the R·τ = {steps} steps"
        raise InputError("row_norms_squared", f"array of shape {rows.shape}", rule, way_out)
    if not np.isfinite(rows).all() or (rows < 0).any():
        worst = float(rows[~(np.isfinite(rows) & (rows >= 0))][0])
        raise InputError("row_norms_squared", worst, "finite numbers >= 0", way_out)
    rows.setflags(write=False)
    return rows
