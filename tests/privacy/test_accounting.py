"""Exact accounting against 60-digit arithmetic and against dp-accounting."""

from __future__ import annotations

import dataclasses
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import veilstream as vs
from veilstream.privacy import gaussian, zcdp
from veilstream.privacy.gaussian import GaussianCurve, mu_for

EPSILONS = (1e-8, 1e-6, 1e-4, 1e-2, 0.1, 0.5, 1.0, 2.0, 10.0, 50.0, 100.0)
DELTAS = (1e-15, 1e-12, 1e-9, 1e-6, 1e-3, 0.1, 0.49, 0.5, 0.51, 0.9, 0.999, 1 - 1e-9)


def delta_in_60_digits(epsilon: float, mu: float) -> mpmath.mpf:
    with mpmath.workdps(60):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
        return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("delta", DELTAS)
def test_noise_is_right_to_machine_precision(epsilon, delta):
    """The residual of 60-digit arithmetic, turned into a relative error of μ."""
    mu = mu_for(epsilon, delta)
    with mpmath.workdps(60):
        slope = mpmath.npdf(mpmath.mpf(epsilon) / mu - mpmath.mpf(mu) / 2)
        error = (delta_in_60_digits(epsilon, mu) - mpmath.mpf(delta)) / slope / mu
    assert abs(float(error)) < 1e-14


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    epsilon=st.floats(math.log(1e-8), math.log(100)).map(math.exp),
    delta=st.floats(math.log(1e-15), math.log(0.999)).map(math.exp),
)
def test_epsilon_and_delta_invert_each_other(epsilon, delta):
    curve = GaussianCurve(mu_for(epsilon, delta))
    assert curve.delta(epsilon) == pytest.approx(delta, rel=1e-11)
    back = curve.epsilon(delta)
    # Where δ(ε) is flat beside δ's own rounding, ε is as good as δ allows.
    slope = (curve.delta(epsilon * 0.99) - curve.delta(epsilon * 1.01)) / (0.02 * epsilon)
    assert abs(back - epsilon) <= 1e-9 * epsilon + 1e-13 * delta / max(slope, 1e-300)


@pytest.mark.parametrize("mu", [1e-9, 1e-4, 0.1, 1.0, 7.0, 40.0])
def test_delta_is_right_across_the_curve(mu):
    for epsilon in np.geomspace(1e-9, 300.0, 40):
        exact = delta_in_60_digits(epsilon, mu)
        if exact > 1e-280:
            assert GaussianCurve(mu).delta(epsilon) == pytest.approx(float(exact), rel=1e-10)


def test_agrees_with_dp_accounting():
    theirs = pytest.importorskip("dp_accounting.gaussian_mechanism")
    for epsilon in (0.01, 0.1, 0.5, 1.0, 2.0, 8.0, 30.0):
        for delta in (1e-10, 1e-6, 1e-3, 0.05):
            sigma = theirs.get_sigma_gaussian(epsilon, delta, tol=1e-13)
            assert 1 / mu_for(epsilon, delta) == pytest.approx(sigma, rel=1e-6)
            assert GaussianCurve(1 / sigma).epsilon(delta) == pytest.approx(epsilon, rel=1e-6)


def test_agrees_with_privacy_loss_distributions():
    """A second, unrelated method: dp-accounting's discretised privacy loss."""
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    loss = pld.from_gaussian_mechanism(1.7, value_discretization_interval=1e-4)
    assert GaussianCurve(1 / 1.7).delta(1.0) == pytest.approx(loss.get_delta_for_epsilon(1.0), rel=1e-3)


@pytest.mark.parametrize(("epsilon", "share"), [(2.0, 0.728), (0.5, 0.609)])
def test_exact_noise_as_a_share_of_the_papers(epsilon, share):
    ratio = zcdp.mu_for(epsilon, 1e-3) / gaussian.mu_for(epsilon, 1e-3)
    assert ratio == pytest.approx(share, abs=5e-4)


def test_papers_noise_follows_its_lemma():
    """lem-priv-analy, letter by letter: V² = 2·B_g²·max‖c‖²/ρ."""
    f = vs.mechanisms.toeplitz(50)
    epsilon, delta, bound = 2.0, 1e-3, 0.7
    tail = math.log(1 / delta)
    rho = (math.sqrt(epsilon + tail) - math.sqrt(tail)) ** 2
    largest = np.linalg.norm(f.strategy_matrix(), axis=0).max()
    variance = 2 * bound**2 * largest**2 / rho
    std, _ = vs.calibrate(vs.Budget(epsilon, delta), f, bound, accounting="zcdp")
    assert std**2 == pytest.approx(variance, rel=1e-9)


def test_papers_noise_really_gives_less_epsilon():
    _, guarantee = vs.calibrate(vs.Budget(2.0, 1e-3), vs.mechanisms.tree(64), 1.0, accounting="zcdp")
    assert guarantee.epsilon_at(1e-3) == pytest.approx(1.365, abs=1e-3)
    assert any("loose" in remark for remark in guarantee.remarks)


def test_trade_off_curve_is_that_of_two_gaussians():
    """Empirical errors of the best test between N(0,1) and N(μ,1); 4.5 standard errors, 1e-5."""
    mu, n = 0.8, 1_000_000
    rng = np.random.default_rng(0)
    for threshold in (-0.5, 0.4, 1.5):
        alpha = (rng.standard_normal(n) > threshold).mean()
        beta = (rng.standard_normal(n) + mu <= threshold).mean()
        assert abs(GaussianCurve(mu).trade_off(alpha) - beta) < 4.5 * 1.5 / math.sqrt(n)
    grid = GaussianCurve(mu).trade_off(np.linspace(0.001, 0.999, 9))
    assert (np.diff(grid) < 0).all()


def test_epsilon_is_zero_where_delta_alone_suffices():
    assert GaussianCurve(0.01).epsilon(0.5) == 0.0


def test_trade_off_is_right_in_the_far_tail():
    with mpmath.workdps(40):
        for alpha in (1e-20, 1e-17, 1e-10, 0.5):
            z = -mpmath.sqrt(2) * mpmath.erfinv(2 * mpmath.mpf(alpha) - 1)
            exact = float(mpmath.ncdf(z - 10))
            assert GaussianCurve(10.0).trade_off(alpha) == pytest.approx(exact, rel=1e-9)


def test_impossible_curves_and_questions_are_refused():
    for mu in (0, -1, math.nan, math.inf):
        with pytest.raises(vs.errors.InputError, match="mu"):
            GaussianCurve(mu)
    curve = GaussianCurve(1.0)
    for epsilon in (-1, math.nan, math.inf, "1"):
        with pytest.raises(vs.errors.InputError, match="epsilon"):
            curve.delta(epsilon)
    for delta in (0, 1, 2, math.nan):
        with pytest.raises(vs.errors.InputError, match="delta"):
            curve.epsilon(delta)


@pytest.mark.parametrize("epochs", [2, 5])
def test_several_epochs_compose_as_dp_accounting_says(epochs):
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    std, one = vs.calibrate(vs.Budget(1.0, 1e-6), vs.mechanisms.independent(1), clip_norm=1.0)
    ours = dataclasses.replace(one, epochs=epochs).epsilon_over_epochs
    theirs = pld.from_gaussian_mechanism(std / one.sensitivity, pessimistic_estimate=True).self_compose(epochs)
    assert ours == pytest.approx(theirs.get_epsilon_for_delta(1e-6), rel=2e-3)
    assert ours <= theirs.get_epsilon_for_delta(1e-6)
    assert dataclasses.replace(one, epochs=1).epsilon_over_epochs == pytest.approx(1.0, rel=1e-9)
