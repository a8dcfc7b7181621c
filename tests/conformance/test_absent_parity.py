"""Learners that miss rounds: the simulation's models are those of a server's fold, draw by draw.

Deployed learners with ledgers of their own take part where the simulation's attendance says so, on
the simulation's clients and its draws, and the server's fold makes models of their messages.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from studies import parity

from veilstream.federation.protocol.fold import ServerFold
from veilstream.learning.tasks import Sample
from veilstream.mechanisms.fine_normals import fine_row
from veilstream.mechanisms.keystream import NoiseKey, Row
from veilstream.plans.clients import stream_of
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.plans.tasks import task_of
from veilstream.records.admission import Answer
from veilstream.simulation.attendance import Attendance
from veilstream.simulation.noise_source import learner_noise_seed

ROUNDS, LEARNERS, TAU, SEED = 9, 4, 3, parity.SEED
CLIP_NORM = 0.55  # some gradients are clipped, and those that are not depend on the local model
ABSENCES = {"missing": 0.4, "late": 0.25, "leaving": 0.25}
SETTINGS = {
    "plain": {},
    "published": {"averaging": 3.0, "objective": "published"},
    "memory": {"forgetting": 0.9},
    "decay": {"step_decay": 1.0, "step_size": 1.0},
}


class OwnDraws(parity.GivenNoise):
    """A learner whose k-th own step has the k-th row that the simulation draws for it."""

    class Rounds(parity.GivenRounds):
        def row(self, step, secret):
            seed = learner_noise_seed(SEED, self.terms.mechanism.name, self.place)
            row = Row(NoiseKey.from_seed(seed).secret, step)
            return parity.Given(fine_row(row, self.dim))


class SpendsAbsentSteps(OwnDraws):
    """Its noise goes on in rounds that it misses."""

    class Rounds(OwnDraws.Rounds):
        def row(self, step, secret):
            table = attendance_of(plan_of({}))[:, self.place]
            round_ = np.flatnonzero(table)[step // TAU]
            return super().row(int(round_) * TAU + step % TAU, secret)


def plan_of(settings: dict) -> Plan:
    method = {
        "name": "ours",
        "mechanism": "buffered",
        "step_size": parity.STEP_SIZE,
        "server_step_size": parity.SERVER_STEP_SIZE,
    }
    return Plan(
        learning={"rounds": ROUNDS, "local_steps": TAU, "learners": LEARNERS, "clip_norm": CLIP_NORM},
        data={"dim": parity.DIM, **ABSENCES},
        privacy={"epsilon": 4.0, "delta": 1e-5},
        run={"seeds": 1, "first_seed": SEED, "noise": "host", "regret": False},
        methods=[method | settings],
    )


def attendance_of(plan: Plan) -> np.ndarray:
    """(R, n)."""
    attendance = Attendance.of(plan)
    assert attendance is not None
    return attendance.taking_part((SEED,), 0, ROUNDS)[:, 0]


def deployed_models(plan: Plan, folder: Path, make: type[parity.GivenNoise]) -> np.ndarray:
    """What the fold publishes, from x^0 on, (R + 1, d)."""
    task, stream, there = task_of(plan), stream_of(plan), attendance_of(plan)
    names = [str(place) for place in range(LEARNERS)]
    learners = {
        name: make.at(place)(plan, folder / f"{name}.db", task, create=True) for place, name in enumerate(names)
    }
    start = np.asarray(task.init(SEED), np.float32)
    fold = ServerFold(learners["0"].terms, start, names)
    models, met_it = [start], set()
    try:
        for r in range(ROUNDS):
            met = stream.round(SEED, r)
            for place in np.flatnonzero(there[r]):
                name = names[place]
                if name not in met_it:
                    fold.enrol(name, 0, 0)
                    met_it.add(name)
                own_round = fold.seats[name].round
                assert own_round == there[:r, place].sum()  # a learner counts its own rounds
                learners[name].begin_round(own_round, fold.x.astype(np.float32))
                for t in range(TAU):
                    client = Sample(met.features[place, t], met.target[place, t])
                    assert learners[name].observe(f"{r}/{t}", client) is Answer.TAKEN
                assert fold.accept(name, learners[name].finish_round().payload)
            closed = fold.close_round()
            assert set(closed.missing) == {names[i] for i in np.flatnonzero(~there[r])}
            models.append(fold.published)
    finally:
        for learner in learners.values():
            learner.close()
    return np.array(models)


def simulated_models(plan: Plan) -> np.ndarray:
    return parity.simulated_models(plan, [prepare(plan, plan.methods[0])])[0]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_server_with_absent_learners_has_the_simulations_models(settings, tmp_path):
    plan = plan_of(settings)
    there = attendance_of(plan)
    assert 0.3 < there.mean() < 0.8
    assert not there[:, there.any(axis=0)].all(axis=0).any()  # nobody is always there
    expected, found = simulated_models(plan), deployed_models(plan, tmp_path, OwnDraws)
    scale = np.abs(expected).max()
    assert scale > 0.1
    np.testing.assert_allclose(found, expected, atol=2e-5 * scale)


def test_noise_that_goes_on_without_its_learner_is_found(tmp_path):
    plan = plan_of({})
    expected, found = simulated_models(plan), deployed_models(plan, tmp_path, SpendsAbsentSteps)
    assert np.abs(found - expected).max() > 1e-2 * np.abs(expected).max()
