"""The study of telemetry in small: what it must find, and that it can fail."""

from __future__ import annotations

import numpy as np
import pytest
from studies import telemetry as study

from veilstream.learning.telemetry_estimates import RoundNoise

pytest.importorskip("jax")


def covered_share(found, metric):
    own = [c for c in found if c.metric == metric]
    return sum(c.covered * c.windows for c in own) / sum(c.windows for c in own)


def test_intervals_cover_the_truth():
    """Four mechanisms, 40 seeds of 4 windows: 640 intervals, to 4 deviations (3.4%)."""
    found = study.coverage(100, range(40))
    assert sum(c.windows for c in found if c.metric == "accuracy") == 640
    for metric in study.METRICS:
        assert abs(covered_share(found, metric) - 0.95) < 0.035


def test_the_study_notices_bars_that_are_too_short(monkeypatch):
    """A covariance that forgets how learners' noise adds up: bars half as long as they must be."""
    honest = RoundNoise.deviation
    monkeypatch.setattr(RoundNoise, "deviation", lambda self, *span: 0.5 * honest(self, *span))
    found = study.coverage(100, range(10))
    assert covered_share(found, "accuracy") < 0.85


def test_the_price_is_one_percent_of_noise_and_little_accuracy():
    for found in study.price(100, range(3)):
        assert found.noise == pytest.approx(np.sqrt(1.0225) - 1.0, rel=1e-6)
        assert abs(found.held_out[0]) < 0.05
