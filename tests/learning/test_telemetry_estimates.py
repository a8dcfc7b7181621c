"""Estimates of telemetry: unbiased, with the error bars that the noise's covariance gives."""

from __future__ import annotations

import math

import numpy as np
import pytest

import veilstream as vs
from veilstream.learning.telemetry_estimates import NORMAL_95, RoundNoise, TelemetrySums
from veilstream.privacy.telemetry import Telemetry

ACCURACY = Telemetry(("accuracy",), 0.3)


class Both:
    def __init__(self, mechanism, std, tau=1):
        self.noise = RoundNoise(mechanism, std, tau)
        self.sums = TelemetrySums(ACCURACY, self.noise)
        self.estimates = self.sums.estimates

    def add(self, sums, spans):
        self.sums.add(sums)
        self.noise.add(spans)


def test_without_noise_an_estimate_is_the_average():
    sums = Both(None, 0.0, tau=2)
    for r, right in enumerate([2, 1, 0, 2]):
        sums.add(np.array([0.3 * (right - 1.0)]), {"north": (0, r, r + 1)})
    (found,) = sums.estimates(window=3)
    assert found.estimate == found.low == found.high == pytest.approx(0.5)
    assert (found.window, found.steps, found.round) == (3, 6, 4)
    assert found.sampling == pytest.approx(math.sqrt(0.25 / 6))
    (all_of_it,) = sums.estimates(window=100)
    assert all_of_it.estimate == pytest.approx(5 / 8)


def test_error_bars_are_those_of_the_dense_covariance():
    """Two learners, one of which missed a round and one of which began a new epoch."""
    mechanism, std, tau = vs.mechanisms.toeplitz(12).with_block_length(1), 1.7, 2
    B = np.vstack([np.zeros(12), mechanism.decoder_matrix()])
    sums = Both(mechanism, std, tau)
    sums.add(np.zeros(1), {"a": (0, 0, 1), "b": (0, 3, 4)})
    sums.add(np.zeros(1), {"a": (0, 1, 2), "b": (0, 4, 5)})
    sums.add(np.zeros(1), {"b": (1, 0, 1)})
    sums.add(np.zeros(1), {"a": (0, 2, 4), "b": (1, 1, 2)})
    (found,) = sums.estimates(window=3)
    pieces = [(2, 8), (8, 10), (0, 4)]  # of a; of b in its first epoch; of b in its second
    variance = sum(((B[hi] - B[lo]) ** 2).sum() for lo, hi in pieces)
    steps = 2 * (3 + 1 + 2)
    assert found.steps == steps
    half = NORMAL_95 * std * math.sqrt(variance) / (steps * 0.3)
    assert found.high - found.estimate == pytest.approx(half, rel=1e-9)
    assert found.estimate - found.low == pytest.approx(half, rel=1e-9)


def test_a_round_that_does_not_count_widens_the_bar():
    """Noise that would have cancelled with it stays: never less than what is really there."""
    mechanism, std = vs.mechanisms.tree(8), 1.0
    B = np.vstack([np.zeros(8), mechanism.with_block_length(1).decoder_matrix()])
    sums = Both(mechanism, std)
    for r in (0, 1, 2, 4, 5, 6):
        sums.add(np.zeros(1), {"a": (0, r, r + 1)})
    (found,) = sums.estimates(window=6)
    exact = np.linalg.norm(B[3] + B[7] - B[4])
    stated = (found.high - found.estimate) * 6 * 0.3 / NORMAL_95
    assert exact <= stated <= 2.0 * exact
    assert stated == pytest.approx(np.linalg.norm(B[3]) + np.linalg.norm(B[7] - B[4]))


def test_twenty_learners_see_accuracy_as_well_as_the_issue_says():
    """To about +-0.002 over 4,000 steps and +-0.01 over 1,000, as standard deviations."""
    mechanism = vs.mechanisms.buffered(4000)
    std, _ = vs.calibrate(vs.Budget(2.0, 1e-3), mechanism, 1.0, telemetry=ACCURACY)
    sums = Both(mechanism, std, tau=1000)
    for r in range(4):
        sums.add(np.zeros(1), {f"{i}": (0, r, r + 1) for i in range(20)})
    (whole,), (last,) = sums.estimates(window=4), sums.estimates(window=1)
    assert 0.001 < (whole.high - whole.estimate) / NORMAL_95 < 0.002
    assert 0.005 < (last.high - last.estimate) / NORMAL_95 < 0.01


def test_nobody_there_is_no_estimate():
    sums = Both(vs.mechanisms.tree(4), 1.0)
    sums.add(np.zeros(1), {})
    assert sums.estimates(window=1) == []
    assert sums.sums.rounds == sums.noise.rounds == 1


@pytest.mark.parametrize("name", ["toeplitz", "tree", "independent"])
def test_intervals_cover_the_realised_average_as_often_as_they_say(name):
    """4000 draws of the noise itself, fixed seed: 95% to within 4 of its deviations, 1.4%."""
    T, n, std = 16, 3, 0.8
    mechanism = vs.mechanisms.build(name, T)
    rng = np.random.default_rng(5)
    runs = 4000
    draws = rng.standard_normal((runs, n, T))
    noise = std * draws @ mechanism.with_block_length(1).noising_matrix().T
    right = rng.random((runs, n, T)) < 0.8
    told = (noise + 0.3 * (right - 0.5)).sum(axis=1)
    sums = Both(mechanism, std)
    for r in range(T):
        sums.add(np.zeros(1), {f"{i}": (0, r, r + 1) for i in range(n)})
    (bar,) = sums.estimates(window=6)
    half = bar.high - bar.estimate
    estimates = ACCURACY.averages(told[:, -6:].sum(axis=1), 6 * n)
    truth = right[:, :, -6:].mean(axis=(1, 2))
    covered = (np.abs(estimates - truth) <= half).mean()
    assert abs(covered - 0.95) < 0.014
