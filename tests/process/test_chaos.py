"""Real processes that are killed at random: short here, long with ./test --slow."""

from __future__ import annotations

import pytest
from studies.chaos import study


def test_a_direct_federation_survives_the_loss_of_any_process(tmp_path):
    report = study(tmp_path, "direct", learners=2, rounds=60, every_s=2.0, seed=4, limit_s=120)
    assert not any(report.violations.values()), report
    assert sum(report.kills.values()) >= 1
    assert report.model_distance < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "rounds", "every_s"), [("direct", 1000, 1.5), ("flare", 2500, 25.0)])
def test_a_long_federation_survives_the_loss_of_any_process(engine, rounds, every_s, tmp_path):
    report = study(tmp_path, engine, rounds=rounds, every_s=every_s, seed=1)
    assert not any(report.violations.values()), report
    assert sum(report.kills.values()) >= 5
