"""The rows of the paper's comparison table (tab), by one interface: assumptions, rate, bound.

A ``rate`` is the table's expression with every hidden constant set to one; a ``bound`` is an
inequality with constants, proved in the docstring of its function. To read them side by side:

- The rows bound different things: static regret against dynamic, a mean over local models against
  one over released ones, losses that are convex against losses that satisfy asm-noncvx. Where
  losses are convex and the optimum stays, all of them speak of the same run.
- Rows differ in noise: ``constants`` has the correlated one, whose std counts the norms of C, and
  ``independent_noise_std`` what the same budget needs with fresh noise in every step.
- The table's η is the step of the released model, our η̃, in every row.
- ``drift`` holds all that gradients of norm B_g cost, which for convex losses without smoothness
  is η̃·B_g² even where nothing is local.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from veilstream.errors import InputError
from veilstream.mechanisms.checks import non_negative, positive_number
from veilstream.research.theory.bounds import Bound, RegretTerms, dynamic_regret_bound, dynamic_regret_bound_independent
from veilstream.research.theory.constants import Constants
from veilstream.research.theory.rates import independent_noise_rate, main_theorem_rate, privacy_price


@dataclass(frozen=True, kw_only=True)
class TableSetting:
    """What the rows of the table depend on."""

    constants: Constants  # Of the losses, the run and its noise. Convex rows use no L, α, μ, σ.
    epsilon: float  # Of the budget; rates read it, bounds read the noise
    delta: float
    independent_noise_std: float | None = None
    """V_i of the rows with independent noise: ``calibrate`` on ``mechanisms.independent``. May be
    left out where ``constants`` has no row norms: its noise is then independent, or none."""
    path_length: float = 0.0  # C̃_R: distances between the optima of successive rounds, summed (gao2018)
    diameter: float | None = None  # Of the bounded domain that gao2018 needs
    pseudo_convexity: float = 1.0
    """K with f(x) - f* <= K·⟨∇f(x), x - x*⟩/‖∇f(x)‖ (gao2018); B_g will do for convex losses."""
    normalised_step: float | None = None
    """How far gao2018 moves in a round; η̃·B_g, the farthest that others move, if left out."""

    def __post_init__(self) -> None:
        non_negative("path_length", self.path_length, "0 when the optimum does not move")
        positive_number("pseudo_convexity", self.pseudo_convexity, "B_g for convex losses")
        if self.independent_noise_std is not None:
            non_negative("independent_noise_std", self.independent_noise_std, "0 for no noise")
        for name in ("diameter", "normalised_step"):
            value = getattr(self, name)
            if value is not None:
                positive_number(name, value, "a length, or leave it out")

    @property
    def with_independent_noise(self) -> Constants:
        """The constants of the rows with independent noise."""
        c = self.constants
        std = self.independent_noise_std
        if std is None:
            if c.row_norms_squared is not None and c.noise_std > 0:
                raise InputError(
                    "independent_noise_std",
                    None,
                    "a number where constants have correlated noise",
                    "veilstream.calibrate(budget, mechanisms.independent(R·τ), clip_norm=B_g)",
                )
            std = c.noise_std
        return dataclasses.replace(c, noise_std=std, row_norms_squared=None)

    @property
    def length_of_step(self) -> float:
        """What gao2018 moves in a round."""
        if self.normalised_step is not None:
            return self.normalised_step
        return self.constants.effective_step_size * self.constants.gradient_bound


@dataclass(frozen=True, kw_only=True)
class ComparedMethod:
    """A row of the table."""

    noise: str | None  # "correlated", "independent", or None where nothing is private
    regret: str  # "dynamic" or "static"
    assumptions: tuple[str, ...]
    rate: Callable[[TableSetting], RegretTerms] = field(repr=False)  # The table's expression, hidden constants one
    bound: Callable[[TableSetting], Bound] = field(repr=False)  # An inequality with its constants, proved here


def _gradient_descent(c: Constants, *, drift: float = 0.0, noise: float = 0.0) -> Bound:
    """‖x⁰ - u‖²/(2Rη̃) + η̃B_g²/2 and what a row adds: no condition on η̃, any comparator u."""
    eta_tilde = c.effective_step_size
    return Bound(
        initial=c.initial_distance_squared / (2 * c.rounds * eta_tilde),
        drift=eta_tilde * c.gradient_bound**2 / 2 + drift,
        noise=noise,
        environment=0.0,
        condition="any η̃ > 0",
        holds=True,
    )


def mini_batch_bound(setting: TableSetting) -> Bound:
    """liu2023: one step a round along the mean of n·τ gradients at x^r, fresh noise in each.

    A learner adds one N(0, V_i²/τ²) vector to the mean of its τ gradients: V_i protects a single
    gradient, and a client moves the mean by 1/τ of one.
    With g^r the mean and ξ^r the learners' averaged noise, independent of x^r,
    E‖ξ^r‖² = d·V_i²/(nτ²) and, for every u::

        E‖x^{r+1} - u‖² = E‖x^r - u‖² - 2η̃·E⟨g^r, x^r - u⟩ + η̃²·E‖g^r‖² + η̃²·d·V_i²/(nτ²)

    Convexity bounds the product from below by f^r(x^r) - f^r(u); sum over rounds and divide.
    """
    c = setting.with_independent_noise
    spread = c.dim * c.noise_variance / c.local_steps**2
    return _gradient_descent(c, noise=c.effective_step_size * spread / 2)


def correlated_mini_batch_bound(setting: TableSetting) -> Bound:
    """denisov2022: as `mini_batch_bound`, with noise (b^{r,τ-1} - b^{r-1,τ-1})ξ/τ in round r.

    x_ξ^r = x^r + (η̃/τ)·b^{r-1,τ-1}ξ moves by -η̃g^r alone, so Σ⟨g^r, x_ξ^r - u⟩ <=
    ‖x⁰ - u‖²/(2η̃) + (η̃/2)·Σ‖g^r‖², for every draw of ξ. What is judged is x^r:
    ⟨g^r, x^r - x_ξ^r⟩ <= B_g·(η̃/τ)·‖b^{r-1,τ-1}ξ‖, and E‖bξ‖ <= ‖b‖·V·sqrt(d). The last round's
    row reaches no model that is judged and is left out.
    """
    c = setting.constants
    rows = np.sqrt(c.round_end_rows_squared[:-1]).sum() / c.rounds
    length = float(rows) * math.sqrt(c.dim * c.noise_variance) / c.local_steps
    return _gradient_descent(c, noise=c.effective_step_size * c.gradient_bound * length)


def local_updates_bound(setting: TableSetting, *, released: bool = False) -> Bound:
    """cdc2021: Algorithm 1 without noise, regret of the local models z_i^{r,t}.

    ‖x^{r+1} - u‖² <= ‖x^r - u‖² - 2η̃⟨g^r, x^r - u⟩ + η̃²B_g², with g^r the mean of ∇f(z) over the
    round. For each of them ⟨∇f(z), x^r - u⟩ >= f(z) - f(u) - B_g·‖x^r - z‖, and z^{r,t} is at most
    tηB_g from x^r: (τ - 1)ηB_g²/2 on average. Judged at the released models, as our own bounds
    are, f(x^r) - f(z) <= B_g·‖x^r - z‖ costs the same once more (``released``).

    At η_g = 1 both parts make η̃B_g²·(1 - 1/(2τ)): the table's η̃B_g², with constant at most one.
    """
    c = setting.constants
    apart = (c.local_steps - 1) * c.step_size * c.gradient_bound**2 / 2
    return _gradient_descent(c, drift=2 * apart if released else apart)


def normalised_gradient_bound(setting: TableSetting) -> Bound:
    """gao2018: x^{r+1} = P(x^r - s·∇f^r/‖∇f^r‖) on a bounded domain, dynamic regret.

    ⟨∇f/‖∇f‖, x^r - x_r*⟩ <= (‖x^r - x_r*‖² - ‖x^{r+1} - x_r*‖²)/(2s) + s/2, and replacing x_r* by
    x_{r+1}* in the middle costs (‖a‖ + ‖b‖)·‖x_{r+1}* - x_r*‖/(2s) <= D·‖x_{r+1}* - x_r*‖/s, D the
    diameter. Summed, with weak pseudo-convexity (K)::

        initial K·D²/(2Rs),  drift K·s/2,  environment K·D·C̃_R/(Rs)

    Corrected: the table prints C̃_R/R. The step's reciprocal belongs there: the
    best step then gives sqrt(R + R·C̃_R), the form of gao2018's own theorem, and f^r(x) = |x - 2sr|
    exceeds what is printed.
    """
    if setting.diameter is None:
        raise InputError("diameter", None, "a length", "gao2018 needs a bounded domain")
    c, s, D, K = (setting.constants, setting.length_of_step, setting.diameter, setting.pseudo_convexity)
    return Bound(
        initial=K * D**2 / (2 * c.rounds * s),
        drift=K * s / 2,
        noise=0.0,
        environment=K * D * setting.path_length / (c.rounds * s),
        condition="any step > 0",
        holds=True,
    )


def _printed(c: Constants, *, step: float, drift: float, noise: float = 0.0, environment: float = 0.0) -> RegretTerms:
    initial = 1 / (c.rounds * step)
    return RegretTerms(initial=initial, drift=drift, noise=noise, environment=environment)


def _mini_batch_rate(setting: TableSetting) -> RegretTerms:
    c = setting.constants
    eta, price = c.effective_step_size, privacy_price(c, setting.epsilon, setting.delta)
    return _printed(c, step=eta, drift=eta * c.gradient_bound**2, noise=eta * price / c.local_steps**2)


def _correlated_mini_batch_rate(setting: TableSetting) -> RegretTerms:
    c = setting.constants
    eta, price = c.effective_step_size, privacy_price(c, setting.epsilon, setting.delta)
    log_steps = math.log(c.rounds * c.local_steps)
    noise = eta * c.gradient_bound * log_steps * math.sqrt(price) / c.local_steps
    return _printed(c, step=eta, drift=eta * c.gradient_bound**2, noise=noise)


def _local_updates_rate(setting: TableSetting) -> RegretTerms:
    c = setting.constants
    eta_tilde = c.effective_step_size
    return _printed(c, step=eta_tilde, drift=eta_tilde * c.gradient_bound**2)


def _normalised_gradient_rate(setting: TableSetting) -> RegretTerms:
    c, s = setting.constants, setting.length_of_step
    return _printed(c, step=s, drift=s, environment=setting.path_length / c.rounds)


_OURS = (
    "every client's gradient is L-Lipschitz and at most B_g along the run",
    "asm-noncvx with (α, μ), asm-regular with σ",
    "η̃ <= α/(8L)",
)
_CONVEX = "every client's loss is convex, with gradients of norm at most B_g"

COMPARED_METHODS: dict[str, ComparedMethod] = {
    "ours, correlated": ComparedMethod(  # thm-up
        noise="correlated",
        regret="dynamic",
        assumptions=_OURS,
        rate=lambda s: main_theorem_rate(s.constants, epsilon=s.epsilon, delta=s.delta),
        bound=lambda s: dynamic_regret_bound(s.constants),
    ),
    "ours, independent": ComparedMethod(  # lem-u-IID
        noise="independent",
        regret="dynamic",
        assumptions=_OURS,
        rate=lambda s: independent_noise_rate(s.constants, epsilon=s.epsilon, delta=s.delta),
        bound=lambda s: dynamic_regret_bound_independent(s.with_independent_noise),
    ),
    "liu2023": ComparedMethod(
        noise="independent",
        regret="static",
        assumptions=(
            _CONVEX,
            "learners are fully connected",
            "one noisy mean of τ gradients at x^r a round; the table's note says batches of one, "
            "which its τ² contradicts",
        ),
        rate=_mini_batch_rate,
        bound=mini_batch_bound,
    ),
    "denisov2022": ComparedMethod(
        noise="correlated",
        regret="static",
        assumptions=(_CONVEX, "one machine that sees the n·τ gradients of a round at x^r and the averaged noise"),
        rate=_correlated_mini_batch_rate,
        bound=correlated_mini_batch_bound,
    ),
    "cdc2021": ComparedMethod(
        noise=None,
        regret="static",
        assumptions=(_CONVEX, "regret of the local models, not of the released ones"),
        rate=_local_updates_rate,
        bound=local_updates_bound,
    ),
    "gao2018": ComparedMethod(
        noise=None,
        regret="dynamic",
        assumptions=(
            "weakly pseudo-convex losses with constant K, a domain of finite diameter",
            "normalised gradients: the step is a length",
        ),
        rate=_normalised_gradient_rate,
        bound=normalised_gradient_bound,
    ),
}
"""Every row of the table, ours first."""
