"""Real processes that are killed at random: short here, long with ./test --slow."""

from __future__ import annotations

import pytest
from studies.chaos import study


def test_a_direct_federation_survives_the_loss_of_any_process(tmp_path):
    report = study(tmp_path, learners=2, rounds=60, every_s=2.0, seed=4, limit_s=120)
    assert not any(report.violations.values()), report
    assert sum(report.kills.values()) >= 1
    assert report.model_distance < 1e-6


@pytest.mark.slow
def test_a_long_federation_survives_the_loss_of_any_process(tmp_path):
    report = study(tmp_path, rounds=1000, every_s=1.5, seed=1)
    assert not any(report.violations.values()), report
    assert sum(report.kills.values()) >= 5
