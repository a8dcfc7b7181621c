"""Workloads: what is published as a linear map, its error, and mechanisms that are made for it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import ellipk

import veilstream as vs
import veilstream.mechanisms as m
from veilstream.errors import InputError, SolverError
from veilstream.mechanisms.optimal_solver import overshoot, resolvents

WORKLOADS = {
    "prefix": {},
    "rounds": {"local_steps": 4},
    "falling steps": {"step_decay": 0.5},
    "own steps": {"step_sizes": tuple(np.linspace(2.0, 0.5, 48))},
    "mean": {"averaging": 0.0},
    "polynomial": {"averaging": 3.0, "local_steps": 3},
    "exponential": {"newest_weight": 0.1},
    "momentum": {"momentum": 0.9, "local_steps": 2},
    "forgetting": {"forgetting": 0.9, "local_steps": 2},
    "all": {"momentum": 0.5, "forgetting": 0.95, "averaging": 2.0, "step_decay": 0.3, "local_steps": 4},
}


def workload(name: str, T: int = 48) -> m.Workload:
    return m.Workload(horizon=T, **WORKLOADS[name])


def served(w: m.Workload, gradients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A server by the book, from x⁰ = 0 and with steps upwards: published models, and x by step."""
    x = velocity = average = 0.0
    published, by_step = [], []
    for r in range(w.rounds):
        size = w.step_sizes[r] if w.step_sizes else (1 + r) ** -w.step_decay
        total = 0.0
        for g in gradients[r * w.local_steps : (r + 1) * w.local_steps]:
            total += g
            by_step.append(w.forgetting * x + size * (w.momentum * velocity + total))
        velocity = w.momentum * velocity + total
        x = w.forgetting * x + size * velocity
        share = 1.0
        if w.averaging is not None:
            share = (w.averaging + 1) / (w.averaging + r + 1)
        if w.newest_weight is not None:
            share = max(w.newest_weight, 1 / (r + 1))
        average = (1 - share) * average + share * x
        published.append(average)
    return np.array(published), np.array(by_step)


def dense(w: m.Workload) -> tuple[np.ndarray, np.ndarray]:
    """The same maps as matrices, from unit impulses."""
    both = [served(w, impulse) for impulse in np.eye(w.horizon)]
    return np.array([p for p, _ in both]).T, np.array([x for _, x in both]).T


def weighted_rows(w: m.Workload) -> tuple[np.ndarray, float]:
    """Rows of all that counts, each times the root of its weight, and the total weight."""
    published, by_step = dense(w)
    hidden = by_step if w.averages else np.delete(by_step, np.s_[w.local_steps - 1 :: w.local_steps], 0)
    rows = np.vstack([published, np.sqrt(w.interior_weight) * hidden])
    return rows, len(published) + w.interior_weight * len(hidden)


def dual_bound(w: m.Workload, v: np.ndarray) -> float:
    """Lower bound on every factorization's weighted error, for any v > 0: a nuclear norm."""
    rows, total = weighted_rows(w)
    return np.linalg.svd(rows * np.sqrt(v), compute_uv=False).sum() ** 2 / (v.sum() * total)


def best_by_general_search(rows: np.ndarray, total: float) -> float:
    """min tr(H·X⁻¹)/total over X = ZᵀZ with unit columns of Z, by a general-purpose minimiser."""
    T = rows.shape[1]
    H = rows.T @ rows

    def value(flat: np.ndarray) -> tuple[float, np.ndarray]:
        C = flat.reshape(T, T)
        length = np.linalg.norm(C, axis=0)
        Z = C / length
        inverse = np.linalg.inv(Z.T @ Z)
        by_z = -2.0 * Z @ (inverse @ H @ inverse)
        by_c = (by_z - Z * (Z * by_z).sum(axis=0)) / length
        return float(np.trace(H @ inverse)) / total, by_c.ravel() / total

    start = np.eye(T) + 0.1 * np.random.default_rng(0).standard_normal((T, T))
    options = {"maxiter": 20000, "maxfun": 40000, "ftol": 1e-15, "gtol": 1e-9}
    return float(minimize(value, start.ravel(), jac=True, method="L-BFGS-B", options=options).fun)


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_matrix_is_what_a_server_does(name):
    w = workload(name)
    np.testing.assert_allclose(w.matrix(), dense(w)[0], atol=1e-12)


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("mechanism", ["toeplitz", "tree_online", "optimal"])
def test_the_error_is_that_of_explicit_matrices(name, mechanism):
    w, f = workload(name), m.build(mechanism, 48)
    published, by_step = dense(w)
    error = w.error(f)
    N, scale = f.noising_matrix(), f.sensitivity() ** 2
    variance = ((published @ N) ** 2).sum(axis=1) * scale
    np.testing.assert_allclose(error.variance, variance, rtol=1e-9)
    np.testing.assert_allclose(error.unpublished, ((by_step @ N) ** 2).sum(axis=1) * scale, rtol=1e-9)
    assert error.mean == pytest.approx(variance.mean(), rel=1e-9)
    assert error.max == pytest.approx(variance.max(), rel=1e-9)
    np.testing.assert_allclose(error.std, np.sqrt(variance), rtol=1e-9)


def test_of_prefix_sums_the_error_is_the_mechanisms_own():
    f = m.buffered(100)
    assert vs.Workload.prefix(100).error(f).mean == pytest.approx(f.mean_error(), rel=1e-12)
    assert vs.Workload(horizon=100, local_steps=4).error(f).mean == pytest.approx(f.round_error(4))


def test_noise_that_runs_has_this_error():
    """10,000 coordinates of streamed noise through the server of above; false alarm below 1e-9."""
    w = workload("all")
    f = m.optimal(48, workload=w)
    published, _ = served(w, np.array(list(f.noise(dim=10_000, seed=5)), np.float64))
    seen = (published**2).mean(axis=1) * f.sensitivity() ** 2
    np.testing.assert_allclose(seen, w.error(f).variance, rtol=6.5 * np.sqrt(2 / 10_000))


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("T", [12, 48, 144])
def test_the_optimum_is_certified_by_a_dense_dual_bound(name, T):
    if "step_sizes" in WORKLOADS[name] and T != 48:
        pytest.skip("its schedule has 48 rounds")
    w = workload(name, T)
    f = m.optimal(T, workload=w, cache=False)
    bound = dual_bound(w, f.multipliers)
    assert f.lower_bound == pytest.approx(bound, rel=1e-7)
    rows, total = weighted_rows(w)
    C, N = f.strategy_matrix(), f.noising_matrix()
    value = ((rows @ N) ** 2).sum() / total * (C**2).sum(axis=0).max()
    assert bound * (1 - 1e-9) <= value <= bound * (1 + 2e-6)
    assert f.duality_gap <= 2e-6


HARD = [
    {"horizon": 43, "interior_weight": 4e-6, "newest_weight": 0.0032, "momentum": 0.53},
    {"horizon": 64, "step_decay": 2.0},
    {"horizon": 64, "step_decay": 12.0},
    {"horizon": 16, "interior_weight": 1e-300, "averaging": 3.0},
]
"""Spectra so wide that a sum of forty resolvents is above the root that it stands for."""


@pytest.mark.parametrize("options", HARD)
def test_a_stated_bound_is_never_above_the_dense_dual_bound(options):
    w = m.Workload(**options)
    f = m.optimal(w.horizon, workload=w, cache=False)
    bound = dual_bound(w, f.multipliers)
    assert f.lower_bound <= bound
    assert f.lower_bound == pytest.approx(bound, rel=1e-8)
    assert f.objective_value() / bound - 1.0 <= f.duality_gap <= 1e-6


def test_what_floats_do_not_resolve_has_no_certificate():
    w = m.Workload(horizon=64, step_decay=8.0, averaging=3.0, momentum=0.9)
    with pytest.raises(SolverError, match=r"optimal\(64\).*closer in size"):
        m.optimal(64, workload=w, cache=False)


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (1e-3, 5.0), (1e-9, 1e9), (1e-25, 1e8)])
def test_resolvents_sum_to_the_inverse_root_but_for_the_stated_excess(low, high):
    shifts, weights = resolvents(low, high)
    for x in np.geomspace(low, high, 777):
        ratio = float(np.sqrt(x) * (weights / (x + shifts)).sum())
        assert -2e-8 <= ratio - 1.0 <= overshoot(low, high) <= 2e-8


@pytest.mark.slow
@pytest.mark.parametrize("T", [1024, 4000])
@pytest.mark.parametrize("options", [{"averaging": 3.0}, {"forgetting": 0.999}])
def test_the_certificate_holds_at_long_horizons(T, options):
    w = m.Workload(horizon=T, **options)
    f = m.optimal(T, workload=w)
    assert f.lower_bound == pytest.approx(dual_bound(w, f.multipliers), rel=1e-7)
    assert f.duality_gap <= 2e-6


@pytest.mark.parametrize("name", ["falling steps", "polynomial", "forgetting", "all"])
@pytest.mark.parametrize("T", [8, 16])
def test_no_general_minimiser_does_better(name, T):
    T = T if T % workload(name).local_steps == 0 else T + 1 if T == 8 else T - 1
    w = workload(name, T)
    found = best_by_general_search(*weighted_rows(w))
    f = m.optimal(T, workload=w)
    assert f.objective_value() == pytest.approx(found, rel=2e-5)
    assert f.objective_value() <= found * (1 + 1e-6)


class TestPublishedFigures:
    """Values that were seen elsewhere before this was written."""

    def test_averaging_of_power_three_at_600_steps(self):
        w = vs.Workload(horizon=600, averaging=3.0)
        prefix, matched = m.optimal(600), m.optimal(600, workload=w)
        assert w.error(prefix).mean == pytest.approx(3.01, abs=0.005)
        assert w.error(m.toeplitz_normalised(600)).mean == pytest.approx(3.22, abs=0.005)
        assert w.error(matched).mean == pytest.approx(2.42, abs=0.005)
        assert prefix.mean_error() == pytest.approx(7.8, abs=0.05)
        assert matched.mean_error() == pytest.approx(9.1, abs=0.05)

    @pytest.mark.parametrize(("rho", "mean"), [(1.0, 8.735), (0.999, 7.37), (0.99, 4.51)])
    def test_forgetting_at_1024_steps(self, rho, mean):
        w = vs.Workload(horizon=1024, forgetting=rho)
        assert w.error(m.optimal(1024, workload=w)).mean == pytest.approx(mean, abs=0.005)

    def test_with_forgetting_the_error_stops_growing(self):
        """Its limit is the square of (2/π)·K(ρ²), K the complete elliptic integral."""
        limit = (2 / np.pi * ellipk(0.99**2)) ** 2
        errors = []
        for T in (64, 256, 1024):
            w = vs.Workload(horizon=T, forgetting=0.99)
            errors.append(w.error(m.optimal(T, workload=w)).mean)
        assert errors == sorted(errors)
        assert 0.98 * limit < errors[-1] < limit


@pytest.mark.parametrize("name", ["falling steps", "polynomial", "exponential", "forgetting"])
def test_buffers_tuned_for_a_workload_beat_those_for_prefix_sums(name):
    w = workload(name, 192)
    tuned, prefix = m.buffered(192, workload=w), m.buffered(192)
    best = m.optimal(192, workload=w).lower_bound
    assert best <= w.weighted_error(tuned) < w.weighted_error(prefix)


def test_a_plain_workload_is_the_old_spelling_to_the_bit():
    old = m.optimal(64, "rounds", local_steps=4, interior_weight=0.2)
    new = m.optimal(64, workload=vs.Workload(horizon=64, local_steps=4, interior_weight=0.2))
    assert all(map(np.array_equal, old.program.matrices, new.program.matrices))
    plain = m.optimal(64, workload=vs.Workload.prefix(64))
    assert all(map(np.array_equal, m.optimal(64).program.matrices, plain.program.matrices))
    buffered = m.buffered(64, workload=vs.Workload(horizon=64, local_steps=4))
    assert all(map(np.array_equal, m.buffered(64).program.matrices, buffered.program.matrices))


def test_toeplitz_with_forgetting_is_a_square_root():
    rho, T = 0.9, 40
    f = m.toeplitz(T, workload=vs.Workload(horizon=T, forgetting=rho))
    C = f.strategy_matrix()
    steps = np.subtract.outer(np.arange(T), np.arange(T))
    np.testing.assert_allclose(C @ C, np.where(steps >= 0, rho ** np.maximum(steps, 0.0), 0.0), atol=1e-5)


REFUSED = {
    "horizon": [{"horizon": 0}],
    "local_steps": [{"local_steps": 5}],
    "forgetting": [{"forgetting": bad} for bad in (0.0, 1.01, float("nan"), True)],
    "momentum": [{"momentum": 1.0}, {"momentum": -0.1}],
    "averaging": [{"averaging": -1.0}, {"averaging": float("inf")}],
    "newest_weight": [{"newest_weight": 0.0}, {"newest_weight": 0.5, "averaging": 1.0}],
    "interior_weight": [{"interior_weight": 0.0}, {"interior_weight": 2.0}],
    "step_decay": [{"step_decay": -1.0}, {"step_sizes": (1.0,) * 12, "step_decay": 0.5}],
    "step_sizes": [{"step_sizes": (1.0, 2.0)}, {"step_sizes": (0.0,) * 12}],
    r"step_sizes\[0\] = 1e\+308": [{"step_sizes": (1e308,) * 12}],
    "step_sizes.*real numbers": [{"step_sizes": ("1",) * 12}],
    r"step_decay = 50\.0: expected <= 27\.8": [{"step_decay": 50.0}],
}


def test_bad_values_are_refused_by_name():
    for told, refused in REFUSED.items():
        for options in refused:
            with pytest.raises(InputError, match=told):
                vs.Workload(**{"horizon": 12, **options})


def test_numbers_of_numpy_are_plain_numbers_to_the_cache():
    w = vs.Workload(horizon=np.int64(12), averaging=np.float32(3.0), forgetting=np.float32(0.5))
    assert w == vs.Workload(horizon=12, averaging=3.0, forgetting=0.5)
    assert json.loads(json.dumps(w.as_dict()))["forgetting"] == 0.5
    assert m.optimal(12, workload=w).duality_gap < 1e-5


def test_a_mechanism_of_another_horizon_is_refused():
    w = vs.Workload(horizon=12, averaging=1.0)
    with pytest.raises(InputError, match="horizon 12"):
        w.error(m.tree(10))
    with pytest.raises(InputError, match="horizon 12"):
        m.optimal(10, workload=w)
    with pytest.raises(InputError, match="workload"):
        m.optimal(12, workload=np.eye(12))
    with pytest.raises(InputError, match="objective"):
        m.optimal(12, "max", workload=w)
    with pytest.raises(InputError, match="4096"):
        m.buffered(5000, workload=vs.Workload(horizon=5000, averaging=1.0))
