"""Mechanisms side by side at one budget: the numbers behind `veilstream plan`.

They are ranked by the noise in what is published (`Setting.workload`): the models at round ends, or
what averaging and forgetting make of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.mechanisms import (
    MECHANISMS,
    ONCE,
    Factorization,
    Participation,
    StationaryFactorization,
    Workload,
    build,
    doubling,
    stationary,
)
from veilstream.mechanisms.buffered import BUFFERED_LIMIT
from veilstream.mechanisms.checks import positive_integer, positive_number
from veilstream.mechanisms.normals import TILE
from veilstream.mechanisms.registry import build_for
from veilstream.mechanisms.unbounded import without_end
from veilstream.plans.prepare import CLOSE
from veilstream.privacy import Accounting, Budget, Guarantee, Neighbours, calibrate
from veilstream.privacy.telemetry import Telemetry
from veilstream.wording import counted

LONG_HORIZON = 20_000
"""Above this, mechanisms that solve for every step are left out unless asked for by name."""
_SOLVED = ("optimal", "tree_full")
_LONGEST_LOOKED_AT = 1_000_000
_SMALLEST = 1e-15
_LARGEST_STD = 1e140


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is planned: one run of Algorithm 1."""

    budget: Budget
    rounds: int
    local_steps: int
    clip_norm: float
    clients_per_step: int = 1
    """How many a step averages."""
    learners: int = 1
    dim: int = 1
    neighbours: Neighbours = Neighbours.REPLACE_ONE
    participation: Participation = ONCE
    accounting: Accounting = Accounting.EXACT
    telemetry: Telemetry | None = None
    """What clients contribute beside their gradients: its price is in every row's noise."""
    workload: Workload | None = None
    """What is published, if not the latest model at every round's end."""
    step_size: float | None = None
    """η·η_g, to state noise in the model itself."""
    people: int | None = None
    """How many people a learner has."""
    unbounded: bool = False
    """Whether nobody knows when it ends: only noise that goes on is then compared, and `horizon`
    is where it is looked at."""

    def __post_init__(self) -> None:
        positive_integer("rounds", self.rounds, "R, try 1000")
        positive_integer("local_steps", self.local_steps, "τ, try 4")
        positive_integer("clients_per_step", self.clients_per_step, "try 1")
        positive_integer("learners", self.learners, "n, try 20")
        positive_integer("dim", self.dim, "d, the number of model parameters")
        _size("clip_norm", self.clip_norm, "of a gradient; try 1")
        if self.step_size is not None:
            _size("step_size", self.step_size, "η·η_g; try 0.1")
        if self.people is not None:
            positive_integer("people", self.people, "how many a learner has")

    @property
    def horizon(self) -> int:
        """T = R·τ."""
        return self.rounds * self.local_steps

    @property
    def published(self) -> Workload:
        """What is published."""
        if self.workload is not None:
            return self.workload
        return Workload(horizon=self.horizon, local_steps=self.local_steps)

    @property
    def people_needed(self) -> int:
        """Fewest people with whom a learner can take every step."""
        often, together = self.participation, self.clients_per_step
        at_once = min(often.min_separation, self.horizon) * together
        return max(-(-self.horizon * together // often.times), at_once)

    @property
    def steps_in_reach(self) -> int | None:
        """How many steps the people that there are suffice for, one after the other.

        In turn, everyone comes back after as many steps as there are groups of
        ``clients_per_step``. Where those are fewer than the separation, nobody is left after the
        last of them.
        """
        if self.people is None:
            return None
        groups = self.people // self.clients_per_step
        if groups < self.participation.min_separation:
            return groups
        return self.people * self.participation.times // self.clients_per_step

    @property
    def shortage(self) -> str | None:
        """What to say where there are too few people for this budget."""
        if self.people is None or self.people >= self.people_needed:
            return None
        said = (
            f"too few people: {self.horizon} steps with everyone taking part "
            f"{self.participation} need {self.people_needed} people a learner, and there are "
            f"{self.people}. "
        )
        if self.people < self.clients_per_step:
            return said + f"One step needs {self.clients_per_step}"
        visits = -(-self.horizon * self.clients_per_step // self.people)
        apart = min(self.participation.min_separation, self.people // self.clients_per_step)
        return (
            said + f"They suffice for {counted(self.steps_in_reach or 0, 'step')}, or, with noise "
            f"for that, with participations = {visits} and min_separation = {apart}"
        )


def _size(field: str, value: object, way_out: str) -> None:
    """Refuse numbers whose squares leave the range of floats."""
    if not _SMALLEST <= positive_number(field, value, way_out) <= 1.0 / _SMALLEST:
        raise InputError(field, value, f"from {_SMALLEST:g} to {1.0 / _SMALLEST:g}", way_out)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One mechanism in a setting.

    Errors are standard deviations per coordinate of the noise in the learners' averaged prefix
    sums, in units of the gradients.
    """

    mechanism: str
    objective: str | None
    """"published" where it is made for what is published, and for people who return; else None."""
    guarantee: Guarantee
    sensitivity: float
    noise_std: float
    error_max: float
    error_mean: float
    error_round_ends: float
    error_published: float
    """Root of the mean variance over what is published, at step size one."""
    model_noise: float | None
    """Norm of the noise in a published model: step size times error_published times √d."""
    relative_to_independent: float
    """error_published over that of independent noise at the same promise."""
    state_vectors: int
    state_bytes: int
    seconds_per_step: float
    error_over_time: NDArray[np.float64]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; without the curve over time."""
        names = (
            "mechanism",
            "objective",
            "sensitivity",
            "noise_std",
            "error_max",
            "error_mean",
            "error_round_ends",
            "error_published",
            "model_noise",
            "relative_to_independent",
            "state_vectors",
            "state_bytes",
            "seconds_per_step",
        )
        return {name: getattr(self, name) for name in names} | {"guarantee": self.guarantee.as_dict()}

    @property
    def title(self) -> str:
        """Its name, and what it is made for."""
        return self.mechanism if self.objective is None else f"{self.mechanism}, {self.objective}"


@dataclass(frozen=True)
class Offer:
    """Another thing to publish from the same messages, and what it would do to the noise."""

    change: str
    """As a plan writes it."""
    error_published: float


@dataclass(frozen=True)
class WithoutEnd:
    """A way to go on without knowing when it ends."""

    way: str
    relative: float
    """Noise in what is published at the last round, over the most that one has who knew the end."""


@dataclass(frozen=True)
class Comparison:
    """All rows, the recommended one first."""

    setting: Setting
    rows: tuple[Row, ...]
    reason: str
    left_out: tuple[str, ...]
    offers: tuple[Offer, ...] = ()
    without_end: tuple[WithoutEnd, ...] = ()

    @property
    def model_reach(self) -> float | None:
        """How far from its start a model can go: every step of full length, in one direction."""
        setting = self.setting
        if setting.step_size is None:
            return None
        ahead = np.full(setting.horizon, setting.clip_norm * setting.step_size)
        return float(np.abs(_published_of(setting.published, ahead)).max())

    @property
    def recommended(self) -> Row:
        """The mechanism to use."""
        return self.rows[0]


def compare(
    setting: Setting,
    names: Sequence[str] | None = None,
    *,
    options: dict[str, Any] | None = None,
    tick: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Build and calibrate mechanisms; ``tick`` is called with each name before its turn.

    Args:
        setting: the run.
        names: of mechanisms; None for all that the setting can have.
        options: for their functions.
        tick: called with each name before its turn.

    Returns:
        The rows, the recommended one first.

    Raises:
        InputError: for no name, or, where the run has no end, a mechanism that needs one.

    """
    if setting.unbounded:
        return _compare_endless(setting, names, tick)
    left_out: tuple[str, ...] = ()
    everything = names is None
    if names is None:
        names = tuple(MECHANISMS)
        if setting.horizon > LONG_HORIZON:
            left_out = _SOLVED
            names = tuple(name for name in names if name not in left_out)
    if not names:
        raise InputError("mechanism", names, "at least one name", "try optimal")
    baseline = _measure(build("independent", setting.horizon), setting, None)
    rows = []
    for name in names:
        tick(name)
        factorization = build(name, setting.horizon, **(options or {}))
        rows.append(_measure(factorization, setting, baseline))
        if everything and _can_be_matched(name, setting):
            matched = build_for(name, setting.published, setting.participation)
            rows.append(_measure(matched, setting, baseline, "published"))
    offers = _offers(setting, _recommended(rows)) if everything else ()
    return _ranked(setting, rows, left_out=left_out, offers=offers)


def _compare_endless(setting: Setting, names: Sequence[str] | None, tick: Callable[[str], None]) -> Comparison:
    """What an unbounded plan runs with, independent noise, and what knowing the end saves."""
    rate = setting.published.forgetting_per_step
    known = ("toeplitz" if rate < 1.0 else "buffered", "independent")
    for name in names or ():
        if name not in known:
            raise InputError(
                "mechanism",
                name,
                f"{' or '.join(known)} for unbounded rounds: it needs an end",
                "leave it out; or name rounds that you will not reach",
            )
    baseline = _measure(build("independent", setting.horizon), setting, None)
    rows = []
    for name in names or known:
        tick(name)
        endless = None if name == "independent" else without_end(rate, setting.horizon)
        rows.append(baseline if endless is None else _measure(endless, setting, baseline))
    return _ranked(setting, rows, ways=_without_end(setting))


def _recommended(rows: Sequence[Row]) -> Row:
    """Of those with nearly the least noise in what is published, the one with the least state."""
    best = min(row.error_published for row in rows)
    # Every mechanism makes its increments from one fresh draw a step; the state sets the rest.
    good = [row for row in rows if row.error_published <= CLOSE * best]
    return min(good, key=lambda row: (row.state_vectors, row.error_published))


def _ranked(
    setting: Setting,
    rows: Sequence[Row],
    *,
    left_out: tuple[str, ...] = (),
    offers: tuple[Offer, ...] = (),
    ways: tuple[WithoutEnd, ...] = (),
) -> Comparison:
    chosen = _recommended(rows)
    others = sorted((r for r in rows if r is not chosen), key=lambda r: r.error_published)
    reason = _reason(chosen, min(row.error_published for row in rows), rows)
    return Comparison(setting, (chosen, *others), reason, left_out, offers, ways)


def _can_be_matched(name: str, setting: Setting) -> bool:
    """Whether this mechanism can be made for what is published, and that is something else."""
    w = setting.published
    if name == "buffered":
        return (setting.participation.times > 1) if w.plain else setting.horizon <= BUFFERED_LIMIT
    if name == "banded":
        return w.plain and setting.participation.times > 1
    if name in ("toeplitz", "toeplitz_normalised"):
        return w.forgetting < 1.0
    return name == "optimal" and not (w.plain and w.local_steps == 1)


def _offers(setting: Setting, chosen: Row) -> tuple[Offer, ...]:
    """What averaging and forgetting would do, with buffered noise as it is."""
    w = setting.published
    if not w.plain:
        return ()
    mechanism = build("buffered", setting.horizon)
    own = w.error(mechanism, setting.participation).mean
    others = {"averaging = 3.0": replace(w, averaging=3.0), "forgetting = 0.999": replace(w, forgetting=0.999)}
    return tuple(
        Offer(change, chosen.error_published * math.sqrt(other.error(mechanism, setting.participation).mean / own))
        for change, other in others.items()
    )


def _without_end(setting: Setting) -> tuple[WithoutEnd, ...]:
    """Horizons that are too long, epochs of doubling length and, with forgetting, stationary noise.

    All at the last round, beside the most that buffered noise has which was made for it.
    """
    w, part = setting.published, setting.participation

    def at_the_end(mechanism: Factorization) -> float:
        """Of what is published; mechanisms that last longer are looked at where w ends."""
        longer = w.at_rounds(mechanism.horizon // w.local_steps)
        return float(longer.error(mechanism, part).variance[w.rounds - 1])

    known = w.error(build("buffered", setting.horizon), part).max
    found = {}
    for times in (10, 100, 1000):
        if setting.horizon * times <= _LONGEST_LOOKED_AT:
            made = build("buffered", setting.horizon * times)
            found[f"a horizon {times} times too long (buffered)"] = at_the_end(made)
    found["epochs of doubling length"] = at_the_end(doubling(setting.horizon))
    rho = w.forgetting_per_step
    if rho < 1.0 and part.times == 1:
        endless = stationary(rho)
        until = endless.until(setting.horizon)
        of_its_own = (endless.sensitivity() / until.sensitivity()) ** 2
        found["stationary, the same for ever"] = at_the_end(until) * of_its_own
    return tuple(WithoutEnd(way, math.sqrt(error / known)) for way, error in found.items())


def _published_of(workload: Workload, increments: NDArray[np.float64]) -> NDArray[np.float64]:
    """What is published of these steps."""
    system = workload.system()
    q = np.zeros(system.order)
    published = np.empty(len(increments))
    for t, step in enumerate(increments):
        q = system.transition[t] @ q + system.entry[t] * step
        published[t] = q[system.rows[0].coordinate]
    return published[workload.local_steps - 1 :: workload.local_steps]


def _reason(chosen: Row, best: float, rows: Sequence[Row]) -> str:
    if len(rows) == 1:
        return "the only one asked for"
    gain = chosen.relative_to_independent
    against = (
        "independent noise does as well here"
        if gain >= 0.999
        else f"{1 / gain:.1f}x less noise in the released model than independent noise"
    )
    if chosen.error_published <= best * (1 + 1e-9):
        return f"least noise in what is published: {against}"
    excess = 100 * (chosen.error_published / best - 1)
    return (
        f"within {excess:.1f}% of the least noise in what is published, with the smallest state "
        f"({chosen.state_vectors} vectors): {against}"
    )


def _seconds_per_step(factorization: Factorization, dim: int) -> float:
    """A few blocks, timed on this machine: good for comparing, not for benchmarking."""
    timed = min(dim, 2 * TILE)
    stream = factorization.noise(dim=timed, seed=0)
    best = math.inf
    for _ in range(min(3, factorization.program.blocks)):
        began = time.perf_counter()
        steps = len(stream.next_block())
        best = min(best, (time.perf_counter() - began) / steps)
    return best * dim / timed


def _measure(factorization: Factorization, setting: Setting, baseline: Row | None, objective: str | None = None) -> Row:
    std, guarantee = calibrate(
        setting.budget,
        factorization,
        setting.clip_norm,
        neighbours=setting.neighbours,
        participation=setting.participation,
        accounting=setting.accounting,
        telemetry=setting.telemetry,
        clients_per_step=setting.clients_per_step,
    )
    if std > _LARGEST_STD:
        raise InputError("noise std", std, f"<= {_LARGEST_STD:g}", "a larger ε, or a smaller clip_norm; try 1")
    # Noise without an end is calibrated as it is, and looked at as far as the horizon.
    seen = factorization
    if isinstance(factorization, StationaryFactorization):
        seen = factorization.until(setting.horizon)
    variance = seen.row_norms_squared() * (std**2 / setting.learners)
    at_round_ends = math.sqrt(float(variance[setting.local_steps - 1 :: setting.local_steps].mean()))
    published = at_round_ends
    if not setting.published.plain:
        unit = std / seen.sensitivity()
        published = math.sqrt(setting.published.error(seen).mean / setting.learners) * unit
    in_model = None
    if setting.step_size is not None:
        in_model = setting.step_size * published * math.sqrt(setting.dim)
    program = factorization.program
    return Row(
        mechanism=factorization.name,
        objective=objective,
        guarantee=guarantee,
        sensitivity=guarantee.sensitivity * (setting.clients_per_step / (setting.neighbours.reach * setting.clip_norm)),
        noise_std=std,
        error_max=math.sqrt(float(variance.max())),
        error_mean=math.sqrt(float(variance.mean())),
        error_round_ends=at_round_ends,
        error_published=published,
        model_noise=in_model,
        relative_to_independent=published / (baseline.error_published if baseline else published),
        state_vectors=program.state_size,
        state_bytes=4 * program.state_size * setting.dim,
        seconds_per_step=_seconds_per_step(factorization, setting.dim),
        error_over_time=np.sqrt(variance),
    )
