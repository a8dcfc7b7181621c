"""Noise without an end: constant for ever with forgetting, epochs of doubling length without."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy.special import ellipk
from studies import unbounded

import veilstream as vs
import veilstream.mechanisms as m
from veilstream.deployment.terms import Terms
from veilstream.errors import HorizonExhausted, InputError
from veilstream.federation.protocol.bounds import ReleaseBounds
from veilstream.federation.protocol.fold import ServerFold
from veilstream.mechanisms.analysis import rounding_gains
from veilstream.plans.prepare import prepare
from veilstream.simulation.engine import Simulation


def closed_form(rho: float) -> float:
    """Σ h(j)²·ρ^(2j) = (2/π)·K(ρ²)."""
    return float(2 / np.pi * ellipk(rho**2))


@pytest.mark.parametrize("rho", [0.3, 0.9, 0.99, 0.999, 0.99999])
def test_sensitivity_and_error_are_the_closed_forms(rho):
    f = m.stationary(rho)
    assert f.sensitivity() ** 2 == pytest.approx(closed_form(rho), rel=3e-6)
    assert f.published_error(rho) == pytest.approx(closed_form(rho) ** 2, rel=3e-6)


@pytest.mark.parametrize("length", [1, 5, 16])
def test_both_are_limits_of_explicit_matrices_from_below(length):
    """At ρ = 0.9 and 400 steps, ρ^400 = 5e-19: the limit is reached to rounding."""
    rho, T = 0.9, 400
    f = m.stationary(rho).with_block_length(length)
    C = f.until(T).strategy_matrix()
    norms = np.sqrt((C**2).sum(axis=0))
    assert norms.max() <= f.sensitivity() * (1 + 1e-12)
    assert norms[:length].max() == pytest.approx(f.sensitivity(), rel=1e-9)
    steps = np.subtract.outer(np.arange(T), np.arange(T))
    W = np.where(steps >= 0, rho ** np.maximum(steps, 0.0), 0.0)
    rows = ((W @ np.linalg.inv(C)) ** 2).sum(axis=1) * f.sensitivity() ** 2
    assert rows.max() <= f.published_error(rho) * (1 + 1e-9)
    assert rows[-length:].max() == pytest.approx(f.published_error(rho), rel=1e-9)


def test_no_horizon_has_a_much_better_optimum():
    """The certified optimum that knows T = 1024 is 1.3% below what knows no end at all."""
    w = vs.Workload(horizon=1024, forgetting=0.99)
    known = m.optimal(1024, workload=w).lower_bound
    assert known < m.stationary(0.99).published_error(0.99) < 1.02 * known


def test_its_noise_is_that_of_a_long_horizon_and_goes_on():
    f = m.stationary(0.95)
    endless, ending = f.noise(dim=3, seed=4), f.until(100).noise(dim=3, seed=4)
    np.testing.assert_array_equal(endless.take(96), ending.take(96))
    endless._next_block, endless._taken = 10**12, 16 * 10**12  # much later
    assert np.isfinite(endless.take(16)).all()
    assert f.noise(dim=1, seed=0).program.matrices[0].nbytes < 10_000


def test_a_guarantee_without_an_end_says_so():
    std, guarantee = vs.calibrate(vs.Budget(1.0, 1e-9), m.stationary(0.99), 1.0)
    assert "over any number of steps" in str(guarantee)
    assert any("without an end" in remark for remark in guarantee.remarks)
    reach = 2 * closed_form(0.99) ** 0.5
    assert vs.privacy_of(std, m.stationary(0.99), 1.0).mu == pytest.approx(reach / std, rel=1e-5)


@pytest.mark.parametrize("rho", [0.0, 1.0, 1.5, -0.1, float("nan"), True, "0.9"])
def test_a_rho_that_forgets_nothing_is_refused(rho):
    with pytest.raises(InputError, match=r"forgetting.*doubling"):
        m.stationary(rho)


def test_errors_of_prefix_sums_are_refused():
    with pytest.raises(InputError, match="published_error"):
        m.stationary(0.9).max_error()


@pytest.mark.parametrize("steps", [-5, 1.5, "3"])
def test_sums_are_of_whole_numbers_of_steps(steps):
    with pytest.raises(InputError, match="steps"):
        m.stationary(0.9).prefix_variance(steps)


@pytest.mark.parametrize("rho", [1.0, 0.0, -1.0, float("nan"), "0.9"])
def test_what_forgets_nothing_has_no_limit(rho):
    with pytest.raises(InputError, match=r"forgetting.*no limit"):
        m.stationary(0.9).published_error(rho)


@pytest.mark.parametrize("steps", [1, 10, 16, 17, 40])
def test_a_limit_is_kept_to_the_step_whatever_the_blocks(steps):
    f = m.stationary(0.95)
    limited = f.limited(steps)
    noise = limited.noise(dim=2, seed=3)
    endless = f.noise(dim=2, seed=3).take(steps)  # a short block's sums may be in another order
    np.testing.assert_allclose(noise.take(steps), endless, atol=2e-6)
    with pytest.raises(HorizonExhausted):
        noise.step()
    assert limited.sensitivity() == f.sensitivity()
    # The same matrix as the square root of Σ ρ^j x^j, whose coefficients are h(j)·ρ^j.
    h = np.cumprod([1.0] + [(1 - 0.5 / j) * 0.95 for j in range(1, steps)])
    np.testing.assert_allclose(limited.strategy_matrix()[:, 0], h, rtol=1e-5)
    if steps >= 10:
        twice = np.append(h, np.zeros(5))[:steps] + np.append(np.zeros(5), h)[:steps]
        assert limited.sensitivity((2, 5)) == pytest.approx(np.linalg.norm(twice), rel=1e-5)


def test_a_million_visits_are_counted_at_once():
    """Visits at every step: the sum of all columns tends to Σ h(j)·ρ^j = (1 - ρ)^-½."""
    report = m.stationary(0.99).sensitivity_report((1_000_000, 1))
    assert report.value == pytest.approx((1e6 / 0.01) ** 0.5, rel=1e-3)


def test_a_rho_too_near_to_one_is_named():
    with pytest.raises(InputError, match=r"forgetting = 0\.999999999999"):
        m.stationary(1.0 - 1e-12).sensitivity()


class TestDoubling:
    def test_epochs_are_apart_and_each_is_buffered(self):
        f = m.doubling(7 * 8, first=8, buffers=3)
        C = f.strategy_matrix()
        inside = np.zeros_like(C, dtype=bool)
        for start, length in ((0, 8), (8, 16), (24, 32)):
            span = slice(start, start + length)
            inside[span, span] = True
            np.testing.assert_allclose(C[span, span], m.buffered(length, 3).strategy_matrix(), atol=1e-6)
        assert (C[~inside] == 0).all()
        assert f.sensitivity() == pytest.approx(1.0, rel=1e-6)

    def test_what_it_does_does_not_depend_on_the_horizon(self):
        short = m.doubling(100, first=16, buffers=3).with_block_length(4)
        long = m.doubling(400, first=16, buffers=3).with_block_length(4)
        np.testing.assert_array_equal(short.noise(dim=2, seed=1).take(100), long.noise(dim=2, seed=1).take(100))

    def test_epochs_may_grow_faster(self):
        C = m.doubling(50, first=4, growth=4, buffers=2).strategy_matrix()
        ends = [i for i in range(1, 50) if not C[i:, :i].any()]
        assert ends == [4, 20]

    def test_the_model_keeps_what_earlier_epochs_left_in_it(self):
        f = m.doubling(24, first=8, buffers=3)
        left = m.buffered(8, 3).row_norms_squared()[-1]
        fresh = m.buffered(16, 3).row_norms_squared()
        np.testing.assert_allclose(f.row_norms_squared()[8:], left + fresh, rtol=1e-6)


PLAN = {
    "learning": {"rounds": 12, "local_steps": 2, "learners": 2, "unbounded": True},
    "data": {"dim": 4, "held_out": 20},
    "privacy": {"epsilon": 8.0, "delta": 1e-6},
    "run": {"seeds": 1, "evaluate_every": 6},
}


def plan_of(**method) -> vs.Plan:
    return vs.Plan(**PLAN, methods=[{"name": "a", "step_size": 0.1} | method])


class TestPlans:
    def test_independent_noise_is_not_deployed_without_an_end(self):
        plan = plan_of(mechanism="independent", forgetting=0.9)
        assert prepare(plan, plan.methods[0]).guarantee is not None  # simulated beside others
        with pytest.raises(InputError, match=r"learning\.unbounded.*independent noise"):
            Terms.of(plan, 4)

    @pytest.mark.parametrize("noise", ["host", "device"])
    @pytest.mark.parametrize("forgetting", [1.0, 0.9])
    def test_unbounded_rounds_are_simulated(self, noise, forgetting):
        plan = plan_of(forgetting=forgetting)
        plan = vs.Plan.parse(plan.to_toml(), {"run.noise": noise})
        prepared = prepare(plan, plan.methods[0])
        assert prepared.factorization.name == ("doubling" if forgetting == 1.0 else "stationary")
        assert prepared.guarantee.endless == (forgetting < 1.0)
        simulation = Simulation(plan, [prepared], (0,), block_rounds=5)
        while not simulation.done:
            simulation.advance()
        assert np.isfinite(simulation.models()).all()
        assert np.abs(simulation.models()).max() > 0
        simulation.close()

    def test_a_rounds_forgetting_is_spread_over_its_steps(self):
        plan = plan_of(forgetting=0.81)
        sensitivity = prepare(plan, plan.methods[0]).factorization.sensitivity()
        assert sensitivity**2 == pytest.approx(closed_form(0.9), rel=1e-5)

    @pytest.mark.parametrize("method", [{"mechanism": "optimal"}, {"mechanism": "buffered", "forgetting": 0.9}])
    def test_a_mechanism_that_needs_an_end_is_refused(self, method):
        with pytest.raises(vs.errors.InputError, match=r"methods\[0\]\.mechanism.*needs an end"):
            plan_of(**method)

    def test_a_deployed_learner_without_forgetting_is_told_what_to_do(self, tmp_path):
        with pytest.raises(InputError, match=r"learning\.unbounded.*add forgetting"):
            vs.Learner(plan_of(), tmp_path / "a.db", vs.tasks.Logistic(dim=4), create=True)


class TestDeployed:
    def test_the_limits_of_rounding_bound_every_step(self):
        """Against the same gains, gathered step by step over 3,000 steps; ρ^3000 = 7e-14."""
        f = m.stationary(0.99).with_block_length(1)
        limit, seen = rounding_gains(f.program), rounding_gains(f.until(3000).program)
        for name in ("output", "feed", "transition", "entry", "column", "observed"):
            np.testing.assert_allclose(getattr(limit, name), getattr(seen, name), rtol=1e-6)

    def test_the_variance_of_sums_is_the_programs(self):
        f = m.stationary(0.97)
        rows = f.until(700).row_norms_squared()
        found = [f.prefix_variance(s) for s in (1, 2, 50, 700)]
        np.testing.assert_allclose(found, rows[[0, 1, 49, 699]], rtol=1e-5)
        assert f.prefix_variance(0) == pytest.approx(0.0, abs=1e-12)

    def test_terms_have_a_horizon_that_nobody_reaches(self):
        terms = Terms.of(plan_of(forgetting=0.9), 4)
        assert terms.rounds * terms.local_steps >= 2**20
        assert terms.guarantee.arithmetic_mu <= 0.0101 * terms.guarantee.curve.mu
        assert terms.settings["digest"] == Terms.of(plan_of(forgetting=0.9), 4).settings["digest"]
        bounds = ReleaseBounds.of(terms)
        assert bounds.coordinate(terms.rounds) < 2**62

    def test_a_learner_and_its_server_go_round_after_round(self, tmp_path):
        """Ten times the rounds that the plan simulates, with restarts in between."""
        plan, task = plan_of(forgetting=0.9), vs.tasks.Logistic(dim=4)
        terms = dataclasses.replace(Terms.of(plan, 4, task), learners=1)
        start = np.full(4, 0.5, np.float32)
        fold = ServerFold(terms, start, ["a"])
        fold.enrol("a", 0, 0)
        rng = np.random.default_rng(0)
        learner = vs.Learner(plan, tmp_path / "a.db", task, create=True)
        sizes = []
        for r in range(120):
            learner.begin_round(r, fold.x.astype(np.float32))
            for t in range(2):
                features = rng.standard_normal(4).astype(np.float32) / 4
                learner.observe(f"{r}/{t}", vs.Sample(features, np.float32(1.0)))
            assert fold.accept("a", learner.finish_round().payload)
            fold.close_round()
            if r in (40, 80):
                learner.close()
                learner = vs.Learner(plan, tmp_path / "a.db", task)
                sizes.append((tmp_path / "a.db").stat().st_size)
        assert learner.round == 120
        assert not learner.over
        learner.close()
        # η·V·(error of what is published) is the noise's size around x⁰: ten times that is far off.
        f = terms.mechanism
        spread = 0.1 * terms.noise_std * (f.published_error(0.9) ** 0.5) / f.sensitivity()
        assert np.abs(fold.x - start).max() < 10 * spread + 2 * 0.1 / (1 - 0.9)

    def test_a_sum_without_an_end(self):
        private = vs.PrivateSum(m.stationary(0.99), vs.Budget(2.0, 1e-6), clip_norm=1.0, dim=3)
        assert private.guarantee.horizon >= 2**20
        assert vs.decode(private.add(np.ones(3))).steps == 1


def test_the_study_in_small():
    found = unbounded.study(300, points=4)
    known, doubling = np.array(found["known horizon"]), np.array(found["doubling"])
    assert found["steps"][-1] == 300
    for t, value in found["certified"].items():
        assert value <= known[found["steps"].index(t)] * (1 + 1e-6)
    assert doubling[-1] > found["oversized"]["300"][-1]
    assert max(found["stationary"]) <= found["stationary limit"] * (1 + 1e-9)
    ran = unbounded.run_endless(20_000, 50)
    assert ran["steps"] == 20_000
    # About 20 stretches of 1/(1-ρ) steps times 50 coordinates: a standard error of 5% at most.
    assert ran["variance seen"] == pytest.approx(ran["variance promised"], rel=0.3)
