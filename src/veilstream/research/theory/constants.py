"""What the bounds depend on: the losses, the run and its noise, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.mechanisms.checks import non_negative, positive_integer, positive_number

STEP_SLACK = 1.0 + 1e-12  # Forgives the last bits when a step size sits exactly on its limit


@dataclass(frozen=True, kw_only=True, eq=False)
class Constants:
    """What the bounds depend on: the losses, the run and its noise."""

    smoothness: float  # L: Lipschitz constant of every client's gradient (asm-smooth)
    regularity: float
    """σ: how far the projection onto the optima moves with the point, squared (asm-regular);
    0 for a single optimum, 1 for a convex set of them."""
    alpha: float  # α: how much of the loss a step towards the nearest optimum gains (asm-noncvx)
    mu: float  # μ: the quadratic part of the same assumption; the modulus when losses are strongly convex
    gradient_bound: float  # B_g: largest norm of a client's gradient (asm-Bg)
    dim: int  # d: number of parameters
    learners: int  # n
    local_steps: int  # τ: steps in a round
    rounds: int  # R
    step_size: float  # η: of the local steps
    server_step_size: float  # η_g
    path_variation: float  # C_R: squared distances from each round's optimum to the overall one, summed over rounds
    initial_distance_squared: float  # E‖x⁰ - x*‖² to the nearest overall optimum
    noise_std: float = 0.0  # V_i: what one learner adds; the V of the bounds is V_i/√n
    row_norms_squared: NDArray[np.float64] | None = None
    """‖b_s‖² of the R·τ rows of B, as `Factorization.row_norms_squared` computes them.
    None when there is no noise, or when it is independent."""

    def __post_init__(self) -> None:
        _set(self, "smoothness", positive_number, "L, the Lipschitz constant of the gradients")
        _set(self, "regularity", non_negative, "σ; 0 for a single optimum, 1 for a convex set")
        _set(self, "alpha", positive_number, "1 for quasi strongly convex losses")
        _set(self, "mu", positive_number, "assumption_constants derives it from other conditions")
        _set(self, "gradient_bound", positive_number, "B_g, the norm that gradients stay below")
        _set(self, "dim", positive_integer, "the number of model parameters")
        _set(self, "learners", positive_integer, "n, try 10")
        _set(self, "local_steps", positive_integer, "τ, try 4")
        _set(self, "rounds", positive_integer, "R, try 1000")
        _set(self, "step_size", positive_number, "η; advised_step_size gives η·η_g·τ")
        _set(self, "server_step_size", positive_number, "η_g, try 1")
        _set(self, "path_variation", non_negative, "C_R; 0 when the optimum does not move")
        _set(self, "initial_distance_squared", non_negative, "the squared distance, not its root")
        _set(self, "noise_std", non_negative, "take it from veilstream.calibrate; 0 for no noise")
        if self.alpha * self.mu > self.smoothness * STEP_SLACK:
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
        return float(self.round_end_rows_squared.sum())

    @property
    def round_end_rows_squared(self) -> NDArray[np.float64]:
        """‖b^{r,τ-1}‖² for every round r; zeros without noise."""
        return self._noise_rows()[self.local_steps - 1 :: self.local_steps]

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


def _set(c: Constants, field: str, check: Callable[[str, object, str], float], way_out: str) -> None:
    object.__setattr__(c, field, check(field, getattr(c, field), way_out))


def _row_norms(values: object, steps: int) -> NDArray[np.float64]:
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
