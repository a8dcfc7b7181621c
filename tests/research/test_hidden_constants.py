"""Rates, and the constants with which they become bounds."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from scipy.special import gammaln

from tests.research.problems import SEEDS, parts, some_constants
from veilstream.errors import InputError
from veilstream.research import theory
from veilstream.research.theory import Constants

LONGEST = 20_000
_j = np.arange(LONGEST)
# h(j) = C(2j, j)/4^j; a row of the Toeplitz B is h(s), ..., h(0), the first column of C all of h.
KAPPA = np.exp(2 * (gammaln(2 * _j + 1) - 2 * gammaln(_j + 1) - _j * math.log(4))).cumsum()


def rate_of(c, budget, noise, environment):
    te, eps, lnd = c.effective_step_size, budget["epsilon"], math.log(1 / budget["delta"])
    privacy = c.dim * c.gradient_bound**2 * lnd / eps**2
    return [
        1 / (c.rounds * te),
        te**2 * c.gradient_bound**2 / c.server_step_size**2,
        noise * privacy,
        environment * c.path_variation / c.rounds,
    ]


@given(SEEDS)
def test_rates_equal_the_printed_expressions(seed):
    c, budget = some_constants(seed), {"epsilon": 0.6, "delta": 1e-4}
    te, n, tau, log = (c.effective_step_size, c.learners, c.local_steps, math.log(c.rounds * c.local_steps))
    ratio = n / c.server_step_size**2
    expected = rate_of(c, budget, (1 + te * ratio) * te / (n * tau), 1)
    np.testing.assert_allclose(parts(theory.independent_noise_rate(c, **budget)), expected)
    expected = rate_of(c, budget, (1 + ratio) * te * log / (n * tau**2), te * log)
    np.testing.assert_allclose(parts(theory.static_regret_rate(c, **budget)), expected)


def test_rates_at_their_step_sizes_are_the_second_displays():
    c, budget = some_constants(3, rounds=50, row_norms_squared=None, noise_std=0), {}
    budget = {"epsilon": 0.6, "delta": 1e-4}
    R, tau, n, eta_g = c.rounds, c.local_steps, c.learners, c.server_step_size
    log, lnd = math.log(R * tau), math.log(1e4)
    price = c.dim * c.gradient_bound**2 * lnd / (n * 0.6**2)

    def at(statement):
        te = theory.step_size_scaling(rounds=R, local_steps=tau, statement=statement)
        return dataclasses.replace(c, step_size=te / (eta_g * tau))

    thm = theory.main_theorem_rate(at("thm-up"), **budget)
    scale = (log / R) ** (2 / 3)
    drift = c.gradient_bound**2 / (eta_g**2 * R ** (2 / 3) * log ** (4 / 3))
    expected = [scale, drift, (1 + n / eta_g**2) * scale * price / tau**2, c.path_variation / R]
    np.testing.assert_allclose(parts(thm), expected)

    coro = theory.static_regret_rate(at("coro"), **budget)
    scale = math.sqrt(log / R)
    drift = c.gradient_bound**2 / (eta_g**2 * R * log)
    noise = (1 + n / eta_g**2) * scale * price / tau**2
    np.testing.assert_allclose(parts(coro), [scale, drift, noise, scale * c.path_variation / R])

    iid = theory.independent_noise_rate(at("lem-u-IID"), **budget)
    assert iid.initial == pytest.approx(R**-0.5)
    # The printed second display has the first of these two parts alone.
    dropped = n / (eta_g**2 * R) * price / tau
    assert iid.noise == pytest.approx(R**-0.5 * price / tau + dropped)


def test_step_size_scalings_balance_start_and_noise_and_refuse_what_they_do_not_know():
    horizon = {"rounds": 1000, "local_steps": 4}
    log = math.log(4000)
    iid = theory.step_size_scaling(**horizon, statement="lem-u-IID")
    assert 1 / (1000 * iid) == pytest.approx(iid)
    static = theory.step_size_scaling(**horizon, statement="coro")
    assert 1 / (1000 * static) == pytest.approx(static * log)
    assert theory.step_size_scaling(rounds=1, local_steps=1, statement="lem-u-IID") == 1
    with pytest.raises(InputError, match="rounds"):
        theory.step_size_scaling(rounds=1, local_steps=1, statement="coro")
    with pytest.raises(InputError, match="statement"):
        theory.step_size_scaling(**horizon, statement="lem-u")


def test_drift_passes_noise_where_the_two_printed_terms_meet():
    # The paper's first figure: ln 4000 = 8.294, d = 100, η_g² = n: 8.294·sqrt(2·100·ln 1000)/ε.
    for tau in (1, 4, 40):
        figure = some_constants(
            rounds=4000 // tau, local_steps=tau, learners=20, dim=100, server_step_size=20**0.5, row_norms_squared=None
        )
        assert theory.drift_exceeds_noise(figure, epsilon=2, delta=1e-3) == pytest.approx(154.14, abs=0.01)
        assert theory.drift_exceeds_noise(figure, epsilon=0.5, delta=1e-3) == pytest.approx(616.57, abs=0.01)


def paper_problem(rng, *, noise="toeplitz", corner=False):
    """Random losses, run and budget, with the paper's noise (lem-priv-analy) written by hand."""
    L, alpha = 10 ** rng.uniform(-2, 2), rng.uniform(0.05, 1.9)
    tau = int(rng.choice([1, 2, 4, 16, 40]))
    R = 2 if corner else int(10 ** rng.uniform(0, 2.6))
    tau = 1 if corner else tau
    R = max(R, 2)
    T, n, eta_g = R * tau, int(rng.integers(1, 200)), 10 ** rng.uniform(-1, 2)
    epsilon, delta, Bg = 10 ** rng.uniform(-2, 2), 10 ** rng.uniform(-9, -1), rng.uniform(0.1, 5)
    root = math.sqrt(epsilon + math.log(1 / delta)) - math.sqrt(math.log(1 / delta))
    rows, column = KAPPA[:T], KAPPA[T - 1]
    if noise == "independent":
        rows, column = None, 1.0
    c = Constants(
        smoothness=L,
        regularity=rng.uniform(0, 2),
        alpha=alpha,
        mu=10 ** rng.uniform(-3, 0) * L / max(alpha, 1),
        gradient_bound=Bg,
        dim=int(rng.integers(1, 1000)),
        learners=n,
        local_steps=tau,
        rounds=R,
        step_size=1.0,
        server_step_size=eta_g,
        path_variation=rng.uniform(0.1, 5),
        initial_distance_squared=rng.uniform(0.1, 5),
        noise_std=math.sqrt(2 * Bg**2 * column) / root,
        row_norms_squared=rows,
    )
    limits = {"dynamic": alpha / (8 * L), "sc": 1 / (8 * L)}
    limits["static"] = 1 / (10 * L * max(1, math.log(T)))
    share = 1.0 if corner else rng.choice([1.0, 10 ** rng.uniform(-4, 0)])
    return c, {"epsilon": epsilon, "delta": delta}, limits, share


STATEMENTS = {
    "thm-up": (
        theory.dynamic_regret_bound,
        theory.main_theorem_rate,
        theory.main_theorem_constants,
        "dynamic",
        "toeplitz",
    ),
    "eq-sc-dyn": (
        theory.dynamic_regret_bound_strongly_convex,
        theory.main_theorem_rate,
        theory.strongly_convex_constants,
        "sc",
        "toeplitz",
    ),
    "lem-u-IID": (
        theory.dynamic_regret_bound_independent,
        theory.independent_noise_rate,
        theory.independent_noise_constants,
        "dynamic",
        "independent",
    ),
    "coro": (
        theory.static_regret_bound,
        theory.static_regret_rate,
        theory.static_regret_constants,
        "static",
        "toeplitz",
    ),
}


def shares_of_constants(statement, count, *, corner=False):
    """Bound / (constant x rate), term by term, over random problems: 1 is a sharp constant."""
    bound, rate, constants, limit, noise = STATEMENTS[statement]
    for seed in range(count):
        rng = np.random.default_rng([5, seed])
        c, budget, limits, share = paper_problem(rng, noise=noise, corner=corner)
        step = share * limits[limit] / (c.server_step_size * c.local_steps)
        c = dataclasses.replace(c, step_size=step)
        evaluated = bound(c)
        assert evaluated.holds
        yield parts(evaluated) / (parts(constants(c, **budget)) * parts(rate(c, **budget)))


@pytest.mark.parametrize("statement", STATEMENTS)
def test_bound_is_at_most_constant_times_rate_over_a_wide_sweep(statement):
    swept = np.array(list(shares_of_constants(statement, 1500)))
    assert swept.max() <= 1 + 1e-9
    assert (swept > 0).all()


@pytest.mark.parametrize("statement", STATEMENTS)
def test_the_constants_are_nearly_reached_at_the_step_limit_and_the_shortest_horizon(statement):
    reached = np.array(list(shares_of_constants(statement, 1500, corner=True))).max(axis=0)
    assert (reached > 0.9).all()


@pytest.mark.parametrize("statement", STATEMENTS)
def test_constants_do_not_depend_on_what_O_speaks_of(statement):
    constants = STATEMENTS[statement][2]
    c, budget = some_constants(1, row_norms_squared=None), {"epsilon": 1.0, "delta": 1e-5}
    before = parts(constants(c, **budget))
    run = {
        "rounds": 777,
        "local_steps": 3,
        "learners": 99,
        "dim": 12_345,
        "server_step_size": 7.0,
        "step_size": 1e-6,
        "gradient_bound": 44.0,
        "path_variation": 1e5,
        "noise_std": 8.0,
    }
    np.testing.assert_array_equal(parts(constants(dataclasses.replace(c, **run), **budget)), before)
    # Only ε/ln(1/δ) matters of the budget: squaring δ with twice the ε changes nothing.
    scaled = parts(constants(c, epsilon=2.0, delta=1e-10))
    np.testing.assert_allclose(scaled, before)


def test_large_epsilon_needs_a_larger_constant_than_the_papers_reading():
    # lem-priv-analy's "ρ ≈ ε²/(4 ln 1/δ)": at ε = 100, δ = 0.1, the noise is 13 times that.
    c = some_constants(1, row_norms_squared=None)
    usual = theory.independent_noise_constants(c, epsilon=1e-6, delta=0.1).noise
    large = theory.independent_noise_constants(c, epsilon=100.0, delta=0.1).noise
    log = math.log(10)
    rho = (math.sqrt(100 + log) - math.sqrt(log)) ** 2
    assert large / usual == pytest.approx(100**2 / (4 * log) / rho, rel=1e-5)
    assert large / usual > 13


def test_no_constant_exists_for_a_single_step():
    c = some_constants(1, rounds=1, local_steps=1, row_norms_squared=np.ones(1), noise_std=1.0)
    assert theory.dynamic_regret_bound(c).noise > 0
    assert theory.main_theorem_rate(c, epsilon=1, delta=1e-3).noise == 0


def test_impossible_budgets_are_refused():
    functions = [theory.main_theorem_rate, *(entry[2] for entry in STATEMENTS.values())]
    for function, (epsilon, delta) in itertools.product(functions, [(0, 0.1), (1, 0), (1, 1.0), (1, 2), (-1, 0.1)]):
        with pytest.raises(InputError):
            function(some_constants(), epsilon=epsilon, delta=delta)
