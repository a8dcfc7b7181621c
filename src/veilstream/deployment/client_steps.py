"""From clients' records to their noisy step, whatever a record makes the task do.

A client's data must not be able to stop or steer a learner: a record that cannot be used and a gradient
that fails are zero and use up their place in the step, a metric that fails counts as wrong.

Gradients of several clients are computed as arrays with a row for each place, also for places that are
empty. So one client's row has the same bits whatever the others are: replacing one record changes no
other client's contribution, not even in the last digit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.local_rounds import LocalRounds
from veilstream.deployment.terms import Terms
from veilstream.errors import InputError, MissingExtra
from veilstream.learning.algorithm import without_tiny
from veilstream.learning.client_metrics import metric_values
from veilstream.learning.purity import Asked, check_pure, check_rows_apart, example_records
from veilstream.learning.tasks import LeastSquares, Logistic, Ripple, Sample, Task, TaskDetails
from veilstream.plans.plan import Plan
from veilstream.privacy.gradient_types import ClippedGradient, Hidden, MetricValues, Noised, RawGradient, add_up
from veilstream.privacy.telemetry import Telemetry

_log = logging.getLogger(__name__)
Float32s = NDArray[np.float32]
_ROWS_BYTES = 1 << 20
_FILLED_UP = 16
_MEASURED = 3
_WITHOUT_ANSWER = {"accuracy": 0.0, "loss": 1.0, "clipped": 1.0, "present": 1.0}
"""Metrics of a client on whose record the task fails: present, and wrong."""


class ClientTelemetry:
    """A task's metrics of one client."""

    def __init__(self, task: Task, telemetry: Telemetry, clip_norm: float) -> None:
        self._task, self._clip_norm = task, clip_norm
        self._each = [replace(telemetry, metrics=(name,)) for name in telemetry.metrics]
        self.failed = 0
        """Clients since this start on whose record the task failed: for this machine only."""
        self.logs_failures = True
        """Whether the first failure is logged when it happens; under a secret order that says who was used then."""

    @property
    def asked(self) -> tuple[Asked, ...]:
        """What is asked of the task beside gradients and predictions, to be checked with them."""
        if not any(one.metrics == ("loss",) for one in self._each):
            return ()
        return (lambda x, sample: self._task.loss(cast(Any, x), sample),)

    def check(self) -> None:
        """Refuse a task that does not have these metrics.

        Raises:
            InputError: for a task that cannot predict.
            MissingExtra: for a loss that needs JAX, where there is none.

        """
        x = np.zeros(self._task.dim, np.float32)
        x.flags.writeable = False
        for record in example_records(self._task)[:1]:
            for one in self._each:
                try:
                    self._value(one, x, record, np.zeros(self._task.dim))
                except MissingExtra:
                    raise
                except Exception as error:  # whatever a task does
                    raise InputError(
                        "telemetry.metrics",
                        one.metrics[0],
                        f"a task that can say it; {type(self._task).__name__} raised {type(error).__name__}",
                        "another metric, or a task that predicts",
                    ) from None

    def values(self, begun: Hidden[Float32s], sample: Sample, raw: RawGradient) -> MetricValues:
        """Of a client who is there; never raises. Failures are counted, the first is logged."""
        x = begun.reveal().view()
        x.flags.writeable = False  # a task that wrote to it would carry data along
        values = np.zeros(len(self._each))
        failed = False
        with np.errstate(all="ignore"):
            numbers = raw.reveal().astype(np.float64)
            for place, one in enumerate(self._each):
                try:
                    values[place] = self._value(one, x, sample, numbers)
                except Exception as error:
                    values[place] = _WITHOUT_ANSWER[one.metrics[0]]
                    if self.logs_failures and not (self.failed or failed):
                        _log.warning(
                            "telemetry: the task raised %s for the %s of a client, which counts as "
                            "wrong; further failures are counted and not logged",
                            type(error).__name__,
                            one.metrics[0],
                        )
                    failed = True
        self.failed += failed
        return MetricValues(values)

    def _value(self, one: Telemetry, x: Float32s, sample: Sample, raw: NDArray[Any]) -> float:
        (value,) = metric_values(one, self._task, x, sample, raw, self._clip_norm)
        return float(value)


class ClientSteps:
    """One task's noisy steps; the task is checked before its first client.

    Its own NumPy gradient is used if it has one (`host_gradient`), else JAX's, compiled.
    """

    def __init__(
        self, task: Task, terms: Terms, telemetry: Callable[[Task, Telemetry, float], ClientTelemetry] = ClientTelemetry
    ) -> None:
        self._task, self._terms = task, terms
        self.telemetry: ClientTelemetry | None = None
        if terms.telemetry is not None:
            self.telemetry = telemetry(task, terms.telemetry, terms.grid.clip_norm)
        self.clipped = 0
        """Gradients since this start that were longer than the clip norm: for this machine only."""
        self._checked = False
        details = TaskDetails.of(task)
        host = details.host_gradient
        self._function: Callable[[Float32s, Sample], Any] = host or self._compiled_gradient
        self._compiled: Callable[..., Any] | None = None
        self._compiled_many: Callable[..., Any] | None = None
        self._many = details.host_gradients
        if self._many is None and host is None:
            self._many = self._compiled_gradients
        self._at_once = min(terms.clients_per_step, max(1, _ROWS_BYTES // (4 * task.dim)))
        """Clients whose gradients are one array: a step's, or as many as the processor's cache holds."""
        self._hides_counts = terms.plan.order == "secret"
        if self.telemetry is not None:
            self.telemetry.logs_failures = not self._hides_counts
        if self._hides_counts and host is not None and not _never_fails(task):
            # If one record makes an array fail, each of its records is asked for again: that time would tell of it.
            self._many = None
        if self._hides_counts:  # how many a step has differs: fewer at once are filled up with less work
            self._at_once = min(self._at_once, max(_FILLED_UP, -(-terms.clients_per_step // 4)))
        self._arrays = 0  # of gradients, since `fill_up` was last called
        self._blank = example_records(task)[0]
        """A made-up record in the place of one that is missing: its gradient is computed and dropped."""
        if host is not None:  # JAX's is checked when one is needed: a restart need not wait for JAX
            check_pure(task, host)

    @property
    def metrics_failed(self) -> int:
        """Clients since this start on whose telemetry the task failed: for this machine only."""
        return 0 if self.telemetry is None else self.telemetry.failed

    def check(self) -> None:
        """Once a process: that the task is pure in all that is asked of it, and has the metrics.

        Raises:
            InputError: for a task that remembers what it was asked before, or cannot predict.

        """
        if self._checked:
            return
        asked: tuple[Asked, ...] = ()
        if self.telemetry is not None:
            self.telemetry.check()
            asked = self.telemetry.asked
        check_pure(self._task, self._function, self._prediction, *asked)
        if self._at_once > 1 and self._many is not None:

            def alone(z: Float32s, record: Sample) -> Any:
                return self.gradient(Hidden(z), record).reveal()

            def together(z: Float32s, records: Sequence[Sample]) -> Any:
                return self.gradients(Hidden(z), records).reveal()

            check_rows_apart(self._task, alone, together, self._at_once)
        self._checked = True

    def noisy(self, local: LocalRounds, clients: Sequence[Sample | None], seed: bytes) -> Noised:
        """The next noisy step, of up to `clients_per_step` clients; `LocalRounds.apply` makes it count.

        None is a client whose record cannot be used: a zero gradient, and no telemetry.
        """
        if not clients:
            return local.noisy(local.nothing(), seed)
        groups = (clients[first : first + self._at_once] for first in range(0, len(clients), self._at_once))
        return self._noisy(local, groups, seed)

    def noisy_in_pieces(self, local: LocalRounds, pieces: Iterable[Sequence[Sample | None]], seed: bytes) -> Noised:
        """The next noisy step, of any number of clients, in pieces of any length.

        Every array of gradients is filled up with made-up records, and there is one also for nobody: `fill_up` can
        then make a round's work the same whoever is in it.
        """
        return self._noisy(local, _filled_up(pieces, self._at_once), seed)

    def fill_up(self, local: LocalRounds, clients: int, steps: int) -> None:
        """Do, for nobody, the rest of the work that so many clients in so many steps can make at most."""
        for _ in range(-(-clients // self._at_once) + steps - self._arrays):
            self._share(local, [None] * self._at_once)
        self._arrays = 0

    def round_work_s(self, local: LocalRounds, clients: int, seeds: Sequence[bytes]) -> float:
        """Seconds for so many clients in a round, from a few steps of made-up ones; moves ``local``, counts nobody."""
        arrays, clipped = self._arrays, self.clipped
        self._share(local, [None] * self._at_once)  # compiles, where that is needed
        began = time.perf_counter()
        local.prepare(seeds)
        for seed in seeds:
            local.apply(self._noisy(local, [[None] * self._at_once], seed))
        step_s = (time.perf_counter() - began) / len(seeds)
        began = time.perf_counter()
        for _ in range(_MEASURED):
            self._share(local, [None] * self._at_once)
        array_s = (time.perf_counter() - began) / _MEASURED
        self._arrays, self.clipped = arrays, clipped
        return step_s * self._terms.local_steps + array_s * -(-clients // self._at_once)

    def _noisy(self, local: LocalRounds, groups: Iterable[Sequence[Sample | None]], seed: bytes) -> Noised:
        total: ClippedGradient | None = None
        told: list[MetricValues] = []
        for some in groups:
            share, values = self._share(local, some)
            total, told = share if total is None else add_up([total, share]), told + values
            self._arrays += 1
        assert total is not None
        all_told = MetricValues(np.stack([each.reveal() for each in told])) if told else None
        return local.noisy(local.whole(total, all_told), seed)

    def _share(self, local: LocalRounds, some: Sequence[Sample | None]) -> tuple[ClippedGradient, list[MetricValues]]:
        """What some clients contribute to a step, and their metrics."""
        if self._hides_counts:
            return self._hidden_share(local, some)
        raw, weights = self._weighted(self.gradients(local.model, some), some)
        if self._terms.gamma is None:  # normalised gradients are short, whatever a client has
            self.clipped += _longer(raw, self._terms.grid.clip_norm)
        share = local.clip(raw) if weights is None else local.clip(raw, weights)
        return share, self._metrics(local, some, raw)

    def _hidden_share(
        self, local: LocalRounds, some: Sequence[Sample | None]
    ) -> tuple[ClippedGradient, list[MetricValues]]:
        """The same, with as much work for every place, whether there is anybody or not: what is nobody's is dropped.

        Everyone keeps their place, so that a record decides nothing about others' rows.
        """
        filled = [sample or self._blank for sample in some]
        raw, weights = self._weighted(self.gradients(local.model, filled), filled)
        rows, shares, there = raw.reveal(), [], np.array([sample is not None for sample in some], bool)
        for part in (there, ~there):
            own = RawGradient(rows[: len(some)][part] if part.any() else np.zeros((1, rows.shape[1]), np.float32))
            kept = None if weights is None or not part.any() else weights[: len(some)][part]
            shares.append(local.clip(own) if kept is None else local.clip(own, kept))
            if part is there and self._terms.gamma is None:
                self.clipped += _longer(own, self._terms.grid.clip_norm)
        told = [self._told(local, sample, row) for sample, row in zip(filled, rows, strict=False)]
        return shares[0], [values for values, mine in zip(told, there, strict=True) if mine and values is not None]

    def _told(self, local: LocalRounds, sample: Sample, row: NDArray[Any]) -> MetricValues | None:
        return None if self.telemetry is None else self.telemetry.values(local.begun, sample, RawGradient(row))

    def _weighted(self, raw: RawGradient, clients: Sequence[Sample | None]) -> tuple[RawGradient, Float32s | None]:
        """Gradients by their labels' weights; the weights themselves where gradients are normalised first."""
        known = self._terms.class_weights
        if known is None:
            return raw, None
        targets = [(sample or self._blank).target for sample in clients]
        targets += [self._blank.target] * (len(raw.reveal()) - len(targets))
        weights: Float32s = known.of(np.asarray(targets))
        if self._terms.gamma is not None:
            return raw, weights
        return RawGradient(weights[:, None] * without_tiny(raw.reveal())), None

    def _metrics(self, local: LocalRounds, clients: Sequence[Sample | None], raw: RawGradient) -> list[MetricValues]:
        if self.telemetry is None:
            return []
        pairs = zip(clients, raw.reveal(), strict=False)
        return [self.telemetry.values(local.begun, sample, RawGradient(row)) for sample, row in pairs if sample]

    def gradients(self, model: Hidden[Float32s], clients: Sequence[Sample | None]) -> RawGradient:
        """A row for each of these clients, zero where the record cannot be used; never raises."""
        rows = np.zeros((self._at_once, self._task.dim), np.float32)
        if self._at_once == 1 or self._many is None:
            for place, sample in enumerate(clients):
                found = self.gradient(model, sample or self._blank).reveal()
                rows[place] = found if sample else 0.0
            return RawGradient(rows)
        there = [place for place, sample in enumerate(clients) if sample]
        filled = [sample or self._blank for sample in clients] + [self._blank] * (self._at_once - len(clients))
        whole = self._together(model, filled)
        if whole is not None:
            rows[there] = whole[there]
            return RawGradient(rows)
        # One record must not take the other clients' gradients with it: each again, in its own place among blanks,
        # where its row has the same bits.
        for place in there:
            alone = [sample if k == place else self._blank for k, sample in enumerate(filled)]
            if (own := self._together(model, alone)) is not None:
                rows[place] = own[place]
        return RawGradient(rows)

    def _together(self, model: Hidden[Float32s], samples: Sequence[Sample]) -> NDArray[Any] | None:
        """The task's rows for as many samples as fit; None where it fails."""
        assert self._many is not None
        try:
            with np.errstate(all="ignore"):
                z = without_tiny(model.reveal())
                z.flags.writeable = False  # a task that wrote to it would carry data along
                features = np.stack([sample.features for sample in samples])
                targets = np.stack([sample.target for sample in samples])
                found = np.asarray(self._many(z, Sample(features, targets)))
        except Exception:
            return None
        return found if found.shape == (len(samples), self._task.dim) and found.dtype.kind == "f" else None

    def gradient(self, model: Hidden[Float32s], sample: Sample) -> RawGradient:
        """Of a client's record, zero where it cannot be used; never raises."""
        zero = np.zeros(self._task.dim, np.float32)
        try:
            with np.errstate(all="ignore"):
                z = without_tiny(model.reveal())
                z.flags.writeable = False  # a task that wrote to it would carry data along
                raw = np.asarray(self._function(z, sample))
                usable = raw.shape == zero.shape and raw.dtype.kind == "f"
                return RawGradient(raw.astype(np.float32) if usable else zero)
        except Exception:
            return RawGradient(zero)

    def _prediction(self, z: Float32s, sample: Sample) -> Any:
        """Asked of every task, since a learner's own score asks it of clients' records."""
        return self._task.predict(cast(Any, z), cast(Any, sample.features[None]))

    def _compiled_gradient(self, z: Float32s, sample: Sample) -> Any:
        if self._compiled is None:
            import jax

            self._compiled = jax.jit(self._task.gradient)
        return self._compiled(z, sample)

    def _compiled_gradients(self, z: Float32s, samples: Sample) -> Any:
        if self._compiled_many is None:
            import jax

            self._compiled_many = jax.jit(jax.vmap(self._task.gradient, in_axes=(None, 0)))
        return self._compiled_many(z, samples)


def _never_fails(task: Task) -> bool:
    """Whether the task's code is ours, which no admitted record makes fail."""
    return type(task).__module__.startswith("veilstream.")


def _filled_up(pieces: Iterable[Sequence[Sample | None]], size: int) -> Iterator[list[Sample | None]]:
    """The same clients in groups of one size, the last with nobody in its other places; at least one group."""
    waiting: list[Sample | None] = []
    begun = False
    for piece in pieces:
        waiting += piece
        while len(waiting) >= size:
            begun = True
            yield waiting[:size]
            waiting = waiting[size:]
    if waiting or not begun:
        yield waiting + [None] * (size - len(waiting))


def _longer(raw: RawGradient, clip_norm: float) -> int:
    """How many of these gradients are longer than the clip norm."""
    with np.errstate(all="ignore"):
        # Not by a dot product: a BLAS would wake its threads for it, and have them spin.
        squares = np.einsum("ij,ij->i", raw.reveal(), raw.reveal())
        return int(np.count_nonzero(~(np.sqrt(squares) <= clip_norm)))


def check_dim(plan: Plan, task: Task) -> None:
    """The server makes its model from the plan alone: the task that the plan names has its size.

    An own task has a size of its own, which server and learner compare when they meet.
    """
    own = ":" in plan.learning.task
    known = isinstance(task, Logistic | LeastSquares | Ripple) and not own
    if known and plan.feature_count != task.dim:
        field = "data.features" if plan.data.kind == "table" else "data.dim"
        raise InputError(
            field,
            plan.feature_count,
            f"the {task.dim} parameters of the task that was given",
            f"[data] dim = {task.dim} in the plan, the same on every side",
        )
