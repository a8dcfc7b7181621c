"""What a simulation's accuracy is worth: three predictions that need no learning, or little of it.

    majority    the class that this learner has met most often so far
    no change   the class of the record that this learner met last
    frozen      the noise-free model as it stood after the first twentieth of the rounds

Every record is predicted before its label counts. None of them is private. Losses are in the units
of the models': majority stands for the running shares of the classes, no change for the running
share of repeats, each begun with one imagined record of every kind.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.files import write_file
from veilstream.learning.tasks import Sample, Task
from veilstream.plans.clients import stream_of
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.plans.tasks import task_of
from veilstream.records.baselines import LabelBaselines
from veilstream.runs.folder import Run
from veilstream.runs.tables import history_csv
from veilstream.simulation.engine import Simulation
from veilstream.streams.pool import PoolStream

Floats = NDArray[np.float64]

BASELINES = ("majority", "no change", "frozen")
FROZEN_SHARE = 0.05  # Of the rounds, that the frozen model learned in


def frozen_rounds(rounds: int) -> int:
    """After how many rounds the frozen model stands still."""
    return max(1, math.ceil(FROZEN_SHARE * rounds))


def prequential_baselines(plan: Plan, task: Task, stream: PoolStream) -> dict[str, dict[str, Floats]]:
    """Accuracy and loss of each baseline by round, on the first seed's clients; NaN where nobody was met."""
    rounds = plan.learning.rounds
    places = stream.indices(plan.run.first_seed, 0, rounds)
    classes = sorted({float(target) for target in stream.targets})
    labels = np.searchsorted(classes, stream.targets)
    found = {name: _Cells(places.shape) for name in BASELINES}
    for learner in range(stream.learners):
        baselines, repeats, seen = LabelBaselines({str(c): 1 for c in range(len(classes))}, "0"), 1, 2
        for r, p, record in _in_order(places[:, learner]):
            label, share = str(labels[record]), repeats / seen
            majority_loss = -math.log(baselines.counts[label] / sum(baselines.counts.values()))
            right = baselines.take(label)
            found["majority"].put((r, learner, p), right.majority, majority_loss)
            repeat_loss = -math.log(share if right.no_change else (1 - share) / (len(classes) - 1))
            found["no change"].put((r, learner, p), right.no_change, repeat_loss)
            repeats, seen = repeats + right.no_change, seen + 1
    _freeze(plan, task, stream, places, found["frozen"])
    return {name: cells.by_round() for name, cells in found.items()}


class _Cells:
    """Right or wrong, and the loss, of every place; NaN where nobody was."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.right: Floats = np.full(shape, np.nan)
        self.loss: Floats = np.full(shape, np.nan)

    def put(self, place: Any, right: Any, loss: Any) -> None:
        self.right[place], self.loss[place] = right, loss

    def by_round(self) -> dict[str, Floats]:
        return {"accuracy": _mean_of_rounds(self.right), "loss": _mean_of_rounds(self.loss)}


def _mean_of_rounds(cells: Floats) -> Floats:
    there = ~np.isnan(cells)
    count = there.sum(axis=(1, 2))
    total = np.where(there, cells, 0.0).sum(axis=(1, 2))
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _in_order(places: NDArray[np.int32]) -> Iterator[tuple[int, int, int]]:
    for r, row in enumerate(places):
        for p, record in enumerate(row):
            if record >= 0:
                yield r, p, int(record)


def _freeze(plan: Plan, task: Task, stream: PoolStream, places: NDArray[np.int32], into: _Cells) -> None:
    import jax

    free = [method for method in plan.methods if method.kind == "noise-free"]
    if not free:
        raise InputError(
            "methods",
            [m.name for m in plan.methods],
            "one of kind noise-free, which is frozen",
            'add a method with kind = "noise-free"',
        )
    learned = frozen_rounds(plan.learning.rounds)
    learning = dataclasses.replace(plan.learning, rounds=learned)
    run = dataclasses.replace(plan.run, seeds=1, evaluate_every=learned)
    short = dataclasses.replace(plan, learning=learning, run=run, methods=(free[0],))
    simulation = Simulation(short, [prepare(short, free[0])], (plan.run.first_seed,), task=task, stream=stream)
    while not simulation.done:
        simulation.advance()
    for r in range(learned):
        into.put(
            (r, slice(0, 1), slice(0, 1)),
            float(simulation.history["accuracy"][0, 0, r]),
            float(simulation.history["loss"][0, 0, r]),
        )
    model = simulation.models()[0, 0]

    def judge(features: Any, target: Any) -> Any:
        one = jax.vmap(lambda f, t: task.loss(model, Sample(f, t)))
        return task.predict(model, features) == target, one(features, target)

    later = places[learned:]
    chosen = np.maximum(later, 0).ravel()
    right, loss = jax.jit(judge)(stream.features[chosen], stream.targets[chosen])
    there = later >= 0
    for cells, values in ((into.right, right), (into.loss, loss)):
        cells[learned:] = np.where(there, np.asarray(values, float).reshape(later.shape), np.nan)


def write_baselines(run: Run) -> None:
    """Put baselines.csv into a run folder of a plan with records, unless it is there."""
    path = run.path / "baselines.csv"
    if path.exists():
        return
    plan = run.plan
    stream = stream_of(plan)
    if not isinstance(stream, PoolStream):
        raise InputError("data.kind", plan.data.kind, "records of a table", 'kind = "table"')
    found = prequential_baselines(plan, task_of(plan), stream)
    columns = {
        column: np.stack([found[name][metric] for name in BASELINES])[:, None]
        for metric, column in (("accuracy", "prequential_accuracy"), ("loss", "loss"))
    }
    rounds = list(range(plan.learning.rounds))
    table = history_csv(list(BASELINES), [plan.run.first_seed], columns, rounds)
    write_file(path, table, shared=True)
