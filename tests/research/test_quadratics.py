"""The exact regret of quadratics: against closed forms, dense covariances and simulated runs of Algorithm 1."""

import dataclasses
import itertools

import numpy as np
import pytest

from veilstream.errors import InputError
from veilstream.mechanisms import independent, optimal, toeplitz, tree
from veilstream.research import theory
from veilstream.research.theory.quadratics import Quadratics, _moments, exact_regret, repaired_bounds


def problem(seed=0, mechanism=toeplitz, **changes):
    """Any quadratics, with a step within lem-u's limit."""
    rng = np.random.default_rng(seed)
    d, R, tau, n = int(rng.integers(1, 5)), int(rng.integers(2, 20)), int(rng.integers(1, 5)), int(rng.integers(1, 6))
    h = rng.uniform(0.2, 1, d) * rng.uniform(0.3, 3)
    eta_g = float(rng.choice([1.0, np.sqrt(n), 3.0]))
    values = {
        "curvatures": h,
        "start": rng.standard_normal(d) * rng.choice([0.0, 3.0]),
        "optima": rng.standard_normal((R, d)).cumsum(0) * rng.choice([0.0, 0.3]),
        "learners": n,
        "local_steps": tau,
        "step_size": rng.uniform(0.05, 1) / (8 * h.max()) / (eta_g * tau),
        "server_step_size": eta_g,
        "noise_std": float(rng.choice([0.0, 0.5, 3.0])),
        "increments": mechanism(R * tau).noising_matrix(),
    }
    return Quadratics(**(values | changes))


def test_independent_noise_at_one_step_a_round_is_an_autoregression():
    """Var x^r = (η·η_g·V)²·(1 - ρ^2r)/(1 - ρ²), ρ = 1 - η·η_g·h."""
    R, h, eta, eta_g, n, std = 50, 0.7, 0.05, 2.0, 4, 1.5
    p = problem(
        curvatures=[h, h],
        start=np.zeros(2),
        optima=np.zeros((R, 2)),
        learners=n,
        local_steps=1,
        step_size=eta,
        server_step_size=eta_g,
        noise_std=std,
        increments=independent(R).noising_matrix(),
    )
    rho = 1 - eta * eta_g * h
    variance = (eta * eta_g) ** 2 * std**2 / n * (1 - rho ** (2 * np.arange(R))) / (1 - rho**2)
    found = exact_regret(p)
    assert found.noise == pytest.approx(2 * h / 2 * variance.mean(), rel=1e-12)
    assert found.path == 0.0


@pytest.mark.parametrize("tau", [1, 3])
def test_a_start_away_from_the_optimum_decays_geometrically(tau):
    R, h, eta, eta_g, x = 40, 0.7, 0.05, 2.0, 3.0
    p = problem(
        curvatures=[h],
        start=[x],
        optima=np.zeros((R, 1)),
        learners=2,
        local_steps=tau,
        step_size=eta,
        server_step_size=eta_g,
        noise_std=0.0,
        increments=independent(R * tau).noising_matrix(),
    )
    rho = 1 - eta_g * (1 - (1 - eta * h) ** tau)
    assert exact_regret(p).total == pytest.approx(h / 2 * x**2 * (1 - rho ** (2 * R)) / (1 - rho**2) / R, rel=1e-12)


@pytest.mark.parametrize("mechanism", [tree, toeplitz, optimal])
def test_correlated_noise_is_a_quadratic_form_in_the_covariance_of_the_sums(mechanism):
    """From B itself: x^R is Σ over steps of its weight times a row of B minus the row before."""
    p = problem(3, mechanism, noise_std=2.0)
    T, tau = p.rounds * p.local_steps, p.local_steps
    B = mechanism(T).decoder_matrix()
    covariance = B @ B.T
    total = 0.0
    for h in p.curvatures:
        q = 1 - p.step_size * h
        rho = 1 - p.server_step_size * (1 - q**tau)
        for r in range(p.rounds):
            weights = np.zeros(T)  # of the steps' noise in x^r
            for s in range(r * tau):
                weights[s] = rho ** (r - 1 - s // tau) * q ** (tau - 1 - s % tau)
            of_sums = weights - np.append(weights[1:], 0.0)  # summation by parts
            total += h / 2 * of_sums @ covariance @ of_sums
    scale = (p.step_size * p.server_step_size) ** 2 * p.noise_variance
    assert exact_regret(p).noise == pytest.approx(scale * total / p.rounds, rel=1e-9)


@pytest.mark.parametrize("seed", [1, 2, 5, 8])
def test_simulated_runs_agree(seed):
    """20,000 runs of Algorithm 1; each of four means within five of its standard errors.

    False-alarm rate: 16 two-sided normal tests at five deviations, below 1e-5 for all.
    """
    p = problem(seed, noise_std=1.5)
    rng = np.random.default_rng(seed)
    runs, n, d, tau = 20_000, p.learners, p.curvatures.size, p.local_steps
    best = p.optima.mean(0)
    noise = rng.standard_normal((runs, n, p.increments.shape[1], d)).astype(np.float32) * p.noise_std
    w = np.einsum("st,kntd->knsd", p.increments.astype(np.float32), noise)
    x = np.tile(p.start, (runs, 1))
    regret, moved, mean_move = np.zeros(runs), np.zeros(runs), np.zeros(runs)
    largest = 0.0
    for r in range(p.rounds):
        regret += (p.curvatures * (x - p.optima[r]) ** 2).sum(1) / 2
        z = np.repeat(x[:, None], n, axis=1)
        moves = []
        for t in range(tau):
            moves.append(z - x[:, None])
            g = p.curvatures * (z - p.optima[r])
            largest = max(largest, (g**2).sum(-1).mean(0).max())
            z = z - p.step_size * (g + w[:, :, r * tau + t])
        move = np.array(moves)
        moved += (move**2).sum(-1).mean((0, 2))
        mean_move += ((p.curvatures * move.mean((0, 2))) ** 2).sum(-1)
        x = x - p.server_step_size * (x[:, None] - z).mean(1)
    virtual = x + p.server_step_size * p.step_size * w.sum(2).mean(1)
    distance = ((virtual - best) ** 2).sum(1)
    found = _moments(p)
    expected = (found.path + found.noise, found.moved_squared, found.mean_move, found.last_distance)
    for value, seen in zip(
        expected, (regret / p.rounds, moved / p.rounds, mean_move / p.rounds, distance), strict=True
    ):
        assert abs(seen.mean() - value) <= 5 * seen.std() / runs**0.5 + 1e-6 * abs(value)
    assert found.largest_gradient**2 == pytest.approx(largest, rel=0.1)


@pytest.mark.parametrize("mechanism", [tree, toeplitz, independent])
def test_undoing_the_proof_step_by_step_goes_down_and_stays_above_the_truth(mechanism):
    for seed in range(40):
        p = problem(seed, mechanism)
        exact = exact_regret(p).total
        bounds = [each.bound for each in repaired_bounds(p)]
        assert bounds[0] == theory.dynamic_regret_bound(p.constants()).total
        assert all(after <= before * (1 + 1e-6) + 1e-12 for before, after in itertools.pairwise(bounds))
        assert bounds[-1] >= exact * (1 - 1e-9) - 1e-12


def test_what_is_wrong_is_refused():
    p = problem(1)
    for field, value in [
        ("curvatures", [0.0] * p.curvatures.size),
        ("start", [0.0] * (p.curvatures.size + 1)),
        ("increments", np.eye(3)),
        ("optima", np.full_like(p.optima, np.nan)),
        ("step_size", 0.0),
    ]:
        with pytest.raises(InputError, match=field):
            dataclasses.replace(p, **{field: value})
    with pytest.raises(InputError, match="step_size"):
        repaired_bounds(dataclasses.replace(p, step_size=1.0))
