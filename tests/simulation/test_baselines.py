"""Labels alone beside a run's methods: in its summary, and by round."""

from __future__ import annotations

import numpy as np
import pytest

import veilstream as vs
from veilstream.errors import InputError
from veilstream.learning.tasks import Logistic
from veilstream.plans.clients import stream_of
from veilstream.plans.plan import Plan
from veilstream.plans.tasks import task_of
from veilstream.privacy import Budget
from veilstream.reports.quality import baseline_cell, named
from veilstream.simulation.baselines import label_figures, write_baselines
from veilstream.simulation.label_rules import learners_share, noisy_count


def plan(**changes):
    made = {
        "learning": {"rounds": 12, "learners": 4, "local_steps": 2, "clients_per_step": 3},
        "data": {"kind": "synthetic", "dim": 5, "held_out": 50},
        "privacy": {"epsilon": 1.0, "delta": 1e-5},
        "methods": [
            {"name": "free", "kind": "noise-free", "step_size": 0.5},
            {"name": "one", "kind": "independent", "step_size": 0.5},
            {"name": "two", "mechanism": "tree", "step_size": 0.5, "epsilon": 4.0},
            {"name": "three", "mechanism": "buffered", "step_size": 0.5},
        ],
        "run": {"seeds": 2, "regret": False},
    }
    return Plan(**{key: made[key] | changes.get(key, {}) if isinstance(made[key], dict) else made[key] for key in made})


def test_rules_see_the_labels_that_the_models_meet():
    ours = plan()
    stream = stream_of(ours)
    found = label_figures(ours, task_of(ours), stream, [0, 1])
    assert list(found) == ["majority", "learner's share", "last label", "noisy count @ 1", "noisy count @ 4"]
    labels = np.stack([stream.round(1, r).target > 0 for r in range(12)]).astype(int)
    assert np.array_equal(found["learner's share"]["loss"][1], learners_share(labels, 2).loss)
    assert np.array_equal(found["noisy count @ 4"]["loss"][1], noisy_count(labels, 2, Budget(4.0, 1e-5), 1).loss)


def test_a_summary_and_its_report_have_them_beside_the_methods(tmp_path):
    run = vs.run(plan(), tmp_path / "run")
    told = run.summary["baselines"]
    assert "accuracy" in told["majority"]
    assert 0 < told["learner's share"]["average_loss"] < 2
    assert 0.4 < told["noisy count @ 4"]["prequential_accuracy"] <= 1
    names = {named(name, entry): name for name, entry in told.items()}
    assert {"each learner's label share", "noisy label count, ε = 4"} <= set(names)
    loss = told["learner's share"]["average_loss"]
    assert baseline_cell(run.simulation, "learner's share", "average_loss") == f"{loss:.4f}"


def test_the_rounds_are_written_once_into_the_folder(tmp_path):
    run = vs.run(plan(), tmp_path / "run")
    write_baselines(run)
    before = (run.path / "baselines.csv").stat().st_mtime_ns
    write_baselines(run)
    assert (run.path / "baselines.csv").stat().st_mtime_ns == before
    assert run.baselines("loss")["last label"].shape == (2, 12)


def test_numbers_have_no_labels_and_neither_have_learners_who_miss_rounds(tmp_path):
    values = plan(learning={"task": "least_squares"})
    assert label_figures(values, task_of(values), stream_of(values), [0]) == {}
    absent = plan(data={"missing": 0.5})
    assert label_figures(absent, Logistic(5), stream_of(absent), [0]) == {}
    run = vs.run(values, tmp_path / "run")
    with pytest.raises(InputError, match="a task with labels"):
        write_baselines(run)
