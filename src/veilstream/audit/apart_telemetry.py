"""Many learners of one number and m metrics in one, so that telemetry is audited as deployed.

`ApartWithTelemetry` is for telemetry what `Apart` is for gradients. What a client contributes comes
from `ClientSteps.noisy`, as deployed: gradient, metrics, clipping, the vector of 1 + m whole numbers,
its noise. Only where that code treats a client as one vector is it called once for each different
client of a step, with the vector of 1 + m numbers that each has: `ClientTelemetry.values`,
`LocalRounds.clip` and `LocalRounds.whole`. Noise, ledger, seeds, grid and messages are inherited,
over one vector of all runs: first every run's gradient, then every run's first metric, and so on,
so that what the deployed code does behind the first ``terms.dim`` coordinates it does to metrics.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from veilstream.audit.disposable import Apart, OneByOne
from veilstream.deployment.client_steps import ClientTelemetry
from veilstream.deployment.epochs import LearnerParts
from veilstream.deployment.local_rounds import LocalRounds
from veilstream.deployment.terms import Terms
from veilstream.errors import InputError
from veilstream.learning.tasks import Sample, Task
from veilstream.plans.plan import Plan
from veilstream.privacy.gradient_types import ClippedGradient, Hidden, MetricValues, RawGradient
from veilstream.privacy.grid import OnGrid
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
    """Whose vectors are made run by run."""
    return _WholeOneByOne(_ManyRuns.of_terms(terms), epoch)


@dataclasses.dataclass(frozen=True)
class _ManyRuns(Terms):
    """The same terms for ``dim`` runs, each with its own metrics."""

    @classmethod
    def of_terms(cls, terms: Terms) -> _ManyRuns:
        held = {field.name: getattr(terms, field.name) for field in dataclasses.fields(terms)}
        return cls(**held)

    @property
    def release_dim(self) -> int:
        """Of all runs together."""
        assert self.telemetry is not None
        return self.dim * (1 + len(self.telemetry.metrics))


class _EachClient(ClientTelemetry):
    """Metrics of the client that each run has, (runs, m)."""

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
        """`LocalRounds.whole` of each different client, as the vector of 1 + m that it is."""
        told = self.terms.telemetry
        assert told is not None
        units = gradient.reveal()
        shape = len(units), len(told.metrics)
        metrics = np.full(shape, _NOBODY) if values is None else values.reveal()
        clients = np.concatenate([units[:, None].astype(np.float64), metrics], axis=1)
        different, which = np.unique(clients, axis=0, return_inverse=True)
        vectors = []
        for number, *own in different:
            one = ClippedGradient(OnGrid(np.array([number], np.int64)))
            there = None if own[0] == _NOBODY else MetricValues(np.array(own))
            vectors.append(super().whole(one, there).reveal())
        return ClippedGradient(OnGrid(np.stack(vectors)[which.ravel()].T.ravel()))
