"""The supplement's dynamic regret for strongly convex losses (app-sc-dynamic)."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given

from tests.research.problems import SEEDS, least_slack, one_dimensional_problems, per_round, simulate, some_constants
from veilstream.errors import InputError
from veilstream.mechanisms import independent, toeplitz, tree
from veilstream.research import theory


def eq_sc_dynm(c, theta):
    """eq-sc-dynm summed over rounds and divided by R, transcribed."""
    L, mu, Bg, d, n = c.smoothness, c.mu, c.gradient_bound, c.dim, c.learners
    R, tau, eta, te = c.rounds, c.local_steps, c.step_size, c.effective_step_size
    V2 = c.noise_std**2 / n
    b = c.row_norms_squared.reshape(R, tau)
    rounds = [
        (te * (1 + theta / te) + 1 / (2 * mu)) * (2 * L**2 * eta**2) * (2 * tau**2 * Bg**2 + 8 * b.max() * d * n * V2)
        + (te / tau) ** 2 * b[r, tau - 1] * d * V2 / theta
        for r in range(R)
    ]
    path = c.path_variation
    return c.initial_distance_squared / (R * te) + math.fsum(rounds) / R + L * path / R


@given(SEEDS)
def test_bound_equals_the_supplements_recursion_summed(seed):
    c = some_constants(seed)
    default = theory.dynamic_regret_bound_strongly_convex(c).total
    assert default == pytest.approx(eq_sc_dynm(c, 1 / (12 * c.smoothness)), rel=1e-12)
    other = theory.dynamic_regret_bound_strongly_convex(c, 0.07).total
    assert other == pytest.approx(eq_sc_dynm(c, 0.07), rel=1e-12)


def slack(factors):
    for rng, h, c in one_dimensional_problems():
        L = c.smoothness
        te = rng.uniform(0.01, 1) / (8 * L)
        theta = rng.uniform(0.01, 1) * (1 / (4 * L) - te) / 1.5
        step = te / (c.server_step_size * c.local_steps)
        c = dataclasses.replace(c, alpha=1.0, mu=h, step_size=step)
        bound = theory.dynamic_regret_bound_strongly_convex(c, theta)
        assert bound.holds
        yield least_slack(c, h, np.array(per_round(bound, c)) * factors, 1.0)


def test_a_round_of_the_proof_holds_for_all_points_and_fails_with_less():
    assert min(slack(np.ones(3))) >= 0
    for which in range(3):
        less = np.ones(3)
        less[which] = 0.5
        assert min(slack(less)) < 0


# Measured regret is at most 0.36 of its bound: a mean over 20 runs would have to be off by a
# factor of 2.8 to raise a false alarm.
@pytest.mark.parametrize("mechanism", [tree, toeplitz, independent])
def test_simulated_regret_stays_below_the_bound(mechanism):
    for seed, tau in itertools.product(range(12), (1, 3)):
        dynamic, _, c = simulate(seed, mechanism, tau)
        room = 1 / (4 * c.smoothness) - c.effective_step_size
        for theta in (None, 0.1 * room / 1.5, room / 1.5):
            bound = theory.dynamic_regret_bound_strongly_convex(c, theta)
            assert bound.holds
            assert dynamic <= bound.total


def test_the_environment_is_needed_and_costs_less_than_in_the_main_lemma():
    corner = {"noise": 0.0, "move": 3.0, "start": 0.0, "share": 1.0}
    dynamic, _, c = simulate(11, tree, 1, **corner)
    bound = theory.dynamic_regret_bound_strongly_convex(c)
    # At τ = 1 the local models do not move: the true drift is zero.
    assert bound.initial < dynamic <= bound.initial + bound.environment
    general = theory.dynamic_regret_bound(c)
    ratio = general.environment / bound.environment
    assert ratio == pytest.approx((12 * c.smoothness + c.mu) / c.smoothness)


def test_condition_flag_turns_at_one_over_8L_and_theta_is_checked():
    c = some_constants(6)
    limit = 1 / (8 * c.smoothness) / (c.server_step_size * c.local_steps)
    at = dataclasses.replace(c, step_size=limit)
    assert theory.dynamic_regret_bound_strongly_convex(at).holds
    beyond = dataclasses.replace(c, step_size=limit * 1.001)
    assert not theory.dynamic_regret_bound_strongly_convex(beyond).holds
    with pytest.raises(InputError, match="theta"):
        theory.dynamic_regret_bound_strongly_convex(c, -1.0)
