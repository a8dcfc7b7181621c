"""What labels alone say of a run's clients (`label_rules`): beside its methods in tables and figures.

    majority            of all learners' labels so far
    learner's share     of this learner's labels so far
    last label          of this learner's record before
    noisy count @ ε     a learner's labels, released as often as the models and at the same budget

The first three protect no one. A noisy count is as private as the models beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.files import write_file
from veilstream.learning.tasks import Task, TaskDetails
from veilstream.plans.clients import stream_of
from veilstream.plans.plan import Plan
from veilstream.plans.tasks import task_of
from veilstream.privacy import Budget, Neighbours
from veilstream.runs.folder import Run
from veilstream.runs.tables import history_csv
from veilstream.simulation.label_rules import RulesFigures, last_label, learners_share, majority, noisy_count
from veilstream.streams.pool import PoolStream, Stream

Floats = NDArray[np.float64]
NOISY_COUNT = "noisy count @ "
_MOST_NUMBERS = 2 * 10**8
"""Features that are drawn again for the labels beside them: some seconds. Seeds beyond are left out."""


def label_figures(plan: Plan, task: Task, stream: Stream, seeds: Sequence[int]) -> dict[str, dict[str, Floats]]:
    """Accuracy and loss (seeds, rounds) of each rule; of fewer seeds where clients are made up and many.

    Nothing for a task without labels, for streams of a caller's own, and where learners miss rounds.
    """
    if not task.classifies or plan.data.kind == "custom" or plan.data.partial_attendance:
        return {}
    found: dict[str, list[RulesFigures]] = {}
    for seed in seeds[: _affordable(plan, task, stream)]:
        labels, classes = _labels(plan, task, stream, seed)
        rules = {
            "majority": majority(labels, classes),
            "learner's share": learners_share(labels, classes),
            "last label": last_label(labels, classes),
        }
        for name, budget in _budgets(plan):
            rules[name] = noisy_count(
                labels,
                classes,
                budget,
                seed,
                participation=plan.participation,
                local_steps=plan.learning.local_steps,
                neighbours=Neighbours.of(plan.neighbours),
            )
        for name, figures in rules.items():
            found.setdefault(name, []).append(figures)
    return {
        name: {"accuracy": np.stack([f.accuracy for f in each]), "loss": np.stack([f.loss for f in each])}
        for name, each in found.items()
    }


def label_means(plan: Plan, task: Task, stream: Stream, seeds: Sequence[int]) -> dict[str, dict[str, float]]:
    """For summary.json: means over seeds and rounds."""
    return {
        name: {
            "prequential_accuracy": float(np.nanmean(each["accuracy"])),
            "average_loss": float(np.nanmean(each["loss"])),
        }
        for name, each in label_figures(plan, task, stream, seeds).items()
        if not np.isnan(each["loss"]).all()
    }


def write_baselines(run: Run) -> None:
    """Put baselines.csv into a run folder of a plan with labels, unless it is there."""
    path = run.path / "baselines.csv"
    if path.exists():
        return
    plan = run.plan
    seeds = list(range(plan.run.first_seed, plan.run.first_seed + plan.run.seeds))
    found = label_figures(plan, task_of(plan), stream_of(plan), seeds)
    if not found:
        raise InputError("learning.task", plan.learning.task, "a task with labels", 'task = "logistic"')
    seeds = seeds[: len(next(iter(found.values()))["loss"])]
    columns = {
        column: np.stack([each[metric] for each in found.values()])
        for metric, column in (("accuracy", "prequential_accuracy"), ("loss", "loss"))
    }
    table = history_csv(list(found), seeds, columns, list(range(plan.learning.rounds)))
    write_file(path, table, shared=True)


def _budgets(plan: Plan) -> Iterator[tuple[str, Budget]]:
    """Each budget of the plan's private methods, once."""
    for budget in dict.fromkeys(plan.budget_of(m) for m in plan.methods if m.method.private):
        yield f"{NOISY_COUNT}{budget.epsilon:g}", budget


def _affordable(plan: Plan, task: Task, stream: Stream) -> int:
    if isinstance(stream, PoolStream):
        return 10
    learning = plan.learning
    clients = learning.rounds * learning.local_steps * learning.clients_per_step * learning.learners
    return max(1, min(10, _MOST_NUMBERS // (clients * task.dim)))


def _labels(plan: Plan, task: Task, stream: Stream, seed: int) -> tuple[NDArray[np.intp], int]:
    """Places of the labels (rounds, learners, clients of a round), -1 for nobody; and how many labels there are."""
    rounds, known = plan.learning.rounds, TaskDetails.of(task).labels
    if isinstance(stream, PoolStream):
        order = stream.indices(seed, 0, rounds)
        targets: NDArray[Any] = np.asarray(stream.targets)[order]
        there = order >= 0
    else:
        met = [stream.round(seed, r) for r in range(rounds)]
        targets = np.stack([np.asarray(each.target) for each in met])
        there = np.stack([np.ones_like(each.target) if each.present is None else each.present for each in met]) > 0
    values = np.unique(targets[there]) if known is None else np.sort(np.asarray(known, np.float64))
    return np.where(there, np.searchsorted(values, targets), -1), len(values)
