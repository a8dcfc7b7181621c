"""Banded matrices for people who return: every pattern, every block length, another library."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.linalg import toeplitz

import veilstream.mechanisms as m
from tests.mechanisms.test_participation import admissible, brute_force, pattern_norms
from tests.support.catalogue import prefix_sums
from veilstream.errors import InputError
from veilstream.mechanisms import analysis, factorization
from veilstream.mechanisms.participation import Participation, banded_sensitivity
from veilstream.mechanisms.registry import build_for
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare


def cut_off(C: np.ndarray, width: int) -> np.ndarray:
    """Columns with their first ``width`` entries alone."""
    return C - np.tril(C, -width)


@pytest.mark.parametrize("block_length", [1, 3, 5, 16])
@pytest.mark.parametrize(("T", "bands"), [(23, 4), (40, 6), (37, 17), (9, 9)])
def test_products_of_columns_are_those_of_the_matrix(T, bands, block_length):
    f = m.banded(T, bands=bands).with_block_length(block_length)
    width = max(2, bands - 2)  # shorter than the bands: something is cut off
    found, beyond = analysis.band_products(f.program, width, range(width))
    C = f.strategy_matrix()
    kept = cut_off(C, width)
    X = kept.T @ kept
    for d in range(width):
        np.testing.assert_allclose(found[d, d:], np.diagonal(X, -d), atol=1e-12)
        assert not found[d, :d].any()
    assert beyond == pytest.approx(np.linalg.norm(C - kept, axis=0).max(), abs=1e-12)
    assert beyond > 0.01


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("bands", [3, 6])
def test_sensitivity_without_the_gram_matrix_equals_brute_force(bands, normalise, monkeypatch):
    monkeypatch.setattr(factorization, "GRAM_LIMIT", 0)
    T = 12
    f = m.banded(T, bands=bands, normalise=normalise)
    C = f.strategy_matrix()
    several = [(k, b) for k, b in admissible(T) if k > 1 and 2 * b >= bands]
    assert any(b < bands for _, b in several)
    for k, b in several:
        report = f.sensitivity_report((k, b))
        expected = brute_force(C, k, b)
        assert report.exact
        assert "banded" in report.method
        assert expected <= report.value <= expected * (1 + 1e-5), (k, b)


def test_columns_that_differ_are_chosen_by_size():
    """Norms that grow: the worst pattern is the right-most, and one step may be worth two."""
    norms = np.array([1.0, 1.0, 1.0, 9.0, 1.0, 16.0])
    products = {1: np.array([0.0, 0.5, 0.5, 2.0, 2.0, 3.0])}
    both = banded_sensitivity(norms, products, 0.0, 2, Participation(2, 1))
    assert both.value**2 == pytest.approx(9 + 16)
    neighbours = banded_sensitivity(norms, {1: products[1] * 2}, 0.0, 2, Participation(2, 1))
    assert neighbours.value**2 == pytest.approx(1 + 16 + 2 * 6)
    three = banded_sensitivity(norms, products, 0.0, 2, Participation(3, 1))
    assert three.value**2 == pytest.approx(9 + 1 + 16 + 2 * 2 + 2 * 3)
    assert three.exact
    unsure = banded_sensitivity(norms, products, 0.1, 2, Participation(3, 1))
    assert unsure.value == pytest.approx(three.value + 0.3)
    assert not unsure.exact
    assert not banded_sensitivity(norms, {1: -products[1]}, 0.0, 2, Participation(3, 1)).exact


@pytest.mark.parametrize(
    ("bands", "normalise", "part"),
    [(8, None, (5, 700)), (24, True, (20, 16)), (24, None, (20, 16)), (40, None, (20, 10))],
)
def test_long_horizons_have_an_exact_sensitivity(bands, normalise, part):
    """Against the matrix itself: a pattern attains it, and 300 others stay below."""
    T = 5003  # no multiple of a block
    f = m.banded(T, bands=bands, participation=part, normalise=normalise)
    report = f.sensitivity_report(part)
    assert report.exact
    C = f.strategy_matrix()
    k, b = part
    rng = np.random.default_rng(1)
    free = T - (k - 1) * b
    others = [np.sort(rng.integers(0, free, k)) + b * np.arange(k) for _ in range(150)]
    tight = [start + b * np.arange(k) for start in rng.integers(0, free, 149)]
    left, right = b * np.arange(k), T - 1 - b * np.arange(k)[::-1]
    seen = pattern_norms(C, [left, right, *tight, *others])
    assert seen.max() <= report.value <= seen.max() * (1 + 1e-5)


@pytest.mark.all
def test_sensitivity_is_that_of_another_library():
    """jax-privacy for Toeplitz matrices that fall, and for columns of norm one without overlap."""
    theirs = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz")
    sensitivity = pytest.importorskip("jax_privacy.matrix_factorization.sensitivity")
    import jax

    part = k, b = 12, 10
    f = m.banded(5003, bands=24, participation=part)
    c = np.minimum.accumulate(f.with_block_length(1).strategy_matrix()[:24, 0])
    with jax.enable_x64(True):
        squared = float(theirs.minsep_sensitivity_squared(c, b, k, n=5003))
        assert f.sensitivity(part) == pytest.approx(np.sqrt(squared), rel=1e-5)
        unit = m.banded(300, bands=10)
        exact = cut_off(unit.strategy_matrix(), 10)  # they refuse rounding beside the bands
        expected = float(sensitivity.get_sensitivity_banded(exact, b, k))
        assert unit.sensitivity(part) == pytest.approx(expected, rel=1e-5)


def test_overlapping_coefficients_are_a_local_optimum():
    """Against other falling coefficients, with errors and sensitivity from dense matrices."""
    T, bands, (k, b) = 60, 8, (6, 4)
    best = m.banded(T, bands=bands, participation=(k, b))
    assert best.sensitivity_report((k, b)).exact
    c = best.with_block_length(1).strategy_matrix()[:bands, 0]
    assert (np.diff(c) <= 1e-6).all()
    assert c.min() > 0.0
    rng = np.random.default_rng(0)
    found = []
    for _ in range(60):
        other = np.zeros(T)
        other[:bands] = np.minimum.accumulate(c * (1 + 0.02 * rng.standard_normal(bands)))
        C = toeplitz(other, np.zeros(T))
        B = prefix_sums(T) @ np.linalg.inv(C)
        found.append(pattern_norms(C, [b * np.arange(k)])[0] ** 2 * (B**2).sum() / T)
    assert min(found) >= best.mean_error((k, b)) * (1 - 1e-5)
    assert max(found) > best.mean_error((k, b)) * (1 + 1e-4)


@pytest.mark.parametrize(("T", "part"), [(320, (20, 16)), (200, (4, 32)), (200, (10, 4))])
def test_the_chosen_number_of_bands_has_the_least_error(T, part):
    chosen = m.banded(T, participation=part)
    tried = {b: m.banded(T, bands=b, participation=part).mean_error(part) for b in (2, 4, 8, 16, 32, 64)}
    assert chosen.mean_error(part) <= min(tried.values()) * (1 + 1e-9)
    assert chosen.mean_error(part) < 0.99 * m.banded(T, bands=8).mean_error(part)


def test_bands_are_as_many_as_fit_and_once_is_the_default():
    assert m.banded(7, participation=(3, 2)).bandwidth <= 7
    assert m.banded(600, participation=(3, 200)).bandwidth == 64
    assert m.banded(100).bandwidth == 16
    assert m.banded(100, participation=(1, 5)).bandwidth == 16


@pytest.mark.all
def test_ours_is_close_to_another_librarys_optimum_over_all_banded_matrices():
    """They let every diagonal vary; ours is Toeplitz with scaled columns, and a state as long."""
    banded = pytest.importorskip("jax_privacy.matrix_factorization.banded")
    import jax

    T, bands, part = 128, 8, (5, 8)
    with jax.enable_x64(True):
        theirs = banded.optimize(T, bands=bands, max_optimizer_steps=200)
        C = np.asarray(theirs.materialize(), np.float64)
    B = prefix_sums(T) @ np.linalg.inv(C)
    error = brute_bound(C, part) ** 2 * (B**2).sum() / T
    ours = m.banded(T, bands=bands, participation=part).mean_error(part)
    assert ours <= 1.03 * error


def brute_bound(C: np.ndarray, part: tuple[int, int]) -> float:
    """√k times the largest column norm: what orthogonal columns cost."""
    k, b = part
    X = C.T @ C
    assert np.abs(np.tril(X, -b)).max() < 1e-6
    return float(np.sqrt(k * X.diagonal().max()))


PLAN = """
[learning]
rounds = 100
[data]
dim = 3
[privacy]
epsilon = 2.0
delta = 1e-5
participations = 5
min_separation = 8
[[methods]]
name = "ours"
mechanism = "banded"
step_size = 0.1
objective = "published"
"""


def test_a_plan_has_bands_tuned_for_its_people():
    plan = Plan.parse(PLAN)
    prepared = prepare(plan, plan.methods[0])
    plain = Plan.parse(PLAN.replace('objective = "published"', ""))
    usual = prepare(plain, plain.methods[0])
    part = (5, 8)
    tuned = m.banded(100, participation=part)
    np.testing.assert_array_equal(prepared.factorization.noising_matrix(), tuned.noising_matrix())  # the same mechanism
    assert prepared.noise_std**2 * prepared.factorization.row_norms_squared().mean() < (
        usual.noise_std**2 * usual.factorization.row_norms_squared().mean()
    )
    assert prepared.guarantee.participation == Participation(5, 8)


@pytest.mark.parametrize(
    "change", [{"privacy.participations": 1, "privacy.min_separation": 1}, {"methods.0.averaging": 3.0}]
)
def test_what_banded_cannot_be_made_for_is_refused(change):
    text = PLAN
    if "methods.0.averaging" in change:
        text, change = PLAN + "averaging = 3.0\n", {}
    with pytest.raises(InputError, match=r"objective.*published.*return.*optimal or buffered"):
        Plan.parse(text, change)
    averaged = m.Workload(horizon=20, averaging=3.0)
    with pytest.raises(InputError, match=r"workload.*banded"):
        build_for("banded", averaged, Participation(2, 3))


@pytest.mark.parametrize("part", [(8, 8), (4, 16)])
def test_more_bands_of_the_inverse_never_cost_people_who_return(part):
    """C of every width falls, as its own coefficients show, so the left-most pattern is the worst of all."""
    errors = []
    for bands in (2, 4, 8, 16):
        made = m.banded(64, bands, inverse=True, participation=part)
        column = made.strategy_matrix()[:, 0]
        assert (np.diff(column) <= 1e-6).all()
        assert column.min() > 0.0
        visits = [made.strategy_matrix()[:, i * part[1]] for i in range(part[0])]
        assert made.sensitivity(part) == pytest.approx(np.linalg.norm(sum(visits)), rel=1e-5)
        errors.append(made.mean_error(part))
    assert all(more <= fewer * (1.0 + 1e-4) for fewer, more in itertools.pairwise(errors))
