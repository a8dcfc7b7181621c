"""The rows of the paper's table: printed rates, and bounds that runs must not pass."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings

from tests.research.problems import SEEDS, parts, some_constants
from veilstream.errors import InputError
from veilstream.mechanisms import toeplitz, tree
from veilstream.research import theory
from veilstream.research.theory import COMPARED_METHODS, TableSetting
from veilstream.research.theory.compared_methods import local_updates_bound

CONVEX = ("liu2023", "denisov2022", "cdc2021")


def setting_of(seed=0, **changes):
    c = some_constants(seed, **changes)
    return TableSetting(constants=c, epsilon=0.7, delta=1e-5, path_length=3.0, diameter=2.0, independent_noise_std=1.3)


def test_every_row_of_the_table_has_assumptions_a_rate_and_a_bound():
    assert list(COMPARED_METHODS) == [
        "ours, correlated",
        "ours, independent",
        "liu2023",
        "denisov2022",
        "cdc2021",
        "gao2018",
    ]
    setting = setting_of()
    for method in COMPARED_METHODS.values():
        assert method.assumptions
        assert isinstance(method.bound(setting), theory.Bound)
        assert method.bound(setting).holds
        rate = method.rate(setting)
        assert (rate.noise > 0) == (method.noise is not None) == (method.bound(setting).noise > 0)
        assert rate.total == pytest.approx(parts(rate).sum())


def test_our_rows_are_our_bounds():
    setting = setting_of(2)
    c, budget = setting.constants, {"epsilon": 0.7, "delta": 1e-5}
    row = COMPARED_METHODS["ours, correlated"]
    assert row.bound(setting) == theory.dynamic_regret_bound(c)
    assert row.rate(setting) == theory.main_theorem_rate(c, **budget)
    row = COMPARED_METHODS["ours, independent"]
    fresh = dataclasses.replace(c, noise_std=1.3, row_norms_squared=None)
    assert row.bound(setting) == theory.dynamic_regret_bound_independent(fresh)
    assert row.rate(setting) == theory.independent_noise_rate(c, **budget)


@given(SEEDS)
def test_rates_equal_the_table(seed):
    setting = setting_of(seed)
    c = setting.constants
    eta, R, tau, n, d, Bg = (c.effective_step_size, c.rounds, c.local_steps, c.learners, c.dim, c.gradient_bound)
    lnd, eps, s = math.log(1e5), 0.7, eta * Bg
    correlated = eta * Bg * math.log(R * tau) * math.sqrt(d) * Bg / (math.sqrt(n) * tau)
    printed = {
        "liu2023": [1 / (R * eta), eta * Bg**2, eta * d * Bg**2 / (n * tau**2) * lnd / eps**2, 0],
        "denisov2022": [1 / (R * eta), eta * Bg**2, correlated * math.sqrt(lnd) / eps, 0],
        "cdc2021": [1 / (R * eta), eta * Bg**2, 0, 0],
        "gao2018": [1 / (R * s), s, 0, 3.0 / R],
    }
    for name, expected in printed.items():
        np.testing.assert_allclose(parts(COMPARED_METHODS[name].rate(setting)), expected)


def test_bad_settings_are_refused_by_name():
    bad = {"path_length": -1.0, "diameter": 0.0, "pseudo_convexity": 0, "normalised_step": -1}
    for field, value in (bad | {"independent_noise_std": -0.1}).items():
        with pytest.raises(InputError) as caught:
            dataclasses.replace(setting_of(), **{field: value})
        assert caught.value.field == field


def test_independent_rows_refuse_the_std_of_correlated_noise():
    missing = dataclasses.replace(setting_of(), independent_noise_std=None)
    for name in ("ours, independent", "liu2023"):
        with pytest.raises(InputError, match="independent_noise_std"):
            COMPARED_METHODS[name].bound(missing)
    fresh = dataclasses.replace(missing.constants, noise_std=1.3, row_norms_squared=None)
    given = COMPARED_METHODS["liu2023"].bound(dataclasses.replace(missing, constants=fresh))
    assert given == COMPARED_METHODS["liu2023"].bound(setting_of())


def test_gao_needs_a_diameter():
    with pytest.raises(InputError, match="diameter"):
        COMPARED_METHODS["gao2018"].bound(dataclasses.replace(setting_of(), diameter=None))


def quiet(R, tau=1, *, step=0.3, server=1.0, slope=2.0, start=0.0, learners=1, std=0.0, rows=None, **changes):
    """One dimension, gradients of size ``slope``; no noise unless it is given."""
    constants = some_constants(
        rounds=R,
        local_steps=tau,
        step_size=step,
        server_step_size=server,
        dim=1,
        learners=learners,
        gradient_bound=slope,
        initial_distance_squared=start**2,
        noise_std=std,
        row_norms_squared=rows,
    )
    return TableSetting(constants=constants, epsilon=1.0, delta=1e-3, **changes)


@pytest.mark.parametrize("R", [1, 2, 17])
@pytest.mark.parametrize("name", CONVEX)
def test_convex_bounds_are_sharp_on_a_slope(name, R):
    # f(x) = 2|x - u| with u exactly R steps of 0.6 away: losses 2·0.6·(R, R-1, ..., 1).
    by_hand = 2 * 0.6 * (R + 1) / 2
    bound = COMPARED_METHODS[name].bound(quiet(R, start=0.6 * R))
    assert bound.total == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("R", [1, 2, 17])
def test_normalised_descent_is_sharp_on_a_slope(R):
    # Steps of 0.25 on |x - u|, u = R steps away and as far as the domain goes: regret 0.25(R+1)/2.
    setting = quiet(R, diameter=0.25 * R, normalised_step=0.25)
    assert COMPARED_METHODS["gao2018"].bound(setting).total == pytest.approx(0.25 * (R + 1) / 2)


def test_drift_of_local_models_is_sharp_where_they_jump_over_the_optimum():
    # f = 2|x|, x = 0.59 and local steps of 0.6: z goes to -0.01 and back, and x never moves.
    R, x, step, slope = 10**6, 0.59, 0.3, 2.0
    setting = quiet(R, 2, step=step, server=1e-3, slope=slope, start=x)
    released, local = slope * x, slope * (x + 0.01) / 2
    assert released <= local_updates_bound(setting, released=True).total <= 1.02 * released
    assert local <= local_updates_bound(setting).total <= 1.01 * local


def test_local_drift_at_unit_server_step_is_the_tables_with_its_constant():
    setting = quiet(5, 4)
    c = setting.constants
    expected = c.effective_step_size * c.gradient_bound**2 * (1 - 1 / 8)
    assert COMPARED_METHODS["cdc2021"].bound(setting).drift == pytest.approx(expected)


@given(SEEDS)
def test_local_models_stay_below_their_bound(seed):
    rng = np.random.default_rng([1, seed])
    R, tau, n = (int(k) for k in rng.integers(1, [60, 6, 5]))
    eta, eta_g, B = 10 ** rng.uniform(-2, 0), rng.uniform(0.2, 3), rng.uniform(0.2, 3)
    theta = rng.normal(size=(R, tau, n)) * rng.choice([0.01, 0.3, 3])
    best = np.median(theta)
    x = start = rng.normal() * 2
    released = local = 0.0
    for r in range(R):
        z, total = np.full(n, x), 0.0
        for t in range(tau):
            local += B * (abs(z - theta[r, t]) - abs(best - theta[r, t])).mean()
            released += B * (abs(x - theta[r, t]) - abs(best - theta[r, t])).mean()
            g = B * np.sign(z - theta[r, t])
            z, total = z - eta * g, total + g.mean()
        x = x - eta * eta_g * total
    setting = quiet(R, tau, step=eta, server=eta_g, slope=B, start=start - best)
    assert local / (R * tau) <= local_updates_bound(setting).total * (1 + 1e-12)
    assert released / (R * tau) <= local_updates_bound(setting, released=True).total * (1 + 1e-12)


def correlated_run(seed, mechanism, *, std=None, start=None, spread=None):
    """x^r, its regret, and the mean of |b^{r-1}ξ|, for one draw of ξ with the dense B."""
    rng = np.random.default_rng([2, seed])
    R, tau = int(rng.integers(1, 40)), int(rng.integers(1, 5))
    eta, B = 10 ** rng.uniform(-2, 0), rng.uniform(0.2, 3)
    std = 10 ** rng.uniform(-1, 2) if std is None else std
    theta = rng.normal(size=R) * (rng.choice([0.01, 0.3, 3]) if spread is None else spread)
    best = np.median(theta)
    decoder = mechanism(R * tau).decoder_matrix()
    noise = np.r_[0.0, (decoder @ rng.normal(size=decoder.shape[1]) * std)[tau - 1 :: tau]]
    x = begin = best + (rng.normal() if start is None else start)
    regret = 0.0
    for r in range(R):
        regret += B * (abs(x - theta[r]) - abs(best - theta[r]))
        x = x - eta * (B * np.sign(x - theta[r]) + (noise[r + 1] - noise[r]) / tau)
    setting = quiet(R, tau, step=eta / tau, slope=B, start=begin - best, std=std, rows=(decoder**2).sum(1))
    return setting, regret / R, abs(noise[:-1]).mean(), decoder


@pytest.mark.parametrize("mechanism", [tree, toeplitz])
@settings(max_examples=20)
@given(seed=SEEDS)
def test_correlated_descent_stays_below_its_bound_draw_by_draw(seed, mechanism):
    # With the lengths that were drawn the inequality holds for every ξ, not only on average.
    setting, regret, drawn, decoder = correlated_run(seed, mechanism)
    c, bound = setting.constants, COMPARED_METHODS["denisov2022"].bound(setting)
    per_length = c.effective_step_size * c.gradient_bound / c.local_steps
    assert regret <= (bound.initial + bound.drift + per_length * drawn) * (1 + 1e-9)
    # And the bound puts the root mean square in place of each length: E|bξ| <= ‖b‖·V.
    ends = np.linalg.norm(decoder[c.local_steps - 1 :: c.local_steps], axis=1)[:-1]
    assert bound.noise == pytest.approx(per_length * c.noise_std * ends.sum() / c.rounds)


def test_the_noise_of_correlated_descent_is_needed():
    # Start at the optimum of |x|, great noise: the regret is the noise, almost to the last bit.
    setting, regret, drawn, _ = correlated_run(3, toeplitz, std=1e5, start=0.0, spread=0.0)
    c, bound = setting.constants, COMPARED_METHODS["denisov2022"].bound(setting)
    per_length = c.effective_step_size * c.gradient_bound / c.local_steps
    assert regret > 100 * (bound.initial + bound.drift)
    assert regret == pytest.approx(per_length * drawn, rel=1e-3)


@given(SEEDS)
def test_independent_descent_stays_below_its_bound_by_exact_moments(seed):
    # f^r(x) = h/2·(x - θ_r)²: mean m and variance v of x^r follow a recursion.
    rng = np.random.default_rng([3, seed])
    R, tau, n = (int(k) for k in rng.integers(1, [80, 6, 9]))
    h, std = rng.uniform(0.1, 3), 10 ** rng.uniform(-1, 1)
    eta = rng.uniform(0.01, 1) / h
    theta = rng.normal(size=R) * rng.choice([0.0, 0.3])
    best = theta.mean()
    m, v = best + rng.choice([0.0, 1.0]), 0.0
    begin, regret, slope = m, 0.0, 1e-12
    for t in theta:
        regret += h / 2 * ((m - t) ** 2 + v - (best - t) ** 2)
        slope = max(slope, h**2 * ((m - t) ** 2 + v))
        m, v = m - eta * h * (m - t), (1 - eta * h) ** 2 * v + eta**2 * std**2 / (n * tau**2)
    setting = quiet(R, tau, step=eta / tau, slope=math.sqrt(slope), start=begin - best, learners=n, std=std)
    bound = COMPARED_METHODS["liu2023"].bound(setting)
    assert regret / R <= bound.total * (1 + 1e-12)


def test_the_noise_of_independent_descent_is_needed():
    # Stationary noise on h/2·x²: E f = ηs²/(2(2 - ηh)), which drift alone, ηh·that, cannot cover.
    h, eta, R, s = 1.0, 0.01, 10_000, 1.0
    v = regret = 0.0
    for _ in range(R):
        regret += h / 2 * v / R
        v = (1 - eta * h) ** 2 * v + eta**2 * s**2
    assert regret == pytest.approx(eta * s**2 / (2 * (2 - eta * h)), rel=0.01)
    bound = COMPARED_METHODS["liu2023"].bound(quiet(R, step=eta, slope=h * math.sqrt(v), std=s))
    assert bound.drift < regret / 50
    assert regret <= bound.total


def chase(theta, s, domain):
    """Average regret of steps of length s on |x - θ_r| from 0, and the path length."""
    x = regret = 0.0
    for t in theta:
        regret += abs(x - t) / len(theta)
        x = float(np.clip(x - s * np.sign(x - t), 0.0, domain))
    return regret, float(abs(np.diff(theta)).sum())


@given(SEEDS)
def test_normalised_descent_stays_below_its_bound(seed):
    rng = np.random.default_rng([4, seed])
    R, s, domain = int(rng.integers(1, 200)), 10 ** rng.uniform(-2, 0), rng.uniform(0.5, 5)
    walk = (rng.normal(size=R) * rng.choice([0.0, 0.02, 0.5])).cumsum() + rng.uniform(0, domain)
    theta = np.clip(walk, 0, domain)
    regret, path = chase(theta, s, domain)
    setting = quiet(R, diameter=domain, normalised_step=s, path_length=path)
    assert regret <= COMPARED_METHODS["gao2018"].bound(setting).total


def test_the_tables_path_term_lacks_the_step():
    # The optimum runs away at twice the speed of the model: regret s·(R - 1)/2, and the table says
    # 1/(Rs) + s + 2s, whatever constant stands before it.
    s, R = 0.1, 1001
    theta = 2 * s * np.arange(R)
    regret, path = chase(theta, s, math.inf)
    assert regret == pytest.approx(s * (R - 1) / 2, rel=0.01)
    setting = quiet(R, diameter=float(theta[-1]), normalised_step=s, path_length=path)
    row = COMPARED_METHODS["gao2018"]
    assert regret > 100 * row.rate(setting).total
    assert regret <= row.bound(setting).total
