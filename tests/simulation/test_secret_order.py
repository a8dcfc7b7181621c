"""A simulation under a secret order: who is used at which step, and what a step's sum is divided by."""

from __future__ import annotations

import numpy as np
import pytest

from veilstream.errors import InputError
from veilstream.plans.clients import stream_of
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.plans.tasks import task_of
from veilstream.records.sample import Sample
from veilstream.records.secret_order import chosen_steps, simulated_secret, simulated_tag
from veilstream.simulation.engine import Simulation
from veilstream.simulation.records import ExpectedRecords
from veilstream.simulation.secret_order import SecretOrder, check_enough_records, steps_of_records
from veilstream.streams.pool import PoolStream
from veilstream.streams.splits import EvenSplit

PLAN = """
[learning]
rounds = 8
clients_per_step = 3
local_steps = 2
learners = 2
task = "logistic"
[data]
kind = "synthetic"
dim = 3
[privacy]
epsilon = 1.0
delta = 1e-3
order = "secret"
[run]
seeds = 2
regret = false
[[methods]]
name = "noise-free"
kind = "noise-free"
step_size = 0.5
"""
STEPS, MANY, RECORDS = 16, 3, 48


def pool(records: int = 2 * RECORDS) -> PoolStream:
    rng = np.random.default_rng(3)
    features, targets = rng.standard_normal((records, 3)), rng.choice([-1, 1], records)
    return PoolStream(
        learners=2,
        rounds=8,
        per_round=6,
        features=features,
        targets=targets,
        held_features=features,
        held_targets=targets,
        split=EvenSplit(),
        provenance="numbers",
    )


@pytest.fixture
def plan() -> Plan:
    return Plan.parse(PLAN)


def test_every_record_is_used_once_at_the_step_that_its_tag_chooses(plan: Plan) -> None:
    stream = pool()
    expected = ExpectedRecords.of(plan, task_of(plan))
    order = SecretOrder(plan, stream, (0, 1), expected)
    used = order.clients(0, 8).reshape(8, 2, 2, 2, order.places)  # rounds, seeds, learners, steps, places
    for seed in (0, 1):
        met = stream.indices(seed, 0, 8)
        for learner in (0, 1):
            known = met[:, learner].reshape(-1)
            tags = [simulated_tag(position) for position in range(RECORDS)]
            chosen = chosen_steps(simulated_secret(seed, learner), tags, STEPS)
            for step in range(STEPS):
                here = used[step // 2, seed, learner, step % 2]
                assert sorted(here[here >= 0]) == sorted(known[chosen == step])


def test_a_model_is_what_sums_divided_by_the_public_number_make_of_it(plan: Plan) -> None:
    """Against Algorithm 1 written out: empty steps are zero, full ones are divided by clients_per_step."""
    import jax.numpy as jnp

    stream, task = pool(), task_of(plan)
    simulation = Simulation(plan, [prepare(plan, m) for m in plan.methods], (0,), stream=stream)
    while not simulation.done:
        simulation.advance()
    x = np.zeros(task.dim)
    met = stream.indices(0, 0, 8)
    counts = []
    for round_ in range(8):
        total = np.zeros(task.dim)
        for learner in (0, 1):
            known = met[:, learner].reshape(-1)
            tags = [simulated_tag(position) for position in range(RECORDS)]
            chosen = chosen_steps(simulated_secret(0, learner), tags, STEPS)
            z = x.copy()
            for step in (2 * round_, 2 * round_ + 1):
                gradient = np.zeros(task.dim)
                counts.append(int((chosen == step).sum()))
                for place in known[chosen == step]:
                    record = Sample(jnp.asarray(stream.features[place]), jnp.asarray(float(stream.targets[place])))
                    one = np.asarray(task.gradient(jnp.asarray(z), record), float)
                    gradient += one * min(1.0, 1.0 / np.linalg.norm(one))
                z -= 0.5 * gradient / MANY
                total += gradient / MANY
        x -= 0.5 * total / 2
    assert min(counts) == 0
    assert max(counts) > MANY
    np.testing.assert_allclose(simulation.models()[0, 0], x, rtol=2e-5, atol=1e-6)


def test_streams_that_are_no_pool_are_dealt_alike(plan: Plan) -> None:
    stream = stream_of(plan)
    order = SecretOrder(plan, stream, (0, 1), ExpectedRecords.of(plan, task_of(plan)))
    met = order.clients(0, 8)
    assert met.present is not None
    assert met.present.sum() == 2 * 2 * RECORDS
    known = np.concatenate([np.asarray(stream.round(1, r).features)[0] for r in range(8)])
    used = met.features[:, 1, 0][met.present[:, 1, 0] > 0]
    np.testing.assert_array_equal(np.sort(known, axis=0), np.sort(used, axis=0))
    np.testing.assert_array_equal(order.clients(3, 2).features, met.features[3:5])


def test_records_of_a_window_are_used_in_the_next() -> None:
    chosen = steps_of_records(simulated_secret(0, 0), 48, 16, 4, 3)
    arrived = np.arange(48) // 12
    used = chosen >= 0
    assert (chosen[used] // 4 == arrived[used] + 1).all()
    np.testing.assert_array_equal(used, arrived < 3)


def test_fewer_records_than_steps_are_refused(plan: Plan) -> None:
    with pytest.raises(InputError, match="at least as many records as steps"):
        check_enough_records(plan, pool(2 * STEPS - 2))
    check_enough_records(plan, pool(2 * STEPS))
