"""How far the noise that runs may be from the Gaussian it stands for, and what is charged for it.

`GridNoise` gives every cell, given all earlier draws, exactly the Gaussian's probability around
h + c. Were h + c the linear function B·z of earlier draws that C stands for, the release would be
the Gaussian mechanism itself, rounded. It is that function up to float64 rounding. The bound:

Fix two neighbouring streams of gradients (each may depend on everything released before) and one
sequence of releases. Let z and z' be the draws that give it under the one and the other, per
coordinate. The increments must make up for the gradients, so with ρ_s, ε_s the rounding errors of
the increment and of the next state in step s (functions of the draws before, and of how the fresh
draw was computed),

    feed·(z_s - z'_s) = -Δg_s - output·ΔS_s - Δρ_s
    ΔS_{s+1} = F·ΔS_s + entry·(z_s - z'_s) + Δε_s

in units of V. This is the inverse recurrence, which maps increments to draws: gradients come out as
C·ΔG, and an error at step j comes out as ‖c_j‖·|Δρ_j| or √(Δε_jᵀ·Q_{j+1}·Δε_j), with Q the
observability Gramian that also gives the column norms of C. By the triangle inequality

    ‖z - z'‖ <= μ + √d·Σ_j ( 2‖c_j‖·|ρ|  +  2·Σ_k √Q_kk·|ε_k| )  =:  μ + `mu`,

and a Gaussian whose mean moves, by amounts that depend on what was released before, by at most
‖z - z'‖ in all has the trade-off curve of μ + `mu` (Smith and Thakurta 2022; Dong, Roth and Su
2019). The bound lets every error of every step and coordinate conspire; really they are as good as
independent, and what they add is far below what can be computed.

Sizes of the errors, with u = 2^-53, draws and states within `REACH` standard deviations:

    |ρ| <= u·(k + 4)·Σ|output|·|S| + 6u·|feed|·REACH + |feed|·DRAW_ERROR + 8u/V   (fractions)
    |ε| <= u·(k + 2)·(Σ|F|·|S| + |entry|·REACH) + |entry|·DRAW_ERROR

Under a secret order δ is no Gaussian's, and half of `mu` is charged at either end instead: the same bound between
real and ideal draws of one world, given the record's step (`privacy.secret_order`).

A draw or state beyond `REACH`, or a draw whose 384 bits run out, has probability at most `delta`
over all steps and coordinates; it is charged to δ, in both worlds.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from veilstream.errors import InputError
from veilstream.mechanisms.analysis import rounding_gains
from veilstream.mechanisms.checks import positive_integer
from veilstream.mechanisms.factorization import Factorization
from veilstream.mechanisms.participation import Participation
from veilstream.mechanisms.program import DRAW_ERROR, ENDLESS, NoiseProgram
from veilstream.mechanisms.unbounded import StationaryFactorization
from veilstream.privacy.calibration import calibrate, reach_of, secret_noise
from veilstream.privacy.grid import Grid, grid_for
from veilstream.privacy.guarantee import Accounting, Budget, Guarantee, Neighbours, Order, SumTrust
from veilstream.privacy.sums import beside_graph, sum_tail
from veilstream.privacy.telemetry import Telemetry

REACH = 16.0
_UNIT_ROUNDOFF = 2.0**-53


@dataclass(frozen=True)
class Charge:
    """What float64 arithmetic may add, at worst, for a whole run."""

    mu: float
    delta: float


@dataclass(frozen=True)
class ReleaseNoise:
    """Noise for a release on the grid."""

    mechanism: Factorization
    """In blocks of one step."""
    std: float
    grid: Grid
    guarantee: Guarantee
    charge: Charge


def charge_for(program: NoiseProgram, dim: int, scale: float, column: float | None = None) -> Charge:
    """The charge for a program in blocks of one step, ``dim`` coordinates, V/grid = ``scale``; see `rounding_gains`."""
    gains = rounding_gains(program, column)
    k, u = program.state_size, _UNIT_ROUNDOFF
    rho = (
        u * (k + 4) * REACH * gains.output
        + gains.feed * (6.0 * u * REACH + DRAW_ERROR)
        + 8.0 * u / scale  # twice, since charging may make the grid one step coarser
    )
    epsilon = u * (k + 2) * REACH * (gains.transition + gains.entry) + gains.entry * DRAW_ERROR
    a_step = gains.column * rho + float((gains.observed * epsilon).sum())
    steps = float(dim) * program.horizon
    return Charge(
        mu=2.0 * math.sqrt(dim) * program.horizon * a_step,
        delta=2.0 * steps * ((k + 1) * math.exp(-0.5 * REACH**2) + 2.0**-300),
    )


def _affordable(stepwise: StationaryFactorization, asked: Guarantee, dim: int) -> int:
    """Steps that noise without an end may have before its arithmetic costs a hundredth of μ.

    A power of two, so that all sides find the same, and at most 2^30: 34 years of a step a second.
    """
    scale = asked.noise_std / grid_for(asked.clip_norm, asked.noise_std, asked.clients_per_step).step
    a_step = charge_for(stepwise.limited(1).program, dim, scale).mu
    steps = 0.01 * (asked.sensitivity / asked.noise_std) / a_step
    if steps < 2.0**20:
        raise InputError(
            "dim",
            dim,
            "few enough for float64 to keep noise without an end for 2^20 steps",
            "fewer parameters, a larger epsilon, or a plan with an end",
        )
    return 1 << min(30, int(math.log2(steps)))


def calibrate_release(
    budget: Budget,
    mechanism: Factorization,
    clip_norm: float,
    dim: int,
    *,
    neighbours: Neighbours | str = Neighbours.REPLACE_ONE,
    participation: Participation | tuple[int, int] | None = None,
    accounting: Accounting | str = Accounting.EXACT,
    clients_per_step: int = 1,
    telemetry: Telemetry | None = None,
    trust: SumTrust | None = None,
    order: Order | str = Order.KNOWN,
    window: int | None = None,
) -> ReleaseNoise:
    """Least noise that keeps the budget for what is really sent, arithmetic included (see `calibrate`).

    Raises:
        InputError: for a δ that draws of finite length cannot keep, or a run so long and wide that
            float64 cannot keep the promise.

    """
    coordinates = positive_integer("dim", dim, "the number of model parameters")
    coordinates += 0 if telemetry is None else len(telemetry.metrics)
    stepwise = mechanism.with_block_length(1)
    options = {
        "neighbours": neighbours,
        "participation": participation,
        "accounting": accounting,
        "clients_per_step": clients_per_step,
        "telemetry": telemetry,
        "trust": trust,
        "order": order,
        "window": window,
    }
    if isinstance(stepwise, StationaryFactorization) and stepwise.horizon == ENDLESS:
        _, asked = calibrate(budget, stepwise, clip_norm, **options)  # type: ignore[arg-type]
        stepwise = stepwise.limited(_affordable(stepwise, asked, coordinates))
    std, asked = calibrate(budget, stepwise, clip_norm, **options)  # type: ignore[arg-type]
    scale = std / grid_for(clip_norm, std, clients_per_step).step
    secretly = Order.of(order) is Order.SECRET
    column = None if stepwise.program.endless else math.sqrt(float(stepwise.column_norms_squared().max()))
    charge = charge_for(stepwise.program, coordinates, scale, column)
    if trust is not None:
        charge = _charge_of_sums(charge, trust, stepwise, coordinates, scale, column)
    if secretly:
        return _under_secret_order(beside_graph(budget, trust), stepwise, asked, charge)
    tail = charge.delta * (1.0 + math.exp(min(asked.epsilon, 700.0)))
    if not tail < 0.5 * asked.delta:
        raise InputError(
            "privacy.delta",
            asked.delta,
            f"more than {2.0 * tail:.1g}: over {stepwise.horizon} steps of {coordinates} "
            "coordinates, draws of finite length can keep no smaller one",
            "a larger delta, or a smaller epsilon",
        )
    inner = Budget(asked.epsilon, asked.delta - tail)
    std, gaussian = calibrate(inner, stepwise, clip_norm, **options)  # type: ignore[arg-type]
    mu = gaussian.sensitivity / gaussian.hiding_std
    if not charge.mu < 0.1 * mu:
        raise InputError(
            "dim",
            coordinates,
            f"few enough for float64: rounding may add {charge.mu:.2g} to mu = {mu:.2g}",
            "fewer steps or parameters, or a larger epsilon",
        )
    std *= mu / (mu - charge.mu) * (1.0 + 4e-16)
    promised = dataclasses.replace(
        gaussian, delta=asked.delta, noise_std=std, arithmetic_mu=charge.mu, arithmetic_delta=charge.delta
    )
    return ReleaseNoise(stepwise, std, grid_for(clip_norm, std, clients_per_step), promised, charge)


def _under_secret_order(budget: Budget, stepwise: Factorization, asked: Guarantee, charge: Charge) -> ReleaseNoise:
    """The chain of three hops of `privacy.secret_order`: at either end half the charge, in between the ideal mixture.

    ``charge`` was worked out at ``asked``, which is the noise unless arithmetic needs more of the budget set aside.
    """

    def of(std: float) -> tuple[float, float]:
        return 0.5 * charge.mu, charge.delta

    reach = reach_of(
        stepwise, asked.clip_norm, asked.neighbours, asked.participation, asked.clients_per_step, asked.telemetry
    )
    assert asked.secret is not None
    std, secret = secret_noise(budget, stepwise, reach, asked.accounting, asked.trust, asked.secret.window, of)
    promised = dataclasses.replace(
        asked, noise_std=std, secret=secret, arithmetic_mu=charge.mu, arithmetic_delta=charge.delta
    )
    return ReleaseNoise(stepwise, std, grid_for(asked.clip_norm, std, asked.clients_per_step), promised, charge)


def _charge_of_sums(
    charge: Charge, trust: SumTrust, stepwise: Factorization, dim: int, scale: float, column: float | None
) -> Charge:
    """The charge where sums of up to all learners are seen; see `privacy.sums`."""
    if column is None:
        raise InputError(
            "learning.unbounded",
            True,
            "a run with an end where only sums are seen",
            'unbounded = false, or trust = "each"',
        )
    return Charge(
        mu=math.sqrt(trust.learners) * charge.mu,
        delta=trust.learners * charge.delta + sum_tail(trust, stepwise.horizon, dim, scale, column),
    )
