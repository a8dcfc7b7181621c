"""Regret: what the released models lost against the optima of `veilstream.research.optima`.

Dynamic regret (eq-dynm) compares the loss of each released model x^r with the best loss (f^r)* of
round r; static regret compares it with the loss of one model x* that is best for the whole stream.
Losses are prequential: losses[r] = f^r(x^r) is the mean over the n·τ clients of round r at the
model released *before* any of them was learned from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from veilstream.errors import InputError
from veilstream.mechanisms.checks import positive_integer

Array: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Regret:
    """Regret after each round: both (..., R); the last entry is that of the whole run."""

    cumulative: Array
    """Reg: summed over rounds and over the τ local steps of each."""
    per_step: Array
    """Reg/(Rτ): the mean over the rounds so far."""


@dataclass(frozen=True, kw_only=True)
class PathVariation:
    """C_R = Σ_r ‖x_r* - x*‖²; NaN with a reason where a minimiser does not exist."""

    value: float
    reason: str = ""

    def __float__(self) -> float:
        return self.value


def dynamic_regret(losses: ArrayLike, optimum_values: ArrayLike, *, local_steps: int = 1) -> Regret:
    """Dynamic regret (eq-dynm) of ``losses`` (..., R) against the (f^r)* of each round (R,).

    ``local_steps`` is τ: it scales the cumulative regret and leaves the regret per step alone.
    """
    return _regret(losses, "optimum_values", optimum_values, local_steps)


def static_regret(losses: ArrayLike, comparator_losses: ArrayLike, *, local_steps: int = 1) -> Regret:
    """Static regret of ``losses`` (..., R) against f^r(x*) (R,), the loss of one fixed model.

    If the offline optimum is not attained no x* exists; the comparator's mean loss is then its
    infimum, and f^r(x*) has no meaning round by round.
    """
    return _regret(losses, "comparator_losses", comparator_losses, local_steps)


def path_variation(round_minimisers: ArrayLike, offline_minimiser: ArrayLike) -> PathVariation:
    """C_R = Σ_r ‖x_r* - x*‖² (lem-u, coro) of minimisers (R, d) and (d,).

    NaN, with the reason, if any of them does not exist (a row of NaN, as `RoundOptimum` has it).
    """
    rounds = np.asarray(round_minimisers, dtype=np.float64)
    offline = np.asarray(offline_minimiser, dtype=np.float64)
    if rounds.ndim != 2 or not len(rounds):
        raise InputError("round_minimisers", f"shape {rounds.shape}", "(R, d)", "one row a round")
    if offline.shape != rounds.shape[1:]:
        rule = f"shape {rounds.shape[1:]}"
        raise InputError("offline_minimiser", f"shape {offline.shape}", rule, "the same d")
    for field, given in (("round_minimisers", rounds), ("offline_minimiser", offline)):
        if np.isinf(given).any():
            raise InputError(field, "infinite entries", "finite or NaN", "NaN marks no minimiser")
    missing = np.flatnonzero(np.isnan(rounds).any(axis=1))
    reasons = []
    if missing.size:
        reasons.append(f"{missing.size} of {len(rounds)} rounds (first: {missing[0]}) have no minimiser")
    if np.isnan(offline).any():
        reasons.append("the whole stream has no minimiser")
    if reasons:
        way_out = "C_R is undefined; use a ridge or a quadratic task to compare with the theory"
        return PathVariation(value=float("nan"), reason="; ".join([*reasons, way_out]))
    return PathVariation(value=float(((rounds - offline) ** 2).sum()))


def _regret(losses: ArrayLike, field: str, comparator: ArrayLike, local_steps: int) -> Regret:
    loss = np.asarray(losses, dtype=np.float64)
    best = np.asarray(comparator, dtype=np.float64)
    if loss.ndim < 1 or not loss.shape[-1]:
        raise InputError("losses", f"shape {loss.shape}", "(..., R) with R >= 1", "one per round")
    if best.shape != loss.shape[-1:]:
        raise InputError(field, f"shape {best.shape}", f"shape {loss.shape[-1:]}", "one per round")
    if np.isnan(loss).any():
        raise InputError("losses", "NaN", "numbers", "the run diverged; lower its step size")
    if not np.isfinite(best).all():
        raise InputError(field, "NaN or infinity", "finite numbers", "solve the rounds again")
    steps = positive_integer("local_steps", local_steps, "τ, the local steps of a round")
    total = np.cumsum(loss - best, axis=-1)
    rounds = np.arange(1, loss.shape[-1] + 1)
    return Regret(cumulative=steps * total, per_step=total / rounds)
