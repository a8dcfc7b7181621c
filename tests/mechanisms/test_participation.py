"""Sensitivity under repeated participation, against every pattern there is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import veilstream.mechanisms as m
from tests.support.catalogue import VARIANTS
from veilstream.errors import InputError
from veilstream.mechanisms import participation
from veilstream.mechanisms.participation import Participation, gram_sensitivity, left_most_sum


def brute_force(C: np.ndarray, k: int, b: int) -> float:
    """Largest ‖Σ c_j·u_j‖ over all patterns, all u alike, each pattern built step by step."""
    T = C.shape[1]
    best = 0.0
    for size in range(1, k + 1):
        for pattern in itertools.combinations(range(T), size):
            if all(j - i >= b for i, j in itertools.pairwise(pattern)):
                best = max(best, np.linalg.norm(C[:, pattern].sum(axis=1)))
    return best


def admissible(T: int):
    return [(k, b) for k in range(1, T + 1) for b in range(1, T + 1) if (k - 1) * b + 1 <= T]


@pytest.mark.parametrize("name", sorted(VARIANTS))
@pytest.mark.parametrize("T", [1, 5, 9, 12])
def test_sensitivity_equals_brute_force_over_patterns(name, T):
    f = VARIANTS[name](T)
    C = f.strategy_matrix()
    for k, b in admissible(T):
        report = f.sensitivity_report((k, b))
        expected = brute_force(C, k, b)
        assert report.value == pytest.approx(expected, rel=1e-8), (k, b)
        assert report.value >= expected * (1 - 1e-14), (k, b)
        assert report.exact
        assert f.sensitivity(Participation(k, b)) == report.value


@pytest.mark.parametrize("name", sorted(VARIANTS))
@pytest.mark.parametrize("T", [9, 12])
def test_bounds_for_long_horizons_are_safe_and_say_what_they_are(name, T, monkeypatch):
    """With enumeration switched off, the other paths must still bound every pattern."""
    monkeypatch.setattr(participation, "_PATTERN_WORK", 0)
    f = VARIANTS[name](T)
    C = f.strategy_matrix()
    for k, b in admissible(T):
        if k == 1:
            continue
        report = gram_sensitivity(C, Participation(k, b))
        expected = brute_force(C, k, b)
        assert report.value >= expected * (1 - 1e-12), (k, b)
        if report.exact:
            assert report.value == pytest.approx(expected, rel=1e-5), (k, b)


def test_negative_correlations_give_a_bound_that_is_not_called_exact():
    C = np.array([[1.0, 0.0], [-0.9, 1.0]])
    report = gram_sensitivity(C, Participation(2, 1))
    assert not report.exact
    assert report.value == pytest.approx(np.sqrt(1.81 + 1.0 + 1.8))


def test_banded_costs_root_k_when_visits_are_a_band_apart():
    f = m.banded(300, bands=10)
    for k in (2, 5, 20):
        report = f.sensitivity_report((k, 10))
        assert report.exact
        assert report.value == pytest.approx(np.sqrt(k), rel=1e-5)


def test_toeplitz_takes_the_left_most_pattern():
    f = m.toeplitz(400)
    report = f.sensitivity_report((6, 50))
    columns = f.strategy_matrix()[:, [0, 50, 100, 150, 200, 250]]
    assert report.exact
    assert report.value == pytest.approx(np.linalg.norm(columns.sum(axis=1)), rel=1e-6)


def test_independent_noise_costs_root_k():
    assert m.independent(200).sensitivity((9, 3)) == pytest.approx(3, rel=1e-9)


def test_horizons_too_long_for_the_gram_matrix_get_a_safe_bound():
    T = participation.GRAM_LIMIT + 100
    f = m.toeplitz_normalised(T)
    report = f.sensitivity_report((3, 10))
    assert not report.exact
    assert report.value == pytest.approx(3 * f.sensitivity())
    band = m.banded(T, bands=8).sensitivity_report((4, 8))
    assert band.exact
    assert 2 <= band.value <= 2 * (1 + 1e-5)
    wide = m.banded(T, bands=8).sensitivity_report((4, 3))  # three visits may meet
    assert not wide.exact
    assert wide.value == pytest.approx(4, rel=1e-6)


def test_more_participation_never_costs_less():
    f = m.optimal(60)
    values = [f.sensitivity((k, 10)) for k in (1, 2, 3, 4)]
    assert values == sorted(values)


@pytest.mark.parametrize("value", [(0, 1), (1, 0), (2.5, 1), (1, -2), (3, 10), (1, 99), "twice", (1, 2, 3)])
def test_impossible_participation_is_refused(value):
    with pytest.raises(InputError, match="participation"):
        m.tree(12).sensitivity(value)


@pytest.mark.parametrize("name", ["banded", "optimal", "toeplitz_normalised", "tree"])
def test_is_never_above_the_bound_of_another_library(name):
    sensitivity = pytest.importorskip("jax_privacy.matrix_factorization.sensitivity")
    f = VARIANTS[name](64)
    C = f.strategy_matrix()
    for k, b in ((4, 8), (3, 16), (10, 6)):
        theirs = float(sensitivity.get_min_sep_sensitivity_upper_bound(C, b, k))
        assert f.sensitivity((k, b)) <= theirs * (1 + 1e-6)


RETURNING = (5, 700)


def pattern_norms(C: np.ndarray, patterns) -> np.ndarray:
    return np.array([np.linalg.norm(C[:, list(p)].sum(axis=1)) for p in patterns])


@pytest.mark.parametrize(
    "build",
    [
        m.toeplitz,
        lambda T: m.buffered(T, 3, normalise=False),
        lambda T: m.buffered(T, 4, participation=RETURNING),
        lambda T: m.banded(T, bands=8, inverse=True, participation=RETURNING),
        lambda T: m.toeplitz(T, workload=m.Workload(horizon=T, forgetting=0.999)),
    ],
)
def test_long_horizons_have_an_exact_sensitivity(build):
    """Against the matrix itself: the left-most pattern, and 200 others that stay below it."""
    T = 5003  # no multiple of a block
    f = build(T)
    report = f.sensitivity_report(RETURNING)
    assert report.exact
    C = f.strategy_matrix()
    k, b = RETURNING
    rng = np.random.default_rng(0)
    free = T - (k - 1) * b
    others = [np.sort(rng.integers(0, free, k)) + b * np.arange(k) for _ in range(200)]
    worst = pattern_norms(C, [b * np.arange(k)])[0]
    assert worst <= report.value <= worst * (1 + 1e-5)
    assert pattern_norms(C, others).max() <= report.value


def test_where_columns_are_scaled_a_bound_is_said_to_be_one():
    assert not m.buffered(5000, 3).sensitivity_report(RETURNING).exact


def test_buffers_tuned_for_people_who_return_do_better():
    """Also better than a banded C with as many bands as the separation allows states."""
    T, part = 6000, (6, 800)
    tuned = m.buffered(T, 5, participation=part)
    assert tuned.mean_error(part) < 0.97 * m.buffered(T, 5, normalise=False).mean_error(part)
    assert tuned.mean_error(part) < m.buffered(T, 5).mean_error(part)
    assert tuned.mean_error(part) < m.banded(T, bands=6).mean_error(part)


def test_noise_without_an_end_knows_people_who_return():
    f = m.stationary(0.99)
    report = f.sensitivity_report((3, 50))
    C = f.until(4000).strategy_matrix()
    assert report.exact
    assert report.value == pytest.approx(np.linalg.norm(C[:, [0, 50, 100]].sum(axis=1)), rel=1e-5)


@pytest.mark.parametrize(("times", "apart"), [(1, 1), (64, 3), (65, 1), (65, 3), (200, 7), (500, 1)])
def test_many_left_most_columns_are_summed_as_one_by_one(times, apart):
    c = np.exp(-0.01 * np.arange(500.0))
    expected = np.zeros(500)
    for at in range(0, min(500, times * apart), apart):
        expected += np.concatenate([np.zeros(at), c[: 500 - at]])
    found = left_most_sum(c, Participation(times, apart))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
