"""Estimates of telemetry: unbiased, with the error bars that the noise's covariance gives."""

from __future__ import annotations

import math

import numpy as np
import pytest

import veilstream as vs
from veilstream.learning.telemetry_estimates import NORMAL_95, OVER_CLIENTS, OVER_STEPS, RoundNoise, TelemetrySums
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


COUNTED = Telemetry(("accuracy", "loss", "present"), 0.3, loss_cap=4.0)


def of_window(sums, std, rounds=100, tau=10):
    """One window whose sums have this deviation; a tree's first prefix has that of one draw."""
    noise = RoundNoise(vs.mechanisms.independent(rounds * tau), std / math.sqrt(rounds * tau), tau)
    all_sums = TelemetrySums(COUNTED, noise)
    noise.add({"a": (0, 0, rounds)})
    all_sums.add(np.asarray(sums))
    return {e.metric: e for e in all_sums.estimates(1)}


def test_where_presence_is_known_empty_steps_do_not_count():
    """500 clients in 1000 steps, all right, each with a loss of 1 (a quarter of the cap)."""
    found = of_window([500 * 0.15, 500 * (0.25 - 0.5) * 0.3, 500 * 0.15], std=1e-9)
    assert found["accuracy"].estimate == pytest.approx(1.0)
    assert found["loss"].estimate == pytest.approx(1.0)
    assert found["present"].estimate == pytest.approx(0.5)
    assert found["accuracy"].average == found["loss"].average == OVER_CLIENTS
    assert found["present"].average == OVER_STEPS
    assert found["loss"].sampling == pytest.approx(math.sqrt(1.0 * 3.0 / 500))  # of 0 or 4 alone


def test_without_presence_the_average_is_over_steps_and_says_so():
    sums = Both(None, 0.0)
    sums.add(np.array([0.15]), {"a": (0, 0, 2)})  # one right, one empty
    (found,) = sums.estimates(1)
    assert found.estimate == pytest.approx(0.75)
    assert found.average == OVER_STEPS


def test_a_presence_that_is_lost_in_noise_is_not_divided_by():
    assert of_window([1.0, 0.0, 4.9], std=1.0)["accuracy"].average == OVER_STEPS
    assert of_window([1.0, 0.0, 5.1], std=1.0)["accuracy"].average == OVER_CLIENTS


@pytest.mark.parametrize("right", [0.9, 0.3])
def test_bars_of_a_ratio_are_those_of_drawn_ratios(right):
    """20,000 draws, fixed seed: their deviation to 5% (10 of its own), the cover to 4 (0.6%)."""
    rng, std, clients = np.random.default_rng(3), 2.0, 400
    S, P = clients * (right - 0.5) * 0.3, clients * 0.15
    draws = np.array([S, P]) + std * rng.standard_normal((20_000, 2))
    ratios = 0.5 + draws[:, 0] / (2.0 * draws[:, 1])
    found = of_window([S, 0.0, P], std)["accuracy"]
    half = found.high - found.estimate
    assert half / NORMAL_95 == pytest.approx(ratios.std(), rel=0.05)
    halves = [
        of_window([s, 0.0, p], std)["accuracy"].high - r for (s, p), r in zip(draws[:2000], ratios[:2000], strict=True)
    ]
    assert abs((np.abs(ratios[:2000] - right) <= halves).mean() - 0.95) < 0.02


@pytest.mark.parametrize("value", [1.0, 1.4, -0.2])
def test_sampling_is_never_nothing(value):
    """An estimate at or beyond an end is one that noise, or few clients, have put there."""
    sums = Both(vs.mechanisms.independent(100), 0.3)
    sums.add(np.array([(value - 0.5) * 0.3 * 100]), {"a": (0, 0, 100)})
    (found,) = sums.estimates(1)
    noise = (found.high - found.estimate) / NORMAL_95
    assert noise == pytest.approx(0.1)
    assert found.sampling == pytest.approx(math.sqrt(0.1 * 0.9 / 100))
    certain = Both(None, 0.0)
    certain.add(np.array([0.15 * 100]), {"a": (0, 0, 100)})
    assert certain.estimates(1)[0].sampling == pytest.approx(math.sqrt(0.005 * 0.995 / 100))


def test_a_step_of_several_clients_samples_several():
    noise = RoundNoise(None, 0.0, 1)
    sums = TelemetrySums(ACCURACY, noise, clients_per_step=4)
    noise.add({"a": (0, 0, 100)})
    sums.add(np.zeros(1))
    assert sums.estimates(1)[0].sampling == pytest.approx(0.5 / math.sqrt(400))
