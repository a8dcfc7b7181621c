"""Which samples a deployed learner takes: shape, type and range, decided before any gradient."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.records.sample import Sample

_SMALL = 4096
"""Numbers of a record; larger ones are looked at one by one, while they are in the processor's cache."""


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

    def admitted_together(self, samples: Sequence[object]) -> list[Sample | None]:
        """`admitted` for each; plain records of the right shape are looked at as one array."""
        found: list[Sample | None] = [None] * len(samples)
        plain = [place for place, sample in enumerate(samples) if self._is_plain(sample)]
        for place in set(range(len(samples))).difference(plain):
            found[place] = self.admitted(samples[place])
        if not plain:
            return found
        with np.errstate(all="ignore"):
            records: list[Any] = [samples[place] for place in plain]
            features = np.stack([record[0] for record in records]).astype(np.float64)
            targets = np.array([record[1] for record in records], np.float64)
            rest = tuple(range(1, features.ndim))
            good = (np.abs(features) <= self.largest).all(axis=rest) & (np.abs(targets) <= self.largest)  # nor NaN
            if self.labels is not None:
                good &= np.isin(targets, self.labels)
            usual = self._usual(features)
            kept: NDArray[Any] = targets.astype(self._target_type)
        for row, place in enumerate(plain):
            if good[row]:
                found[place] = Sample(usual[row], kept[row])
        return found

    def from_arrays(self, features: NDArray[np.float32], targets: NDArray[Any]) -> list[Sample]:
        """Samples that were admitted before and kept as arrays, a row for each."""
        kept: NDArray[Any] = targets.astype(self._target_type)
        return [Sample(row, kept[place]) for place, row in enumerate(features)]

    def _is_plain(self, sample: object) -> bool:
        if not isinstance(sample, tuple) or not 2 <= len(sample) <= 3:
            return False
        features, target = sample[0], sample[1]
        if (
            type(features) is not np.ndarray
            or features.size > _SMALL
            or features.shape != self.shape
            or features.dtype.kind not in "biuf"
        ):
            return False
        return type(target) in (float, bool) or (
            isinstance(target, np.ndarray | np.generic) and target.shape == () and target.dtype.kind in "biuf"
        )

    @property
    def _target_type(self) -> type:
        whole = self.labels is not None and all(isinstance(label, int) for label in self.labels)
        return np.int32 if whole else np.float32

    @staticmethod
    def _usual(features: NDArray[Any]) -> NDArray[np.float32]:
        usual: NDArray[np.float32] = features.astype(np.float32)
        usual *= np.abs(usual) >= np.finfo(np.float32).tiny  # denormals slow arithmetic down
        return usual

    def _admitted(self, sample: object) -> Sample | None:
        if not isinstance(sample, tuple) or not 2 <= len(sample) <= 3:
            return None
        features, target = np.asarray(sample[0]), np.asarray(sample[1])
        if features.dtype.kind not in "biuf" or target.dtype.kind not in "biuf":
            return None
        if features.shape != self.shape or target.shape != ():
            return None
        if not -self.largest <= _least(features) <= _most(features) <= self.largest:  # nor NaN
            return None
        if not abs(float(target)) <= self.largest:
            return None
        if self.labels is not None and float(target) not in self.labels:
            return None
        return Sample(self._usual(features), np.asarray(target, self._target_type))


def _least(numbers: NDArray[Any]) -> float:
    return float(numbers.min(initial=0))


def _most(numbers: NDArray[Any]) -> float:
    return float(numbers.max(initial=0))


class Answer(enum.Enum):
    """All that a client is told; the same whatever became of its data."""

    TAKEN = "taken"
    REFUSED = "refused"
