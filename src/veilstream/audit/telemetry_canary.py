"""A canary in the whole vector: gradient and telemetry move together, as far as they may.

Each run has a vector of 1 + m numbers, m metrics behind a gradient of one number, and is judged
along the canary's direction as in `canary`. Metrics are a small part of it, so their coordinates
are judged by themselves as well, all runs together (`CoordinateGroup`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from veilstream.audit.cells import later_message
from veilstream.audit.deployed import RIGHT, WRONG, TelemetryTask, vector_by_hand
from veilstream.audit.disposable import Apart, OneByOne
from veilstream.audit.statistics import ManyRun, many_run
from veilstream.audit.statistics.check import Check
from veilstream.audit.statistics.groups import CoordinateGroup
from veilstream.audit.statistics.law import patterns
from veilstream.audit.transcript import law_of_terms, reach_of
from veilstream.deployment.client_steps import ClientTelemetry
from veilstream.deployment.epochs import LearnerParts
from veilstream.deployment.learner import Learner
from veilstream.deployment.local_rounds import LocalRounds
from veilstream.deployment.release import decode
from veilstream.deployment.terms import Terms
from veilstream.errors import InputError
from veilstream.learning.tasks import Sample, Task
from veilstream.plans.plan import Plan
from veilstream.privacy.gradient_types import ClippedGradient, Hidden, MetricValues, RawGradient
from veilstream.privacy.grid import OnGrid
from veilstream.privacy.guarantee import Neighbours
from veilstream.privacy.telemetry import Telemetry

_NOBODY = np.inf  # in a row of metrics; no metric is


class ManyClients(Task, Protocol):
    """A task whose sample stands for one client in each of ``dim`` runs."""

    def clients(self, sample: Sample) -> tuple[list[Sample | None], NDArray[np.intp]]:
        """The different records (None: nobody comes), and which of them each run has."""


class ApartWithTelemetry(Apart):
    """Every coordinate of the task is a run of its own, of dimension one, with its metrics."""

    def __init__(self, plan: Plan, task: ManyClients) -> None:
        if plan.telemetry is None:
            raise InputError("telemetry", None, "a plan with telemetry", "add [telemetry]")
        super().__init__(plan, task, parts=LearnerParts(rounds=_rounds, telemetry=_EachClient))


def _rounds(terms: Terms, epoch: int) -> LocalRounds:
    return _WholeOneByOne(_ManyRuns.of_terms(terms), epoch)


@dataclasses.dataclass(frozen=True)
class _ManyRuns(Terms):
    @classmethod
    def of_terms(cls, terms: Terms) -> _ManyRuns:
        held = {field.name: getattr(terms, field.name) for field in dataclasses.fields(terms)}
        return cls(**held)

    @property
    def release_dim(self) -> int:
        assert self.telemetry is not None
        return self.dim * (1 + len(self.telemetry.metrics))


class _EachClient(ClientTelemetry):
    def __init__(self, task: Task, telemetry: Telemetry, clip_norm: float) -> None:
        super().__init__(task, telemetry, clip_norm)
        self._clients = cast("ManyClients", task).clients

    def values(self, begun: Hidden[NDArray[np.float32]], sample: Sample, raw: RawGradient) -> MetricValues:
        """Asked of the deployed code for each different client."""
        records, which = self._clients(sample)
        numbers, rows = raw.reveal(), []
        for k, record in enumerate(records):
            if record is None or not (which == k).any():
                rows.append(np.full(len(self._each), _NOBODY))
                continue
            own = RawGradient(numbers[np.argmax(which == k)].reshape(1))
            rows.append(super().values(begun, record, own).reveal())
        return MetricValues(np.stack(rows)[which])


class _WholeOneByOne(OneByOne):
    def whole(self, gradient: ClippedGradient, values: MetricValues | None) -> ClippedGradient:
        """`LocalRounds.whole` of each run, as the vector of 1 + m that it is."""
        told = self.terms.telemetry
        assert told is not None
        units = gradient.reveal()
        behind = np.zeros((len(units), len(told.metrics)), np.int64)
        alone = ClippedGradient(OnGrid(np.zeros(1, np.int64)))
        for client in [] if values is None else values.reveal():  # a row for each run
            different, which = np.unique(client, axis=0, return_inverse=True)
            there = [None if own[0] == _NOBODY else MetricValues(own) for own in different]
            behind += np.stack([super(_WholeOneByOne, self).whole(alone, own).reveal()[1:] for own in there])[
                which.ravel()
            ]
        return ClippedGradient(OnGrid(np.concatenate([units[:, None], behind], axis=1).T.ravel()))


Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Float32s = NDArray[np.float32]
Bools = NDArray[np.bool_]

_NUMBERS = 8000  # that one learner sends: few enough for the draws of a group of steps to be made together
_CANARY, _OTHER = 2.0, 3.0  # targets of the samples that stand for a step of all runs
_ENDLESS = 1e12  # g / (|g| + gamma) is then a direction, to float32


class TelemetryFindings(NamedTuple):
    """What the runs say of the whole vector, and of telemetry's coordinates alone."""

    many: ManyRun
    checks: tuple[Check, ...]


class _WholeCanary(TelemetryTask):
    """In every run a client who says nothing, or at its step the canary of that run's coin."""

    def __init__(self, terms: Terms, second: Bools) -> None:
        self.dim = len(second)
        self.which = second.astype(np.intp)
        self.replaced = terms.guarantee.neighbours is Neighbours.REPLACE_ONE
        B = terms.grid.clip_norm
        # Three times too long, so clipped; just within the bound, so not clipped. Normalised
        # gradients come close to their bound only if they are endless.
        long, short = (3.0, 1.0 - 2.0**-20) if terms.gamma is None else (_ENDLESS, _ENDLESS)
        self.raw = np.array([-short * B if self.replaced else 0.0, long * B], np.float32)
        """The canary's gradients in the first and in the second world."""
        self._zeros = np.zeros(self.dim, np.float32)

    def host_gradient(self, z: Float32s, sample: Sample) -> Float32s:
        if float(sample.target) == _CANARY:
            gradients: Float32s = self.raw[self.which]
            return gradients
        return self._zeros

    def clients(self, sample: Sample) -> tuple[list[Sample | None], NDArray[np.intp]]:
        wrong, right = (Sample(sample.features, target) for target in (WRONG, RIGHT))
        if float(sample.target) == _CANARY:
            return [wrong if self.replaced else None, right], self.which
        return [wrong], np.zeros(self.dim, np.intp)


class _Expected:
    """What clients should add, worked out by hand, in units of the grid."""

    def __init__(self, terms: Terms, task: _WholeCanary) -> None:
        self.other = vector_by_hand(terms, np.zeros(1, np.float32), right=False)
        first = vector_by_hand(terms, task.raw[:1], right=False)
        second = vector_by_hand(terms, task.raw[1:], right=True)
        self.canary = np.stack([first if task.replaced else np.zeros_like(first), second])
        """(2, 1 + m), of the first and of the second world."""


def whole_reach(terms: Terms) -> float:
    """How far neighbours' whole vectors are apart, worked out apart from what calibrates.

    Where a record is replaced, a client is there before and after: `present` does not move.
    """
    told = terms.telemetry
    assert told is not None
    replaced = terms.guarantee.neighbours is Neighbours.REPLACE_ONE
    moving = [name for name in told.metrics if not (replaced and name == "present")]
    each = (told.width if replaced else told.width / 2) / terms.clients_per_step
    return float(np.hypot(reach_of(terms), each * np.sqrt(len(moving))))


def telemetry_runs(
    plan: Plan,
    terms: Terms,
    runs: int,
    *,
    batch: int | None = None,
    make: Callable[[Plan, Any], Learner] = ApartWithTelemetry,
    seed: int | None = None,
    tick: Callable[[int], None] = lambda _: None,
) -> TelemetryFindings:
    """Run, collect every message of every run, and judge; ``seed`` is of the coins.

    Guarantees: for correct code `TelemetryFindings.many` alarms as `many_run` says, and each of the
    checks has P(p <= x) <= x.
    """
    told = terms.telemetry
    if told is None:
        raise InputError("telemetry", None, "a plan with telemetry", "add [telemetry]")
    law = law_of_terms(terms, whole_reach(terms))
    # From theory: the direction in which the two worlds differ, and the point half-way.
    direction, centre = _between(terms)
    coins = np.random.default_rng(seed).integers(0, 2, runs).astype(bool)
    transcripts = np.empty((terms.rounds, runs))
    messages = {0, later_message(terms.rounds), terms.rounds - 1}
    metrics = CoordinateGroup("telemetry's coordinates", law, terms.grid.step, messages=messages)
    each = [CoordinateGroup(f"telemetry's {name}", law, terms.grid.step) for name in told.metrics]
    batch = batch or _NUMBERS // (1 + len(each))
    for first in range(0, runs, batch):
        here = slice(first, min(first + batch, runs))
        task = _WholeCanary(terms, coins[here])
        with make(plan, task) as learner:
            prefixes, others, known = _messages(terms, learner, task, law.worst)
        transcripts[:, here] = (prefixes - others[:, None]) @ direction * terms.grid.step
        behind = slice(1, None)
        flat = terms.rounds, -1
        units = prefixes - known
        metrics.add(units[..., behind].reshape(flat), known[..., behind].reshape(flat))
        for k, group in enumerate(each, 1):
            group.add(units[..., k], known[..., k])
        tick(terms.rounds)
    assert law.expected is not None
    many = many_run(
        transcripts, coins, law, delta=terms.guarantee.delta, expected=float(law.expected[law.worst]), centre=centre
    )
    groups = [metrics, *(each if len(each) > 1 else ())]
    return TelemetryFindings(many, tuple(check for group in groups for check in group.checks()))


def _messages(terms: Terms, learner: Learner, task: _WholeCanary, worst: int) -> tuple[Integers, Integers, Integers]:
    """Prefixes (R, runs, 1 + m) read from the bytes; of others' vectors (R, 1 + m); of all."""
    tau = terms.local_steps
    visits = patterns(terms.rounds * tau, terms.guarantee.participation)[worst]
    expected = _Expected(terms, task)
    numbers = len(expected.other)
    prefixes = np.empty((terms.rounds, task.dim, numbers), np.int64)
    others = np.zeros((terms.rounds, numbers), np.int64)
    canaries = np.zeros(terms.rounds, np.int64)
    x, nothing = np.zeros(task.dim, np.float32), np.zeros((), np.float32)
    places = range(terms.clients_per_step)
    for r in range(terms.rounds):
        learner.begin_round(r, x)
        offered = []
        for step in range(r * tau, (r + 1) * tau):
            for place in places:
                if step in visits and place == 0:
                    offered.append(("canary", Sample(nothing, _CANARY)))
                    canaries[r:] += 1
                else:
                    offered.append((f"client {step}/{place}", Sample(nothing, _OTHER)))
                    others[r:] += expected.other
        learner.take_many(offered)
        message = decode(learner.finish_round().payload)
        prefixes[r] = message.prefix.reshape(numbers, task.dim).T
    known = others[:, None] + canaries[:, None, None] * expected.canary[task.which]
    return prefixes, others, known


def _between(terms: Terms) -> tuple[Floats, float]:
    """Unit vector from the first world to the second, and half their sum along it; by hand."""
    told, B = terms.telemetry, terms.grid.clip_norm / terms.clients_per_step
    assert told is not None
    half = told.width / 2 / terms.clients_per_step
    second = np.array([B] + [half] * len(told.metrics))
    first = np.zeros_like(second)
    if terms.guarantee.neighbours is Neighbours.REPLACE_ONE:
        first = np.array([-B] + [half if m == "present" else -half for m in told.metrics])
    direction = (second - first) / np.linalg.norm(second - first)
    return direction, float(0.5 * (first + second) @ direction)
