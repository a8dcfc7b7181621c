"""A real server while strangers hold connections to its model API: the short form of `studies.strangers`."""

from __future__ import annotations

from studies.strangers import study


def test_strangers_take_neither_rounds_nor_files_nor_memory_of_the_process_that_has_the_rounds():
    report = study(300, 40, seconds=2.0, repeats=1, learners=3, dim=20)
    assert not report.violations
    assert report.connected >= 340
    assert report.disturbed[0] > 0
    assert report.rounds_open_files < 64  # none of theirs
    assert report.api_open_files < 64 + 2 * 64  # at most 64 from one address
