"""How much noise a budget needs, and the inverse question."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from veilstream.errors import InputError
from veilstream.mechanisms.checks import positive_integer, positive_number
from veilstream.mechanisms.factorization import Factorization
from veilstream.mechanisms.participation import Participation, as_participation
from veilstream.mechanisms.program import ENDLESS
from veilstream.privacy import gaussian, zcdp
from veilstream.privacy.clipping import checked_clip_norm
from veilstream.privacy.gaussian import GaussianCurve
from veilstream.privacy.guarantee import Accounting, Budget, Guarantee, Neighbours, Order, SecretSteps, SumTrust
from veilstream.privacy.secret_order import Charge, secret_order_epsilon, secret_order_noise
from veilstream.privacy.sums import beside_graph
from veilstream.privacy.telemetry import Telemetry
from veilstream.privacy.zcdp import ZcdpCurve

_ROUND_UP = 1.0 + 4e-15
"""Covers the last bits of root finding, so that rounding never makes noise smaller."""


def calibrate(
    budget: Budget,
    factorization: Factorization,
    clip_norm: float,
    *,
    neighbours: Neighbours | str = Neighbours.REPLACE_ONE,
    participation: Participation | tuple[int, int] | None = None,
    accounting: Accounting | str = Accounting.EXACT,
    clients_per_step: int = 1,
    telemetry: Telemetry | None = None,
    trust: SumTrust | None = None,
    order: Order | str = Order.KNOWN,
    window: int | None = None,
) -> tuple[float, Guarantee]:
    """Least noise that keeps the budget, and the guarantee that it gives.

    The sensitivity comes from the program that runs (lem-priv-analy with the computed max‖c‖,
    never a bound on it).

    Args:
        budget: the promise for the whole horizon.
        factorization: the mechanism; calibrate on the object whose noise you use.
        clip_norm: B_g, the norm that every client's gradient is clipped to.
        neighbours: "replace-one" or "zero-out".
        participation: how often one client may take part, and how far apart; None for once.
        accounting: "exact", or "zcdp" as in the paper (valid, and more noise than needed).
        clients_per_step: where a step averages the clipped gradients of several clients, one of
            them moves it by that much less.
        telemetry: what each client contributes beside its gradient; the sensitivity is that of the
            whole vector.
        trust: whom the promise counts on where only sums over learners are seen: the noise of all
            honest learners together then keeps the budget, and each adds 1/√honest of it.
        order: "secret" where every record chooses its step unseen, which needs less noise
            (`privacy.secret_order`); for people who take part once.
        window: beside a secret order, that records choose among the steps of the next window of so
            many; None for all steps of an epoch.

    Returns:
        V, the ``std`` for `Factorization.noise`, and the `Guarantee`.

    Raises:
        InputError: for a value that the rules exclude.

    """
    if not isinstance(budget, Budget):
        raise InputError("budget", budget, "a Budget", "Budget(epsilon=1.0, delta=1e-6)")
    how, asked, budget = Accounting.of(accounting), budget, beside_graph(budget, trust)
    reach = reach_of(factorization, clip_norm, neighbours, participation, clients_per_step, telemetry)
    secret: SecretSteps | None = None
    if Order.of(order) is Order.SECRET:
        std, secret = secret_noise(budget, factorization, reach, how, trust, window)
    else:
        mu_for = gaussian.mu_for if how is Accounting.EXACT else zcdp.mu_for
        together = reach.sensitivity / mu_for(float(budget.epsilon), float(budget.delta)) * _ROUND_UP
        std = together if trust is None else together / trust.gain * _ROUND_UP
    if not (math.isfinite(std) and std > 0.0):
        raise InputError("noise std", std, "finite and > 0", "another clip norm; try 1")
    return std, Guarantee(
        epsilon=float(asked.epsilon),
        delta=float(asked.delta),
        mechanism=factorization.name,
        horizon=factorization.horizon,
        clip_norm=reach.clip_norm,
        neighbours=reach.neighbours,
        participation=reach.participation,
        accounting=how,
        noise_std=std,
        sensitivity=reach.sensitivity,
        sensitivity_exact=reach.exact,
        clients_per_step=reach.clients_per_step,
        telemetry=telemetry,
        trust=trust,
        secret=secret,
    )


def secret_noise(
    budget: Budget,
    factorization: Factorization,
    reach: Reach,
    accounting: Accounting,
    trust: SumTrust | None,
    window: int | None,
    charge: Charge = lambda _: (0.0, 0.0),
) -> tuple[float, SecretSteps]:
    """V of one learner under a secret order, and how it was worked out; ``charge`` is given the std that hides.

    Raises:
        InputError: for what a secret order does not cover.

    """
    _check_secret(factorization, reach, accounting)
    near = reach.neighbours
    found = secret_order_noise(budget, factorization, near, window, charge)
    std = found.std * reach.unit * _ROUND_UP
    if trust is None:
        return std, found.steps
    std = std / trust.gain * _ROUND_UP
    floor = secret_order_epsilon(found.std / trust.gain, budget.delta, factorization, near, window, charge)
    return std, replace(found.steps, epsilon_floor=floor)


def _check_secret(factorization: Factorization, reach: Reach, accounting: Accounting) -> None:
    if accounting is not Accounting.EXACT:
        raise InputError(
            "privacy.accounting", accounting.value, "exact beside a secret order", 'remove it, or order = "known"'
        )
    if reach.participation.times != 1:
        raise InputError(
            "privacy.participations",
            reach.participation.times,
            "1 beside a secret order: several visits of one person have no price there",
            'participations = 1, or order = "known"',
        )
    if factorization.horizon >= ENDLESS:
        raise InputError(
            "learning.unbounded",
            True,
            "a run with an end beside a secret order: a record chooses among all steps of an epoch",
            'unbounded = false, or order = "known"',
        )


def privacy_of(
    std: float,
    factorization: Factorization,
    clip_norm: float,
    *,
    neighbours: Neighbours | str = Neighbours.REPLACE_ONE,
    participation: Participation | tuple[int, int] | None = None,
    accounting: Accounting | str = Accounting.EXACT,
    clients_per_step: int = 1,
    telemetry: Telemetry | None = None,
) -> GaussianCurve | ZcdpCurve:
    """The inverse question: what noise of this ``std`` gives, as a whole privacy curve.

    Args:
        std: V, as `calibrate` returns it.
        factorization: as for `calibrate`.
        clip_norm: as for `calibrate`.
        neighbours: as for `calibrate`.
        participation: as for `calibrate`.
        accounting: "exact" for what the noise really gives, "zcdp" for what the paper's formula
            says that it gives, which is never less.
        clients_per_step: as for `calibrate`.
        telemetry: as for `calibrate`.

    Returns:
        A curve with ``epsilon(delta)`` and ``delta(epsilon)``.

    Raises:
        InputError: for a value that the rules exclude.

    """
    noise = positive_number("std", std, "take it from veilstream.calibrate")
    how = Accounting.of(accounting)
    reach = reach_of(factorization, clip_norm, neighbours, participation, clients_per_step, telemetry)
    curve = GaussianCurve if how is Accounting.EXACT else ZcdpCurve
    return curve(reach.sensitivity / noise)


@dataclass(frozen=True)
class Reach:
    """How far one client can move the mechanism, from options that have been checked."""

    unit: float
    """What one record can add to a step: its largest norm over the clients of a step."""
    clip_norm: float
    neighbours: Neighbours
    participation: Participation
    clients_per_step: int
    sensitivity: float
    exact: bool


def reach_of(
    factorization: Factorization,
    clip_norm: float,
    neighbours: Neighbours | str,
    participation: Participation | tuple[int, int] | None,
    clients_per_step: int,
    telemetry: Telemetry | None,
) -> Reach:
    """Check the options, and work out the sensitivity."""
    if not isinstance(factorization, Factorization):
        raise InputError("factorization", factorization, "a Factorization", "mechanisms.optimal(1000)")
    clip = checked_clip_norm(clip_norm)
    together = positive_integer("clients_per_step", clients_per_step, "try 1")
    near, part = Neighbours.of(neighbours), as_participation(participation)
    report = factorization.sensitivity_report(part)
    norm = clip if telemetry is None else telemetry.release_norm(clip)
    sensitivity = near.reach * (norm / together) * report.value
    return Reach(norm / together, clip, near, part, together, sensitivity, report.exact)
