"""One round of each proof for all points, and simulated runs that must stay below the bounds."""

import dataclasses
import itertools

import numpy as np
import pytest

from tests.research.problems import least_slack, one_dimensional_problems, per_round, simulate
from veilstream.mechanisms import independent, toeplitz, tree
from veilstream.research import theory


def dynamic_slack(factors):
    for _, h, c in one_dimensional_problems():
        charges = np.array(per_round(theory.dynamic_regret_bound(c), c)) * factors * c.alpha
        yield least_slack(c, h, charges, c.alpha)


def independent_slack(factors):
    for _, h, c in one_dimensional_problems():
        c = dataclasses.replace(c, row_norms_squared=None)
        bound = theory.dynamic_regret_bound_independent(c)
        gain = c.initial_distance_squared / (bound.initial * c.rounds * c.effective_step_size)
        charges = np.array(per_round(bound, c)) * factors * gain
        yield least_slack(c, h, charges, gain, fresh=True)


def static_slack(factors):
    for rng, h, c in one_dimensional_problems():
        L = c.smoothness
        te = rng.uniform(0.01, 0.5) / (8 * L)
        theta = rng.uniform(0.01, 1) * (1 / (4 * L) - te) / 1.5
        step = te / (c.server_step_size * c.local_steps)
        c = dataclasses.replace(c, alpha=1.0, mu=h, step_size=step)
        bound = theory.static_regret_bound(c, theta)
        assert bound.holds
        charges = np.array(per_round(bound, c)) * factors
        gain = 2 - 4 * L * (te + 1.5 * theta)
        assert gain >= 1 - 1e-12
        yield least_slack(c, h, charges, gain, against_best=True)


@pytest.mark.parametrize(("slack", "tightness"), [(dynamic_slack, 0.1), (independent_slack, 0.1), (static_slack, 0.5)])
def test_a_round_of_the_proof_holds_for_all_points_and_fails_with_less(slack, tightness):
    assert min(slack(np.ones(3))) >= 0
    for which in range(3):
        less = np.ones(3)
        less[which] = tightness
        assert min(slack(less)) < 0


MECHANISMS = [tree, toeplitz, independent]


# Measured regret is at most 0.3 of its bound, over 240 problems: a mean over 20 runs would have to
# be off by a factor of three to raise a false alarm.
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_simulated_regret_stays_below_every_bound(mechanism):
    for seed, tau in itertools.product(range(36), (1, 3)):
        alpha = [1.0, 1.0, 0.6, 1.4][seed % 4]
        dynamic, static, c = simulate(seed, mechanism, tau, alpha=alpha)
        bound = theory.dynamic_regret_bound(c)
        assert bound.holds
        assert dynamic <= bound.total
        if mechanism is independent:
            assert dynamic <= theory.dynamic_regret_bound_independent(c).total
        if alpha == 1:
            room = 1 / (4 * c.smoothness) - c.effective_step_size
            for share in (0.01, 0.3, 1.0):
                fixed = theory.static_regret_bound(c, share * room / 1.5)
                assert fixed.holds
                assert static <= fixed.total


# Each corner lets one term carry the bound alone, so that a term that is missing shows.
CORNERS = {
    "initial": {"noise": 0.0, "move": 0.0, "start": 3.0, "share": 0.02},
    "noise": {"noise": 30.0, "move": 0.0, "start": 0.0, "share": 1.0},
    "environment": {"noise": 0.0, "move": 3.0, "start": 0.0, "share": 1.0},
}


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_term_is_needed_somewhere(mechanism):
    for term, corner in CORNERS.items():
        dynamic, _, c = simulate(11, mechanism, 1, **corner)
        bound = theory.dynamic_regret_bound(c)
        assert dynamic <= bound.total
        # At τ = 1 the local models do not move: the true drift is zero.
        needed = dataclasses.replace(bound, drift=0.0, **{term: 0.0}).total
        assert dynamic > needed
