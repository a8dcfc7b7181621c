"""The bounds: their constants, their formulas, their limits, and the steps they advise."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.research.problems import SEEDS, parts, some_constants
from veilstream.errors import InputError
from veilstream.research import theory

BOUNDS = [theory.dynamic_regret_bound, theory.dynamic_regret_bound_independent, theory.static_regret_bound]


def test_derived_quantities_follow_their_definitions():
    c = some_constants(rounds=3, local_steps=2, row_norms_squared=[1, 2, 9, 4, 5, 6])
    assert c.round_row_norms_squared == 2 + 4 + 6
    assert c.max_row_norm_squared == 9
    assert c.effective_step_size == pytest.approx(c.step_size * c.server_step_size * 2)
    assert c.noise_variance == pytest.approx(c.noise_std**2 / c.learners)


def test_row_norms_are_a_copy_that_nobody_can_change():
    rows = np.ones(8)
    c = some_constants(rounds=4, local_steps=2, row_norms_squared=rows)
    rows[:] = 7
    assert c.max_row_norm_squared == 1
    with pytest.raises(ValueError, match="read-only"):
        c.row_norms_squared[0] = 3


BAD = {
    "smoothness": (0,),
    "regularity": (-1e-9,),
    "alpha": (math.nan, True),
    "mu": (0.0,),
    "gradient_bound": (math.inf,),
    "dim": (2.0,),
    "learners": (0,),
    "local_steps": (-1,),
    "rounds": (True,),
    "step_size": ("0.1",),
    "server_step_size": (0.0,),
    "path_variation": (-1.0, True),
    "initial_distance_squared": (math.inf,),
    "noise_std": (-0.1, None),
    "row_norms_squared": (np.ones(3), np.ones((4, 2)), [1] * 7 + [-1], [1] * 7 + [math.nan], "ones"),
}


def test_bad_constants_are_refused_by_name():
    good = {"rounds": 4, "local_steps": 2, "row_norms_squared": np.ones(8)}
    some_constants(**good)
    for field, values in BAD.items():
        for value in values:
            with pytest.raises(InputError) as caught:
                some_constants(**(good | {field: value}))
            assert caught.value.field == field


def test_constants_that_no_smooth_loss_has_are_refused():
    some_constants(smoothness=2.0, alpha=0.5, mu=4.0)
    with pytest.raises(InputError, match=r"mu = 4\.01: expected <= L/α = 4"):
        some_constants(smoothness=2.0, alpha=0.5, mu=4.01)


@pytest.mark.parametrize("bound", [theory.dynamic_regret_bound, theory.static_regret_bound])
def test_noise_without_row_norms_is_refused_rather_than_ignored(bound):
    with pytest.raises(InputError) as caught:
        bound(some_constants(noise_std=1.0, row_norms_squared=None))
    assert caught.value.field == "row_norms_squared"


def lem_u(c):
    L, a, mu, s, Bg, d, n = (c.smoothness, c.alpha, c.mu, c.regularity, c.gradient_bound, c.dim, c.learners)
    R, tau, eta, te = c.rounds, c.local_steps, c.step_size, c.effective_step_size
    V2 = c.noise_std**2 / n
    b = c.row_norms_squared.reshape(R, tau)
    BR = sum(b[r, tau - 1] for r in range(R))
    shat = (
        24 * L * (1 + s) * te**2 / (a**2 * R) * BR * d * V2 / tau**2
        + (12 * L + a * mu) * c.path_variation / (a**2 * R)
        + (1 / a) * (te + a / (12 * L) + 1 / mu) * (2 * L**2 * eta**2) * (2 * tau**2 * Bg**2 + 8 * b.max() * d * n * V2)
    )
    return c.initial_distance_squared / (a * R * te) + shat


def lem_u_iid(c):
    L, a, mu, Bg, d, n = c.smoothness, c.alpha, c.mu, c.gradient_bound, c.dim, c.learners
    R, tau, eta, te = c.rounds, c.local_steps, c.step_size, c.effective_step_size
    V2 = c.noise_std**2 / n
    return (
        c.initial_distance_squared / (a * R * te)
        + 2 * te * d / a * V2 / tau
        + (12 * L + a * mu) * c.path_variation / (a**2 * R)
        + (1 / a) * (2 * te + 1 / mu) * 4 * L**2 * eta**2 * (tau**2 * Bg**2 + tau * d * n * V2)
    )


def coro(c, theta):
    L, mu, Bg, d, n = c.smoothness, c.mu, c.gradient_bound, c.dim, c.learners
    R, tau, eta, te = c.rounds, c.local_steps, c.step_size, c.effective_step_size
    V2 = c.noise_std**2 / n
    b = c.row_norms_squared.reshape(R, tau)
    c_vi = te**2 * (1 + theta / te) + te / (2 * mu)
    c_vii = te**2 * (1 + 3 * theta / (2 * te))
    vi = L**2 * eta**2 * (2 * tau**2 * Bg**2 + 8 * b.max() * d * n * V2)
    each_round = (
        2 * c_vi * vi
        + te / theta * (te / tau) ** 2 * b[:, -1].mean() * d * V2
        + 2 * c_vii * 2 * L * (L / 2) * c.path_variation / R
    )
    return c.initial_distance_squared / (R * te) + each_round / te


@given(SEEDS)
def test_dynamic_bound_equals_the_printed_lemma(seed):
    c = some_constants(seed)
    assert theory.dynamic_regret_bound(c).total == pytest.approx(lem_u(c), rel=1e-12)


@given(SEEDS)
def test_independent_bound_is_the_printed_one_times_its_correction(seed):
    c = some_constants(seed)
    c = dataclasses.replace(c, row_norms_squared=None)
    share = c.effective_step_size * 8 * c.smoothness / c.alpha  # 1 at the limit α/(8L)
    correction = 1 if share <= 5 / 6 else 1 / (11 / 6 - share)
    ours = theory.dynamic_regret_bound_independent(c).total
    assert ours == pytest.approx(correction * lem_u_iid(c), rel=1e-12)


@given(SEEDS)
def test_static_bound_equals_its_recursion_summed(seed):
    c = some_constants(seed)
    theta = c.effective_step_size * max(1, math.log(c.rounds * c.local_steps))
    assert theory.static_regret_bound(c).total == pytest.approx(coro(c, theta), rel=1e-12)
    assert theory.static_regret_bound(c, 0.07).total == pytest.approx(coro(c, 0.07), rel=1e-12)


def test_main_theorem_rate_equals_the_printed_expression():
    c = some_constants(3)
    R, tau, n, d = c.rounds, c.local_steps, c.learners, c.dim
    te, eta_g, Bg, lnd, eps = c.effective_step_size, c.server_step_size, c.gradient_bound, 7, 0.6
    rate = theory.main_theorem_rate(c, epsilon=eps, delta=math.exp(-lnd))
    noise = (1 + n / eta_g**2) * te**2 * math.log(R * tau) ** 2
    noise *= d * Bg**2 * lnd / (n * tau**2 * eps**2)
    expected = [1 / (R * te), te**2 / eta_g**2 * Bg**2, noise, c.path_variation / R]
    np.testing.assert_allclose(parts(rate), expected, rtol=1e-12)


def recursion_coefficient(L, alpha, eta_tilde, theta):
    """What eq-a17-indp leaves in front of the regret, over η̃, from the bounds of (IV) and (V)."""
    from_v = 2 * eta_tilde * 2  # 2η̃²·E‖g‖², and ‖a + b‖² <= 2‖a‖² + 2‖b‖²
    from_iv = theta
    return 2 * alpha - (from_v + from_iv) * 2 * L  # E‖∇f‖² <= 2L(f - f*)


@given(st.floats(0.01, 1.0))
def test_independent_bound_divides_by_no_more_than_its_proof_leaves(share):
    c = some_constants(1)
    step = share * c.alpha / (8 * c.smoothness) / (c.server_step_size * c.local_steps)
    c = dataclasses.replace(c, step_size=step)
    te = c.effective_step_size
    left = recursion_coefficient(c.smoothness, c.alpha, te, c.alpha / (12 * c.smoothness))
    bound = theory.dynamic_regret_bound_independent(c)
    undivided = c.initial_distance_squared / (c.rounds * te)
    assert bound.holds
    assert bound.initial >= undivided / left * (1 - 1e-12)
    assert bound.initial <= 1.2 * undivided / c.alpha * (1 + 1e-12)


def test_printed_independent_constants_fall_short_at_the_step_limit():
    L, alpha = 2.0, 0.7
    left = recursion_coefficient(L, alpha, alpha / (8 * L), alpha / (12 * L))
    assert left == pytest.approx(5 * alpha / 6)  # the paper divides by α


@pytest.mark.parametrize(("R", "tau"), [(1, 1), (2, 1), (1, 2), (3, 1), (50, 4)])
def test_static_default_theta_meets_eqtheta_on_the_papers_step_limit(R, tau):
    log_steps = max(1.0, math.log(R * tau))
    c = some_constants(rounds=R, local_steps=tau, row_norms_squared=np.ones(R * tau), server_step_size=1.0)
    c = dataclasses.replace(c, step_size=1 / (10 * c.smoothness * log_steps) / tau)
    bound = theory.static_regret_bound(c)
    assert bound.holds
    assert math.isfinite(bound.total)
    too_far = dataclasses.replace(c, step_size=c.step_size * 1.8)
    assert not theory.static_regret_bound(too_far).holds


@pytest.mark.parametrize("bound", BOUNDS)
@given(seed=SEEDS)
def test_each_term_answers_to_its_own_cause(bound, seed):
    c = some_constants(seed)
    all_parts = parts(bound(c))
    assert (all_parts > 0).all()
    assert bound(c).total == pytest.approx(all_parts.sum())
    causes = {"initial_distance_squared": (0, 1), "gradient_bound": (1, 2), "noise_std": (2, 2)}
    causes["path_variation"] = (3, 1)
    for field, (index, power) in causes.items():
        tripled = parts(bound(dataclasses.replace(c, **{field: 3 * getattr(c, field)})))
        expected = all_parts.copy()
        expected[index] *= 3**power
        np.testing.assert_allclose(tripled, expected, rtol=1e-12)


@pytest.mark.parametrize("bound", BOUNDS)
def test_terms_vanish_with_their_cause(bound):
    quiet = some_constants(2, noise_std=0.0, row_norms_squared=None, path_variation=0, initial_distance_squared=0)
    assert parts(bound(quiet))[[0, 2, 3]].tolist() == [0, 0, 0]
    assert bound(quiet).drift == bound(some_constants(2)).drift > 0


def test_dynamic_bound_scales_as_its_formula_says():
    c = some_constants(4)
    base = theory.dynamic_regret_bound(c)
    assert theory.dynamic_regret_bound(
        dataclasses.replace(c, row_norms_squared=2 * c.row_norms_squared)
    ).noise == pytest.approx(2 * base.noise)
    assert theory.dynamic_regret_bound(dataclasses.replace(c, dim=5 * c.dim)).noise == pytest.approx(5 * base.noise)
    # σ and n touch the noise of the released model only: subtract the local part.
    released = base.noise - theory.dynamic_regret_bound(dataclasses.replace(c, learners=10**12)).noise
    smoother = dataclasses.replace(c, regularity=2 * c.regularity + 1)
    gained = theory.dynamic_regret_bound(smoother).noise - base.noise
    assert gained == pytest.approx(released, rel=1e-6)
    more = dataclasses.replace(c, learners=4 * c.learners)
    assert base.noise - theory.dynamic_regret_bound(more).noise == pytest.approx(0.75 * released, rel=1e-6)


def test_local_terms_depend_on_the_local_step_alone():
    # Same η̃, four times η_g: the local models move four times less (PAPER-NOTES 20).
    c = some_constants(5)
    far = dataclasses.replace(c, step_size=c.step_size / 4, server_step_size=4 * c.server_step_size)
    assert theory.dynamic_regret_bound(far).drift == pytest.approx(theory.dynamic_regret_bound(c).drift / 16)
    assert theory.dynamic_regret_bound(far).initial == pytest.approx(theory.dynamic_regret_bound(c).initial)


@pytest.mark.parametrize("bound", [theory.dynamic_regret_bound, theory.dynamic_regret_bound_independent])
def test_condition_flag_turns_at_alpha_over_8L(bound):
    c = some_constants(6)
    limit = c.alpha / (8 * c.smoothness) / (c.server_step_size * c.local_steps)
    assert bound(dataclasses.replace(c, step_size=limit)).holds
    beyond = bound(dataclasses.replace(c, step_size=limit * 1.001))
    assert not beyond.holds
    assert "α/(8L)" in beyond.condition
    wild = bound(dataclasses.replace(c, step_size=limit * 100))
    assert not wild.holds
    assert (parts(wild) >= 0).all()


def test_static_bound_trades_noise_against_environment_by_theta():
    c = some_constants(7)
    narrow, wide = (theory.static_regret_bound(c, theta) for theta in (0.001, 0.1))
    assert narrow.environment < wide.environment
    assert narrow.noise > wide.noise
    with pytest.raises(InputError, match="theta"):
        theory.static_regret_bound(c, 0.0)


def test_bounds_are_unit_free():
    # Measuring lengths in other units multiplies x by k, gradients by 1/k, L by 1/k², η by k².
    c, k = some_constants(8), 3.7
    other = dataclasses.replace(
        c,
        smoothness=c.smoothness / k**2,
        mu=c.mu / k**2,
        gradient_bound=c.gradient_bound / k,
        noise_std=c.noise_std / k,
        step_size=c.step_size * k**2,
        path_variation=c.path_variation * k**2,
        initial_distance_squared=c.initial_distance_squared * k**2,
    )
    for bound in BOUNDS:
        np.testing.assert_allclose(parts(bound(other)), parts(bound(c)), rtol=1e-9)
    assert theory.advised_step_size(other) == pytest.approx(theory.advised_step_size(c) * k**2)


@pytest.mark.parametrize("noise_std", [0.0, 0.1, 30.0])
@settings(max_examples=20)
@given(seed=SEEDS)
def test_advised_step_beats_every_step_of_a_grid(seed, noise_std):
    c = some_constants(seed, noise_std=noise_std)
    scale, limit = c.server_step_size * c.local_steps, c.alpha / (8 * c.smoothness)

    def total(eta_tilde):
        return theory.dynamic_regret_bound(dataclasses.replace(c, step_size=eta_tilde / scale)).total

    advised = theory.advised_step_size(c)
    assert 0 < advised <= limit
    grid = limit * np.geomspace(1e-5, 1, 600)
    totals = [total(step) for step in grid]
    assert total(advised) <= min(totals) * (1 + 1e-12)
    assert advised == pytest.approx(grid[np.argmin(totals)], rel=0.02)
    assert theory.dynamic_regret_bound(dataclasses.replace(c, step_size=advised / scale)).holds


def test_advised_step_ignores_the_given_one_and_reaches_its_limit():
    c = some_constants(9)
    assert theory.advised_step_size(dataclasses.replace(c, step_size=1e-7)) == pytest.approx(
        theory.advised_step_size(c)
    )
    far = dataclasses.replace(c, initial_distance_squared=1e12)
    assert theory.advised_step_size(far) == c.alpha / (8 * c.smoothness)
    with pytest.raises(InputError, match="initial_distance_squared"):
        theory.advised_step_size(dataclasses.replace(c, initial_distance_squared=0))


def test_noise_only_advice_follows_the_cube_root_law():
    # Great noise, so that 3sη̃⁴ is nothing beside 2qη̃³: η̃ ~ V^(-2/3).
    c = some_constants(10, noise_std=1e6)
    more = dataclasses.replace(c, noise_std=1e9)
    ratio = theory.advised_step_size(more) / theory.advised_step_size(c)
    assert ratio == pytest.approx(1e-2, rel=1e-3)


def test_step_size_scaling_balances_start_and_noise():
    R, tau = 1000, 4
    step = theory.step_size_scaling(rounds=R, local_steps=tau)
    assert 1 / (R * step) == pytest.approx(step**2 * math.log(R * tau) ** 2)
    with pytest.raises(InputError):
        theory.step_size_scaling(rounds=1, local_steps=1)


def test_threshold_of_the_papers_logistic_regression():
    # PAPER-NOTES 29: 4000 steps, τ = 4, n = 20, η_g = 1.
    threshold = theory.correlated_beats_independent(rounds=1000, local_steps=4, learners=20, server_step_size=1.0)
    assert threshold == pytest.approx(0.0028, abs=5e-5)
    single = {"rounds": 1, "local_steps": 1, "learners": 2, "server_step_size": 1.0}
    assert theory.correlated_beats_independent(**single) == math.inf


@given(SEEDS)
def test_threshold_makes_the_correlated_rate_the_smaller_one(seed):
    c = some_constants(seed)
    threshold = theory.correlated_beats_independent(
        rounds=c.rounds, local_steps=c.local_steps, learners=c.learners, server_step_size=c.server_step_size
    )
    scale = c.server_step_size * c.local_steps
    c = dataclasses.replace(c, step_size=threshold / scale)
    te, ratio = threshold, c.learners / c.server_step_size**2
    eps, delta = 1.3, 1e-5
    privacy = c.dim * c.gradient_bound**2 * math.log(1 / delta) / (c.learners * eps**2)
    lem_u_iid_rate = (1 + te * ratio) * te * privacy / c.local_steps
    noise = theory.main_theorem_rate(c, epsilon=eps, delta=delta).noise
    assert noise <= lem_u_iid_rate
    # Without the part that the paper drops, the threshold is exact.
    assert noise == pytest.approx(te * privacy / c.local_steps)
