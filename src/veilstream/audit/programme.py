"""What an audit will do: which runs, how many, of which size; and so how long it takes.

A quick audit makes the same checks as a full one, with fewer runs and draws. Plans that are longer
than an audit can be are audited with fewer rounds, and the record says so (`Programme.reduced_from`):
the law of a transcript needs a matrix of steps by steps.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from veilstream.audit.canary import BATCH
from veilstream.audit.cells import DIM, DRAWS, later_message
from veilstream.audit.checks import EPOCHS, GROUP_DIM, GROUP_RUNS, MOST_LEARNERS, SMALL_DIM, varied
from veilstream.audit.deployed import listen
from veilstream.audit.remaining_promise import floor_plan, known_order
from veilstream.audit.secret_order import clients_of, costs_of
from veilstream.audit.sums import summed
from veilstream.deployment.terms import Terms
from veilstream.errors import InputError
from veilstream.plans.plan import Plan
from veilstream.plans.plan_tables import DataPlan
from veilstream.privacy.guarantee import Guarantee

MOST_ROUNDS, MOST_STEPS = 2048, 4096
QUICK_ROUNDS, QUICK_STEPS = 256, 2048
LARGE_RUNS = 3
_COORDINATES = 100_000
_NUMBERS = 16_000_000  # of one transcript
_QUICK_NUMBERS = 4_000_000  # of one run, all its steps
_FULL_LATE_NUMBERS = 400_000_000
_TELEMETRY_RUNS = 100_000
_GROUPED_STEPS, _GROUPED_ROUNDS = 8, 24
"""Long enough for learners to keep their noise whole (every 64 steps), and to start again from there."""
_FEDERATION_DIM = 4000
_GROUP_CELLS = 8001  # coordinates, so that draws of a group are made together
_PROBE_DIM, _PROBE_ROUNDS = 20_000, 8
_OFTEN_LATE = 6.0  # an audit may take so many times as long as it was said to: machines are shared
_LEAST_LIMIT_S = 180.0


def reduced(plan: Plan, *, full: bool = True) -> Plan:
    """The plan with as many rounds as an audit can look at; budget, mechanism and all else stay."""
    rounds, steps = (MOST_ROUNDS, MOST_STEPS) if full else (QUICK_ROUNDS, QUICK_STEPS)
    most = max(2, min(rounds, steps // plan.learning.local_steps))
    if plan.learning.rounds <= most:
        return plan
    if plan.window is not None and plan.privacy is not None:  # whole windows, and two of them at least
        of_window = min(plan.window // plan.learning.local_steps, most // 2)
        most -= most % of_window
        privacy = dataclasses.replace(plan.privacy, window=of_window * plan.learning.local_steps)
        return dataclasses.replace(plan, privacy=privacy, learning=dataclasses.replace(plan.learning, rounds=most))
    return dataclasses.replace(plan, learning=dataclasses.replace(plan.learning, rounds=most))


def auditable(plan: Plan, *, full: bool = True) -> Plan:
    """The plan for one learner, with the audit's own clients, and without what is post-processing.

    All that the promise rests on stays: budget, mechanism, horizon, clip norm, participation; but for
    the horizon of plans that are longer than an audit (`reduced`). A method of kind "auto" normalises
    gradients as deployed, with the gamma of a task whose gradients nobody knows a bound of. Weights of labels only
    shorten gradients; the audit's have none, and so the full length.
    """
    plan = reduced(plan, full=full)
    learning = dataclasses.replace(
        plan.learning,
        learners=1 if plan.trust is None else plan.learning.learners,
        projection_radius=None,
        model_norm_cap=1e30,
        task="custom",
        ridge=0.0,
        class_weights=None,
    )
    return dataclasses.replace(plan, learning=learning, data=DataPlan(kind="custom"))


def in_groups(plan: Plan, terms: Terms) -> Plan | None:
    """The plan itself if its rounds have several steps, and enough of them; else the same in rounds of several.

    A learner stores the steps of a round together, and draws their noise together. With one step a
    round that code would never run. None where such a plan cannot be.
    """
    steps = terms.rounds * terms.local_steps
    if terms.local_steps >= _GROUPED_STEPS // 2 and steps >= _GROUPED_STEPS * _GROUPED_ROUNDS:
        return plan
    rounds = max(_GROUPED_ROUNDS, steps // _GROUPED_STEPS)
    try:
        learning = dataclasses.replace(plan.learning, rounds=rounds, local_steps=_GROUPED_STEPS)
        return dataclasses.replace(plan, learning=learning)
    except InputError:  # participation that so few rounds do not allow
        return None


@dataclass(frozen=True, eq=False, kw_only=True)
class Programme:
    """All that one audit does."""

    given: Plan
    plan: Plan
    terms: Terms
    """With as many coordinates as the long runs have."""
    grouped: Plan | None
    grouped_terms: Terms | None
    full: bool
    federation: bool
    seed: int
    """Of the order in which clients come, restarts and kills; never of noise."""
    runs: int
    draws: int
    late: int
    """The message, from 0, whose cells are looked at beside the first and the tenth: drawn for each audit."""
    secret: Plan | None = None
    """The plan as it is, where its order is secret; all above is then of the same noise with a known order."""
    secret_terms: Terms | None = None
    """With as many coordinates as a learner of that audit has clients."""
    sums: Plan | None = None
    """The plan with fewer learners, where only sums are seen; all above is then of each learner's own noise, and so of
    the floor."""
    sums_terms: Terms | None = None
    promise: Guarantee
    """Of the plan, but for its rounds."""

    @classmethod
    def of(
        cls,
        plan: Plan,
        *,
        full: bool = False,
        runs: int | None = None,
        coordinates: int = _COORDINATES,
        draws: int | None = None,
        federation: bool = True,
        seed: int | None = None,
    ) -> Programme:
        """What an audit of this plan does; ``runs``, ``coordinates`` and ``draws`` where they are given."""
        seed = secrets.randbits(31) if seed is None else seed
        short, secret, secret_terms, sums = auditable(plan, full=full), None, None, None
        some = Terms.of(short, 1)
        promise = some.guarantee
        if short.order == "secret":
            secret = short if short.trust is None else floor_plan(short, some)
            secret_terms = some if short.trust is None else Terms.of(secret, 1)
            secret_terms = dataclasses.replace(secret_terms, dim=clients_of(secret_terms))
            short = known_order(short, some)
            some = Terms.of(short, 1)
        if short.trust is not None:
            sums, short = summed(short), floor_plan(short, some)
            some = Terms.of(short, 1)
        rounds, tau = some.rounds, some.local_steps
        steps = rounds * tau
        most = _NUMBERS // rounds if full else _QUICK_NUMBERS // steps
        terms = Terms.of(short, max(min(coordinates, most), 2 * rounds + 2))
        grouped = in_groups(short, terms)
        late = int(np.random.default_rng([seed, 3]).integers(rounds // 2, rounds))
        return cls(
            given=plan,
            plan=short,
            terms=terms,
            grouped=grouped,
            grouped_terms=None if grouped is None else Terms.of(grouped, 1),
            full=full,
            federation=federation,
            seed=seed,
            runs=runs or (100_000 if full else int(np.clip(2_000_000 // steps, 2000, 20_000))),
            draws=draws or (DRAWS if full else max(200_000, 2_000_000 // tau)),
            late=late,
            secret=secret,
            secret_terms=secret_terms,
            sums=sums,
            sums_terms=None if sums is None else Terms.of(sums, 1),
            promise=promise,
        )

    @property
    def reduced_from(self) -> int | None:
        """Rounds of the plan that was given, where the audit has fewer."""
        rounds = self.given.learning.rounds
        return None if rounds == self.plan.learning.rounds else rounds

    @property
    def late_draws(self) -> int:
        """Numbers of the late message."""
        numbers = _FULL_LATE_NUMBERS if self.full else _QUICK_NUMBERS
        return int(np.clip(numbers // ((self.late + 1) * self.terms.local_steps), 20_000, self.draws))

    @property
    def late_dim(self) -> int:
        """Of learners whose late message is looked at; odd, so that the last draw has no partner."""
        return min((1 << 18) + 1, self.late_draws)

    @property
    def group_draws(self) -> int:
        """Numbers of the last message of learners that take groups."""
        assert self.grouped_terms is not None
        numbers = (10 if self.full else 1) * _QUICK_NUMBERS
        return int(np.clip(numbers // (self.grouped_terms.rounds * self.grouped_terms.local_steps), 16_000, self.draws))

    @property
    def group_dim(self) -> int:
        """Of those learners."""
        return min(_GROUP_CELLS, self.group_draws)

    @property
    def group_canaries(self) -> int:
        """Runs with a canary among clients who come in groups, where the plan itself has none."""
        return min(self.runs, 20_000)

    @property
    def telemetry_runs(self) -> int:
        """Runs with a canary in telemetry."""
        least = 20_000 if self.terms.local_steps == 1 else 4000
        return min(max(self.runs, least), _TELEMETRY_RUNS, _NUMBERS // self.terms.rounds)

    @property
    def secret_runs(self) -> int:
        """Clients with a secret step who are told apart, or not."""
        return 40_000 if self.full else 8000

    @property
    def sum_runs(self) -> int:
        """Runs with a canary where only sums are seen; each is a coordinate of learners that are run once."""
        assert self.sums_terms is not None
        return int(np.clip(self.runs, 2 * self.sums_terms.rounds + 400, 40_000 if self.full else 8000))

    def learners(self, rounds: int) -> int:
        """Small ones: so many that their messages are enough, and no more than the time allows."""
        messages, most = (6144, MOST_LEARNERS) if self.full else (1536, 8)
        return int(np.clip(messages // (EPOCHS * rounds), 4, most))

    def costs(self) -> dict[str, float]:
        """Milliseconds of an ordinary core for each stage, roughly; they are scaled by `seconds`."""
        t, g = self.terms, self.grouped_terms
        rounds, tau = t.rounds, t.local_steps
        found = {
            "long runs": LARGE_RUNS * cost(rounds, tau, t.release_dim),
            "canaries": cost(rounds, tau, min(BATCH, self.runs)) * -(-self.runs // BATCH),
            "same draws": 6 * cost(rounds, tau, 64),
            "small learners": EPOCHS * self.learners(rounds) * cost(rounds, tau, SMALL_DIM),
            "cells": self._cell_cost(later_message(rounds), self.draws, DIM)
            + self._cell_cost(self.late, self.late_draws, self.late_dim),
            "a copied store": 3 * cost(4, tau, 400),
        }
        if t.telemetry is not None:
            numbers = self.telemetry_runs * (1 + len(t.telemetry.metrics))
            found["canaries in telemetry"] = 3 * cost(rounds, tau, 8000) * -(-numbers // 8000)
        if g is not None:
            found["groups"] = GROUP_RUNS * cost(g.rounds, g.local_steps, GROUP_DIM)
            learners = -(-self.group_draws // self.group_dim)
            found["groups"] += learners * cost(g.rounds, g.local_steps, self.group_dim)
            if self.grouped is not self.plan:
                found["groups"] += cost(g.rounds, g.local_steps, BATCH) * -(-self.group_canaries // BATCH)
                found["groups"] += 4 * cost(g.rounds, g.local_steps, 64)
                found["groups"] += EPOCHS * self.learners(g.rounds) * cost(g.rounds, g.local_steps, SMALL_DIM)
        if self.secret_terms is not None:
            found["a secret order"] = costs_of(self.secret_terms, self.secret_runs, cost)
        if self.sums is not None and self.sums_terms is not None:
            each = cost(self.sums_terms.rounds, 1, 2 * self.sum_runs) + 4.0 * self.sums_terms.rounds
            found["sums"] = self.sums.learning.learners * each
        if self.federation:
            found["federation"] = 4 * cost(rounds, tau, _FEDERATION_DIM)
            if g is not None and self.grouped is not self.plan:
                found["federation"] += 4 * cost(g.rounds, g.local_steps, _FEDERATION_DIM)
        return found

    def _cell_cost(self, last: int, draws: int, dim: int) -> float:
        dim = min(dim, draws)
        return cost(last + 1, self.terms.local_steps, dim) * -(-draws // dim)

    def seconds(self) -> float:
        """How long all of it takes on this machine, from a short run."""
        terms = dataclasses.replace(self.terms, dim=_PROBE_DIM)
        rounds = min(_PROBE_ROUNDS, terms.rounds)
        began = time.monotonic()
        listen(self.plan, terms, adaptive=False, rounds=rounds, served=varied(terms.rounds, 0)["served"])
        slower = (time.monotonic() - began) / (1e-3 * cost(rounds, terms.local_steps, terms.dim))
        return 2.0 + max(0.3, slower) * 1e-3 * sum(self.costs().values())

    def in_words(self) -> str:
        """What will be run."""
        t = self.terms
        size = f"{t.rounds:,} rounds of {t.local_steps}"
        if self.reduced_from is not None:
            size += f" (of the plan's {self.reduced_from:,} rounds: longer plans are audited with fewer)"
        parts = [
            f"{LARGE_RUNS} runs with {t.dim:,} coordinates",
            f"{self.runs:,} runs with a canary",
            f"{self.learners(t.rounds)} small learners through {EPOCHS} epochs",
            f"{self.draws:,} numbers of message 1 and {later_message(t.rounds) + 1}, {self.late_draws:,} of "
            f"message {self.late + 1}",
        ]
        if self.grouped is not None:
            parts.append("learners that take clients in groups")
        if self.secret_terms is not None:
            parts.append(f"{self.secret_runs:,} clients with a secret step")
        if self.sums is not None:
            parts.append(f"sums over {self.sums.learning.learners} learners in {self.sum_runs:,} runs")
        if self.federation:
            parts.append("a federation")
        return f"{'full' if self.full else 'quick'} audit, {size}: " + ", ".join(parts)


def limit_of(seconds: float) -> float:
    """The most that an audit may take that was said to take so many seconds."""
    return max(_LEAST_LIMIT_S, _OFTEN_LATE * seconds)


def cost(rounds: int, steps: int, dim: int) -> float:
    """Milliseconds of a run, with what is worked out from it."""
    return rounds * (2.0 + steps * (0.4 + dim / 2500.0))


class Meter:
    """Counts what has been done, in the unit of `cost`, and stops an audit that is past its time."""

    def __init__(
        self, tick: Callable[[int], None], say: Callable[[str], None], limit_s: float | None, programme: Programme
    ) -> None:
        self._tick, self._say, self._limit_s = tick, say, limit_s
        self._costs = programme.costs()
        self._began, self._whole = time.monotonic(), 0.0
        self.stages = 0

    @property
    def elapsed_s(self) -> float:
        """Since the audit began."""
        return time.monotonic() - self._began

    def stage(self, name: str) -> None:
        """A part of the audit begins."""
        self.stages += 1
        self._say(f"{name} ({self.stages} of {len(self._costs)}, {self.elapsed_s:.0f} s so far)")

    def rounds(self, terms: Terms, dim: int) -> Callable[[int], None]:
        """A callback for rounds of learners with so many numbers."""
        each = cost(1, terms.local_steps, dim)

        def tick(count: int) -> None:
            self._whole += count * each
            self._tick(int(self._whole))
            self._whole -= int(self._whole)
            if self._limit_s is not None and self.elapsed_s > self._limit_s:
                raise InputError(
                    "audit",
                    f"{self.elapsed_s:.0f} s",
                    f"an audit that ends within the {self._limit_s:.0f} s it announced at most",
                    "nothing was decided: this machine is busier than when it began; try again, or with fewer "
                    "rounds (--set learning.rounds=64), --runs or --draws",
                )

        return tick
