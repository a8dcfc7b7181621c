"""Mechanisms side by side at one budget, ranked by the noise in what is published (`Setting.workload`)."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError, VeilstreamError
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
from veilstream.mechanisms.banded import banded
from veilstream.mechanisms.buffered import BUFFERED_LIMIT
from veilstream.mechanisms.columns import DENSE_COLUMNS
from veilstream.mechanisms.normals import TILE
from veilstream.mechanisms.optimal import RETURNING_LIMIT
from veilstream.mechanisms.registry import build_for, built_in
from veilstream.mechanisms.unbounded import without_end
from veilstream.plans.auto import with_defaults
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import SOLVED, effort, prepare, published_noise, recommended, warn_of_kept_noise
from veilstream.plans.tasks import task_of
from veilstream.privacy import Accounting, Budget, Guarantee, Neighbours, Order, calibrate
from veilstream.privacy.guarantee import SumTrust
from veilstream.privacy.secret_bands import banded_for_secret_order, bands_for_secret_order
from veilstream.privacy.secret_order import rough_secret_noise
from veilstream.privacy.telemetry import Telemetry
from veilstream.wording import counted

LONG_HORIZON = 20_000  # above this, mechanisms that solve for every step are left out unless asked for by name
LONGEST_OTHER_ORDER = 500  # up to so many steps a comparison also says what a secret order would give
_LONGEST_LOOKED_AT = 1_000_000
_LARGEST_STD = 1e140


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is planned: one run of Algorithm 1."""

    budget: Budget
    rounds: int
    local_steps: int
    clip_norm: float
    clients_per_step: int = 1  # how many a step averages
    learners: int = 1
    dim: int = 1
    neighbours: Neighbours = Neighbours.REPLACE_ONE
    participation: Participation = ONCE
    accounting: Accounting = Accounting.EXACT
    telemetry: Telemetry | None = None  # its price is in every row's noise
    order: Order = Order.KNOWN
    window: int | None = None
    trust: SumTrust | None = None
    workload: Workload | None = None  # what is published, if not the latest model at every round's end
    step_size: float | None = None  # η·η_g, to state noise in the model itself
    unbounded: bool = False  # only noise that goes on is then compared, and looked at at `horizon`
    mechanism: str | None = None  # the plan's own: compared at any horizon
    kept: tuple[tuple[str, str, str | None], ...] = ()  # name, mechanism and objective of a plan's private methods

    @classmethod
    def of(cls, plan: Plan) -> Setting:
        """What a plan's first private method runs with."""
        method = next((m for m in plan.methods if m.method.private), None)
        if method is None:
            raise InputError(
                "methods", [m.name for m in plan.methods], "a method that protects someone", "add one with a mechanism"
            )
        if method.method.chooses_steps:
            method = prepare(plan, method).plan
        else:
            warn_of_kept_noise(plan, method)
        steps, clients = plan.steps_and_clients(method)
        return cls(
            budget=plan.budget_of(method),
            rounds=plan.learning.rounds,
            local_steps=steps,
            clip_norm=plan.clip_norm_of(method),
            clients_per_step=clients,
            learners=plan.learning.learners,
            dim=task_of(plan).dim,
            neighbours=Neighbours.of(plan.neighbours),
            participation=plan.participation,
            accounting=Accounting.of(plan.accounting_of(method)),
            telemetry=plan.telemetry_of(method),
            order=Order.of(plan.order),
            window=plan.window,
            trust=plan.trust,
            workload=plan.workload_of(method),
            step_size=method.local_step_size * method.server_step_size,
            unbounded=plan.learning.unbounded,
            mechanism=method.mechanism_name,
            kept=tuple(
                (m.name, m.mechanism_name or "", (with_defaults(plan, m) if m.method.chooses_steps else m).objective)
                for m in plan.methods
                if m.method.private
            ),
        )

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
    def steps_with_people(self) -> int:
        """Steps in which records are used: with a window all but the first one's, which are noise alone."""
        return self.horizon - (self.window or 0)

    @property
    def people_needed(self) -> int:
        """Fewest people with whom a learner can take every step that uses any; with a window the most, too."""
        often, together, steps = self.participation, self.clients_per_step, self.steps_with_people
        at_once = min(often.min_separation, steps) * together
        return max(-(-steps * together // often.times), at_once)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One mechanism in a setting; errors are standard deviations per coordinate in the averaged prefix sums."""

    mechanism: str
    objective: str | None  # "published" where it is made for what is published, and for people who return; else None
    guarantee: Guarantee
    sensitivity: float
    noise_std: float
    error_max: float
    error_mean: float
    error_round_ends: float
    error_published: float  # root of the mean variance over what is published, at step size one
    model_noise: float | None  # norm of the noise in a published model: step size times error_published times √d
    relative_to_independent: float  # error_published over that of independent noise at the same promise
    state_vectors: int
    state_bytes: int
    seconds_per_step: float
    error_over_time: NDArray[np.float64]
    bands: int | None = None  # of banded noise whose number of bands was chosen for a secret order

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; without the curve over time."""
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("guarantee", "error_over_time")}
        if self.bands is None:
            del kept["bands"]
        return kept | {"guarantee": self.guarantee.as_dict()}

    @property
    def title(self) -> str:
        """Its name, and what it is made for."""
        if self.bands is not None:
            return f"{self.mechanism}, {counted(self.bands, 'band')}"
        return self.mechanism if self.objective is None else f"{self.mechanism}, {self.objective}"

    @property
    def effort(self) -> tuple[bool, int]:
        """What it takes; see `recommended`."""
        return effort(self.mechanism, self.objective, self.state_vectors)


@dataclass(frozen=True, kw_only=True)
class OtherOrder:
    """The same promise under the other order, with the best noise for it."""

    order: Order
    mechanism: str
    bands: int | None
    error_published: float
    rough: bool  # to within some percent, and not certified

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"order": self.order.value}


@dataclass(frozen=True)
class OnlySums:
    """The same promise against a server that sees only sums over learners."""

    honest: int
    error_published: float
    floor_epsilon: float
    """What is left, at the same δ, for whoever trusts no other learner."""


@dataclass(frozen=True)
class Comparison:
    """All rows, the recommended one first."""

    setting: Setting
    rows: tuple[Row, ...]
    reason: str
    left_out: tuple[str, ...]
    offers: Mapping[str, float]  # `error_published` of what else could be published from the same messages
    without_end: Mapping[str, float]  # noise at the last round without a known end, over the most with one
    other_order: OtherOrder | None = None
    without_window: OtherOrder | None = None
    """Beside a window: a secret order over the whole epoch, for records that are all there before it begins."""

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

    @property
    def in_sums(self) -> OnlySums | None:
        """The recommended noise where the server sees only sums over learners; None where a run can have none.

        With the plan's own honest learners, or half of all where it counts on nobody.
        """
        s, best = self.setting, self.recommended
        if s.learners < 2 or s.unbounded or s.local_steps != 1:
            return None
        if s.order is Order.SECRET and s.trust is None:
            return None  # its floor takes an accounting of its own
        trust = s.trust or SumTrust(learners=s.learners, honest=(s.learners + 1) // 2)
        known = best.guarantee
        gain = 1.0 if s.trust is not None else trust.gain
        promised = replace(known, trust=trust, noise_std=known.noise_std / gain)
        return OnlySums(trust.honest, best.error_published / gain, promised.floor_epsilon)

    @property
    def of_the_plan(self) -> tuple[str, Row] | None:
        """The plan's method with the recommended noise, or that with the least; None if no row is one's."""
        own = [
            (name, row)
            for name, mechanism, objective in self.setting.kept
            for row in self.rows
            if (row.mechanism, row.objective) == (mechanism, None if objective == "mean" else objective)
        ]
        best = self.recommended
        return min(own, key=lambda pair: (pair[1] is not best, pair[1].error_published), default=None)

    def own_in_words(self) -> str | None:
        """How the plan's own noise compares with the recommended one."""
        if (own := self.of_the_plan) is None:
            return None
        (name, row), best = own, self.recommended
        if row is best:
            return f"{name} has the recommended noise."
        excess = 100 * (row.error_published / best.error_published - 1)
        more = f"{excess:.0f}% more" if excess >= 0 else f"{-excess:.0f}% less"
        return f"{name} has {row.title}: {more} noise in what is published than recommended."

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        s, own = self.setting, self.of_the_plan
        return {
            "setting": {
                "epsilon": s.budget.epsilon,
                "delta": s.budget.delta,
                "rounds": s.rounds,
                "local_steps": s.local_steps,
                "horizon": s.horizon,
                "unbounded": s.unbounded,
                "clip_norm": s.clip_norm,
                "clients_per_step": s.clients_per_step,
                "learners": s.learners,
                "dim": s.dim,
                "neighbours": s.neighbours.value,
                "participation": [s.participation.times, s.participation.min_separation],
                "accounting": s.accounting.value,
                "order": s.order.value,
                "window": s.window,
                "trust": None if s.trust is None else asdict(s.trust),
            },
            "only_sums": None if self.in_sums is None else asdict(self.in_sums),
            "other_order": None if self.other_order is None else self.other_order.as_dict(),
            "without_window": None if self.without_window is None else self.without_window.as_dict(),
            "workload": s.published.as_dict(),
            "model": {"step_size": s.step_size, "noise": self.recommended.model_noise, "reach": self.model_reach},
            "people_needed": s.people_needed,
            "steps_with_people": s.steps_with_people,
            "offers": dict(self.offers),
            "without_end": dict(self.without_end),
            "recommended": self.recommended.mechanism,
            "objective": self.recommended.objective,
            "of_the_plan": None if own is None else {"method": own[0], "noise": own[1].title},
            "reason": self.reason,
            "left_out": list(self.left_out),
            "mechanisms": [row.as_dict() for row in self.rows],
        }


def compare(
    setting: Setting,
    names: Sequence[str] | None = None,
    tick: Callable[[str], None] = lambda _: None,
    *,
    both_orders: bool = False,
) -> Comparison:
    """Build and calibrate mechanisms, and look at the other order if asked.

    Args:
        setting: what is planned.
        names: which mechanisms; None for all that the setting can have.
        tick: gets each name before its turn.
        both_orders: whether to say what the other order would give.

    """
    w, everything = setting.published, names is None
    chosen = names_for(setting) if names is None else tuple(names)
    baseline = _measure(build("independent", setting.horizon), setting, None)
    rows = []
    for name in chosen:
        tick(name)
        if everything and not built_in(name) and name != setting.mechanism:
            try:
                rows.append(_measure(build(name, setting.horizon), setting, baseline))
            except VeilstreamError as error:  # another package's mechanism stops no comparison
                warnings.warn(f"mechanism {name!r} is left out: {error}", stacklevel=2)
            continue
        if name == "independent":
            rows.append(baseline)
        elif setting.order is Order.SECRET and name == "banded":
            rows.append(_banded_row(setting, baseline))
        elif setting.unbounded:
            rows.append(_measure(without_end(w.forgetting_per_step, setting.horizon), setting, baseline))
        else:
            rows.append(_measure(build(name, setting.horizon), setting, baseline))
        if everything and setting.order is Order.KNOWN and not setting.unbounded and _can_be_matched(name, setting):
            matched = build_for(name, w, setting.participation)
            rows.append(_measure(matched, setting, baseline, "published"))
    rows.sort(key=lambda row: row.error_published)
    best = recommended(rows, lambda row: row.error_published, lambda row: row.effort, setting.order)
    plain = everything and not setting.unbounded and setting.order is Order.KNOWN
    left_out = [name for name in MECHANISMS if name not in chosen] if plain else []
    return Comparison(
        setting,
        (best, *(row for row in rows if row is not best)),
        _reason(best, rows),
        tuple(left_out),
        _offers(setting, best) if plain else {},
        _without_end(setting) if setting.unbounded else {},
        other_order(setting) if both_orders else None,
        _whole_epoch(setting) if both_orders and setting.window is not None else None,
    )


def other_order(setting: Setting) -> OtherOrder | None:
    """What the other order would give: the known one's buffered noise, or about the secret one's banded noise.

    None where the secret one is not for this setting, or takes long to work out.
    """
    if setting.order is Order.SECRET:
        known = replace(setting, order=Order.KNOWN, window=None)
        noise = _measure(build("buffered", setting.horizon), known, None)
        return OtherOrder(
            order=Order.KNOWN, mechanism=noise.mechanism, bands=None, error_published=noise.error_published, rough=False
        )
    return _whole_epoch(setting)


def _whole_epoch(setting: Setting) -> OtherOrder | None:
    """About what a secret order over all steps of an epoch would give."""
    w, returning = setting.published, setting.participation.times > 1
    if setting.unbounded or returning or setting.accounting is not Accounting.EXACT:
        return None
    if not 2 <= setting.horizon <= LONGEST_OTHER_ORDER:
        return None
    bands = bands_for_secret_order(setting.budget, w, setting.neighbours)
    mechanism = banded(setting.horizon, bands)
    norm = setting.clip_norm if setting.telemetry is None else setting.telemetry.release_norm(setting.clip_norm)
    std = rough_secret_noise(setting.budget, mechanism, setting.neighbours) * norm / setting.clients_per_step
    if setting.trust is not None:
        std /= setting.trust.gain
    published = published_noise(mechanism, std, w) / math.sqrt(setting.learners)
    return OtherOrder(order=Order.SECRET, mechanism=mechanism.name, bands=bands, error_published=published, rough=True)


def _banded_row(setting: Setting, baseline: Row) -> Row:
    mechanism = banded_for_secret_order(setting.budget, setting.published, setting.neighbours, setting.window)
    return replace(_measure(mechanism, setting, baseline), bands=mechanism.bandwidth)


def names_for(setting: Setting) -> tuple[str, ...]:
    """The mechanisms to compare: what goes on without an end, or all that are solved in reasonable time."""
    if setting.unbounded:
        return ("toeplitz" if setting.published.forgetting_per_step < 1.0 else "buffered", "independent")
    if setting.order is Order.SECRET:
        looked_at = ("banded", "buffered", "independent") if setting.horizon <= DENSE_COLUMNS else ("banded",)
        return tuple(dict.fromkeys([*looked_at, setting.mechanism or "banded"]))
    slow = () if setting.horizon <= LONG_HORIZON else SOLVED
    return tuple(name for name in MECHANISMS if name not in slow or name == setting.mechanism)


def _can_be_matched(name: str, setting: Setting) -> bool:
    w = setting.published
    if name == "buffered":
        return (setting.participation.times > 1) if w.plain else setting.horizon <= BUFFERED_LIMIT
    if name in ("banded", "banded_inverse"):
        return w.plain and setting.participation.times > 1
    if name in ("toeplitz", "toeplitz_normalised"):
        return w.forgetting < 1.0
    if name == "optimal" and setting.participation.times > 1:
        return setting.horizon <= RETURNING_LIMIT
    return name == "optimal" and not (w.plain and w.local_steps == 1)


def _offers(setting: Setting, chosen: Row) -> dict[str, float]:
    """What averaging and forgetting would do, with buffered noise as it is."""
    w = setting.published
    if not w.plain:
        return {}
    mechanism = build("buffered", setting.horizon)
    own = w.error(mechanism, setting.participation).mean
    others = {"averaging = 3.0": replace(w, averaging=3.0), "forgetting = 0.999": replace(w, forgetting=0.999)}
    return {
        change: chosen.error_published * math.sqrt(other.error(mechanism, setting.participation).mean / own)
        for change, other in others.items()
    }


def _without_end(setting: Setting) -> dict[str, float]:
    """Noise at the last round without a known end, over the most that buffered noise made for it has."""
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
    return {way: math.sqrt(error / known) for way, error in found.items()}


def _published_of(workload: Workload, increments: NDArray[np.float64]) -> NDArray[np.float64]:
    system = workload.system()
    q = np.zeros(system.order)
    published = np.empty(len(increments))
    for t, step in enumerate(increments):
        q = system.transition[t] @ q + system.entry[t] * step
        published[t] = q[system.rows[0].coordinate]
    return published[workload.local_steps - 1 :: workload.local_steps]


def _reason(chosen: Row, rows: Sequence[Row]) -> str:
    best = min(rows, key=lambda row: row.error_published)
    if len(rows) == 1:
        return "the only one asked for"
    gain = chosen.relative_to_independent
    against = (
        "independent noise does as well here"
        if gain >= 0.999
        else f"{1 / gain:.1f}x less noise in the released model than independent noise"
    )
    if chosen is best:
        return f"least noise in what is published: {against}"
    excess = 100 * (1 - best.error_published / chosen.error_published)
    ready = f"needs no solution for this horizon and {counted(chosen.state_vectors, 'vector')} of state"
    if chosen.effort[0] == best.effort[0]:
        ready = f"has the smallest state ({counted(chosen.state_vectors, 'vector')})"
    return f"{against}. It {ready}; {best.title} has {excess:.1f}% less"


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
        order=setting.order,
        window=setting.window,
        trust=setting.trust,
    )
    if std > _LARGEST_STD:
        raise InputError("noise std", std, f"<= {_LARGEST_STD:g}", "a larger ε, or a smaller clip_norm; try 1")
    # Noise without an end is calibrated as it is, and looked at as far as the horizon.
    seen = factorization
    if isinstance(factorization, StationaryFactorization):
        seen = factorization.until(setting.horizon)
    variance = seen.row_norms_squared() * (std**2 / setting.learners)
    at_round_ends = math.sqrt(float(variance[setting.local_steps - 1 :: setting.local_steps].mean()))
    published = published_noise(factorization, std, setting.published) / math.sqrt(setting.learners)
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
