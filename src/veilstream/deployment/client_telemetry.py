"""One client's metrics at a deployed learner, whatever its record does to them."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError, MissingExtra
from veilstream.learning.client_metrics import metric_values
from veilstream.learning.purity import Asked, example_records
from veilstream.learning.tasks import Sample, Task
from veilstream.privacy.gradient_types import Hidden, MetricValues, RawGradient
from veilstream.privacy.telemetry import Telemetry

_log = logging.getLogger(__name__)
_WITHOUT_ANSWER = {"accuracy": 0.0, "loss": 1.0, "clipped": 1.0, "present": 1.0}
"""Of a client on whose record the task fails: present, and wrong."""


class ClientTelemetry:
    """Metrics of one task, which is asked whether it has them before its first client."""

    def __init__(self, task: Task, telemetry: Telemetry, clip_norm: float) -> None:
        self._task, self._clip_norm = task, clip_norm
        self._each = [replace(telemetry, metrics=(name,)) for name in telemetry.metrics]
        self._checked = False
        self.failed = 0
        """Clients since this start on whose record the task failed: for this machine only."""

    @property
    def asked(self) -> tuple[Asked, ...]:
        """What is asked of the task beside gradients and predictions, to be checked with them."""
        if not any(one.metrics == ("loss",) for one in self._each):
            return ()
        return (lambda x, sample: self._task.loss(cast(Any, x), sample),)

    def check(self) -> None:
        """Once a process: that the task has these metrics.

        Raises:
            InputError: for a task that cannot predict.
            MissingExtra: for a loss that needs JAX, where there is none.

        """
        if self._checked:
            return
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
        self._checked = True

    def values(self, begun: Hidden[NDArray[np.float32]], sample: Sample, raw: RawGradient) -> MetricValues:
        """Of a client who is there; never raises.

        A metric that fails counts as wrong; such clients are counted, and the first is logged, by
        the kind of error alone.

        Args:
            begun: the model that the round began with.
            sample: the client's record.
            raw: its gradient, before clipping.

        """
        x = begun.reveal().view()
        x.flags.writeable = False  # a task that wrote to it would carry data along
        with np.errstate(all="ignore"):
            return MetricValues(self._values(x, sample, raw.reveal().astype(np.float64)))

    def _values(self, x: NDArray[np.float32], sample: Sample, raw: NDArray[Any]) -> NDArray[np.float64]:
        values = np.zeros(len(self._each))
        failed = False
        for place, one in enumerate(self._each):
            try:
                values[place] = self._value(one, x, sample, raw)
            except Exception as error:  # a client's data must not be able to stop or steer a learner
                values[place] = _WITHOUT_ANSWER[one.metrics[0]]
                if not (self.failed or failed):
                    _log.warning(
                        "telemetry: the task raised %s for the %s of a client, which counts as "
                        "wrong; further failures are counted and not logged",
                        type(error).__name__,
                        one.metrics[0],
                    )
                failed = True
        self.failed += failed
        return values

    def _value(self, one: Telemetry, x: NDArray[np.float32], sample: Sample, raw: NDArray[Any]) -> float:
        (value,) = metric_values(one, self._task, x, sample, raw, self._clip_norm)
        return float(value)
