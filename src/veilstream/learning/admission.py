"""Which samples a deployed learner looks at: shape, type and range, decided before any gradient."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from veilstream.errors import InputError
from veilstream.learning.tasks import Task

__all__ = ["Admission"]


@dataclass(frozen=True)
class Admission:
    """What a sample must look like. `accepts` never raises."""

    shape: tuple[int, ...]
    labels: tuple[float, ...] | None
    """Targets that are allowed; None for any finite number."""
    largest: float = 1e6
    """No feature may be larger than this."""

    @classmethod
    def of(cls, task: Task) -> Admission:
        """As the task says: `features_shape`, and `labels` where it classifies."""
        shape = getattr(task, "features_shape", None)
        if shape is None:
            raise InputError(
                "task", type(task).__name__, "a task with features_shape",
                "say what one client's features look like: task.features_shape = (d,)",
            )  # fmt: skip
        labels = getattr(task, "labels", None)
        return cls(tuple(shape), None if labels is None else tuple(labels))

    def accepts(self, sample: object) -> bool:
        """Whether a step may be spent on it."""
        try:
            if not isinstance(sample, tuple) or not 2 <= len(sample) <= 3:
                return False
            features, target = np.asarray(sample[0]), np.asarray(sample[1])
            if features.dtype.kind not in "biuf" or target.dtype.kind not in "biuf":
                return False
            if features.shape != self.shape or target.shape != ():
                return False
            if not np.isfinite(features).all() or float(np.abs(features).max()) > self.largest:
                return False
            if self.labels is not None:
                return float(target) in self.labels
            return bool(np.isfinite(target)) and abs(float(target)) <= self.largest
        except Exception:  # whatever a client sends, the answer is one of two
            return False
