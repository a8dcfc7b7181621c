"""Metrics of one client for telemetry, in [0, 1], written once for NumPy and for JAX.

Accuracy and loss are those of x^r, which the server knows, before anything is learned from the
client. Whether a gradient is clipped is asked at the local model, where it is taken.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from veilstream.errors import InputError
from veilstream.learning.tasks import Sample, Task, jax_numpy
from veilstream.privacy.telemetry import Telemetry


def check_metrics(telemetry: Telemetry, task: Task) -> None:
    """Refuse metrics that the task does not have."""
    if "accuracy" in telemetry.metrics and not task.classifies:
        raise InputError(
            "telemetry.metrics",
            list(telemetry.metrics),
            f"no accuracy where {type(task).__name__} predicts a number",
            'metrics = ["loss"]',
        )


def metric_values(telemetry: Telemetry, task: Task, x: Any, sample: Sample, raw: Any, clip_norm: Any) -> Any:
    """The metrics of a present client, (m,), at the round's first model x; ``raw`` is its gradient before clipping."""
    xp: Any = np if isinstance(raw, np.ndarray) else jax_numpy()
    values = []
    for name in telemetry.metrics:
        if name == "accuracy":
            value = task.predict(x, sample.features[None])[0] == sample.target
        elif name == "loss":
            loss = xp.asarray(task.loss(x, sample)) / telemetry.loss_cap
            value = xp.where(loss < 1.0, loss, 1.0)  # also for what is no number
        elif name == "clipped":
            length = xp.sqrt((raw * raw).sum())
            value = ~(length <= clip_norm)
        else:
            value = xp.ones(())
        values.append(xp.asarray(value, raw.dtype))
    return xp.stack(values)
