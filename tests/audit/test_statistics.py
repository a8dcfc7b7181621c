"""The audit's statistics against what is known of them: coverage, references, closed forms.

Seeds are fixed, so a test that passes always passes; each says how often it would fail if seeds
were drawn and the code correct.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom, binomtest, kstest

from tests.support.catalogue import VARIANTS, prefix_sums
from veilstream.audit.statistics import Law, difference, law_of, many_run, one_run
from veilstream.audit.statistics.differencing import clipped_by_hand
from veilstream.audit.statistics.many_run import clopper_pearson, epsilon_at_least, epsilon_of
from veilstream.audit.statistics.one_run import _covariance_p
from veilstream.mechanisms import Participation
from veilstream.privacy.clipping import clip

T = 12


def law(name: str = "toeplitz", horizon: int = T, local_steps: int = 1, claim=math.inf) -> Law:
    N = VARIANTS[name](horizon).noising_matrix()
    return law_of(N, std=3.0, reach=2.0, claim=claim, local_steps=local_steps)


def noise(of: Law, d: int, rng: np.random.Generator) -> np.ndarray:
    return of.root @ rng.standard_normal((of.rounds, d))


@pytest.mark.parametrize("name", VARIANTS)
def test_with_one_step_a_round_the_separation_is_the_column_norm(name):
    f = VARIANTS[name](T)
    C = np.linalg.inv(f.noising_matrix())  # of what is drawn; `tree_online` publishes more rows
    norms = np.linalg.norm(C, axis=0)
    np.testing.assert_allclose(law(name).expected, 2.0 * norms / 3.0, rtol=1e-6)
    assert law(name).expected.max() <= 2.0 * f.sensitivity() / 3.0 * (1 + 1e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_covariance_is_that_of_the_published_decoder(name):
    B = VARIANTS[name](T).decoder_matrix()
    np.testing.assert_allclose(law(name).covariance, 9.0 * B @ B.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_messages_at_round_ends_tell_no_more_than_all_prefixes(name):
    whole, ends = law(name), law(name, local_steps=4)
    assert ends.shifts.shape == (T // 4, T)
    assert (ends.expected <= whole.expected * (1 + 1e-9)).all()
    a, S = prefix_sums(T)[3::4], whole.covariance[3::4, 3::4]
    direct = [2.0 * math.sqrt(a[:, j] @ np.linalg.inv(S) @ a[:, j]) for j in range(T)]
    np.testing.assert_allclose(ends.expected, direct, rtol=1e-6)


def test_several_visits_add_up():
    f = VARIANTS["banded"](T)
    twice = law_of(f.noising_matrix(), std=3.0, reach=2.0, claim=1.0, participation=Participation(2, 6))
    C = np.linalg.inv(f.noising_matrix())
    np.testing.assert_allclose(twice.expected[0], 2.0 / 3.0 * np.linalg.norm(C[:, 0] + C[:, 6]), rtol=1e-6)
    assert twice.expected.max() <= 2.0 / 3.0 * f.sensitivity((2, 6)) * (1 + 1e-6)


def test_intervals_of_one_client_are_exact():
    """Also where columns are few. Fails by chance in 2e-6 of seeds."""
    rng, of = np.random.default_rng(1), law()
    of = Law(of.shifts[:, [4]], of.reach, of.claim, of.covariance)
    below = above = 0
    for _ in range(800):
        found = one_run(noise(of, 20, rng), of, confidence=0.8)
        below += found.upper[0] < of.expected[0]
        above += found.lower[0] > of.expected[0]
    for misses in (below, above):
        assert binom.ppf(5e-7, 800, 0.1) <= misses <= binom.isf(5e-7, 800, 0.1)


def test_intervals_hold_for_all_clients_at_once_and_the_bound_with_them():
    """Fails by chance in 1e-6 of seeds."""
    rng, of = np.random.default_rng(2), law("optimal")
    missed = exceeded = 0
    for _ in range(400):
        found = one_run(noise(of, 60, rng), of, confidence=0.8)
        missed += bool(((found.lower > of.expected) | (found.upper < of.expected)).any())
        exceeded += found.mu_lower > of.expected.max()
    assert missed <= binom.isf(5e-7, 400, 0.2)
    assert exceeded <= binom.isf(5e-7, 400, 0.2)


@pytest.mark.parametrize(("rounds", "d"), [(4, 40), (16, 60), (16, 20_000)])
def test_the_covariance_test_has_its_level(rounds, d):
    """p-values are uniform, with Wishart matrices by Bartlett's decomposition. Fails in 1e-6."""
    rng = np.random.default_rng(rounds * d)
    found = []
    for _ in range(1000):
        L = np.tril(rng.standard_normal((rounds, rounds)), -1)
        L += np.diag(np.sqrt(rng.chisquare(d - np.arange(rounds))))
        found.append(_covariance_p(L @ L.T / d, d))
    assert kstest(found, "uniform").pvalue > 1e-6


def test_correct_noise_raises_no_alarm_in_a_hundred_repeats():
    """An alarm has probability 1e-6 each, so this fails in 1e-4 of seeds."""
    rng, of = np.random.default_rng(3), law("buffered")
    of = Law(of.shifts, of.reach, float(of.expected.max()), of.covariance)
    assert not any(one_run(noise(of, 400, rng), of).alarm for _ in range(100))


def test_less_noise_is_a_violation_and_more_is_another_mechanism():
    rng, of = np.random.default_rng(4), law()
    of = Law(of.shifts, of.reach, float(of.expected.max()), of.covariance)
    less = one_run(0.9 * noise(of, 20_000, rng), of)
    assert less.violation
    assert less.mu_lower == pytest.approx(of.claim / 0.9, rel=0.03)
    more = one_run(1.1 * noise(of, 20_000, rng), of)
    assert more.stranger
    assert not more.violation


def test_noise_of_the_right_covariance_that_is_not_normal_is_another_mechanism():
    rng, of = np.random.default_rng(5), law()
    flat = of.root @ rng.uniform(-math.sqrt(3), math.sqrt(3), (T, 20_000))
    found = one_run(flat, of)
    assert found.covariance_p > 1e-6
    assert found.normality_p < 1e-6
    assert found.stranger


@pytest.mark.parametrize("known", [True, False])
def test_a_message_without_noise_of_its_own_has_no_privacy(known):
    rng, of = np.random.default_rng(6), law()
    of = Law(of.shifts, of.reach, 1.0, of.covariance if known else None)
    residuals = noise(law(), 500, rng)
    residuals[7] = residuals[6]  # step 7 is bare
    found = one_run(residuals, of)
    assert found.violation
    assert math.isinf(found.mu_surely)
    assert np.isinf(found.measured[7])
    assert np.isfinite(found.measured[8:]).all()


def test_the_bound_does_not_depend_on_the_claimed_law():
    rng, of = np.random.default_rng(7), law()
    residuals = noise(of, 300, rng)
    blind = one_run(residuals, Law(of.shifts, of.reach, 1.0))
    np.testing.assert_allclose(blind.measured, one_run(residuals, of).measured, rtol=1e-6)
    assert blind.covariance_p is None


def canaries(of: Law, runs: int, rng: np.random.Generator, size: float = 1.0):
    second = rng.integers(0, 2, runs).astype(bool)
    moved = of.shifts[:, [of.worst]] * np.where(second, 0.5, -0.5) * of.reach * size
    return noise(of, runs, rng) + moved, second


def judged(of: Law, runs: int, seed: int, size: float = 1.0, **options):
    transcripts, second = canaries(of, runs, np.random.default_rng(seed), size)
    expected = float(of.expected[of.worst])
    kept = Law(of.shifts, of.reach, expected, of.covariance)
    return many_run(transcripts, second, kept, delta=1e-3, expected=expected, **options)


@pytest.mark.parametrize(("count", "total"), [(0, 10), (3, 10), (10, 10), (713, 2000)])
def test_binomial_bounds_are_those_of_scipy(count, total):
    reference = binomtest(count, total).proportion_ci(0.98, method="exact")
    assert clopper_pearson(count, total, 0.01) == pytest.approx((reference.low, reference.high), abs=1e-12)


def test_epsilon_from_counts_is_that_of_jax_privacy():
    auditing = pytest.importorskip("jax_privacy.auditing")
    rng = np.random.default_rng(8)
    inside, outside = rng.normal(1.0, 1.0, 3000), rng.normal(0.0, 1.0, 2500)
    theirs = auditing.CanaryScoreAuditor(inside, outside).epsilon_clopper_pearson(
        0.05, delta=1e-3, threshold_strategy=auditing.Explicit(1.7)
    )
    wrong, missed = int((outside >= 1.7).sum()), int((inside < 1.7).sum())
    ours = epsilon_at_least(wrong, 2500, missed, 3000, 1e-3, 0.05)
    assert ours == pytest.approx(theirs, rel=1e-9)


def test_the_bound_on_mu_is_a_bound():
    """At confidence 0.8 it exceeds the truth in at most a fifth of 200 audits; fails in 1e-6."""
    of = law("buffered")
    found = [judged(of, 600, seed, confidence=0.8) for seed in range(200)]
    truth = float(of.expected.max())
    assert sum(f.mu_lower > truth for f in found) <= binom.isf(1e-6, 200, 0.2)
    assert sum(f.epsilon_lower > epsilon_of(truth, 1e-3) for f in found) <= binom.isf(1e-6, 200, 0.2)


def test_many_runs_come_near_the_truth_and_raise_no_alarm():
    of = law("buffered")
    truth = float(of.expected.max())
    found = judged(of, 40_000, 9)
    assert not found.alarm
    assert 0.93 * truth < found.mu_lower < truth
    ratio, learned = found.guesses
    assert ratio.mu_lower < truth < ratio.mu_upper
    assert learned.mu_lower > 0.9 * truth
    assert found.epsilon_lower < found.epsilon_via_mu < epsilon_of(truth, 1e-3)


def test_a_canary_that_moves_further_is_a_violation_and_one_that_moves_less_a_stranger():
    assert judged(law(), 20_000, 10, size=1.3).violation
    short = judged(law(), 20_000, 11, size=0.7)
    assert short.stranger
    assert not short.violation


def test_a_leak_that_only_learning_finds_is_found():
    """A message that the claimed law says nothing about carries the canary."""
    of = law()
    rng = np.random.default_rng(12)
    transcripts, second = canaries(of, 8000, rng, size=0.0)
    transcripts[3] += np.where(second, 8.0, -8.0)
    found = many_run(transcripts, second, Law(of.shifts, of.reach, 1.0, of.covariance), delta=1e-3)
    assert found.violation
    assert found.best.statistic == "learned linear"


def test_differencing_explains_gradients_and_nothing_else():
    rng = np.random.default_rng(13)
    known = rng.integers(-5, 5, (2, 4, 6))
    shared = rng.integers(-1000, 1000, (4, 6))
    sizes = ([84] * 4, [84] * 4)
    same = difference(shared + known[0], shared + known[1], *known, differing_steps=1, sizes=sizes)
    assert not same.alarm
    assert same.unexplained_units == 0
    leak = known[1].copy()
    leak[2, 3] += 9
    for first, second, of in (
        (shared + known[0], shared + leak, sizes),
        (shared + known[0], shared + known[1], ([84] * 4, [84, 84, 84, 92])),
        (shared + known[0], (shared + known[1])[:3], sizes),
    ):
        assert difference(first, second, *known, differing_steps=1, sizes=of).alarm


def test_clipping_by_hand_is_what_the_clipper_does():
    rng = np.random.default_rng(14)
    step = 2.0**-20
    for scale in (1e-30, 0.01, 1.0, 100.0, 1e30):
        raw = (scale * rng.standard_normal(50)).astype(np.float32)
        units = np.trunc(clip(raw, 1.0).astype(np.float64) / step)
        assert np.abs(clipped_by_hand(raw, 1.0, step) - units).max() <= 1
    raw[3] = np.nan
    assert not clipped_by_hand(raw, 1.0, step).any()
    assert not clipped_by_hand(np.zeros(4), 1.0, step).any()
