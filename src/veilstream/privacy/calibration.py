"""How much noise a budget needs, and the inverse question."""

from __future__ import annotations

import math

from veilstream.errors import InputError
from veilstream.mechanisms.checks import positive_number
from veilstream.mechanisms.factorization import Factorization
from veilstream.mechanisms.participation import Participation, as_participation
from veilstream.privacy import gaussian, zcdp
from veilstream.privacy.gaussian import GaussianCurve
from veilstream.privacy.guarantee import Accounting, Budget, Guarantee, Neighbours

__all__ = ["calibrate", "privacy_of"]

_ROUND_UP = 1.0 + 4e-15
"""Covers the last bits of root finding, so that rounding never makes noise smaller."""


def calibrate(
    budget: Budget,
    factorization: Factorization,
    clip_norm: float,
    neighbours: Neighbours | str = Neighbours.REPLACE_ONE,
    participation: Participation | tuple[int, int] | None = None,
    accounting: Accounting | str = Accounting.EXACT,
) -> tuple[float, Guarantee]:
    """Least noise that keeps the budget, and the guarantee that it gives.

    Returns V, the ``std`` for `Factorization.noise`, and the `Guarantee`. The sensitivity comes
    from the program that runs (lem-priv-analy with the computed max‖c‖, never a bound on it).
    """
    if not isinstance(budget, Budget):
        raise InputError("budget", budget, "a Budget", "Budget(epsilon=1.0, delta=1e-6)")
    clip = positive_number("clip_norm", clip_norm, "the norm gradients are clipped to; try 1")
    near, how = Neighbours.of(neighbours), Accounting.of(accounting)
    part = as_participation(participation)
    report = factorization.sensitivity_report(part)
    sensitivity = near.reach * clip * report.value
    mu_for = gaussian.mu_for if how is Accounting.EXACT else zcdp.mu_for
    std = sensitivity / mu_for(float(budget.epsilon), float(budget.delta)) * _ROUND_UP
    if not math.isfinite(std):
        raise InputError("clip_norm", clip_norm, "small enough for finite noise", "try 1")
    return std, Guarantee(
        epsilon=float(budget.epsilon),
        delta=float(budget.delta),
        mechanism=factorization.name,
        horizon=factorization.horizon,
        clip_norm=clip,
        neighbours=near,
        participation=part,
        accounting=how,
        noise_std=std,
        sensitivity=sensitivity,
        sensitivity_exact=report.exact,
    )


def privacy_of(
    std: float,
    factorization: Factorization,
    clip_norm: float,
    *,
    neighbours: Neighbours | str = Neighbours.REPLACE_ONE,
    participation: Participation | tuple[int, int] | None = None,
) -> GaussianCurve:
    """The inverse question: what noise of this ``std`` gives, as a whole privacy curve."""
    noise = positive_number("std", std, "take it from veilstream.calibrate")
    clip = positive_number("clip_norm", clip_norm, "the norm gradients are clipped to; try 1")
    reach = Neighbours.of(neighbours).reach
    return GaussianCurve(reach * clip * factorization.sensitivity(participation) / noise)
