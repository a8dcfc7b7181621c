"""An operator's year with real processes, shorter: each mishap of the handbook, and logs without a false line."""

from __future__ import annotations

import pytest
from studies.operator_year import study

pytestmark = [pytest.mark.process, pytest.mark.all]


def test_an_operators_year_loses_nothing_and_its_logs_say_what_happened(tmp_path):
    report = study(tmp_path, rounds=900, reply_s=0.1, measure_s=4.0)
    assert not report.violations
    assert not report.unexplained
    assert len(report.episodes) == 8
    assert report.lines["error"] >= 1
    assert report.facts["longest round when it left, s"] < 8.0  # the deadline is 10 s
