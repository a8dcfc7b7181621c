"""Real processes that are killed while only sums are seen: short here, long with ./test --slow."""

from __future__ import annotations

import pytest
from studies.masked_chaos import study


@pytest.mark.all
def test_no_round_is_opened_twice_when_processes_are_killed(tmp_path):
    report = study(tmp_path, learners=3, rounds=25, every_s=3.0, seed=2, limit_s=240)
    assert not report.violations, report
    assert report.kills


@pytest.mark.slow
def test_no_round_of_a_long_run_is_opened_twice(tmp_path):
    report = study(tmp_path, learners=10, rounds=1000, every_s=1.5, seed=1)
    assert not report.violations, report
    assert sum(report.kills.values()) >= 5
