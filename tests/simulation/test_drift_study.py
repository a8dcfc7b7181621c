"""The study of drift in small: every way does what it says."""

from __future__ import annotations

import csv

import numpy as np
import pytest
from studies import drift
from studies.drift_figure import draw

from veilstream.plans.prepare import prepare

WORLD = drift.Synthetic("abrupt", rounds=12, learners=2)
CELLS = [(budget, step) for budget in drift.BUDGETS for step in (0.4, 1.6)]
NOISE_FREE = slice(0, 2)


def test_restarts_begin_anew_where_they_should_and_only_there():
    """A model that begins anew has the loss of zero, ln 2, whatever the clients are."""
    constant, anew, new_noise = (
        way(WORLD, CELLS, (0, 1), False) for way in (drift.constant_step, drift.from_the_start, drift.new_noise)
    )
    assert constant.shape == anew.shape == (6, 2, 12)  # (no noise, two budgets) x two steps
    np.testing.assert_allclose(anew[:, :, ::4], np.log(2), rtol=1e-6)
    assert (np.abs(constant[:, :, 4::4] - np.log(2)) > 1e-4).all()
    np.testing.assert_allclose(anew[NOISE_FREE, :, :4], constant[NOISE_FREE, :, :4], rtol=1e-5)
    np.testing.assert_allclose(new_noise[NOISE_FREE], constant[NOISE_FREE], rtol=1e-5)
    assert (new_noise[2:, :, 2:] != constant[2:, :, 2:]).all()


def test_new_noise_is_calibrated_for_one_epoch_each():
    """A client is in one epoch, so what it can move is that of a mechanism of a third's length."""
    world = drift.Synthetic("none", rounds=30, learners=2)
    plan, short = world.plan(CELLS), world.plan(CELLS, rounds=10)
    method = plan.methods[-1]
    fresh = drift.with_new_noise(plan, prepare(plan, method), 3)
    assert fresh.noise_std == pytest.approx(prepare(short, method).noise_std, rel=1e-3)
    assert fresh.factorization.horizon == 120
    C = fresh.factorization.strategy_matrix()
    np.testing.assert_allclose(C[40:80, :40], 0.0, atol=1e-6)  # nothing goes from epoch to epoch


def test_new_noise_knows_that_a_step_averages_clients():
    """16 clients a step of the real stream: a 16th of the sensitivity, as without epochs."""
    plan = drift.Recorded("electricity").plan([(2.0, 1.0)], rounds=30)
    usual = prepare(plan, plan.methods[0])
    fresh = drift.with_new_noise(plan, usual, 1)
    ratio = usual.factorization.sensitivity() / fresh.factorization.sensitivity()
    assert usual.noise_std == pytest.approx(fresh.noise_std * ratio, rel=1e-3)


def test_shared_noise_is_that_of_each_method_by_itself():
    plan = WORLD.plan(CELLS)
    for shared, method in zip(drift.calibrated(plan), plan.methods, strict=True):
        own = prepare(plan, method)
        assert (shared.plan, shared.noise_std) == (method, own.noise_std)


def test_steps_are_chosen_on_other_data_than_reported():
    searched = drift.Recorded("covertype").plan(CELLS, search=True)
    reported = drift.Recorded("covertype").plan(CELLS)
    assert (searched.data.source, reported.data.source) == ("data:covertype/tuning", "data:covertype")
    assert not set(drift.SEEDS) & set(drift.SEARCH_SEEDS)
    assert [m.clip_norm for m in reported.methods] == [1.0, 1.0, 0.3, 0.3, 0.3, 0.3]


def test_the_study_in_small(monkeypatch, tmp_path):
    monkeypatch.setattr(drift, "STEPS", (0.4, 1.6))
    monkeypatch.setattr(drift, "FORGETTING", (0.9,))
    monkeypatch.setattr(drift, "SEEDS", (0, 1))
    monkeypatch.setattr(drift, "SEARCH_SEEDS", (5,))
    found = drift.study({"seasonal": drift.Synthetic("seasonal", rounds=12, learners=2)})
    by_way = found["seasonal"]
    assert set(by_way) == {"constant step", "forgetting 0.9", "new noise, 3 epochs", "from the start, 3 epochs"}
    for by_budget in by_way.values():
        assert set(by_budget) == {"no noise", "ε = 2", "ε = 0.5"}
        assert min(min(each["figures"]) for each in by_budget.values()) >= 0.0  # it is regret
        assert all(each["step"] in (0.4, 1.6) for each in by_budget.values())
    assert drift.compared(found, "seasonal", "constant step", "ε = 2") == (0.0, 0.0)
    text = drift.table(found)
    assert "| seasonal | no noise |" in text
    lines = list(csv.DictReader(drift.every_seed(found).splitlines()))
    assert len(lines) == 4 * 3 * 2  # ways, budgets, seeds
    seen = by_way["forgetting 0.9"]["ε = 2"]["figures"][1]
    (line,) = (
        each for each in lines if (each["way"], each["budget"], each["seed"]) == ("forgetting 0.9", "ε = 2", "1")
    )
    assert float(line["figure"]) == pytest.approx(seen, abs=1e-6)
    differences = {"seasonal": {b: {w: drift.compared(found, "seasonal", w, b) for w in by_way} for b in ("ε = 2",)}}
    draw(differences, tmp_path / "drift.png")
    assert (tmp_path / "drift.png").stat().st_size > 10_000


def test_differences_are_taken_seed_by_seed():
    found = {"w": {"constant step": {"b": {"figures": [1.0, 2.0, 3.0]}}, "other": {"b": {"figures": [1.5, 2.5, 3.8]}}}}
    mean, error = drift.compared(found, "w", "other", "b")
    assert mean == pytest.approx(0.6)
    assert error == pytest.approx(np.sqrt(0.03) / np.sqrt(3))  # of 0.5, 0.5, 0.8
