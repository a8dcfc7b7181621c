"""Steps of several clients in real processes, of which some are killed: the short form of the study."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from studies import federated_batches
from studies.federated_batches import mnist_plan, short_plan, study

pytest.importorskip("grpc")


def test_processes_that_are_killed_serve_the_replayed_models_to_the_bit(tmp_path):
    report = study(short_plan(learners=2), tmp_path, limit_s=120)
    assert set(report.kills) == {"server", "model API", "learner"}
    assert report.unequal_rounds == 0
    assert report.used < 1.0, report
    assert report.accuracy[0] == pytest.approx(report.accuracy[1], abs=0.01)
    assert report.clients == 2 * 12 * 2 * 7


def test_other_draws_are_found(tmp_path, monkeypatch):
    """The processes have another seed than simulation and replay: every model after the first differs."""
    run = federated_batches.run_processes

    def with_another_seed(plan, *more):
        return run(dataclasses.replace(plan, run=dataclasses.replace(plan.run, first_seed=4)), *more)

    monkeypatch.setattr(federated_batches, "run_processes", with_another_seed)
    plan = short_plan(learners=2, rounds=6)
    report = study(plan, tmp_path, limit_s=120)
    assert report.unequal_rounds == 6
    assert report.used > 10.0


@pytest.mark.slow
def test_the_preset_of_mnist(tmp_path):
    report = study(mnist_plan(), tmp_path)
    assert report.unequal_rounds == 0
    assert report.used < 1.0, report
    assert np.abs(report.accuracy[0] - report.accuracy[1]) < 0.005
