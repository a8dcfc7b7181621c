"""Models and baselines judged on the same held-out rows.

A baseline needs no model: the most frequent label (or the mean) of the records that were learned from, and, where
records have a time, the label of the learner's record before. Both are judged on the rows that the models are judged
on. Targets are a task's own: labels as numbers, or numbers on the task's scale with ``unit`` as the length of 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.learning import quality
from veilstream.learning.quality import Floats, Groups, LabelQuality, NumberQuality


@dataclass(frozen=True)
class LabelNames:
    """A task's labels in order: their targets, and what people call them."""

    targets: tuple[float, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, targets: Sequence[float], names: Sequence[str] | None = None) -> LabelNames:
        """Of these targets; without names, they are called as the numbers that they are."""
        known = tuple(float(t) for t in targets)
        return cls(known, tuple(f"{t:g}" for t in known) if names is None else tuple(names))

    def places(self, targets: Any) -> NDArray[np.int64]:
        """Place of each target in the order of the labels; the first one for what is no label."""
        told = np.asarray(targets, np.float64)
        order = np.argsort(self.targets)
        known = np.asarray(self.targets)[order]
        at = np.minimum(np.searchsorted(known, told), len(known) - 1)
        places: NDArray[np.int64] = np.where(known[at] == told, order[at], 0)
        return places


@dataclass(frozen=True)
class HeldOutRows:
    """Records that nothing was learned from."""

    features: NDArray[Any]
    target: Floats
    people: Groups | None = None  # whose each row is; None where every row is someone else
    previous: Floats | None = None  # target of the learner's record before, nan for none; None where order is nothing


@dataclass(frozen=True)
class Judged:
    """One model's, or one baseline's, predictions on one seed's rows."""

    quality: LabelQuality | NumberQuality
    values: Floats
    """Of each row: right or wrong, or the squared error in the unit of ``quality``."""
    balanced: Floats | None = None
    """Of each row: terms whose mean is the balanced accuracy; None for numbers."""


@dataclass(frozen=True)
class Judge:
    """What a seed's models are judged on: rows, labels, and the targets that were learned from."""

    rows: HeldOutRows
    learned: Floats
    labels: LabelNames | None  # None for numbers
    unit: float = 1.0

    @cached_property
    def truth(self) -> NDArray[np.int64]:
        """Place of each row's label."""
        assert self.labels is not None
        return self.labels.places(self.rows.target)

    def model(self, predicted: Any, logits: Any = None) -> Judged:
        """A model, from what it says of each row."""
        if self.labels is None:
            return self._number(np.asarray(predicted, np.float64))
        return self._label(self.labels.places(predicted), logits)

    def constant(self) -> tuple[str, Judged]:
        """The most frequent label that was learned from (its name), or the mean ("")."""
        n = len(self.rows.target)
        if self.labels is None:
            return "", self._number(np.full(n, self.learned.mean()))
        counts = np.bincount(self.labels.places(self.learned), minlength=len(self.labels.names))
        most = int(counts.argmax())
        judged = self._label(np.full(n, most, np.int64), None)
        shares = (counts + 1.0) / (counts.sum() + len(counts))  # one imagined record of every label
        loss = float(-np.log(shares[self.truth]).mean())
        assert isinstance(judged.quality, LabelQuality)
        told = LabelQuality(**{**vars(judged.quality), "auc": 0.5, "log_loss": loss})
        return self.labels.names[most], Judged(told, judged.values, judged.balanced)

    def no_change(self) -> Judged | None:
        """The label of the learner's record before; the constant where there is none before."""
        if self.rows.previous is None:
            return None
        there = ~np.isnan(self.rows.previous)
        if self.labels is None:
            return self._number(np.where(there, self.rows.previous, self.learned.mean()))
        counts = np.bincount(self.labels.places(self.learned), minlength=len(self.labels.names))
        return self._label(np.where(there, self.labels.places(self.rows.previous), counts.argmax()), None)

    def _label(self, places: NDArray[np.int64], logits: Any) -> Judged:
        assert self.labels is not None
        classes = len(self.labels.names)
        found = quality.label_quality(self.truth, places, classes, logits)
        right = (self.truth == places).astype(np.float64)
        return Judged(found, right, quality.balanced_terms(self.truth, places, classes))

    def _number(self, predicted: Floats) -> Judged:
        found = quality.number_quality(self.rows.target * self.unit, predicted * self.unit)
        return Judged(found, (self.unit * (predicted - self.rows.target)) ** 2)


@dataclass(frozen=True)
class Comparison:
    """How much better than a baseline, with the standard error of that: over held-out rows (people) and seeds."""

    gain: float  # in accuracy, balanced accuracy, or squared error; > 0 is better
    error: float

    @property
    def better(self) -> bool:
        """Better by more than chance explains: 1.96 standard errors. False alarms: 2.5% of runs that gain nothing."""
        return self.gain > quality.Z95 * self.error

    @property
    def worse(self) -> bool:
        """Worse by more than chance explains."""
        return -self.gain > quality.Z95 * self.error


def compared(
    judges: Sequence[Judge], models: Sequence[Judged], others: Sequence[Judged], *, balanced: bool, same_rows: bool
) -> Comparison:
    """Models of all seeds against baselines (or other models) of the same seeds, row by row."""
    people = judges[0].rows.people if same_rows else None
    if judges[0].labels is None:
        gains = [other.values - model.values for model, other in zip(models, others, strict=True)]
    elif balanced:
        gains = [_of(model.balanced) - _of(other.balanced) for model, other in zip(models, others, strict=True)]
    else:
        gains = [model.values - other.values for model, other in zip(models, others, strict=True)]
    if not all(np.isfinite(gain).all() for gain in gains):
        return Comparison(-math.inf, 0.0)  # a model that diverged
    return Comparison(*quality.spread_over(gains, people, same_rows=same_rows))


def _of(terms: Floats | None) -> Floats:
    assert terms is not None
    return terms


def sampling_error(judges: Sequence[Judge], models: Sequence[Judged], *, same_rows: bool) -> float | None:
    """Half the width of the 95% interval of the mean accuracy (or RMSE) that comes from the choice of held-out rows."""
    people = judges[0].rows.people if same_rows else None
    each = [model.values for model in models]
    if same_rows:
        error = quality.standard_error(np.mean(each, axis=0), people)
    else:
        error = math.sqrt(sum(quality.standard_error(values) ** 2 for values in each)) / len(each)
    if judges[0].labels is None:  # of the root of a mean, to first order
        mean = float(np.mean([values.mean() for values in each]))
        error = error / (2.0 * math.sqrt(mean)) if mean > 0.0 else 0.0
    return quality.Z95 * error if math.isfinite(error) else None
