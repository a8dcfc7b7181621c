"""Noise on the host or in JAX: the same Algorithm 1, whatever the blocks and the company."""

from __future__ import annotations

import copy

import jax
import numpy as np
import pytest

from tests.simulation.test_algorithm_one import MECHANISMS, algorithm_1, entry, plan_of, simulate
from veilstream.errors import InputError, PrivacyError
from veilstream.learning.tasks import Sample
from veilstream.mechanisms import build
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.simulation import noise_source
from veilstream.simulation.engine import Simulation
from veilstream.simulation.noise_source import DeviceNoise, HostNoise, noise_place_of, noise_seed

FREE = {"name": "free", "kind": "noise-free", "step_size": 0.3, "server_step_size": 1.5}


def threefry_draws(T: int, width: int, seed: int, mechanism: str) -> np.ndarray:
    """ξ as `DeviceNoise` promises them: key from the seed's low 64 bits, one fold a step."""
    low = noise_seed(seed, mechanism) % 2**64
    key = jax.random.wrap_key_data(np.array([low >> 32, low % 2**32], np.uint32), impl="threefry2x32")
    rows = [jax.random.normal(jax.random.fold_in(key, step), (width,)) for step in range(T)]
    return np.array(rows)


def at(place: str, plan: Plan) -> Plan:
    return Plan.parse(plan.to_toml(), {"run.noise": place})


@pytest.mark.parametrize(
    ("tau", "block_rounds", "mechanisms"),
    [(1, 1, ["optimal"]), (1, 7, ["toeplitz_normalised"]), (3, 2, ["rounds"]), (3, 9, MECHANISMS)],
)
def test_device_noise_is_algorithm_1(tau, block_rounds, mechanisms):
    """Seven rounds in blocks of one, of two and a short last one, in one, in less than one."""
    plan = at("device", plan_of(tau, [*map(entry, mechanisms), FREE]))
    models = simulate(plan, seeds=(0, 5), block_rounds=block_rounds).models()
    for index, method in enumerate(plan.methods):
        expected = algorithm_1(plan, index, 5, xi_of=threefry_draws)
        scale = max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(models[index, 1], expected, atol=1e-5 * scale, err_msg=method.name)


def test_neither_blocks_nor_company_change_device_noise():
    both = at("device", plan_of(4, [entry("banded"), entry("tree")], rounds=6))
    alone = at("device", plan_of(4, [entry("tree")], rounds=6))
    whole, single = simulate(both, block_rounds=6), simulate(alone, seeds=(1,), block_rounds=3)
    np.testing.assert_allclose(single.models()[0, 0], whole.models()[1, 1], atol=2e-6)
    small = simulate(both, block_rounds=2)
    np.testing.assert_allclose(small.models(), whole.models(), atol=2e-6)
    for name in ("loss", "noise"):
        np.testing.assert_allclose(small.history[name], whole.history[name], rtol=1e-5)
    np.testing.assert_array_equal(small.held_out_accuracy, whole.held_out_accuracy)


def test_methods_without_any_noise_run_on_the_device_too():
    """A group of methods may have no mechanism at all: noise-free ones, and Gao's unit steps."""
    gao = {"name": "gao", "kind": "gao", "step_size": 0.25}
    plan = plan_of(1, [gao, FREE], learners=1)
    on_device, on_host = simulate(at("device", plan)), simulate(at("host", plan))
    np.testing.assert_allclose(on_device.models(), on_host.models(), atol=1e-6)
    assert np.abs(on_device.models()).max() > 0.1


class Nothing:
    """Clients without features: all that moves a model is noise."""

    provenance = "made up"

    def round(self, seed: int, round_: int) -> Sample:
        return Sample(np.zeros((3, 3, 6), np.float32), np.ones((3, 3), np.float32))

    def held_out(self, seed: int, count: int, round_: int) -> Sample:
        return Sample(np.zeros((count, 6), np.float32), np.ones(count, np.float32))


@pytest.mark.parametrize("place", ["host", "device"])
def test_methods_with_one_mechanism_differ_exactly_by_the_factor(place):
    """Budget, accounting and clip norm scale the noise; mechanism and seed are other noise."""
    methods = [
        entry("tree"),
        entry("tree", name="tight", epsilon=1.0),
        entry("tree", name="loose", epsilon=1.0, accounting="zcdp"),
        entry("tree", name="clipped", clip_norm=0.25),
        entry("toeplitz"),
    ]
    plan = at(place, plan_of(3, methods))
    simulation = simulate(plan, stream=Nothing())
    stds = [prepare(plan, m).noise_std for m in plan.methods]
    assert stds[3] == pytest.approx(stds[0] / 4)
    assert stds[0] < stds[1] < stds[2]
    x, noise = simulation.models(), simulation.history["noise"]
    for index in range(1, 4):
        factor = stds[index] / stds[0]
        np.testing.assert_allclose(x[index], x[0] * factor, rtol=1e-4, atol=1e-6 * factor)
        np.testing.assert_allclose(noise[index], noise[0] * factor, rtol=1e-5)
    directions = x / np.linalg.norm(x, axis=-1, keepdims=True)
    assert abs((directions[4] * directions[0]).sum(axis=-1)).max() < 0.99
    assert abs((directions[:, 0] * directions[:, 1]).sum(axis=-1)).max() < 0.99


def test_noise_in_the_history_is_the_norm_of_what_the_average_release_carries():
    """One round of noise alone: x¹ = -eta·eta_g·tau·(noise in the averaged release)."""
    plan = at("host", plan_of(3, [entry("tree")], rounds=1))
    simulation = simulate(plan, stream=Nothing())
    moved = np.linalg.norm(simulation.models()[0], axis=-1) / (0.3 * 1.5 * 3)
    np.testing.assert_allclose(simulation.history["noise"][0, :, 0], moved, rtol=1e-5)


def host_noise(**more) -> HostNoise:
    mechanisms = [build("tree", 24), build("toeplitz", 24)]
    return HostNoise(mechanisms, (3, 4), **{"steps": 2, "dim": 5, "rounds": 4} | more)


def test_host_noise_is_the_streams_of_all_seeds_in_order():
    noise = host_noise()
    blocks = [noise.take(0, 4, 4), noise.take(4, 4, 3), noise.take(8, 3, 1), noise.take(11, 1, 0)]
    noise.close()
    for index, name in enumerate(("tree", "toeplitz")):
        taken = np.concatenate([block[index] for block in blocks])
        assert taken.shape == (12, 2, 2, 5)
        for place, seed in enumerate((3, 4)):
            stream = build(name, 24).noise(dim=5, seed=noise_seed(seed, name))
            np.testing.assert_allclose(taken[:, :, place].reshape(24, 5), stream.take(24), atol=1e-5)


@pytest.mark.parametrize("again", [(0, 4), (8, 4), (4, 3), (2, 4)])
def test_rounds_out_of_order_are_refused(again):
    noise = host_noise()
    noise.take(0, 4, 4)
    with pytest.raises(PrivacyError, match="never used twice"):
        noise.take(*again, 0)
    noise.close()


def test_rounds_that_are_past_are_refused_even_where_none_are_begun():
    noise = host_noise()
    noise.take(0, 4, 0)
    with pytest.raises(PrivacyError, match=r"rounds 0 to 3 was made, of rounds 1 to 2 asked"):
        noise.take(1, 2, 0)
    noise.close()


def test_noise_that_is_run_forward_goes_on_where_it_stood():
    whole, late = host_noise(), host_noise()
    whole.take(0, 4, 4)
    for ours, theirs in zip(late.take(4, 4, 0), whole.take(4, 4, 0), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    whole.close()
    late.close()


def test_auto_is_the_host_on_a_cpu_and_the_device_elsewhere(monkeypatch):
    plan = plan_of(1, [entry("tree")])

    def place(asked: str) -> str:
        return noise_place_of(at(asked, plan))

    assert jax.default_backend() == "cpu"
    assert (place("auto"), place("device")) == ("host", "device")
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        assert (place("auto"), place("host")) == ("device", "host")
    monkeypatch.setattr(noise_source, "find_spec", lambda name: None)  # without cryptography
    assert place("auto") == "device"


@pytest.fixture(scope="module")
def half_way():
    """A run on the device to its end, and its state after four of six rounds; two groups."""
    liu = {**entry("liu"), "kind": "liu", "mechanism": None}
    plan = at("device", plan_of(3, [entry("optimal"), liu], rounds=6))
    prepared = [prepare(plan, m) for m in plan.methods]
    simulation = Simulation(plan, prepared, (0, 1), block_rounds=2)
    simulation.advance(), simulation.advance()
    state = copy.deepcopy(simulation.state())
    while not simulation.done:
        simulation.advance()
    return plan, prepared, state, simulation


def test_a_checkpoint_on_the_device_goes_on_to_the_same_numbers(half_way):
    plan, prepared, state, whole = half_way
    resumed = Simulation(plan, prepared, (0, 1), block_rounds=2)
    resumed.restore(state)
    assert resumed.round == 4
    while not resumed.done:
        resumed.advance()
    np.testing.assert_array_equal(resumed.models(), whole.models())
    for name, values in whole.history.items():
        np.testing.assert_array_equal(resumed.history[name], values)
    np.testing.assert_array_equal(resumed.held_out_accuracy, whole.held_out_accuracy)


def test_replay_is_the_state_that_the_blocks_lead_to():
    noise = DeviceNoise([build("tree", 36), build("optimal", 36)], (3, 4), steps=2, dim=5, rounds=3)
    states, block = noise.initial_state(), jax.jit(noise.block)
    for number in range(2):
        states, _ = block(noise.keys, states, number)
    for ours, theirs in zip(noise.replay(2), states, strict=True):
        assert np.abs(theirs).max() > 0
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_a_checkpoint_of_another_place_or_blocks_is_refused_with_the_way_out(half_way):
    plan, prepared, state, _ = half_way
    elsewhere = Simulation(at("host", plan), prepared, (0, 1), block_rounds=2)
    with pytest.raises(InputError, match=r'expected device, as .* \(--set run.noise="device"'):
        elsewhere.restore(state)
    elsewhere.close()
    longer = Simulation(plan, prepared, (0, 1), block_rounds=3)
    with pytest.raises(InputError, match=r"expected blocks of 2 rounds .* was started with"):
        longer.restore(state)
    assert longer.round == 0


def test_a_checkpoint_on_the_host_takes_blocks_of_any_length():
    """There draws are a stream: a part of a block changes nothing but rounding."""
    plan = at("host", plan_of(3, [entry("buffered")], rounds=6))
    prepared = [prepare(plan, m) for m in plan.methods]
    first = Simulation(plan, prepared, (0, 1), block_rounds=2)
    first.advance()
    second = Simulation(plan, prepared, (0, 1), block_rounds=4)
    second.restore(first.state())
    for simulation in (first, second):
        while not simulation.done:
            simulation.advance()
        simulation.close()
    np.testing.assert_allclose(second.models(), first.models(), atol=2e-6)
