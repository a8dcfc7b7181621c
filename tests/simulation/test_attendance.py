"""Learners that miss rounds, come late or leave for good, against Algorithm 1 by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from studies import dropouts

import veilstream as vs
from tests.conformance.test_factorizations import draws
from tests.simulation.test_algorithm_one import MECHANISMS, algorithm_1, check_resumes, entry, plan_of, simulate
from veilstream.deployment.simulated_learner import SimulatedLearner
from veilstream.errors import InputError
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.privacy.guarantee import SumTrust
from veilstream.simulation.attendance import Attendance
from veilstream.simulation.engine import Simulation
from veilstream.simulation.noise_source import OwnPaceNoise, learner_noise_seed

FREE = {"name": "free", "kind": "noise-free", "step_size": 0.3, "server_step_size": 1.5}


def absent(plan: Plan, **data) -> Plan:
    return Plan.parse(plan.to_toml(), {f"data.{key}": held for key, held in data.items()})


def own_draws(learners: int):
    """ξ as every learner draws them by itself: row k belongs to its own k-th step."""

    def xi(T: int, width: int, seed: int, mechanism: str) -> np.ndarray:
        d = width // learners
        return np.concatenate([draws(T, d, learner_noise_seed(seed, mechanism, i)) for i in range(learners)], axis=1)

    return xi


class Told(Attendance):
    """Attendance as a test writes it down, the same for every seed."""

    table = np.array(
        [[1, 1, 0], [0, 1, 0], [1, 0, 0], [0, 0, 0], [1, 0, 1], [1, 0, 0], [0, 0, 1]], bool
    )  # learner 1 leaves after round 1, learner 2 comes at round 4, round 3 has nobody

    def taking_part(self, seeds, first, count):
        rows = self.table[first : first + count]
        return np.repeat(rows[:, None], len(seeds), axis=1)


@pytest.fixture
def told(monkeypatch):
    monkeypatch.setattr(Attendance, "of", lambda plan: Told(learners=3, rounds=7, missing=0.5))
    return Told.table


@pytest.mark.parametrize(("tau", "block_rounds"), [(1, 7), (3, 1), (3, 3)])
def test_absent_learners_spend_no_step_and_their_noise_waits(told, tau, block_rounds):
    plan = absent(plan_of(tau, [*map(entry, MECHANISMS), FREE]), missing=0.5)
    models = simulate(plan, block_rounds=block_rounds).models()
    for index, method in enumerate(plan.methods):
        expected = algorithm_1(plan, index, 1, xi_of=own_draws(3), weights=told.astype(float))
        scale = max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(models[index, 1], expected, atol=1e-5 * scale, err_msg=method.name)


def test_forgetting_goes_on_in_rounds_without_anyone(told):
    plan = absent(plan_of(2, [entry("buffered", forgetting=0.8)]), missing=0.5)
    start = np.linspace(-1.0, 1.0, 6).astype(np.float32)
    expected = algorithm_1(plan, 0, 0, xi_of=own_draws(3), start=start, weights=told.astype(float))
    found = simulate(plan, start=start).models()[0, 0]
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_noise_in_the_model_is_the_mechanisms_own_at_every_learners_step(told):
    """Without gradients, x = -η̃/(nτ)·Σ_i (Bξ_i)(own steps so far): all the rest has cancelled."""
    plan = absent(plan_of(2, [entry("buffered", server_step_size=1.0)], clip_norm=1e-9), missing=0.5)
    prepared = prepare(plan, plan.methods[0])
    prepared = dataclasses.replace(prepared, noise_std=1.0)
    simulation = Simulation(plan, [prepared], (0,))
    while not simulation.done:
        simulation.advance()
    B = np.cumsum(prepared.factorization.noising_matrix(), axis=0)
    xi = own_draws(3)(14, 18, 0, "buffered").reshape(14, 3, 6)
    left = sum(B[2 * told[:, i].sum() - 1] @ xi[:, i] for i in range(3))
    np.testing.assert_allclose(simulation.models()[0, 0], -0.3 / 3 * left, atol=1e-5)


def test_loss_is_that_of_all_clients_also_of_absent_learners(told):
    """Round 3 has nobody, and its people are still served by the model: no gap in the curve."""
    history = simulate(absent(plan_of(1, [FREE]), missing=0.5)).history
    assert np.isfinite(history["loss"]).all()
    assert np.isfinite(history["accuracy"]).all()
    assert history["loss"][0, 0, 4] != history["loss"][0, 0, 3]
    assert (history["noise"] == 0.0).all()


def test_noise_of_a_round_without_anyone_is_zero(told):
    history = simulate(absent(plan_of(1, [entry("tree")]), missing=0.5)).history
    assert (history["noise"][0, :, 3] == 0.0).all()
    assert (np.delete(history["noise"][0], 3, axis=1) > 0.0).all()


def test_checkpoint_goes_on_to_the_same_numbers():
    check_resumes(absent(plan_of(3, [entry("buffered"), entry("tree")]), missing=0.4, late=0.5), 2)


def test_a_learner_that_is_never_there_needs_no_noise():
    """A stream is not run forward for rounds that its learner misses."""
    attendance = Told(learners=3, rounds=7, missing=0.5)
    mechanism = vs.mechanisms.tree(6)  # 3 rounds of 2 steps: no learner has more than 4
    noise = OwnPaceNoise([mechanism], (0,), attendance, steps=2, dim=6, rounds=7)
    with pytest.raises(vs.errors.HorizonExhausted):
        noise.take(0, 7, 0)  # learner 0 asks for a fourth round
    noise.close()
    noise = OwnPaceNoise([mechanism], (0,), attendance, steps=2, dim=6, rounds=7)
    made = noise.take(0, 5, 0)[0].reshape(5, 2, 3, 2)
    noise.close()
    np.testing.assert_array_equal((made != 0.0).all(axis=(1, 3)), Told.table[:5])


def test_shares_are_those_asked_for():
    """10,000 draws at 0.3: five standard deviations, 0.023; false alarms below 1e-6."""
    attendance = Attendance(learners=50, rounds=200, missing=0.3)
    present = attendance.taking_part((0, 1), 0, 200)
    np.testing.assert_allclose(1.0 - present.mean(axis=(0, 2)), 0.3, atol=0.023)
    assert not np.array_equal(present[:, 0], present[:, 1])


def test_blocks_do_not_change_who_is_there():
    attendance = Attendance(learners=9, rounds=40, missing=0.5, late=0.4, leaving=0.4)
    whole = attendance.taking_part((3, 7), 0, 40)
    parts = [attendance.taking_part((3, 7), r, 8) for r in range(0, 40, 8)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(attendance.taking_part((7,), 0, 40)[:, 0], whole[:, 1])


@pytest.mark.parametrize("rounds", [1, 2, 30])
def test_late_learners_come_once_and_leaving_ones_go_for_good(rounds):
    attendance = Attendance(learners=20, rounds=rounds, missing=0.0, late=0.25, leaving=0.5)
    present = attendance.taking_part((5,), 0, rounds)[:, 0].astype(int)
    changes = np.diff(present, axis=0)
    assert ((changes == 1).sum(axis=0) <= 1).all()
    assert ((changes == -1).sum(axis=0) <= 1).all()
    assert present.any(axis=0).all()  # everyone is there at some time
    assert (present[0] == 0).sum() == (5 if rounds > 1 else 0)
    assert (present[-1] == 0).sum() <= 10
    if rounds == 30:
        assert (present[-1] == 0).any()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"missing": 1.0}, r"data\.missing.* = 1\.0: expected a number >= 0 and < 1.*try 0\.3"),
        ({"late": -0.1}, r"data\.late.* = -0\.1: expected a number >= 0 and <= 1"),
        ({"leaving": 2}, r"data\.leaving.* = 2: expected"),
    ],
)
def test_what_cannot_be_is_refused(given, message):
    with pytest.raises(InputError, match=message):
        absent(plan_of(1, [FREE]), **given)


def test_noise_on_the_device_is_refused_where_learners_miss_rounds():
    plan = plan_of(1, [FREE]).to_toml()
    with pytest.raises(InputError, match=r'run\.noise = \'device\'.*pace.*noise = "host"'):
        Plan.parse(plan, {"data.missing": 0.1, "run.noise": "device"})


def test_one_simulated_learner_misses_what_it_is_not_given():
    plan = plan_of(1, [entry("tree")], learners=1)
    SimulatedLearner(plan)
    with pytest.raises(InputError, match=r"data\.missing.*one learner"):
        SimulatedLearner(absent(plan, missing=0.2))


def test_the_study_in_small(tmp_path):
    """Half absent: with constant weights noise stays what it was, with others it piles up."""
    found = dropouts.study((0.0, 0.5), rounds=100, learners=5, dim=30)
    whole, half, ruined = (
        np.array(found[weights][share]["buffered @ 0.5"]["noise over rounds"])[:, -20:]
        for weights, share in (("constant", "0"), ("constant", "0.5"), ("answered", "0.5"))
    )
    # The noise of a prefix at half as many own steps is no larger; at any one time it has 90
    # numbers, so a ratio of 1.5 is more than four standard errors (of a ninth) from one.
    assert half.mean() < 1.5 * whole.mean()
    assert ruined.mean() > 2 * half.mean()
    assert "| 0.5 | 0.5 | constant, step raised |" in dropouts.table(found)
    dropouts.draw(found, 100, tmp_path / "dropouts.png")
    assert (tmp_path / "dropouts.png").stat().st_size > 10_000


def test_rounds_in_which_only_sums_are_seen_wait_for_the_last_of_the_core():
    """As a server does, which names no set without them: properties of every round, for three seeds."""
    trust = SumTrust(learners=8, honest=3, colluding=1)
    alone = Attendance(learners=8, rounds=60, missing=0.4)
    there = dataclasses.replace(alone, trust=trust)
    for seed in range(3):
        here, drawn = there.taking_part([seed], 0, 60)[:, 0], alone.taking_part([seed], 0, 60)[:, 0]
        core = np.logical_and.accumulate(here, axis=0).sum(axis=1)
        assert core.min() == 4
        assert here.sum(axis=1).min() >= (8 + 1) // 2 + 1
        assert (here >= drawn).all()  # nobody is sent away
        assert (here != drawn).any()
        assert np.array_equal(there.taking_part([seed], 7, 9)[:, 0], here[7:16])


def test_a_run_whose_core_leaves_for_good_is_over_in_simulation_too():
    trust = SumTrust(learners=6, honest=5)
    with pytest.raises(InputError, match=r"over at round \d+"):
        Attendance(learners=6, rounds=30, missing=0.0, leaving=0.5, trust=trust).taking_part([0], 0, 30)
