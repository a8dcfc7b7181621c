"""Every bug of the list, planted and caught. Run `python -m studies.mutations` for the table."""

from __future__ import annotations

import pytest
from studies.mutations import order_bugs, outside_bugs, path_bugs, sum_bugs
from studies.mutations.__main__ import ALL

NAMED = {
    "noise redrawn after a restart",
    "a round re-sent with fresh noise",
    "B_g instead of 2·B_g",
    "rollback: the same noise, other data",
    "clipping off",
    "NaN let through",
    "noise row shifted by one",
    "index clamped past the horizon",
    "twice the horizon",
    "the same client twice",
    "one noise draw per round, raw local steps",
    "float release without the grid",
    "weights 1/(who answered)",
    "a seed chosen by the operator",
    "one coordinate without noise",
    "ten coordinates without noise",
    "two coordinates sharing noise",
    "seeds from a secret of the store and the step",
    "float32 products under the grid",
    "seeds of 16 bits",
    "a metric outside its bound",
    "telemetry that was not calibrated for",
    "half the noise in telemetry's coordinates",
    "metrics sent threefold by the learner's step",
    *path_bugs.PLANTED,
    *outside_bugs.PLANTED,
    *order_bugs.PLANTED,
    *sum_bugs.PLANTED,
}
CHECKS = {
    "one run",
    "many runs",
    "same draws",
    "conformance",
    "coordinates",
    "pairs",
    "epochs",
    "cells",
    "guard",
    "whole audit",
    "secret order",
    "sums",
}


@pytest.mark.parametrize("bug", ALL, ids=lambda bug: bug.__name__)
def test_is_caught_by_a_named_check(bug):
    finding = bug()
    assert finding.caught, finding.figure
    assert finding.caught_by in CHECKS
    assert finding.bug in NAMED


def test_every_bug_of_the_list_is_planted():
    assert len(ALL) == len(NAMED)
