"""Cells of real messages, short and long; and the study that counts them, stopped and gone on."""

from __future__ import annotations

import numpy as np
import pytest
from studies.cell_attack import planted
from studies.cells import PART, Study, judged, load, run

from veilstream.audit.statistics.check import FALSE_ALARMS


def test_a_study_goes_on_where_it_stopped(tmp_path):
    study = Study("independent", rounds=2)
    first = run(study, 3000, workers=1, folder=tmp_path)
    again = run(study, 9000, workers=1, folder=tmp_path)
    for message in study.messages:
        assert first[message].draws == 3000
        assert again[message].draws == 9000
        assert (again[message].counts >= first[message].counts).all()
        np.testing.assert_array_equal(load(study, tmp_path)[message].counts, again[message].counts)
    np.savez(study.path(tmp_path, 0), std=1.0, counts=np.zeros(3))
    with pytest.raises(SystemExit, match="another law"):
        load(study, tmp_path)


def test_the_study_sees_float32_under_the_grid():
    study = Study("buffered", rounds=64)
    with planted():
        first, _ = judged(study, run(study, PART // 2, workers=1))
    assert first["lattice_share"] / first["lattice_error"] > 8
    assert abs(first["lattice_share"] - 1.0) < 5 * first["lattice_error"]


@pytest.mark.slow
def test_cells_of_the_first_and_tenth_message_are_a_rounded_gaussians():
    """2·10⁸ draws of each; an alarm has probability 1e-6."""
    study = Study("buffered", rounds=64)
    for row in judged(study, run(study, 200_000_000, workers=2)):
        assert row["p"] > FALSE_ALARMS, row
        assert abs(row["eta_squared"]) < 5 * row["standard_error"], row
        assert abs(row["lattice_share"]) < 5 * row["lattice_error"], row
