"""Which samples a deployed learner takes: shape, type and range, decided before any gradient."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from veilstream.records.sample import Sample


@dataclass(frozen=True)
class Admission:
    """What a sample must look like; `veilstream.learning.tasks.admission_of` makes it of a task."""

    shape: tuple[int, ...]
    labels: tuple[float, ...] | None  # targets that are allowed; None for any finite number
    largest: float = 1e6  # no feature may be larger than this

    @property
    def in_words(self) -> str:
        """The rule in words."""
        shape = " x ".join(map(str, self.shape)) or "one"
        labels = self.labels
        target = "a number" if labels is None else f"one of {', '.join(map(str, labels))}"
        return f"{shape} finite numbers as features, and {target} as target"

    def admitted(self, sample: object) -> Sample | None:
        """The sample as float32 without denormals, or None. Never raises."""
        try:
            with np.errstate(all="ignore"):
                return self._admitted(sample)
        except Exception:  # whatever a client sends, the answer is one of two
            return None

    def _admitted(self, sample: object) -> Sample | None:
        if not isinstance(sample, tuple) or not 2 <= len(sample) <= 3:
            return None
        features, target = np.asarray(sample[0]), np.asarray(sample[1])
        if features.dtype.kind not in "biuf" or target.dtype.kind not in "biuf":
            return None
        if features.shape != self.shape or target.shape != ():
            return None
        if not (np.abs(features.astype(np.float64)) <= self.largest).all():  # nor NaN
            return None
        if not abs(float(target)) <= self.largest:
            return None
        if self.labels is not None and float(target) not in self.labels:
            return None
        usual = features.astype(np.float32)
        usual[np.abs(usual) < np.finfo(np.float32).tiny] = 0.0  # denormals slow arithmetic down
        whole = self.labels is not None and all(isinstance(label, int) for label in self.labels)
        return Sample(usual, np.asarray(target, np.int32 if whole else np.float32))


class Answer(enum.Enum):
    """All that a client is told; the same whatever became of its data."""

    TAKEN = "taken"
    REFUSED = "refused"
