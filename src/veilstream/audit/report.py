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
from veilstream.audit.cells import DRAWS
from veilstream.audit.checks import deployed_checks, ticks_of_checks
from veilstream.audit.deployed import Unkind, listen, twin_runs
from veilstream.audit.federated import federation_checks
from veilstream.audit.statistics import FALSE_ALARMS, Differencing, Law, ManyRun, OneRun, one_run
from veilstream.audit.statistics.check import Check, alarming
from veilstream.audit.statistics.many_run import epsilon_of
from veilstream.audit.telemetry_canary import telemetry_runs
from veilstream.audit.transcript import Transcript, law_of_terms
from veilstream.deployment.terms import Terms
from veilstream.errors import InputError
from veilstream.plans.plan import Plan
from veilstream.plans.plan_tables import DataPlan
from veilstream.privacy.grid import grid_for
from veilstream.privacy.guarantee import Guarantee
from veilstream.runs.released_model import plan_digest

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
_COORDINATES = 100_000
_NUMBERS = 16_000_000  # of one transcript
_MOST_ROUNDS = 2048
_TWIN_DIM = 64
_TELEMETRY_RUNS = 100_000


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
    """Cells, single coordinates, telemetry's, pairs, epochs, seeds, a federation if one was run."""
    telemetry: ManyRun | None = None

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
    def verdict(self) -> str:
        """In a line."""
        if self.alarms:
            return "BROKEN: " + "; ".join(self.alarms)
        g, mu = self.guarantee, self.mu_lower
        return (
            f"KEPT, as far as messages tell: the promise is epsilon = {g.epsilon:g} at delta = "
            f"{g.delta:g} (mu = {self.fixed.claim:.4f}); the messages use at least "
            f"{mu / self.fixed.claim:.1%} of that mu, and no check raised an alarm"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; what is infinite is the text "infinite"."""
        delta = self.guarantee.delta
        plain = {
            "kept": not self.alarms,
            "verdict": self.verdict,
            "alarms": list(self.alarms),
            "plan_sha256": self.plan_sha256,
            "made": self.made,
            "runs": self.many.runs,
            "guarantee": self.guarantee.as_dict(),
            "claimed": {"mu": self.fixed.claim, "epsilon": self.guarantee.epsilon, "delta": delta},
            "one_run": {
                name: _one_run_dict(run, delta) for name, run in (("fixed", self.fixed), ("adaptive", self.adaptive))
            },
            "many_run": _many_run_dict(self.many),
            **({"telemetry": _many_run_dict(self.telemetry)} if self.telemetry else {}),
            "same_draws": dataclasses.asdict(self.twins) | {"alarm": self.twins.alarm},
            "independence_p": self.independence_p,
            "repeats_unlike": self.repeats_unlike,
            "on_grid": self.on_grid,
            "checks": [check.as_dict() for check in self.checks],
            "cannot_see": list(UNSEEN),
        }
        readable: dict[str, Any] = _finite(plain)
        return readable


def auditable(plan: Plan) -> Plan:
    """The plan for one learner, with the audit's own clients, and without what is post-processing.

    All that the promise rests on stays: budget, mechanism, horizon, clip norm, participation. A
    method of kind "auto" normalises gradients as deployed, with the gamma of a task whose
    gradients nobody knows a bound of.
    """
    learning = dataclasses.replace(
        plan.learning, learners=1, projection_radius=None, model_norm_cap=1e30, task="custom", ridge=0.0
    )
    if learning.rounds > _MOST_ROUNDS:
        raise InputError(
            "learning.rounds",
            learning.rounds,
            f"at most {_MOST_ROUNDS} in an audit",
            "audit the same method with fewer rounds",
        )
    return dataclasses.replace(plan, learning=learning, data=DataPlan(kind="custom"))


def ticks(plan: Plan, runs: int, draws: int = DRAWS, *, federation: bool = False) -> int:
    """How many rounds an audit takes."""
    rounds = plan.learning.rounds
    return rounds * (2 + -(-runs // BATCH)) + ticks_of_checks(rounds, draws) + (rounds if federation else 0)


def audit(
    plan: Plan,
    *,
    runs: int = 100_000,
    coordinates: int = _COORDINATES,
    draws: int = DRAWS,
    federation: bool = False,
    tick: Callable[[int], None] = lambda _: None,
) -> AuditReport:
    """Run every check on a deployed learner of this plan; also in a federation, if asked to.

    Guarantees: if the code is correct, all checks together raise an alarm with probability at most
    `SHARES` times `FALSE_ALARMS`. Stores are made in temporary folders; seeds come from the
    operating system, as in deployment.

    Args:
        plan: what is audited; one private method.
        runs: how many runs with a canary.
        coordinates: of the one long run, as many as fit.
        draws: how often each cell test sees a message.
        federation: also run a server and learners, and audit their wire.
        tick: called with the number of rounds that have been done.

    Returns:
        Every check with its verdict, beside the guarantee.

    Raises:
        InputError: for a plan that cannot be deployed, or has too many rounds to audit.

    """
    digest, made = plan_digest(plan), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    plan = auditable(plan)
    rounds, tau = plan.learning.rounds, plan.learning.local_steps
    dim = max(min(coordinates, _NUMBERS // rounds), 2 * rounds + 2)
    terms = Terms.of(plan, dim)
    law = law_of_terms(terms)
    middle = {rounds // 3, rounds // 2}
    fixed = listen(plan, terms, adaptive=False, restarts=middle, tick=tick)
    adaptive = listen(plan, terms, Unkind(terms, seed=1), adaptive=True, restarts=middle, tick=tick)
    small = dataclasses.replace(terms, dim=_TWIN_DIM)
    many = canary_runs(
        plan,
        dataclasses.replace(terms, dim=1),
        runs,
        others="loud" if tau == 1 else "echo",
        adaptive=True,
        insist=True,
        tick=lambda _: tick(rounds),
    )
    told = None
    if terms.telemetry is not None:
        told = telemetry_runs(plan, terms, min(runs, _TELEMETRY_RUNS, _NUMBERS // rounds))
    return AuditReport(
        plan_sha256=digest,
        made=made,
        guarantee=terms.guarantee,
        fixed=one_run(fixed.residuals, law),
        adaptive=one_run(adaptive.residuals, law),
        independence_p=unlike_each(fixed, adaptive, law),
        repeats_unlike=fixed.repeats_unlike + adaptive.repeats_unlike,
        on_grid=_on_grid(fixed, terms) and _on_grid(adaptive, terms),
        twins=twin_runs(plan, small, at=law.worst, adaptive=tau == 1),
        many=many,
        local_steps=tau,
        checks=deployed_checks(plan, terms, (fixed, adaptive), draws=draws, tick=tick)
        + (federation_checks(plan, terms, tick=tick) if federation else ())
        + (() if told is None else told.checks),
        telemetry=None if told is None else told.many,
    )


def unlike_each(one: Transcript, other: Transcript, law: Law) -> float:
    """p-value for noise of two learners that is independent."""
    assert law.root is not None
    first, second = (solve_triangular(law.root, transcript.residuals, lower=True) for transcript in (one, other))
    together = float((first * second).sum()) / math.sqrt(float((first**2).sum()))
    return float(2.0 * norm.sf(abs(together)))


def _on_grid(transcript: Transcript, terms: Terms) -> bool:
    """The grid that the promise needs, worked out anew, and no finer."""
    return transcript.grid >= grid_for(terms.guarantee.clip_norm, terms.guarantee.noise_std).step


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(held) for held in value]
    return "infinite" if isinstance(value, float) and math.isinf(value) else value


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
