"""Regret without a bound: for quadratic losses the expectation is a recursion that can be evaluated.

Every client of round r has the loss f(x) = ½(x - x_r*)ᵀH(x - x_r*) with the same diagonal H, and
nothing is clipped. Then Algorithm 1 is linear. With q = 1 - ηh for a curvature h and the increments
d_s = b_s - b_{s-1} of B's rows, in every coordinate::

    x^{r+1} - x_r* = ρ·(x^r - x_r*) - η_g·η·Σ_t q^{τ-1-t}·d_{rτ+t}·ξ̄,    ρ = 1 - η_g·(1 - q^τ)

so x^r is a mean plus a known vector times ξ̄, the learners' averaged noise. `exact_regret` adds up
E f^r(x^r) - f^r(x_r*). `repaired_bounds` starts from lem-u's right-hand side and undoes the steps of
its proof one after the other, each in its exact expectation: what the bound loses where.

Guarantees: every number of `repaired_bounds` is an upper bound on `exact_regret` wherever
η̃ <= α/(8L), with α = 1, μ the smallest and L the largest curvature, σ = 0, and B_g the largest
root mean square of a gradient that a learner takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from veilstream.errors import InputError
from veilstream.mechanisms.checks import non_negative, positive_integer, positive_number
from veilstream.research.theory.bounds import dynamic_regret_bound
from veilstream.research.theory.constants import STEP_SLACK, Constants

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Quadratics:
    """Quadratic losses with one diagonal Hessian, and the run and noise of Algorithm 1 on them."""

    curvatures: Array  # (d,): the diagonal of H
    start: Array  # (d,): x⁰
    optima: Array  # (R, d): x_r*, where all clients of round r have their optimum
    learners: int  # n
    local_steps: int  # τ
    step_size: float  # η: of the local steps
    server_step_size: float  # η_g
    noise_std: float  # V_i: what one learner adds
    increments: Array  # (R·τ, any number): rows b_s - b_{s-1}, as `Factorization.noising_matrix` gives them

    def __post_init__(self) -> None:
        for field in ("curvatures", "start", "optima", "increments"):
            object.__setattr__(self, field, _numbers(field, getattr(self, field)))
        object.__setattr__(self, "learners", positive_integer("learners", self.learners, "n, try 10"))
        object.__setattr__(self, "local_steps", positive_integer("local_steps", self.local_steps, "τ, try 4"))
        positive_number("step_size", self.step_size, "η of a local step")
        positive_number("server_step_size", self.server_step_size, "η_g, try 1")
        non_negative("noise_std", self.noise_std, "take it from veilstream.calibrate; 0 for no noise")
        if not self.curvatures.min() > 0:
            raise InputError("curvatures", float(self.curvatures.min()), "> 0", "a quadratic needs a single optimum")
        d, R = self.curvatures.size, self.optima.shape[0]
        shapes = {"start": (d,), "optima": (R, d), "increments": (R * self.local_steps, self.increments.shape[-1])}
        for field, shape in shapes.items():
            found = getattr(self, field).shape
            if found != shape:
                raise InputError(field, f"array of shape {found}", f"shape {shape}", "R rounds of τ steps, d numbers")

    @property
    def rounds(self) -> int:
        """R."""
        return int(self.optima.shape[0])

    @property
    def effective_step_size(self) -> float:
        """η̃ = η·η_g·τ."""
        return self.step_size * self.server_step_size * self.local_steps

    @property
    def noise_variance(self) -> float:
        """V² = V_i²/n."""
        return self.noise_std**2 / self.learners

    def constants(self) -> Constants:
        """What lem-u asks for, as this problem has it."""
        best = self.optima.mean(axis=0)
        return Constants(
            smoothness=float(self.curvatures.max()),
            regularity=0.0,
            alpha=1.0,
            mu=float(self.curvatures.min()),
            gradient_bound=max(_moments(self).largest_gradient, 1e-300),
            dim=self.curvatures.size,
            learners=self.learners,
            local_steps=self.local_steps,
            rounds=self.rounds,
            step_size=self.step_size,
            server_step_size=self.server_step_size,
            path_variation=float(((self.optima - best) ** 2).sum()),
            initial_distance_squared=float(((self.start - best) ** 2).sum()),
            noise_std=self.noise_std,
            row_norms_squared=(np.cumsum(self.increments, axis=0) ** 2).sum(axis=1),
        )


@dataclass(frozen=True, kw_only=True)
class ExactRegret:
    """E Reg/(R·τ) of quadratic losses, by what causes it."""

    path: float  # of the run without noise: start, movement of the optima, and both together
    noise: float  # what noise adds

    @property
    def total(self) -> float:
        """Their sum."""
        return self.path + self.noise


@dataclass(frozen=True)
class Repaired:
    """lem-u's bound with the steps of the proof undone up to this one."""

    step: str
    bound: float


def exact_regret(problem: Quadratics) -> ExactRegret:
    """The expected dynamic regret for each step, R·τ of them. O(T²) for T = R·τ.

    Args:
        problem: the losses, the run and its noise.

    Returns:
        The regret, not a bound.

    """
    found = _moments(problem)
    return ExactRegret(path=found.path, noise=found.noise)


def repaired_bounds(problem: Quadratics) -> list[Repaired]:
    """lem-u's bound, then the same with one step of the proof after the other undone.

    Args:
        problem: the losses, the run and its noise, with η̃ <= 1/(8L).

    Returns:
        Upper bounds on the exact regret, the first the printed one; each undoes what the ones before it do, too.

    """
    c, found = problem.constants(), _moments(problem)
    te, R, L, mu = problem.effective_step_size, problem.rounds, c.smoothness, c.mu
    if te > STEP_SLACK / (8 * L):
        raise InputError("step_size", problem.step_size, f"η·η_g·τ <= 1/(8L) = {1 / (8 * L):.6g}", "a smaller η")
    printed = dynamic_regret_bound(c)
    theta = 1 / (12 * L)
    widest = (1 / (4 * L) - te) / 1.5  # eqtheta
    scale = te**2 / problem.local_steps**2 * c.dim * problem.noise_variance
    ends = c.round_end_rows_squared
    released = scale * float(ends[:-1].sum()) / R  # the noise of x^r ends with round r - 1
    environment = c.path_variation / R
    start, end = c.initial_distance_squared / (R * te), found.last_distance / (R * te)

    def bound(theta: float, move: float, left: float = 0.0, factor: float = 1.0) -> float:
        """eq-26 with (VI) = move, after dividing by what the regret keeps of its factor."""
        spread = 2 * (te + theta + 1 / mu) * move
        return (start - left + spread + 2 / theta * released + (1 / theta + mu) * environment) / factor

    def kept(theta: float) -> float:
        return 2 - 4 * L * (te + 1.5 * theta)

    printed_move = (printed.drift + _local_noise(c)) / (2 * (te + theta + 1 / mu))
    return [
        Repaired("lem-u as printed", printed.total),
        Repaired("the last round's noise left out", bound(theta, printed_move)),
        Repaired("local models as far as they move (eq-18)", bound(theta, found.moved_squared * L**2)),
        Repaired("their gradients averaged before squaring (VI)", bound(theta, found.mean_move)),
        Repaired("the last distance kept (eq-26)", bound(theta, found.mean_move, end)),
        Repaired("the regret's whole factor kept (eq-a17)", bound(theta, found.mean_move, end, kept(theta))),
        Repaired(
            "the best θ (eqtheta)", _least(lambda t: bound(t, found.mean_move, end, kept(t)), widest * (1 - 1e-9))
        ),
    ]


def _local_noise(c: Constants) -> float:
    """The part of lem-u's noise term that is about local models."""
    weight = (c.effective_step_size + 1 / (12 * c.smoothness) + 1 / c.mu) / c.alpha
    return weight * 2 * (c.smoothness * c.step_size) ** 2 * 8 * c.max_row_norm_squared * c.dim * c.noise_std**2


def _least(value: Callable[[float], float], widest: float) -> float:
    """The least value over θ in (0, widest]: of convex numerator over a falling factor, by a fine grid."""
    return min(float(value(widest * share)) for share in np.geomspace(1e-4, 1.0, 2001))


@dataclass(frozen=True)
class _Moments:
    path: float
    noise: float
    moved_squared: float  # mean of E‖z_i^{r,t} - x^r‖² over rounds, learners and steps
    mean_move: float  # mean over rounds of (VI): E‖mean of H(z_i^{r,t} - x^r)‖²
    largest_gradient: float  # root of the largest E‖∇f(z_i^{r,t})‖²
    last_distance: float  # E‖x_ξ^R - x*‖²


@dataclass(frozen=True)
class _Round:
    """Squares of one round, a number for each coordinate, in expectation."""

    path: Array
    noise: Array
    moved: Array
    mean_move: Array
    gradients: Array  # (τ, d)


def _moments(p: Quadratics) -> _Moments:
    rounds = list(_each_round(p))
    last = rounds.pop()
    R, h = p.rounds, p.curvatures
    gradients = np.array([r.gradients for r in rounds]).sum(axis=2)
    return _Moments(
        path=sum(float(h @ r.path) for r in rounds) / (2 * R),
        noise=sum(float(h @ r.noise) for r in rounds) / (2 * R),
        moved_squared=sum(float(r.moved.sum()) for r in rounds) / R,
        mean_move=sum(float(r.mean_move.sum()) for r in rounds) / R,
        largest_gradient=float(np.sqrt(gradients.max())),
        last_distance=float((last.path + last.noise).sum()),
    )


def _each_round(p: Quadratics) -> Iterator[_Round]:
    """Each round's expectations, and at last those of x_ξ^R around the overall optimum in `path` and `noise`."""
    tau, eta, eta_g, V2 = p.local_steps, p.step_size, p.server_step_size, p.noise_variance
    levels, of = np.unique(p.curvatures, return_inverse=True)  # noise depends on a coordinate's curvature alone
    q = 1 - eta * levels
    rho = 1 - eta_g * (1 - q**tau)
    width = p.increments.shape[1]
    mean = p.start.astype(np.float64)
    drawn = np.zeros((levels.size, width))  # x^r is its mean plus drawn·ξ̄
    zero = np.zeros_like(p.curvatures)
    for r in range(p.rounds):
        target = p.optima[r]
        away = mean - target
        steps = p.increments[r * tau : (r + 1) * tau]
        own = np.zeros((levels.size, width))  # z_i^{r,t} has -η·own·ξ_i besides its share of x^r
        total, moved, gradients = np.zeros((levels.size, width)), zero.copy(), []
        for t in range(tau):
            shrunk = (q**t)[:, None]
            moved += _spread((q**t - 1)[:, None] * drawn, -eta * own, p)[of] + ((q**t - 1)[of] * away) ** 2
            total += (shrunk - 1) * drawn - eta * own
            gradient = _spread(shrunk * drawn, -eta * own, p)[of] + ((q**t)[of] * away) ** 2
            gradients.append(p.curvatures**2 * gradient)
            own = q[:, None] * own + steps[t]
        mean_shrink = (np.array([q**t - 1 for t in range(tau)]).mean(axis=0))[of]
        mean_move = (mean_shrink * away) ** 2 + V2 * ((total / tau) ** 2).sum(axis=1)[of]
        yield _Round(
            path=away**2,
            noise=V2 * (drawn**2).sum(axis=1)[of],
            moved=moved / tau,
            mean_move=p.curvatures**2 * mean_move,
            gradients=np.array(gradients),
        )
        mean = target + rho[of] * away
        drawn = rho[:, None] * drawn - eta_g * eta * own
    virtual = drawn + eta_g * eta * p.increments.sum(axis=0)  # x_ξ^R: the last row of B added back
    path = (mean - p.optima.mean(axis=0)) ** 2
    noise = V2 * (virtual**2).sum(axis=1)[of]
    yield _Round(path=path, noise=noise, moved=zero, mean_move=zero, gradients=np.zeros((tau, zero.size)))


def _spread(shared: Array, own: Array, p: Quadratics) -> Array:
    """Variance of shared·ξ̄ + own·ξ_i, for each curvature: ξ̄ is the mean of the learners' ξ_i."""
    V2 = p.noise_variance
    both = 2 * V2 * (shared * own).sum(axis=1)
    variance: Array = V2 * (shared**2).sum(axis=1) + both + p.noise_std**2 * (own**2).sum(axis=1)
    return variance


def _numbers(field: str, values: ArrayLike) -> Array:
    try:
        found = np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(field, values, "an array of numbers", "see Quadratics") from None
    if not np.isfinite(found).all():
        raise InputError(field, "a number that is not finite", "finite numbers", "see Quadratics")
    found.setflags(write=False)
    return found
