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
from veilstream.learning.tasks import Task, TaskDetails
from veilstream.plans.clients import learner_rows, stream_of
from veilstream.plans.plan import Plan
from veilstream.plans.records import label_unit
from veilstream.records.cells import as_text
from veilstream.streams.pool import Stream
from veilstream.streams.table_stream import TableStream


@dataclass(frozen=True)
class Scores:
    """How well models do on people who did not take part."""

    metric: str
    """accuracy, or rmse in the label's own units."""
    before: float
    after: float
    constant: float
    """Of the best constant guess: the commonest label, or the mean."""

    def text(self) -> str:
        """The scores in words."""
        guess = "the commonest label" if self.metric == "accuracy" else "the mean"
        form = ".3f" if self.metric == "accuracy" else ".4g"
        return (
            f"{self.before:{form}} before, {self.after:{form}} after, on clients who did not take "
            f"part (always {guess}: {self.constant:{form}})"
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
        """Two models on held-out clients; None if a prediction is not one label or number."""
        plan = self.plan
        held = self.stream.held_out(plan.run.first_seed, plan.data.held_out, plan.learning.rounds - 1)
        target = np.asarray(held.target, np.float64).ravel()
        shape = TaskDetails.of(task).features_shape or np.shape(held.features)[1:]
        features = np.asarray(held.features, np.float32).reshape(len(target), *shape)
        first, last = (np.asarray(task.predict(x, features), np.float64) for x in (before, after))
        if first.shape != target.shape:
            return None
        if task.classifies:
            common = float(np.unique(target, return_counts=True)[1].max()) / len(target)
            right = float((first == target).mean()), float((last == target).mean())
            return Scores("accuracy", *right, common)
        unit = label_unit(plan)
        error = (unit * float(np.sqrt(np.mean((x - target) ** 2))) for x in (first, last))
        return Scores("rmse", next(error), next(error), float(target.std()) * unit)

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
