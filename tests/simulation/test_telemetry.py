"""Telemetry in simulation: the clients' metrics and noise, which move no model."""

from __future__ import annotations

import csv
import dataclasses

import numpy as np
import pytest

import veilstream as vs
from tests.simulation.test_algorithm_one import simulate
from veilstream.errors import InputError
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.simulation.engine import Simulation
from veilstream.simulation.run_checkpoint import StateShape, read_checkpoint, write_checkpoint

pytest.importorskip("jax")


def plan_with(telemetry=None, methods=None, **tables):
    learning = {"rounds": 24, "local_steps": 3, "learners": 4, "clip_norm": 0.5}
    return Plan(
        name="told",
        learning=learning | tables.pop("learning", {}),
        data={"dim": 6} | tables.pop("data", {}),
        privacy={"epsilon": 4.0, "delta": 1e-5},
        run={"seeds": 2, "noise": "host", "regret": False, "evaluate_every": 4} | tables.pop("run", {}),
        methods=methods or [{"name": "a", "mechanism": "buffered", "step_size": 0.2}],
        **({} if telemetry is None else {"telemetry": telemetry}),
    )


FREE = [{"name": "free", "kind": "noise-free", "step_size": 0.2}]
ALL = {"metrics": ["accuracy", "loss", "clipped", "present"], "loss_cap": 20.0}


def test_without_noise_telemetry_is_what_the_oracle_measures():
    found = simulate(plan_with(ALL, FREE))
    telemetry = found.plan.telemetry_of(found.plan.methods[0])
    said = telemetry.averages(found.telemetry.releases[0], 1)
    assert said[..., 0] == pytest.approx(found.history["accuracy"][0], abs=1e-5)
    assert said[..., 1] == pytest.approx(found.history["loss"][0], rel=1e-4)
    assert 0.0 < said[..., 2].mean() < 1.0
    assert said[..., 3] == pytest.approx(1.0, abs=1e-6)


def test_without_noise_the_model_does_not_notice():
    told, untold = simulate(plan_with(ALL, FREE)), simulate(plan_with(None, FREE))
    assert np.allclose(told.models(), untold.models(), atol=1e-6)
    assert np.ptp(untold.models()) > 0.1


def test_clipped_counts_gradients_that_are_longer_than_the_clip_norm():
    """At zero a logistic gradient is half its client's features, whose norm is one or less."""
    step = [{"name": "free", "kind": "noise-free", "step_size": 1e-9}]
    for clip_norm, expected in ((0.4999, 1.0), (0.5001, 0.0)):
        plan = plan_with({"metrics": ["clipped"]}, step, learning={"clip_norm": clip_norm, "rounds": 3})
        found = simulate(plan)
        telemetry = plan.telemetry_of(plan.methods[0])
        lengths = [
            np.linalg.norm(found.stream.round(seed, r).features, axis=-1).ravel() for seed in (0, 1) for r in range(3)
        ]
        share = np.mean(np.concatenate(lengths) / 2 > clip_norm)
        said = telemetry.averages(found.telemetry.releases[0], 1).mean()
        assert said == pytest.approx(share, abs=1e-6)
        assert share == expected


def test_a_telemetry_coordinate_has_the_noise_of_the_others():
    """200 seeds, fixed: the variance of the last prefix sum, to 4 of its deviations (40%)."""
    plan = plan_with({"metrics": ["present"]}, learning={"rounds": 8, "learners": 1})
    found = simulate(plan, seeds=range(200))
    (prepared,) = [prepare(plan, method) for method in plan.methods]
    telemetry = plan.telemetry_of(plan.methods[0])
    last = (found.telemetry.releases[0].sum(axis=1) * 3)[:, 0] - 24 * telemetry.width / 2
    expected = prepared.noise_std**2 * prepared.factorization.row_norms_squared()[-1]
    assert last.var() == pytest.approx(expected, rel=0.4)
    assert abs(last.mean()) < 4.0 * np.sqrt(expected / 200)


@pytest.mark.parametrize("missing", [0.0, 0.4])
def test_intervals_cover_what_the_oracle_saw(missing):
    """60 seeds, one window: 95%, and at most 4 of its deviations (11%) off."""
    data = {"missing": missing} if missing else {}
    told = {"metrics": ["accuracy"], "scale": 2.0, "window": 10}
    plan = plan_with(told, data=data, run={"evaluate_every": 24})
    found = simulate(plan, seeds=range(60))
    covered = []
    right = right_by_learner(found.plan, range(60)) if missing else None
    for s in range(60):
        sums = found.telemetry.sums(0, s, 24)
        (estimate,) = sums.estimates(10)
        there = np.ones((10, 4), bool)
        if missing:
            there = found._attendance.taking_part([s], 14, 10)[:, 0]
        truth = found.history["accuracy"][0, s, 14:].mean()
        if missing:  # the oracle also counts clients of learners that were missing
            truth = right[:, s][there].sum() / (3 * there.sum())
        assert estimate.steps == 3 * there.sum()
        covered.append(estimate.low <= truth <= estimate.high)
    assert abs(np.mean(covered) - 0.95) <= 0.11


def right_by_learner(plan, seeds):
    """Right predictions of each learner's clients in rounds 14 to 23, (rounds, seeds, n), by hand."""
    again = Simulation(plan, [prepare(plan, method) for method in plan.methods], seeds, block_rounds=1)
    right = np.zeros((10, len(seeds), 4))
    try:
        for r in range(24):
            models = again.models()[0]
            again.advance()
            for s, seed in enumerate(seeds) if r >= 14 else ():
                clients = again.stream.round(seed, r)
                hit = np.where(clients.features @ models[s] >= 0, 1.0, -1.0) == clients.target
                right[r - 14, s] = hit.sum(axis=-1)
    finally:
        again.close()
    return right


def test_a_run_folder_has_its_estimates(tmp_path):
    run = vs.run(plan_with({"window": 6}), out=tmp_path / "run")
    with (tmp_path / "run/telemetry.csv").open() as file:
        header = next(csv.reader(file))
    assert header[:7] == ["method", "seed", "round", "metric", "estimate", "low", "high"]
    rows = run.telemetry()
    assert [row.round for row in rows if row.seed == "0"] == [4, 8, 12, 16, 20, 24]
    assert {row.window for row in rows} == {"4", "6"}
    for row in rows:
        assert row.method == "a"
        assert row.low < row.estimate < row.high
    guarantee = run.guarantees["a"]["guarantee"]
    assert guarantee["telemetry"]["noise_price"] == pytest.approx(0.0111874, abs=1e-6)


def test_a_run_without_telemetry_has_no_such_file(tmp_path):
    run = vs.run(plan_with(), out=tmp_path / "run")
    assert run.telemetry() == []
    assert not (tmp_path / "run/telemetry.csv").exists()
    assert "telemetry" not in (tmp_path / "run/guarantee.json").read_text()
    assert "telemetry" not in (tmp_path / "run/plan.toml").read_text()


def test_blocks_change_nothing_but_rounding():
    told = plan_with(ALL)
    whole, apart = simulate(told), simulate(told, block_rounds=5)
    assert np.allclose(whole.telemetry.releases, apart.telemetry.releases, atol=1e-5)


def test_a_checkpoint_goes_on_to_the_same_telemetry():
    plan = plan_with({"window": 4})
    prepared = [prepare(plan, method) for method in plan.methods]
    whole = simulate(plan, block_rounds=4)
    first = Simulation(plan, prepared, [0, 1], block_rounds=4)
    for _ in range(4):
        first.advance()
    second = Simulation(plan, prepared, [0, 1], block_rounds=4)
    second.restore(first.state())
    while not second.done:
        second.advance()
    assert np.array_equal(second.telemetry.releases, whole.telemetry.releases)
    assert np.array_equal(second.models(), whole.models())


def test_a_checkpoint_without_its_telemetry_is_refused_by_name(tmp_path):
    plan = plan_with({})
    prepared = [prepare(plan, method) for method in plan.methods]
    simulation = Simulation(plan, prepared, [0, 1])
    state = simulation.state()
    simulation.close()
    shape = StateShape(methods=1, seeds=2, rounds=24, looks=len(simulation.evaluated), metrics=1)
    write_checkpoint(tmp_path / "whole.npz", state)
    assert read_checkpoint(tmp_path / "whole.npz", shape).telemetry is not None
    write_checkpoint(tmp_path / "part.npz", dataclasses.replace(state, telemetry=None))
    with pytest.raises(InputError, match="a whole checkpoint of this run"):
        read_checkpoint(tmp_path / "part.npz", shape)


def test_a_task_that_predicts_numbers_has_no_accuracy():
    class Numbers(vs.tasks.LeastSquares):
        pass

    plan = plan_with({}, learning={"task": "custom"})
    prepared = [prepare(plan, method) for method in plan.methods]
    with pytest.raises(InputError, match="no accuracy where Numbers predicts a number"):
        Simulation(plan, prepared, [0], task=Numbers(6))


def test_noise_made_on_the_device_reaches_telemetry_too():
    plan = plan_with({"metrics": ["present"]}, run={"noise": "device"})
    found = simulate(plan)
    telemetry = plan.telemetry_of(plan.methods[0])
    said = telemetry.averages(found.telemetry.releases[0], 1)[..., 0]
    assert np.isfinite(said).all()
    assert said.std() > 0.1
    (estimate,) = found.telemetry.sums(0, 0, 24).estimates(24)
    assert abs(estimate.estimate - 1.0) < 2.0 * (estimate.high - estimate.estimate)
