"""The whole audit of a plan: every check on the deployed learner, and what came of it."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from scipy.stats import norm

from veilstream.audit.canary import BATCH, canary_runs
from veilstream.audit.cells import DIM, later_message
from veilstream.audit.checks import (
    GROUP_DIM,
    SMALL_DIM,
    cell_checks,
    contributions,
    copied_store_check,
    group_checks,
    pooled_checks,
    run_checks,
    seed_check,
    small_checks,
    varied,
)
from veilstream.audit.deployed import Unkind, listen, twin_runs
from veilstream.audit.federated import federation_checks
from veilstream.audit.programme import LARGE_RUNS, Meter, Programme, auditable
from veilstream.audit.secret_order import mixture_checks, order_checks
from veilstream.audit.statistics import FALSE_ALARMS, Differencing, Law, ManyRun, OneRun, one_run
from veilstream.audit.statistics.check import Check, alarming
from veilstream.audit.statistics.many_run import epsilon_of
from veilstream.audit.sums import SumsFound, sum_checks
from veilstream.audit.telemetry_canary import telemetry_runs
from veilstream.audit.transcript import Transcript, law_of_terms
from veilstream.deployment.terms import Terms
from veilstream.errors import PrivacyError
from veilstream.mask_graph import SMALL
from veilstream.plans.plan import Plan
from veilstream.privacy.grid import grid_for
from veilstream.privacy.guarantee import Guarantee
from veilstream.runs.released_model import plan_digest, rest_digest

__all__ = ["DEFAULT_PLAN", "SHARES", "UNSEEN", "AuditReport", "audit", "auditable", "ticks", "unlike_each"]

Floats = NDArray[np.float64]

DEFAULT_PLAN = """
name = "audit"
[learning]
rounds = 64
[privacy]
epsilon = 2.0
delta = 1e-3
[[methods]]
name = "ours"
mechanism = "buffered"
step_size = 0.1
"""

UNSEEN = (
    "who may have read the seeds on the learner's own machine, or chosen them in another program",
    "how long things take, and what a client reveals by other means",
    "a flaw that shows on some inputs only, none of which the audit sent",
    "anything rarer than its runs: events of probability well below one in the number of runs",
    "seeds that look drawn and are known to someone: messages and statistics are the same",
)

SHARES = 6
"""Parts of an audit that may each raise a false alarm with probability `FALSE_ALARMS`: two runs,
canaries, canaries in telemetry, two learners, and all of ``checks`` together."""
_TWIN_DIM = 64


@dataclass(frozen=True, eq=False)
class AuditReport:
    """What was claimed, what was found."""

    plan_sha256: str
    """Of the plan that was given (`plan_digest`)."""
    made: str
    guarantee: Guarantee
    fixed: OneRun
    adaptive: OneRun
    independence_p: float
    """Of the hypothesis that two learners' noise has nothing to do with each other."""
    repeats_unlike: int
    on_grid: bool
    """Whether messages are multiples of the grid that this promise needs."""
    twins: Differencing
    many: ManyRun
    local_steps: int
    checks: tuple[Check, ...]
    """Parts, cells, single coordinates, telemetry's, pairs, epochs, seeds, groups, a federation."""
    telemetry: ManyRun | None = None
    sums: SumsFound | None = None
    """Where only sums are seen; all else is then of each learner's own noise, and so of the floor."""
    full: bool = True
    rounds: int = 0
    """That were audited, of `reduced_from` where the plan has more than an audit can look at."""
    reduced_from: int | None = None
    rest_sha256: str = ""
    """Of the plan without its rounds (`rest_digest`): equal for a plan and its reduction."""
    seconds: float = 0.0
    seed: int = 0
    """Of the order in which clients came; never of noise."""

    @property
    def alarms(self) -> tuple[str, ...]:
        """Every check that found something; none if the code keeps its promise."""
        found = []
        for name, run in (("fixed", self.fixed), ("adaptive", self.adaptive)):
            if run.violation:
                found.append(
                    f"one run, {name} server: mu is at least {run.mu_surely:.4g}, {run.claim:.4g} was promised"
                )
            elif run.stranger:
                found.append(f"one run, {name} server: this is not the noise that was claimed")
        if self.independence_p < FALSE_ALARMS:
            found.append("two learners share their noise: their seeds were not drawn")
        if self.repeats_unlike:
            found.append(f"{self.repeats_unlike} rounds were answered twice, unlike")
        if not self.on_grid:
            found.append("messages are finer than the grid: low-order bits give data away")
        if self.twins.alarm:
            found.append(
                f"same draws, one client replaced: {self.twins.unexplained_units} units moved that no gradient explains"
            )
        if self.many.violation:
            best = max(g.mu_surely for g in self.many.guesses)
            found.append(f"{self.many.runs} runs: mu is at least {best:.4g}, more than promised")
        elif self.many.stranger:
            found.append(f"{self.many.runs} runs: guesses do not fit the claimed mechanism")
        if self.telemetry is not None and self.telemetry.alarm:
            best = max(g.mu_surely for g in self.telemetry.guesses)
            found.append(
                f"{self.telemetry.runs} runs with telemetry: mu is at least {best:.4g} of "
                f"{self.telemetry.claim:.4g}, or guesses do not fit the claimed mechanism"
            )
        found += [f"{check.name}: {check.means} ({check.figure}; p = {check.p:.1g})" for check in alarming(self.checks)]
        return tuple(found)

    @property
    def mu_lower(self) -> float:
        """The largest lower bound on μ that was found."""
        return max(self.fixed.mu_lower, self.adaptive.mu_lower, self.many.mu_lower)

    @property
    def claim(self) -> float:
        """The promised μ: against a server that sees sums, where it sees no more."""
        return self.fixed.claim if self.sums is None else self.sums.together.claim

    @property
    def verdict(self) -> str:
        """In a line."""
        if self.alarms:
            return "BROKEN: " + "; ".join(self.alarms)
        if self.sums is not None:
            return self._verdict_of_sums(self.sums)
        g, mu = self.guarantee, self.mu_lower
        known = ", for the noise alone, were the order known" if g.secret is not None else ""
        part = "" if self.reduced_from is None else f" ({self.rounds:,} of {self.reduced_from:,} rounds were audited)"
        return (
            f"KEPT, as far as messages tell{part}: the promise is epsilon = {g.epsilon:g} at delta = "
            f"{g.delta:g} (mu = {self.fixed.claim:.4f}{known}); the messages use at least "
            f"{mu / self.fixed.claim:.1%} of that mu, and no check raised an alarm"
        )

    def _verdict_of_sums(self, sums: SumsFound) -> str:
        g, floor = self.guarantee, max(self.mu_lower, sums.mu_of_floor)
        known = ", for the noise alone, were the order known" if g.secret is not None else ""
        part = "" if self.reduced_from is None else f" ({self.rounds:,} of {self.reduced_from:,} rounds were audited)"
        return (
            f"KEPT, as far as messages tell{part}: the promise is epsilon = {g.epsilon:g} at delta = {g.delta:g} "
            f"against a server that sees sums (mu = {self.claim:.4f}{known}); sums over {sums.honest} learners whose "
            f"noise nobody knows use at least {sums.mu / self.claim:.1%} of that mu. Where the noise of all others is "
            f"known, the floor is epsilon = {g.floor_epsilon:.4g} (mu = {self.fixed.claim:.4f}{known}); messages use "
            f"at least {floor / self.fixed.claim:.1%} of it, and no check raised an alarm. The sums that were audited "
            f"are of {sums.learners} learners, all pairs of which share masks{_without_graph(g)}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; what is infinite is the text "infinite"."""
        delta = self.guarantee.delta
        plain = {
            "kept": not self.alarms,
            "verdict": self.verdict,
            "alarms": list(self.alarms),
            "plan_sha256": self.plan_sha256,
            "rest_sha256": self.rest_sha256,
            "rounds": self.rounds,
            "reduced_from": self.reduced_from,
            "made": self.made,
            "full": self.full,
            "seconds": round(self.seconds, 1),
            "schedule_seed": self.seed,
            "false_alarm_rate": SHARES * FALSE_ALARMS,
            "runs": self.many.runs,
            "guarantee": self.guarantee.as_dict(),
            "claimed": {"mu": self.claim, "epsilon": self.guarantee.epsilon, "delta": delta},
            "one_run": {
                name: _one_run_dict(run, delta) for name, run in (("fixed", self.fixed), ("adaptive", self.adaptive))
            },
            "many_run": _many_run_dict(self.many),
            **({"telemetry": _many_run_dict(self.telemetry)} if self.telemetry else {}),
            **({"sums": _sums_dict(self.sums)} if self.sums else {}),
            "same_draws": dataclasses.asdict(self.twins) | {"alarm": self.twins.alarm},
            "independence_p": self.independence_p,
            "repeats_unlike": self.repeats_unlike,
            "on_grid": self.on_grid,
            "checks": [check.as_dict() for check in self.checks],
            "cannot_see": list(UNSEEN),
        }
        readable: dict[str, Any] = _finite(plain)
        return readable


def _without_graph(guarantee: Guarantee) -> str:
    """What sums of so few learners leave out, where a run has a graph of masks."""
    trust = guarantee.trust
    if trust is None or trust.learners <= SMALL:
        return ""
    return f": the graph of masks of {trust.learners} learners, its draw and its agreement in two steps were not run"


def ticks(plan: Plan, runs: int | None = None, draws: int | None = None, *, federation: bool = True) -> int:
    """How often a quick audit ticks, about."""
    return int(sum(Programme.of(plan, runs=runs, draws=draws, federation=federation).costs().values()))


def audit(
    plan: Plan,
    *,
    full: bool = False,
    runs: int | None = None,
    coordinates: int = 100_000,
    draws: int | None = None,
    federation: bool = True,
    tick: Callable[[int], None] = lambda _: None,
) -> AuditReport:
    """Run every check on deployed learners of this plan, alone and in a federation.

    Guarantees: if the code is correct, all checks together raise an alarm with probability at most
    `SHARES` times `FALSE_ALARMS`. Stores are made in temporary folders; seeds come from the
    operating system, as in deployment.

    Args:
        plan: what is audited; one private method. Of a plan that is too long, fewer rounds are.
        full: as many runs and draws as the documentation's figures are for.
        runs: how many runs with a canary.
        coordinates: of the long runs, as many as fit.
        draws: how often each cell test sees a message.
        federation: also run a server and learners, and audit their wire.
        tick: called with milliseconds of work that have been done, about.

    Returns:
        Every check with its verdict, beside the guarantee.

    Raises:
        InputError: for a plan that cannot be deployed.

    """
    programme = Programme.of(plan, full=full, runs=runs, coordinates=coordinates, draws=draws, federation=federation)
    return run_programme(programme, tick=tick)


def run_programme(
    programme: Programme,
    *,
    tick: Callable[[int], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
    limit_s: float | None = None,
) -> AuditReport:
    """Do what the programme says; ``say`` hears the name of each stage.

    Raises:
        InputError: when ``limit_s`` is over.

    """
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    plan, terms, seed = programme.plan, programme.terms, programme.seed
    meter = Meter(tick, say, limit_s, programme)
    law, rounds, tau = law_of_terms(terms), terms.rounds, terms.local_steps
    meter.stage("long runs")
    long_runs = [
        listen(
            plan,
            terms,
            Unkind(terms, seed=k),
            adaptive=k == 1,
            tick=meter.rounds(terms, terms.release_dim),
            **varied(rounds, seed + k),
        )
        for k in range(LARGE_RUNS)
    ]
    fixed, adaptive = long_runs[:2]
    checks: list[Check] = [
        dataclasses.replace(check, name=f"{check.name}, run {k}")
        for k, transcript in enumerate(long_runs)
        for check in run_checks(transcript, terms, law)
    ]
    checks += pooled_checks("long runs", long_runs, terms, law)
    meter.stage("canaries")
    many = canary_runs(
        plan,
        dataclasses.replace(terms, dim=1),
        programme.runs,
        others="loud" if tau == 1 else "echo",
        adaptive=True,
        insist=True,
        tick=meter.rounds(terms, min(BATCH, programme.runs)),
    )
    told = None
    if terms.telemetry is not None:
        meter.stage("canaries in telemetry")
        told = telemetry_runs(plan, terms, programme.telemetry_runs, tick=meter.rounds(terms, 24_000))
        checks += told.checks
    meter.stage("same draws")
    small = dataclasses.replace(terms, dim=_TWIN_DIM)
    twins = twin_runs(plan, small, at=law.worst * terms.clients_per_step, adaptive=tau == 1)
    checks.append(contributions(plan, small, seed=seed, tick=meter.rounds(terms, _TWIN_DIM)))
    meter.stage("small learners")
    checks += small_checks(
        plan,
        dataclasses.replace(terms, dim=SMALL_DIM),
        learners=programme.learners(rounds),
        also=long_runs,
        seed=seed,
        tick=meter.rounds(terms, SMALL_DIM),
    )
    meter.stage("a copied store")
    checks += [copied_store_check(plan, terms, tick=meter.rounds(terms, 400)), seed_check()]
    if programme.grouped is not None:
        meter.stage("groups")
        checks += _or_failure("groups", lambda: _in_groups(programme, meter))
    if programme.secret is not None:
        meter.stage("a secret order")
        checks += _or_failure("a secret order", lambda: _secret_order(programme, meter))
    sums = None
    if programme.sums is not None:
        meter.stage("sums")
        found: list[SumsFound] = []
        checks += _or_failure("sums", lambda: _of_sums(programme, meter, found))
        sums = found[0] if found else None
    meter.stage("cells")
    checks += _cells(programme, meter)
    if programme.federation:
        meter.stage("federation")
        checks += _or_failure("federation", lambda: _federations(programme, meter))
    return AuditReport(
        plan_sha256=plan_digest(programme.given),
        made=made,
        guarantee=programme.promise,
        fixed=one_run(fixed.residuals, law),
        adaptive=one_run(adaptive.residuals, law),
        independence_p=unlike_each(fixed, adaptive, law),
        repeats_unlike=sum(transcript.repeats_unlike for transcript in long_runs),
        on_grid=all(_on_grid(transcript, terms) for transcript in long_runs),
        twins=twins,
        many=many,
        local_steps=tau,
        checks=tuple(checks),
        telemetry=None if told is None else told.many,
        sums=sums,
        full=programme.full,
        rounds=plan.learning.rounds,
        reduced_from=programme.reduced_from,
        rest_sha256=rest_digest(programme.given),
        seconds=meter.elapsed_s,
        seed=seed,
    )


def _or_failure(stage: str, make: Callable[[], list[Check]]) -> list[Check]:
    """Checks of a stage; a learner that could not go on in it is an alarm like any other."""
    try:
        return make()
    except PrivacyError as error:
        return [Check(f"learners go on, {stage}", 0.0, str(error), "a learner could not go on in its own audit")]


def _in_groups(programme: Programme, meter: Meter) -> list[Check]:
    """Learners that store and draw several steps together."""
    plan, terms, seed = programme.grouped, programme.grouped_terms, programme.seed
    assert plan is not None
    assert terms is not None
    checks = group_checks(plan, terms, seed=seed, tick=meter.rounds(terms, GROUP_DIM))
    if terms.local_steps > 1:
        checks += cell_checks(
            plan,
            terms,
            programme.group_draws,
            messages=[terms.rounds - 1],
            dim=programme.group_dim,
            where=", in groups",
            tick=meter.rounds(terms, programme.group_dim),
        )
    if plan is programme.plan:
        return checks
    small = dataclasses.replace(terms, dim=SMALL_DIM - 1)
    found = small_checks(
        plan, small, learners=programme.learners(terms.rounds), seed=seed, tick=meter.rounds(terms, SMALL_DIM)
    )
    found.append(contributions(plan, dataclasses.replace(terms, dim=_TWIN_DIM), seed=seed))
    many = canary_runs(
        plan,
        terms,
        programme.group_canaries,
        others="echo",
        adaptive=True,
        insist=True,
        false_alarms=FALSE_ALARMS / 100,
        tick=meter.rounds(terms, BATCH),
    )
    found.append(
        Check(
            "runs with a canary",
            0.0 if many.alarm else 1.0,  # its level is far below a check's
            f"{many.runs:,} runs: mu >= {many.mu_lower:.4g} of {many.claim:.4g}",
            "the canary is told apart better than was promised",
        )
    )
    return checks + [dataclasses.replace(check, name=f"{check.name}, in groups") for check in found]


def _secret_order(programme: Programme, meter: Meter) -> list[Check]:
    """Of the plan as it is: how steps are drawn, and how well somebody with a secret step is told apart."""
    plan, terms, seed = programme.secret, programme.secret_terms, programme.seed
    assert plan is not None
    assert terms is not None
    tick = meter.rounds(terms, 3 * terms.dim)
    return [
        *order_checks(plan, terms, seed=seed, tick=tick),
        *mixture_checks(plan, terms, programme.secret_runs, seed=seed, tick=tick),
    ]


def _of_sums(programme: Programme, meter: Meter, found: list[SumsFound]) -> list[Check]:
    """What the server can work out where it opens sums alone."""
    plan, terms, trust = programme.sums, programme.sums_terms, programme.given.trust
    assert plan is not None
    assert terms is not None
    assert trust is not None
    tick = meter.rounds(terms, 2 * programme.sum_runs)
    checks, sums = sum_checks(plan, terms, programme.sum_runs, of=trust.honest, seed=programme.seed, tick=tick)
    found.append(sums)
    return checks


def _cells(programme: Programme, meter: Meter) -> list[Check]:
    """Of the first message, the tenth, and a late one that chance chose for this audit."""
    plan, terms, draws = programme.plan, programme.terms, programme.draws
    checks = cell_checks(plan, terms, draws, tick=meter.rounds(terms, min(DIM, draws)))
    if programme.late in (0, later_message(terms.rounds)):
        return checks
    return checks + cell_checks(
        plan,
        terms,
        programme.late_draws,
        messages=[programme.late],
        dim=programme.late_dim,
        tick=meter.rounds(terms, programme.late_dim),
    )


def _federations(programme: Programme, meter: Meter) -> list[Check]:
    """The plan's own, and one whose rounds have several clients, where they are two."""
    found = [*federation_checks(programme.plan, programme.terms, seed=programme.seed, tick=_of(meter, programme.terms))]
    grouped, terms = programme.grouped, programme.grouped_terms
    if grouped is None or terms is None or grouped is programme.plan:
        return found
    more = federation_checks(grouped, terms, seed=programme.seed, tick=_of(meter, terms))
    return found + [dataclasses.replace(check, name=f"{check.name}, in groups") for check in more]


def _of(meter: Meter, terms: Terms) -> Callable[[int], None]:
    return meter.rounds(terms, 4 * 4000)


def unlike_each(one: Transcript, other: Transcript, law: Law) -> float:
    """p-value for noise of two learners that is independent."""
    assert law.root is not None
    first, second = (solve_triangular(law.root, transcript.residuals, lower=True) for transcript in (one, other))
    together = float((first * second).sum()) / math.sqrt(float((first**2).sum()))
    return float(2.0 * norm.sf(abs(together)))


def _on_grid(transcript: Transcript, terms: Terms) -> bool:
    """The grid that the promise needs, worked out anew, and no finer."""
    return (
        transcript.grid >= grid_for(terms.guarantee.clip_norm, terms.guarantee.noise_std, terms.clients_per_step).step
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(held) for held in value]
    return "infinite" if isinstance(value, float) and math.isinf(value) else value


def _sums_dict(sums: SumsFound) -> dict[str, Any]:
    return {
        "honest": sums.honest,
        "honest_of": sums.of,
        "learners": sums.learners,
        "rounds": sums.rounds,
        "graph_of_masks": False,
        "promise": {"mu": sums.together.claim, "mu_one_run": sums.noise.mu_lower} | _many_run_dict(sums.together),
        "floor": {"mu": sums.floor.claim, "mu_one_run": sums.noise_of_one.mu_lower} | _many_run_dict(sums.floor),
    }


def _one_run_dict(run: OneRun, delta: float) -> dict[str, Any]:
    return {
        "coordinates": run.coordinates,
        "mu_lower": run.mu_lower,
        "epsilon_lower": epsilon_of(run.mu_lower, delta),
        "share_of_claim": run.mu_lower / run.claim,
        "expected_in_what_is_sent": None if run.expected is None else float(run.expected.max()),
        "steps_outside": run.outside,
        "covariance_p": run.covariance_p,
        "normality_p": run.normality_p,
        "confidence": run.confidence,
        "alarm": run.alarm,
    }


def _many_run_dict(many: ManyRun) -> dict[str, Any]:
    return {
        "runs": many.runs,
        "counted": many.runs - many.fitted,
        "mu_lower": many.mu_lower,
        "epsilon_via_mu": many.epsilon_via_mu,
        "epsilon_without_assumptions": many.epsilon_lower,
        "expected_in_what_is_sent": many.expected,
        "statistics": [dataclasses.asdict(guesses) for guesses in many.guesses],
        "confidence": many.confidence,
        "alarm": many.alarm,
    }
