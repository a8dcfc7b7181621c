"""Regret of the released models against the optima of `veilstream.research.optima`.

Losses are prequential: losses[r] = f^r(x^r) is the mean over the n·τ clients of round r at the
model released *before* any of them was learned from.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from veilstream.errors import InputError

Floats = NDArray[np.float64]


def average_regret(losses: ArrayLike, comparator_losses: ArrayLike) -> Floats:
    """Reg/(Rτ) after each round, (..., R): the mean difference over the rounds so far.

    Dynamic regret (eq-dynm) compares with the best loss (f^r)* of each round, static regret with the
    losses f^r(x*) of one model that is best for the whole stream, (R,).
    """
    loss, best = np.asarray(losses, np.float64), np.asarray(comparator_losses, np.float64)
    if best.shape != loss.shape[-1:] or not best.size:
        raise InputError("comparator_losses", f"shape {best.shape}", f"shape {loss.shape[-1:]}", "one per round")
    if np.isnan(loss).any() or not np.isfinite(best).all():
        raise InputError("losses", "NaN", "numbers", "the run diverged; lower its step size")
    regret: Floats = np.cumsum(loss - best, axis=-1) / np.arange(1, loss.shape[-1] + 1)
    return regret


def path_variation(round_minimisers: Floats, offline_minimiser: Floats) -> tuple[float, str]:
    """C_R = Σ_r ‖x_r* - x*‖² (lem-u, coro) of minimisers (R, d) and (d,); NaN, with the reason, where one is NaN."""
    missing = np.flatnonzero(np.isnan(round_minimisers).any(axis=1))
    reasons = []
    if missing.size:
        reasons.append(f"{missing.size} of {len(round_minimisers)} rounds (first: {missing[0]}) have no minimiser")
    if np.isnan(offline_minimiser).any():
        reasons.append("the whole stream has no minimiser")
    if reasons:
        way_out = "C_R is undefined; use a ridge or a quadratic task to compare with the theory"
        return math.nan, "; ".join([*reasons, way_out])
    return float(((round_minimisers - offline_minimiser) ** 2).sum()), ""
