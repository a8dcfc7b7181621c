"""How much noise a budget needs, and the inverse question."""

from __future__ import annotations

import math

from veilstream.errors import InputError
from veilstream.mechanisms.checks import positive_integer, positive_number
from veilstream.mechanisms.factorization import Factorization
from veilstream.mechanisms.participation import Participation, as_participation
from veilstream.privacy import gaussian, zcdp
from veilstream.privacy.clipping import checked_clip_norm
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
    clients_per_step: int = 1,
) -> tuple[float, Guarantee]:
    """Least noise that keeps the budget, and the guarantee that it gives.

    Where a step averages the clipped gradients of ``clients_per_step`` clients, one of them moves
    it by that much less.

    Returns V, the ``std`` for `Factorization.noise`, and the `Guarantee`. The sensitivity comes
    from the program that runs (lem-priv-analy with the computed max‖c‖, never a bound on it).
    """
    if not isinstance(budget, Budget):
        raise InputError("budget", budget, "a Budget", "Budget(epsilon=1.0, delta=1e-6)")
    if not isinstance(factorization, Factorization):
        raise InputError(
            "factorization", factorization, "a Factorization", "mechanisms.optimal(1000)"
        )
    clip = checked_clip_norm(clip_norm)
    together = positive_integer("clients_per_step", clients_per_step, "try 1")
    near, how = Neighbours.of(neighbours), Accounting.of(accounting)
    part = as_participation(participation)
    report = factorization.sensitivity_report(part)
    sensitivity = near.reach * (clip / together) * report.value
    mu_for = gaussian.mu_for if how is Accounting.EXACT else zcdp.mu_for
    std = sensitivity / mu_for(float(budget.epsilon), float(budget.delta)) * _ROUND_UP
    if not (math.isfinite(std) and std > 0.0):
        raise InputError("noise std", std, "finite and > 0", "another clip norm; try 1")
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
        clients_per_step=together,
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
    clip = checked_clip_norm(clip_norm)
    reach = Neighbours.of(neighbours).reach
    return GaussianCurve(reach * clip * factorization.sensitivity(participation) / noise)
