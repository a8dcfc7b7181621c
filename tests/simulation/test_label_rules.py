"""Predictions from labels alone, against counts by hand and the Gaussian mechanism's formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from veilstream.mechanisms.participation import Participation
from veilstream.privacy import Budget
from veilstream.simulation.label_rules import count_noise, last_label, learners_share, majority, noisy_count

LABELS = np.array([[[1, 1], [0, -1]], [[1, 0], [0, 0]], [[0, -1], [1, -1]]])  # (rounds, learners, clients)


def test_the_majority_knows_all_learners_labels_of_earlier_rounds():
    found = majority(LABELS, 2)
    # Each label begins with one; then 1, 2 and 3, 1 have come: (1, 1), (2, 3), (5, 4).
    assert found.accuracy == pytest.approx([1 / 3, 1 / 4, 1 / 2])  # a tie says 0
    losses = [math.log(2), -(math.log(3 / 5) + 3 * math.log(2 / 5)) / 4, -(math.log(5 / 9) + math.log(4 / 9)) / 2]
    assert found.loss == pytest.approx(losses)


def test_a_learners_share_knows_its_own_labels_record_by_record():
    found = learners_share(LABELS, 2)
    # Learner 0 meets 1 1 1 0 0, learner 1 meets 0 0 0 1.
    shares = [[1 / 2, 2 / 3, 1 / 2], [3 / 4, 1 / 5, 2 / 3, 3 / 4], [2 / 6, 1 / 5]]
    assert found.loss == pytest.approx([-np.log(each).mean() for each in shares])
    assert found.accuracy == pytest.approx([2 / 3, 3 / 4, 0.0])  # ties say 0


def test_the_last_label_is_the_learners_own_and_counts_repeats():
    found = last_label(LABELS, 2)
    # Learner 0 meets 1 1 1 0 0, learner 1 meets 0 0 0 1, each after 0.
    shares = [[1 / 2, 1 / 3, 1 / 2], [2 / 4, 1 - 3 / 5, 2 / 3, 3 / 4], [3 / 6, 1 - 4 / 5]]
    assert found.accuracy == pytest.approx([2 / 3, 3 / 4, 1 / 2])
    assert found.loss == pytest.approx([-np.log(each).mean() for each in shares])


def test_a_noisy_count_without_noise_to_speak_of_is_the_share_at_the_last_release():
    labels = np.random.default_rng(1).integers(0, 3, (40, 4, 1))
    found = noisy_count(labels, 3, Budget(1e6, 0.1), seed=0)
    assert found.loss == pytest.approx(learners_share(labels, 3).loss, abs=0.02)


def test_a_round_without_clients_has_no_figure():
    nobody = np.full((2, 2, 1), -1)
    assert np.isnan(noisy_count(nobody, 2, Budget(1.0, 1e-3), seed=0).loss).all()


@pytest.mark.parametrize("rounds", [1, 7, 1000])
def test_the_noise_of_a_count_is_the_gaussian_mechanisms_for_a_move_of_root_two(rounds):
    """Balle and Wang's formula gives δ back at ε, to the last digits."""
    std, epsilon, reach = count_noise(rounds, Budget(0.5, 1e-3)), 0.5, math.sqrt(2.0)
    a, b = reach / (2 * std), epsilon * std / reach
    assert norm.cdf(a - b) - math.exp(epsilon) * norm.cdf(-a - b) == pytest.approx(1e-3, rel=1e-9)


def test_people_who_return_need_more_noise_and_most_where_they_meet_in_one_release():
    once = count_noise(100, Budget(1.0, 1e-5))
    apart = count_noise(100, Budget(1.0, 1e-5), Participation(4, 5))
    assert apart == pytest.approx(2.0 * once)  # four releases of one person: √4
    together = count_noise(100, Budget(1.0, 1e-5), Participation(4, 1), local_steps=8)
    assert together == pytest.approx(4.0 * once)


def test_noise_larger_than_the_count_says_nothing():
    """One label only: with a weak budget the shares find it, with a strong one they stay near even (one seed)."""
    labels = np.zeros((50, 1, 4), int)
    weak, strong = (noisy_count(labels, 2, Budget(epsilon, 1e-5), seed=3).loss[-1] for epsilon in (8.0, 1e-3))
    assert weak < 0.1
    assert strong == pytest.approx(math.log(2), abs=0.5)
