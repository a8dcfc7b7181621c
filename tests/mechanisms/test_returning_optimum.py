"""The certified optimum for people who return: closed forms, another library's search, and what cannot be asked."""

from __future__ import annotations

import numpy as np
import pytest

import veilstream.mechanisms as m
from tests.mechanisms.test_participation import brute_force
from tests.support.catalogue import prefix_sums
from veilstream.errors import InputError
from veilstream.mechanisms.participation import Participation
from veilstream.mechanisms.registry import build_for
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare


@pytest.mark.parametrize("T", [4, 9, 30])
def test_without_a_band_noise_is_independent(T):
    """Visits in neighbouring steps: only C = I has orthogonal columns, with mean error k·(T+1)/2."""
    made = m.optimal(T, participation=(3, 1), cache=False)
    np.testing.assert_allclose(made.strategy_matrix(), np.eye(T), atol=1e-6)
    assert made.mean_error((3, 1)) == pytest.approx(3 * (T + 1) / 2, rel=1e-6)
    assert made.duality_gap < 1e-6


def test_a_band_as_wide_as_the_run_is_nearly_the_optimum_for_once():
    """‖A·C⁺‖² of the best of all C is 17.8662 at T = 8 (PAPER-NOTES 15); one entry of CᵀC must vanish here."""
    made = m.optimal(8, participation=(2, 7), cache=False)
    assert 17.8662 / 8 <= made.mean_error((2, 7)) / 2 <= 1.01 * 17.8662 / 8


@pytest.mark.parametrize(("T", "part"), [(40, (5, 8)), (33, (2, 16)), (64, (8, 8))])
def test_the_certificate_holds_and_the_program_reaches_it(T, part):
    made = m.optimal(T, participation=part, cache=False)
    C = made.strategy_matrix()
    assert np.abs(np.tril(C.T @ C, -part[1])).max() < 1e-6
    assert made.sensitivity(part) == pytest.approx(np.sqrt(part[0]), rel=1e-6)
    B = prefix_sums(T) @ np.linalg.inv(C)
    assert made.mean_error(part) == pytest.approx(part[0] * (B**2).sum() / T, rel=1e-6)
    assert -1e-9 <= made.duality_gap < 1e-6
    for bands in (2, part[1]):  # the bound is below every other C with so few bands
        assert m.banded(T, bands).mean_error(part) >= made.lower_bound


@pytest.mark.parametrize("part", [(2, 3), (3, 4), (2, 6)])
def test_its_sensitivity_is_that_of_all_patterns(part):
    """To float32's rounding, which leaves products of either sign outside the bands."""
    made = m.optimal(12, participation=part, cache=False)
    for k, b in ((2, 3), (3, 4), (2, 1)):
        assert made.sensitivity((k, b)) == pytest.approx(brute_force(made.strategy_matrix(), k, b), rel=1e-6)


@pytest.mark.all
def test_another_librarys_search_finds_nothing_better():
    theirs = pytest.importorskip("jax_privacy.matrix_factorization.banded")
    import jax

    T, part = 128, (5, 8)
    with jax.enable_x64(True):
        found = theirs.optimize(T, bands=8, max_optimizer_steps=500)
        C = np.asarray(found.materialize(), np.float64)
    largest = np.sqrt((C**2).sum(axis=0).max())
    error = part[0] * largest**2 * ((prefix_sums(T) @ np.linalg.inv(C)) ** 2).sum() / T
    made = m.optimal(T, participation=part, cache=False)
    assert made.lower_bound <= error
    assert made.mean_error(part) <= error * (1.0 + 1e-6)
    assert error <= 1.005 * made.lower_bound  # they come close, so the bound is not idle


@pytest.mark.parametrize("averaged", [{"local_steps": 4}, {"averaging": 3.0}])
def test_it_is_best_for_what_is_published(averaged):
    part = Participation(4, 8)
    workload = m.Workload(horizon=48, **averaged)
    made = build_for("optimal", workload, part)
    assert made.duality_gap < 1e-6
    usual = m.optimal(48, participation=part)
    ours = workload.weighted_error(made) / made.sensitivity() ** 2 * made.sensitivity(part) ** 2
    theirs = workload.weighted_error(usual) / usual.sensitivity() ** 2 * usual.sensitivity(part) ** 2
    assert ours < theirs


def test_buffers_have_two_objectives_for_people_who_return():
    part = (8, 8)
    largest, mean = (m.buffered(64, 4, participation=part, objective=o, cache=False) for o in ("max", "mean"))
    assert mean.mean_error(part) < 0.9 * largest.mean_error(part)
    assert largest.max_error(part) < mean.max_error(part)
    fewer = m.buffered(64, 2, participation=part, objective="mean", cache=False)
    assert mean.mean_error(part) <= fewer.mean_error(part) * (1.0 + 1e-6)


PLAN = """
[learning]
rounds = 60
[data]
dim = 3
[privacy]
epsilon = 2.0
delta = 1e-5
participations = 5
min_separation = 8
[[methods]]
name = "ours"
step_size = 0.1
"""


@pytest.mark.parametrize(
    ("mechanism", "objective", "same"),
    [
        ("optimal", "published", lambda: m.optimal(60, participation=(5, 8))),
        ("buffered", "published", lambda: m.buffered(60, participation=(5, 8), objective="mean")),
        ("buffered", "max", lambda: m.buffered(60, participation=(5, 8), objective="max")),
        ("banded_inverse", "published", lambda: m.banded(60, inverse=True, participation=(5, 8))),
    ],
)
def test_a_plan_reaches_each(mechanism, objective, same):
    plan = Plan.parse(PLAN + f'mechanism = "{mechanism}"\nobjective = "{objective}"\n')
    made = prepare(plan, plan.methods[0]).factorization
    np.testing.assert_array_equal(made.noising_matrix(), same().noising_matrix())


def test_what_cannot_be_asked_is_refused():
    with pytest.raises(InputError, match=r"participation.*4000 steps.*at most 2048.*banded"):
        m.optimal(4000, participation=(2, 100))
    with pytest.raises(InputError, match=r"objective.*max.*mean or rounds"):
        m.optimal(100, "max", participation=(2, 10))
    with pytest.raises(InputError, match=r"objective"):
        m.buffered(100, objective="rounds")
    with pytest.raises(InputError, match=r"objective.*only with mechanism = optimal"):
        Plan.parse(PLAN + 'mechanism = "buffered"\nobjective = "rounds"\n')
