"""A demonstration's data: the plan's own stream, or its files dealt to the learners."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.files import write_file
from veilstream.learning.judged import Judge, Judged
from veilstream.learning.tasks import Task, TaskDetails
from veilstream.plans.clients import learner_rows, stream_of
from veilstream.plans.plan import Plan
from veilstream.plans.records import target_range
from veilstream.records.cells import as_text
from veilstream.simulation.final_figures import FinalFigures
from veilstream.simulation.verdict import Verdict, Verdicts
from veilstream.streams.pool import Stream
from veilstream.streams.table_stream import TableStream
from veilstream.wording import counted

_AT_ONCE = 1024


@dataclass(frozen=True)
class Scores:
    """How well models do on all records that no learner was given."""

    metric: str
    """accuracy, or rmse in the label's own units."""
    before: float
    after: float
    constant: float
    """Of a guess without a model: the commonest label of the records that were learned from, or their mean."""
    guess: str
    """That label, or "the mean"."""
    rows: int
    verdict: Verdict
    figures: dict[str, Any]
    """Of the last model, as summary.json of a simulation names them."""

    def text(self) -> str:
        """The scores in words."""
        form = ".3f" if self.metric == "accuracy" else ".4g"
        return (
            f"{self.before:{form}} before, {self.after:{form}} after, on all {counted(self.rows, 'record')} that no "
            f"learner was given (always {self.guess}: {self.constant:{form}})"
        )


@dataclass(frozen=True)
class DemoData:
    """Where a demonstration's clients come from."""

    plan: Plan
    stream: Stream
    names: tuple[str, ...]
    """Names of the learners, in the form that keys allow."""

    @classmethod
    def of(cls, plan: Plan) -> DemoData:
        """Read the plan's data, with the checks of a simulation."""
        stream = stream_of(plan)
        if isinstance(stream, TableStream):
            return cls(plan, stream, _key_names(stream.names))
        return cls(plan, stream, tuple(f"learner-{i}" for i in range(plan.learning.learners)))

    def deal(self, folder: Path) -> list[str]:
        """Each learner's ``--data``; writes their files, without the people who are held out."""
        if not isinstance(self.stream, TableStream):
            return [f"plan:{index}" for index in range(len(self.names))]
        rows = learner_rows(self.plan)
        a_round = self.plan.learning.local_steps * self.plan.learning.clients_per_step
        lasts = {name: math.ceil(len(own) / a_round) for name, own in rows.items()}
        if min(lasts.values()) < self.plan.learning.rounds:
            shown = ", ".join(f"{name}: {count}" for name, count in list(lasts.items())[:12])
            raise InputError(
                "learning.rounds",
                self.plan.learning.rounds,
                f"rounds that every learner's records last for ({shown})",
                f"--rounds {min(lasts.values())}, fewer local_steps or clients_per_step, or more records",
            )
        paths = [folder / name / "records.jsonl" for name in self.names]
        for path, own in zip(paths, rows.values(), strict=True):
            rows_as_json = (json.dumps({k: _plain(v) for k, v in cells.items()}) + "\n" for cells in own)
            write_file(path, (row.encode() for row in rows_as_json))
        return [str(path) for path in paths]

    def scores(self, task: Task, before: NDArray[Any], after: NDArray[Any]) -> Scores | None:
        """Two models on held-out clients, judged as a simulation's are; None where that cannot be."""
        figures = FinalFigures.of(self.plan, task, self.stream, [self.plan.run.first_seed])
        if figures is None:
            return None
        first, last = (self._judged(task, figures.judges[0], x) for x in (before, after))
        if first is None or last is None:
            return None
        ((label, constant),) = figures.constants
        metric = "rmse" if figures.judges[0].labels is None else "accuracy"
        begun, done, guessed = (float(getattr(one.quality, metric)) for one in (first, last, constant))
        return Scores(
            metric,
            begun,
            done,
            guessed,
            guess="the mean" if metric == "rmse" else f'"{label}"',
            rows=len(figures.judges[0].rows.target),
            verdict=Verdicts(self.plan, figures).of_deployed([last]),
            figures=figures.figures([last]),
        )

    def _judged(self, task: Task, judge: Judge, model: NDArray[Any]) -> Judged | None:
        """By what the task says in NumPy, in batches; None if that is not one label or number of each row."""
        target, details = judge.rows.target, TaskDetails.of(task)
        shape = details.features_shape or np.shape(judge.rows.features)[1:]
        logits = details.logits if task.classifies else None
        said: list[NDArray[Any]] = []
        told: list[NDArray[Any]] = []
        for first in range(0, len(target), _AT_ONCE):
            some = np.asarray(judge.rows.features[first : first + _AT_ONCE], np.float32)
            features = some.reshape(len(some), *shape)
            said.append(np.asarray(task.predict(model, features), np.float64))
            told += [] if logits is None else [np.asarray(logits(model, features), np.float64)]
        predicted = np.concatenate(said)
        if predicted.shape != target.shape:
            return None
        if judge.labels is not None and not np.isin(predicted, judge.labels.targets).all():
            return None
        if (known := target_range(self.plan)) is not None:
            predicted = predicted.clip(*known)
        return judge.model(predicted, np.concatenate(told) if told else None)

    def text(self) -> str:
        """What became of the rows; empty for made-up data."""
        if not isinstance(self.stream, TableStream):
            return ""
        report = self.stream.report
        refused = "; ".join(f"{r}: {count}" for r, count in report.refused.most_common(5))
        return (
            f"{report.rows} rows: {report.used} to learn from, {report.held_out} held out, "
            f"{sum(report.refused.values())} refused" + (f" ({refused})" if refused else "")
        )


def _key_names(names: tuple[str, ...]) -> tuple[str, ...]:
    found: list[str] = []
    for place, name in enumerate(names):
        made = re.sub(r"[^A-Za-z0-9_-]+", "-", name).lstrip("-_")[:50] or f"learner-{place}"
        found.append(f"{made}-{place}" if made in found else made)
    return tuple(found)


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float | bool) else as_text(value)
