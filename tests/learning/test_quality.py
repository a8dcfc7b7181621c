"""Measures of quality against brute force and closed forms, never against our own output."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from veilstream.learning import quality


def rows(seed: int, classes: int, n: int = 60):
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, classes, n)
    logits = np.round(rng.normal(size=(n, classes)), 1)  # rounded: there are ties
    logits[np.arange(n), truth] += 0.7
    return truth, logits


def auc_by_pairs(positive, scores) -> float:
    wins = [
        1.0 if a > b else 0.5 if a == b else 0.0
        for a in np.asarray(scores)[positive]
        for b in np.asarray(scores)[~positive]
    ]
    return sum(wins) / len(wins)


@pytest.mark.parametrize("seed", range(4))
def test_auc_is_the_share_of_pairs_in_the_right_order(seed):
    truth, logits = rows(seed, 2)
    score = np.round(logits[:, 1] - logits[:, 0], 1)
    assert quality.auc(truth, score, 2) == pytest.approx(auc_by_pairs(truth == 1, score), abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_auc_of_many_labels_is_the_mean_of_each_against_the_others(seed):
    truth, logits = rows(seed, 4)
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    each = [auc_by_pairs(truth == k, shares[:, k]) for k in range(4)]
    assert quality.auc(truth, logits, 4) == pytest.approx(sum(each) / 4, abs=1e-12)


def test_a_model_that_says_no_to_all_is_exposed():
    truth = np.array([0] * 73 + [1] * 27)
    found = quality.label_quality(truth, np.zeros(100, int), 2, np.full(100, -1.0))
    assert (found.accuracy, found.balanced_accuracy, found.recall, found.auc) == (0.73, 0.5, (1.0, 0.0), 0.5)
    assert found.confusion.tolist() == [[73, 0], [27, 0]]
    entropy = -(0.73 * math.log(0.73) + 0.27 * math.log(0.27))
    assert found.log_loss == pytest.approx(entropy, abs=0.02)  # its halves' shares differ a little


def test_labels_without_rows_and_rows_of_one_label():
    truth = np.array([0, 0, 2])
    found = quality.label_quality(truth, np.array([0, 2, 2]), 4)
    assert found.recall == (0.5, None, 1.0, None)
    assert found.balanced_accuracy == 0.75
    assert found.auc is found.log_loss is None
    assert quality.label_quality(np.zeros(5, int), np.zeros(5, int), 2, np.arange(5.0)).auc is None


def test_a_diverged_model_has_labels_but_no_scores():
    found = quality.label_quality(np.array([0, 1]), np.array([0, 0]), 2, np.array([np.nan, 1.0]))
    assert (found.accuracy, found.auc, found.log_loss) == (0.5, None, None)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 5))
def test_balanced_accuracy_is_accuracy_where_each_row_weighs_one_over_its_label_s_count(seed, classes):
    truth, logits = rows(seed, classes)
    predicted = logits.argmax(axis=1)
    weights = np.array([1.0 / (truth == k).sum() for k in truth])
    expected = (weights * (truth == predicted)).sum() / weights.sum()
    counts = quality.confusion(truth, predicted, classes)
    assert quality.balanced_accuracy(counts) == pytest.approx(expected, abs=1e-12)
    assert quality.balanced_terms(truth, predicted, classes).mean() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("classes", [2, 4])
def test_calibration_is_the_least_log_loss_of_the_other_half(classes):
    truth, logits = rows(7, classes, 400)
    logits = 3.0 * logits + np.arange(classes)  # a model that is too sure, and biased
    half = np.random.default_rng(0x5EED).permutation(len(truth)) % 2 == 0

    def shares(point, told):
        scores = point[0] * told + np.append(0.0, point[1:])
        return np.exp(scores - np.logaddexp.reduce(scores, axis=1)[:, None])

    def loss(point, part):
        return -np.log(shares(point, logits[part])[np.arange(part.sum()), truth[part]]).mean()

    expected = np.empty_like(logits)
    for part in (half, ~half):
        best = minimize(loss, np.zeros(classes), args=(~part,), method="BFGS", options={"gtol": 1e-8})
        expected[part] = shares(best.x, logits[part])
    given_logits = logits[:, 1] - logits[:, 0] if classes == 2 else logits
    np.testing.assert_allclose(quality.calibrated(truth, given_logits, classes), expected, atol=1e-4)


def test_scores_that_tell_labels_apart_have_a_finite_loss_near_zero():
    truth = np.repeat([0, 1], 50)
    loss = quality.label_quality(truth, truth, 2, np.where(truth == 1, 1e4, -1e4)).log_loss
    assert 0.0 <= loss < 0.01


def test_rmse_and_r2_of_a_hand_computed_case():
    found = quality.number_quality([1.0, 2.0, 3.0, 6.0], [2.0, 2.0, 3.0, 4.0])
    assert found.rmse == pytest.approx(math.sqrt(5 / 4))
    assert found.r2 == pytest.approx(1 - (5 / 4) / (14 / 4))
    assert quality.number_quality([1.0, 1.0], [1.0, 2.0]).r2 is None


def test_standard_error_of_independent_rows_is_the_textbook_s():
    values = np.random.default_rng(1).normal(size=50)
    assert quality.standard_error(values) == pytest.approx(values.std(ddof=1) / math.sqrt(50))
    assert quality.standard_error([1.0]) == math.inf


def test_standard_error_counts_people_not_rows():
    values = np.random.default_rng(2).normal(size=40)
    alone = quality.standard_error(values)
    repeated = quality.standard_error(np.repeat(values, 5), np.repeat(np.arange(40), 5))
    assert repeated == pytest.approx(alone)  # five equal rows of one person say no more than one
    assert quality.standard_error(np.repeat(values, 5)) < 0.5 * alone


def test_sampling_errors_cover_the_truth():
    """400 samples of a known balanced accuracy: at least 92% within 1.96 errors.

    At a coverage of 95% fewer happen with probability 0.5%; the seed is fixed.
    """
    rng, inside = np.random.default_rng(3), 0
    for _ in range(400):
        truth = (rng.random(300) < 0.27).astype(int)
        right = rng.random(300) < np.where(truth == 1, 0.4, 0.8)
        terms = quality.balanced_terms(truth, np.where(right, truth, 1 - truth), 2)
        mean, error = quality.spread_over([terms], None, same_rows=True)
        inside += abs(mean - 0.6) <= quality.Z95 * error
    assert inside >= 0.92 * 400


def test_seeds_with_the_same_rows_do_not_average_their_error_out():
    values = np.random.default_rng(4).normal(size=100)
    same = quality.spread_over([values] * 9, None, same_rows=True)[1]
    apart = quality.spread_over([values] * 9, None, same_rows=False)[1]
    assert same == pytest.approx(quality.standard_error(values))
    assert apart == pytest.approx(same / 3)
