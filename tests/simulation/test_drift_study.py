"""The study of drift in small: every way does what it says."""

from __future__ import annotations

import numpy as np
import pytest
from studies import drift

from veilstream.plans.prepare import prepare


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(drift, "STEPS", (0.4, 1.6))
    monkeypatch.setattr(drift, "FORGETTING", (0.9,))
    monkeypatch.setattr(drift, "SEEDS", (0, 1))


def test_restarts_begin_anew_where_they_should_and_only_there(small):
    """A model that begins anew has the loss of zero, ln 2, whatever the clients are."""
    ways = drift.ways("abrupt", rounds=12, learners=2)
    constant, anew = ways["constant step"](), ways["from the start, 3 epochs"]()
    assert constant.shape == anew.shape == (6, 2, 12)  # (no noise, two budgets) x two steps
    np.testing.assert_allclose(anew[:, :, ::4], np.log(2), rtol=1e-6)
    assert (np.abs(constant[:, :, 4::4] - np.log(2)) > 1e-4).all()
    noise_free = slice(0, 2)
    np.testing.assert_allclose(anew[noise_free, :, :4], constant[noise_free, :, :4], rtol=1e-5)
    new_noise = ways["new noise, 3 epochs"]()
    np.testing.assert_allclose(new_noise[noise_free], constant[noise_free], rtol=1e-5)
    assert (new_noise[2:, :, 2:] != constant[2:, :, 2:]).all()


def test_new_noise_is_calibrated_for_one_epoch_each():
    """A client is in one epoch, so what it can move is that of a mechanism of a third's length."""
    plan = drift.plan_of("none", 30, 2)
    short = drift.plan_of("none", 10, 2)
    method = plan.methods[-1]
    fresh = drift.with_new_noise(plan, prepare(plan, method), 3)
    assert fresh.noise_std == pytest.approx(prepare(short, method).noise_std, rel=1e-3)
    assert fresh.factorization.horizon == 120
    C = fresh.factorization.strategy_matrix()
    np.testing.assert_allclose(C[40:80, :40], 0.0, atol=1e-6)  # nothing goes from epoch to epoch


def test_the_study_in_small(small):
    found = drift.study(("seasonal",), rounds=12, learners=2)["seasonal"]
    assert set(found) == {
        "least loss", "constant step", "forgetting 0.9", "new noise, 3 epochs",
        "from the start, 3 epochs",
    }  # fmt: skip
    for way, by_budget in found.items():
        if way != "least loss":
            assert min(min(each["regret"]) for each in by_budget.values()) >= 0.0
    assert "| constant step |" in drift.table({"seasonal": found})
