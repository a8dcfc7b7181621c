"""The memory plan: it keeps its budget, says what it lacks, and is not far from the truth."""

from __future__ import annotations

import re
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import veilstream as vs
from tests.test_package import SMALL_PLAN
from veilstream.errors import InputError
from veilstream.learning.models.pytree import PytreeTask
from veilstream.learning.tasks import Logistic
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.simulation import memory
from veilstream.simulation.engine import _IN_FLIGHT, Simulation, memory_of
from veilstream.simulation.memory import GroupSize, MemoryPlan, memory_plan
from veilstream.simulation.noise_source import HostNoise
from veilstream.streams.pool import PoolStream
from veilstream.streams.splits import EvenSplit

MIB = 2**20
GROUP = GroupSize(methods=3, steps=2, clients_per_step=1, states=(4, 9))


def plan_for(mib: int, *, rounds: int = 10_000, **more: Any) -> MemoryPlan:
    given = {"groups": [GROUP], "seeds": 10, "learners": 5, "dim": 20_000, "on_host": True}
    return memory_plan(budget_bytes=mib * MIB, rounds=rounds, **given | more)


def plan_or_need(mib: int, **shape: Any) -> MemoryPlan | int:
    """A plan, or the MiB that a refusal asks for."""
    try:
        return memory_plan(budget_bytes=mib * MIB, **shape)
    except InputError as error:
        return int(re.fullmatch(r"at least (\d+) for one seed of this plan.*", error.rule)[1])


groups = st.builds(
    GroupSize,
    methods=st.integers(1, 12),
    steps=st.integers(1, 8),
    clients_per_step=st.integers(1, 30),
    states=st.lists(st.integers(0, 40), max_size=4).map(tuple),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    mib=st.integers(201, 20_000),
    cut=st.lists(groups, min_size=1, max_size=3),
    seeds=st.integers(1, 50),
    learners=st.integers(1, 50),
    dim=st.integers(1, 200_000),
    rounds=st.integers(1, 10**6),
    evaluate_every=st.integers(1, 100),
    workspace=st.integers(0, 500_000),
    feature_floats=st.integers(0, 5_000),
    pooled=st.booleans(),
    on_host=st.booleans(),
    processes=st.integers(1, 4),
)
def test_what_is_planned_fits_the_budget_or_is_refused(mib, cut, seeds, processes, **shape):
    fits = plan_or_need(mib, groups=cut, seeds=seeds, processes=processes, **shape)
    if isinstance(fits, int):
        assert fits > mib
        return
    assert fits.bytes * processes <= mib * MIB
    assert 1 <= fits.seeds_together <= seeds
    assert 1 <= fits.rounds_per_block <= -(-shape["rounds"] // 50)


@pytest.mark.parametrize("processes", [1, 3])
def test_a_refusal_names_the_least_budget_that_does(processes):
    with pytest.raises(InputError, match=r"raise it, or take fewer methods") as refused:
        plan_for(10, processes=processes)
    assert str(refused.value).startswith("run.memory_mib = 10: expected at least ")
    need = int(re.search(r"at least (\d+)", refused.value.rule)[1])
    assert ("in each of 3 processes" in refused.value.rule) == (processes == 3)
    least = plan_for(need, processes=processes)
    assert (least.seeds_together, least.rounds_per_block) == (1, 1)
    with pytest.raises(InputError):
        plan_for(need - 1, processes=processes)


def test_the_horizon_changes_nothing_but_the_cap_of_a_fiftieth():
    """Blocks are at most a fiftieth of the run, so that a checkpoint is never far."""
    tight = [plan_for(600, rounds=rounds) for rounds in (10_000, 100_000, 10**7)]
    assert tight[0] == tight[1] == tight[2]
    assert 1 <= tight[0].rounds_per_block < 10_000 // 50
    assert [plan_for(60_000, rounds=r).rounds_per_block for r in (1, 49, 51, 1000)] == [1, 1, 2, 20]


def test_more_memory_never_means_fewer_seeds_or_shorter_blocks():
    budgets = range(230, 12_000, 97)
    together = [plan_for(mib).seeds_together for mib in budgets]
    assert together == sorted(together)
    assert (together[0], together[-1]) == (1, 10)
    alone = [plan_for(mib, seeds=1).rounds_per_block for mib in budgets]
    assert alone == sorted(alone)
    assert alone[0] < alone[-1] == 200


def test_blocks_on_a_device_stay_short():
    """A program in long blocks has large matrices, which no budget here counts."""
    long = plan_for(60_000, rounds=10**6, on_host=False).rounds_per_block
    assert long * GROUP.steps <= 128 < plan_for(60_000, rounds=10**6).rounds_per_block


def test_what_cannot_fit_claims_no_folder(tmp_path):
    with pytest.raises(InputError, match=r"run.memory_mib = 1: expected at least 201 for one seed"):
        vs.run(Plan.parse(SMALL_PLAN, {"run.memory_mib": 1}), tmp_path / "out")
    plan = Plan.parse(SMALL_PLAN, {"run.memory_mib": 300})
    with pytest.raises(InputError, match=r"run.memory_mib = 300: expected at least 40\d .* in each"):
        vs.run(plan, tmp_path / "out", processes=2)
    assert not (tmp_path / "out").exists()


def network(hidden: int, width: int = 390) -> PytreeTask:
    def init(seed: int) -> dict:
        rng = np.random.default_rng(seed)
        return {
            "in": np.float32(rng.standard_normal((width, hidden)) / width**0.5),
            "out": np.float32(rng.standard_normal(hidden) / hidden**0.5),
        }

    def loss(params, x, y):
        return jnp.logaddexp(0.0, -y * (jnp.tanh(x @ params["in"]) @ params["out"]))

    return PytreeTask(loss, init)


def pool(width: int, learners: int, rounds: int, per_round: int) -> PoolStream:
    rng = np.random.default_rng(0)
    features = rng.standard_normal((20, width), np.float32)
    targets = np.where(features[:, 0] > 0, 1.0, -1.0).astype(np.float32)
    return PoolStream(
        learners=learners,
        rounds=rounds,
        per_round=per_round,
        features=features,
        targets=targets,
        held_features=features,
        held_targets=targets,
        split=EvenSplit(),
        provenance="made up",
    )


def case(place: str, mechanisms: list[str], methods: int, **learning: Any) -> Plan:
    """``methods`` of each mechanism, and one without noise."""
    noisy = [
        {"name": f"{name} {i}", "mechanism": name, "step_size": 0.1} for name in mechanisms for i in range(methods)
    ]
    return Plan(
        learning={"rounds": 200, "task": "custom"} | learning,
        data={"kind": "custom"},
        privacy={"epsilon": 1.0, "delta": 1e-3},
        run={"seeds": 2, "noise": place, "evaluate_every": 1},
        methods=[*noisy, {"name": "free", "kind": "noise-free", "step_size": 0.1}],
    )


def compiled_bytes(simulation: Simulation, rounds: int) -> int:
    """Arguments, results and scratch of the block that runs, and results not yet read."""
    (group,) = simulation._groups
    here = simulation._position
    clients, schedule = simulation._clients(0, rounds), simulation._schedule(group, 0, rounds)
    fixed = (schedule, group.clip_norm, group.noise_std, simulation._pool)
    if simulation.noise_place == "device":
        lowered = group.run_block.lower(here.noise[0], 0, here.models[0], clients, *fixed)
    else:
        width = simulation.plan.learning.learners * simulation.task.dim
        shape = (rounds, group.block.steps, len(simulation.seeds), width)
        made = len(set(group.block.mechanism_of)) * (jax.ShapeDtypeStruct(shape, jnp.float32),)
        lowered = group.run_block.lower(here.models[0], clients, made, *fixed)
    held = lowered.compile().memory_analysis()
    data = sum(leaf.nbytes for leaf in jax.tree.leaves(simulation._pool))
    sizes = held.argument_size_in_bytes + held.output_size_in_bytes + held.temp_size_in_bytes
    kept = 4 * group.block.keep * here.models[0].average.size  # of blocks that wait to be read
    return int(sizes - data + _IN_FLIGHT * kept)


def planned_and_simulation(plan: Plan, task: Any, width: int) -> tuple[int, Simulation]:
    learning = plan.learning
    stream = pool(width, learning.learners, learning.rounds, learning.local_steps * learning.clients_per_step)
    prepared = [prepare(plan, m) for m in plan.methods]
    fits = memory_of(plan, prepared, plan.run.seeds, task, stream)
    assert fits.seeds_together == plan.run.seeds
    simulation = Simulation(
        plan, prepared, range(plan.run.seeds), task=task, stream=stream, block_rounds=fits.rounds_per_block
    )
    assert simulation.block_rounds == 4
    return fits.bytes - memory._FIXED, simulation


LINEAR = 50_000
SHAPES = {
    "steps": (["toeplitz"], 1, {"local_steps": 3, "learners": 2}),
    "many clients": (["tree"], 1, {"clients_per_step": 20, "learners": 2}),
    "many methods": (["tree"], 6, {}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_on_the_device_takes_what_was_planned_for_it(shape):
    mechanisms, methods, learning = SHAPES[shape]
    plan = case("device", mechanisms, methods, **learning)
    planned, simulation = planned_and_simulation(plan, Logistic(LINEAR), LINEAR)
    used = compiled_bytes(simulation, simulation.block_rounds)
    assert used <= planned <= 4 * used


@pytest.mark.parametrize("shape", ["steps", "many clients"])
def test_a_block_on_the_host_takes_what_was_planned_for_it(shape):
    """A block in use, the next one being made, states, and the round that is computed."""
    mechanisms, methods, learning = SHAPES[shape]
    plan = case("host", mechanisms, methods, **learning)
    planned, simulation = planned_and_simulation(plan, network(128), 390)
    assert simulation._rounds_apart
    used = compiled_bytes(simulation, 1)
    simulation.close()
    noise = noise_bytes(simulation)
    assert used + noise <= planned <= 12 * (used + noise)


def noise_bytes(simulation: Simulation) -> int:
    """Peak of what NumPy allocates while one block is in use and the next is made."""
    (group,) = simulation._groups
    rounds, width = simulation.block_rounds, simulation.plan.learning.learners * simulation.task.dim
    found = [p.factorization for p in group.prepared if p.factorization]
    tracemalloc.start()
    noise = HostNoise(found, simulation.seeds, steps=group.block.steps, dim=width, rounds=rounds)
    for first in range(0, 3 * rounds, rounds):
        made = noise.take(first, rounds, rounds)
        noise._ahead[2].result()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    noise.close()
    assert peak > 2 * sum(block.nbytes for block in made)
    return peak


def test_host_noise_holds_states_and_four_blocks_whatever_the_horizon():
    """The formula's own terms: Σ k·n·d, and four copies of a block of L steps."""
    from veilstream.mechanisms import build

    peaks = []
    for horizon in (64, 1024):
        mechanisms = [build("buffered", horizon), build("independent", horizon)]
        states = sum(m.program.state_size for m in mechanisms)
        tracemalloc.start()
        noise = HostNoise(mechanisms, (0, 1), steps=2, dim=30_000, rounds=4)
        for first in (0, 4, 8):
            noise.take(first, 4, 4)
        noise._ahead[2].result()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        noise.close()
        assert peaks[-1] <= 4 * 30_000 * 2 * (states + 4 * 2 * 8)
    assert peaks[1] < 1.1 * peaks[0]
