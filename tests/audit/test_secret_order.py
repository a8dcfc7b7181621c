"""The checks of a secret order: correct code raises no alarm, each planted fault one in the check made for it."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import kstest, norm
from studies.mutations import order_bugs

from veilstream.audit.programme import reduced
from veilstream.audit.remaining_promise import known_order
from veilstream.audit.secret_order import Mixture, _least_epsilon
from veilstream.audit.statistics.check import alarming
from veilstream.deployment.terms import Terms
from veilstream.plans.plan import Plan

BY_CHECK = {
    "order known": "known from nobody's name",
    "order by file": "nothing to do with the order of the records",
    "permutation instead of independent choices": "uniform, each by itself",
    "choice redrawn after a crash": "every client in one step",
    "time tells the count": "the work of a round",
    "half the noise under a secret order": "who is told apart",
}


def test_correct_code_raises_no_alarm():
    """All together raise one with probability 1e-6; steps, coins and noise are drawn anew in each run of this."""
    checks = order_bugs.checks()
    assert alarming(checks) == ()
    assert len(checks) == 8


@pytest.mark.all
@pytest.mark.parametrize("bug", order_bugs.PLANTED)
def test_each_planted_fault_is_caught_by_its_check(bug):
    order_bugs.secret_plan()
    with order_bugs.PLANTED[bug]():
        alarms = {check.name.removeprefix("secret order: ") for check in alarming(order_bugs.checks())}
    assert BY_CHECK[bug] in alarms


IN_WINDOWS = {
    "used in the order of arrival": "nothing to do with the order of the records",
    "used in the window of arrival": "every client in one step",
    "time tells the count": "the work of a round",
}


def test_correct_code_raises_no_alarm_where_records_arrive():
    """As above, with a window; 1e-6 again."""
    checks = order_bugs.checks(window=8)
    assert alarming(checks) == ()
    assert len(checks) == 8


@pytest.mark.all
@pytest.mark.parametrize("bug", order_bugs.PLANTED_IN_WINDOWS)
def test_each_planted_fault_of_windows_is_caught_by_its_check(bug):
    order_bugs.secret_plan(8)
    with order_bugs.PLANTED_IN_WINDOWS[bug]():
        alarms = {check.name.removeprefix("secret order: ") for check in alarming(order_bugs.checks(window=8))}
    assert IN_WINDOWS[bug] in alarms


def test_a_long_plan_is_audited_over_whole_windows():
    learning = {"rounds": 3000, "local_steps": 2, "clients_per_step": 4}
    for window, rounds, audited in ((200, 200, 200), (3000, 256, 256)):
        plan = Plan(
            learning=learning,
            data={"dim": 4},
            privacy={"epsilon": 2.0, "delta": 1e-3, "order": "secret", "window": window},
            methods=[{"name": "ours", "mechanism": "independent", "step_size": 0.1}],
        )
        short = reduced(plan, full=False)
        assert (short.learning.rounds, short.window) == (rounds, audited)


def test_the_noise_is_the_same_where_the_order_is_known():
    """So all checks of noise, which know the order, are about what a learner with a secret one draws."""
    plan, terms = order_bugs.secret_plan()
    known = Terms.of(known_order(plan, terms), 1)
    assert known.noise_std == pytest.approx(terms.noise_std, rel=1e-9)
    assert known.guarantee.epsilon == pytest.approx(terms.guarantee.epsilon_if_order_known)
    assert known.guarantee.epsilon > terms.guarantee.epsilon


def test_with_one_round_the_mixture_is_the_gaussian_test():
    """Then nothing is hidden: the error is that of two Gaussians, by its closed form (20,000 draws, 5 deviations)."""
    mixture = Mixture(np.array([[1.0]]), 0.7, -0.7)
    ratio, second, right = mixture.drawn(20_000, 1)
    error = float(((ratio <= 0) != second).mean())
    expected = float(norm.cdf(-0.7))
    assert abs(error - expected) < 5 * np.sqrt(expected * (1 - expected) / 20_000)
    assert right.all()


def test_the_bound_on_epsilon_holds_for_randomised_response():
    """Told the truth with probability e/(1+e), so epsilon is 1: a bound at 99% is above it in few of 400 runs.

    More than 16 of 400 have probability below 1e-5 at 1% each.
    """
    rng = np.random.default_rng(2)
    above = 0
    for _ in range(400):
        second = rng.integers(2, size=2000).astype(bool)
        truth = rng.random(2000) < np.e / (1 + np.e)
        above += _least_epsilon(np.where(second ^ truth, 1.0, -1.0), second, 0.0, 1e-9, 0.01) > 1.0
    assert above <= 16


@pytest.mark.slow
def test_p_values_of_correct_code_are_uniform_where_they_are_exact():
    """Over 40 audits, by Kolmogorov and Smirnov's test of three checks at 1e-4 each: false alarms 3e-4."""
    found = [order_bugs.checks(seed) for seed in range(40)]
    for place in (2, 5, 6):
        assert kstest([checks[place].p for checks in found], "uniform").pvalue > 1e-4
    assert not any(alarming(checks) for checks in found)
