"""Many learners on one server, also one that is killed; short forms."""

from __future__ import annotations

from studies.load import study


def test_fifty_learners_on_one_server_have_the_model_that_their_releases_imply(tmp_path):
    report = study(50, 50, 4, tmp_path, limit_s=60)
    assert not any(report.violations.values()), report
    assert report.round_s > 0


def test_the_model_is_the_same_to_the_bit_though_the_server_is_killed(tmp_path):
    report = study(6, 50, 300, tmp_path, limit_s=90, kills=3)  # enough that the kills come before the end
    assert not any(report.violations.values()), report
    assert report.kills == 3
