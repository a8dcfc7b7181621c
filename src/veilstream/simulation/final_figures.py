"""A simulation's last models on all held-out rows, beside baselines: what summary.json says of how good they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.learning.judged import HeldOutRows, Judge, Judged, LabelNames, sampling_error
from veilstream.learning.quality import LabelQuality, NumberQuality
from veilstream.learning.tasks import Task, TaskDetails
from veilstream.plans.plan import Plan
from veilstream.plans.records import label_names, label_unit, target_range
from veilstream.simulation.held_out import CACHE_FLOATS
from veilstream.streams.pool import PoolStream, Stream
from veilstream.streams.table_stream import TableStream

_ROUNDS = 64  # of made-up records, that baselines learn from; a pool's are known altogether


def spread(values: Sequence[float | None] | NDArray[Any]) -> dict[str, Any] | None:
    """Mean and standard deviation over seeds; None where a seed has no finite value."""
    if any(v is None for v in values):
        return None
    each = np.asarray(values, np.float64)
    if not len(each) or not np.isfinite(each).all():
        return None
    std = float(each.std(ddof=1)) if len(each) > 1 else 0.0
    return {"mean": float(each.mean()), "std": std, "seeds": [float(v) for v in each]}


@dataclass(frozen=True)
class FinalFigures:
    """Judges the models of each method; one `Judge` a seed."""

    plan: Plan
    task: Task
    stream: Stream
    judges: tuple[Judge, ...]
    seeds: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan, task: Task, stream: Stream, seeds: Sequence[int]) -> FinalFigures | None:
        """Of a run's seeds; None where nobody is held out, or a target is not one label or number."""
        if plan.data.kind == "table" and plan.data.held_out_share == 0.0:
            return None
        same = isinstance(stream, PoolStream)
        each = [_rows(plan, stream, seed) for seed in (seeds[:1] if same else seeds)]
        learned = [_learned(plan, stream, seed) for seed in (seeds[:1] if same else seeds)]
        if each[0].target.ndim != 1 or not np.concatenate(learned).size:
            return None
        labels = _labels(plan, task, np.concatenate([*learned, *(rows.target for rows in each)]))
        unit = label_unit(plan) if labels is None else 1.0
        judges = tuple(Judge(r, y, labels, unit) for r, y in zip(each, learned, strict=True))
        return cls(plan, task, stream, judges * (len(seeds) if same else 1), tuple(seeds))

    @property
    def same_rows(self) -> bool:
        """Whether all seeds have the same held-out rows."""
        return isinstance(self.stream, PoolStream)

    def judged(self, models: NDArray[Any]) -> list[Judged] | None:
        """A method's models, one for each seed; None for a task that does not say one label or number of each row."""
        found = []
        for judge, model in zip(self.judges, models, strict=True):
            said = self._predictions(model, judge.rows)
            if said is None or (judge.labels is not None and not np.isin(said[0], judge.labels.targets).all()):
                return None
            found.append(judge.model(*said))
        return found

    def _predictions(self, model: NDArray[Any], rows: HeldOutRows) -> tuple[NDArray[Any], Any] | None:
        """Predictions and logits of all rows, in batches that a CPU's caches hold."""
        import jax

        size = max(64, CACHE_FLOATS // max(1, TaskDetails.of(self.task).workspace // 4))
        said: list[NDArray[Any]] = []
        told: list[NDArray[Any]] = []
        try:
            with jax.default_matmul_precision("highest"):
                for first in range(0, len(rows.target), size):
                    predicted, logits = self._predict(model, rows.features[first : first + size])
                    said.append(np.asarray(predicted, np.float64))
                    told += [] if logits is None else [np.asarray(logits, np.float64)]
        except InputError:
            return None  # a task that was given no way to predict
        predicted = np.concatenate(said)
        if (known := target_range(self.plan)) is not None:
            predicted = predicted.clip(*known)
        if predicted.shape != rows.target.shape:
            return None
        return predicted, np.concatenate(told) if told else None

    @cached_property
    def _predict(self) -> Any:
        import jax

        return jax.jit(partial(_both, self.task))

    @cached_property
    def constants(self) -> list[tuple[str, Judged]]:
        """The most frequent label, or the mean, for each seed."""
        return [judge.constant() for judge in self.judges]

    @cached_property
    def no_change(self) -> list[Judged] | None:
        """The label of the record before, for each seed; None where time is nothing."""
        found = [judge.no_change() for judge in self.judges]
        there = [each for each in found if each is not None]
        return there if len(there) == len(found) else None

    def baselines(self) -> dict[str, Any]:
        """For summary.json; means over seeds."""
        constants = [judged for _, judged in self.constants]
        if self.judges[0].labels is None:
            told: dict[str, Any] = {"mean": _means(constants, ("rmse", "r2"))}
            kept: tuple[str, ...] = ("rmse",)
        else:
            label = {"label": self.constants[0][0]}
            told = {"majority": label | _means(constants, ("accuracy", "balanced_accuracy", "log_loss"))}
            kept = ("accuracy", "balanced_accuracy")
        if self.no_change is not None:
            told["no_change"] = _means(self.no_change, kept)
        return told

    def held_out(self, main: list[Judged] | None) -> dict[str, Any]:
        """For summary.json: how many rows, how they were chosen, and what their choice leaves open."""
        rows = self.judges[0].rows
        available = len(rows.target)
        split = self.stream.split_by if isinstance(self.stream, TableStream) else "made-up"
        return {
            "rows": available,
            "used": available,
            "people": None if rows.people is None else len(np.unique(rows.people)),
            "split": "people" if self.plan.data.kind == "mnist" else split,
            "sampling_error": None if main is None else sampling_error(self.judges, main, same_rows=self.same_rows),
        }

    def figures(self, judged: list[Judged]) -> dict[str, Any]:
        """A method's part of summary.json."""
        each = [one.quality for one in judged]
        if self.judges[0].labels is None:
            numbers = [one for one in each if isinstance(one, NumberQuality)]
            r2 = spread([one.r2 for one in numbers])
            return {"rmse": spread([one.rmse for one in numbers]), "r2": r2, "explained": r2}
        found = [one for one in each if isinstance(one, LabelQuality)]
        names = self.judges[0].labels.names
        accuracy = spread([one.accuracy for one in found])
        return {
            "accuracy": accuracy,
            "held_out_accuracy": accuracy,
            "auc": spread([one.auc for one in found]),
            "balanced_accuracy": spread([one.balanced_accuracy for one in found]),
            "log_loss": spread([one.log_loss for one in found]),
            "recall": {name: spread([one.recall[k] for one in found]) for k, name in enumerate(names)},
            "confusion": {
                "labels": list(names),
                "counts": np.mean([one.confusion for one in found], axis=0).round(3).tolist(),
            },
        }


def _both(task: Task, model: Any, features: Any) -> tuple[Any, Any]:
    logits = TaskDetails.of(task).logits if task.classifies else None
    return task.predict(model, features), None if logits is None else logits(model, features)


def _means(judged: Sequence[Judged], keys: Sequence[str]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for key in keys:
        each: list[float | None] = [getattr(one.quality, key) for one in judged]
        there = [v for v in each if v is not None and math.isfinite(v)]
        found[key] = sum(there) / len(there) if len(there) == len(each) else None
    return found


def _rows(plan: Plan, stream: Stream, seed: int) -> HeldOutRows:
    """All held-out rows there are; of made-up records as many as the plan says."""
    if isinstance(stream, PoolStream):
        people = previous = None
        if isinstance(stream, TableStream):
            people, previous = stream.held_people, stream.held_previous
        return HeldOutRows(stream.held_features, np.asarray(stream.held_targets, np.float64), people, previous)
    held = stream.held_out(seed, plan.data.held_out, plan.learning.rounds - 1)
    return HeldOutRows(np.asarray(held.features), np.asarray(held.target, np.float64))


def _learned(plan: Plan, stream: Stream, seed: int) -> NDArray[np.float64]:
    """Targets of the records that are learned from; of made-up records those of some rounds."""
    if isinstance(stream, PoolStream):
        places = stream.indices(seed, 0, plan.learning.rounds)
        return np.asarray(stream.targets, np.float64)[places[places >= 0]]
    rounds = np.unique(np.linspace(0, plan.learning.rounds - 1, _ROUNDS).astype(int))
    found = []
    for r in rounds:
        met = stream.round(seed, int(r))
        target = np.asarray(met.target, np.float64)
        found.append(target.ravel() if met.present is None else target[np.asarray(met.present) > 0])
    return np.concatenate(found)


def _labels(plan: Plan, task: Task, targets: NDArray[np.float64]) -> LabelNames | None:
    if not task.classifies:
        return None
    known = TaskDetails.of(task).labels
    values = sorted({float(t) for t in targets}) if known is None else [float(t) for t in known]
    return LabelNames.of(values, label_names(plan, values))
