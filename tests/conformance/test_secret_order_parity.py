"""A simulation and deployed learners with the same secret, draws and records make the same model.

The simulation computes in float32 and the learner on whole numbers, so they may be apart by what rounding explains (as
`studies.parity` has it, with the clients of the fullest step). A record in another step would be outside by far.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from studies.parity import CLIP_NORM, DIM, LEARNERS, SEED, SERVER_STEP_SIZE, STEP_SIZE, GivenRounds, simulated_models

from veilstream.deployment.epochs import LearnerParts
from veilstream.deployment.learner import Learner
from veilstream.federation.protocol.fold import ServerFold
from veilstream.learning.tasks import Sample
from veilstream.plans.clients import stream_of
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.plans.tasks import task_of
from veilstream.records.secret_order import chosen_step, simulated_secret, simulated_tag

ROUNDS, MANY = 8, 4


def plan_of(tau: int, mechanism: str, window: int | None = None) -> Plan:
    return Plan(
        learning={
            "rounds": ROUNDS,
            "local_steps": tau,
            "clients_per_step": MANY,
            "learners": LEARNERS,
            "clip_norm": CLIP_NORM,
        },
        data={"dim": DIM},
        privacy={"epsilon": 4.0, "delta": 1e-3, "order": "secret", "window": window},
        run={"seeds": 1, "first_seed": SEED},
        methods=[
            {"name": mechanism, "mechanism": mechanism, "step_size": STEP_SIZE, "server_step_size": SERVER_STEP_SIZE}
        ],
    )


def deployed_models(plan: Plan, folder, records_of) -> tuple[np.ndarray, float]:
    """x^0 to x^R of the server's own fold of what deployed learners send; and the grid."""
    task = task_of(plan)
    names = [str(place) for place in range(LEARNERS)]
    learners = []
    for place, name in enumerate(names):
        parts = LearnerParts(
            rounds=lambda terms, epoch, place=place: GivenRounds(terms, epoch, place),
            order_secret=lambda place=place: simulated_secret(SEED, place),
        )
        learner = Learner(plan, folder / f"{name}.db", task, create=True, parts=parts)
        if plan.window is None:
            learner.use_records(records_of(place))
        learners.append(learner)
    start = np.asarray(task.init(SEED), np.float32)
    fold = ServerFold(learners[0].terms, start, names)
    models = [start]
    for r in range(ROUNDS):
        x = fold.x.astype(np.float32)
        for place, (name, learner) in enumerate(zip(names, learners, strict=True)):
            met = None if plan.window is None else records_of(place)[r * len(records_of(place)) // ROUNDS :]
            fold.accept(name, learner.learn_round(r, x, met).payload)
        fold.close_round()
        models.append(fold.published)
    grid = learners[0].grid.step
    for learner in learners:
        learner.close()
    return np.array(models, np.float64), grid


@pytest.mark.parametrize(
    ("tau", "mechanism", "window"),
    [(2, "independent", None), (2, "independent", 4), pytest.param(1, "banded", None, marks=pytest.mark.all)],
)
def test_models_of_a_deployment_are_the_simulations(tau, mechanism, window, tmp_path):
    """With a window, a round's records arrive in it, and are used in the next one."""
    plan = plan_of(tau, mechanism, window)
    stream = stream_of(plan)
    met = [stream.round(SEED, r) for r in range(ROUNDS)]
    a_round = tau * MANY

    def records_of(place):
        return [
            (simulated_tag(r * a_round + t), Sample(met[r].features[place, t], met[r].target[place, t]))
            for r in range(ROUNDS)
            for t in range(a_round)
        ]

    (simulated,) = simulated_models(plan, [prepare(plan, plan.methods[0])])
    deployed, grid = deployed_models(plan, tmp_path, records_of)
    fullest = max(
        Counter(
            (
                at // (window * MANY) if window else 0,
                chosen_step(simulated_secret(SEED, place), tag, window or ROUNDS * tau),
            )
            for at, (tag, _) in enumerate(records_of(place))
        ).most_common(1)[0][1]
        for place in range(LEARNERS)
    )
    assert fullest > MANY
    # Each client's share and each noise prefix is rounded to the grid, and float32 is 2^-23 of what it adds up; local
    # models that are apart by that move gradients by a quarter of it at most, a step (L = 1/4 with features of norm 1).
    a_step = np.sqrt(DIM) * grid * (fullest + 3) + 64 * 2.0**-23 * (1.0 + np.abs(simulated).max())
    allowed = 2.0 * STEP_SIZE * max(1.0, SERVER_STEP_SIZE) * a_step * ROUNDS * tau
    apart = np.abs(deployed - simulated).max()
    assert apart < allowed
    # One record in another step moves a model by more than what is allowed.
    assert allowed < 0.05 * STEP_SIZE * SERVER_STEP_SIZE * CLIP_NORM / (MANY * LEARNERS)


def test_another_secret_makes_another_model(tmp_path):
    """So the comparison above is of the order, too."""
    plan = plan_of(1, "independent")
    stream = stream_of(plan)
    met = [stream.round(SEED, r) for r in range(ROUNDS)]

    def records_of(place):
        return [
            (b"other" + simulated_tag(r * MANY + t), Sample(met[r].features[place, t], met[r].target[place, t]))
            for r in range(ROUNDS)
            for t in range(MANY)
        ]

    (simulated,) = simulated_models(plan, [prepare(plan, plan.methods[0])])
    deployed, _ = deployed_models(plan, tmp_path, records_of)
    assert np.abs(deployed - simulated).max() > 0.05 * STEP_SIZE * SERVER_STEP_SIZE * CLIP_NORM / (MANY * LEARNERS)
