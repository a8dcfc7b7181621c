"""With the same draws, a deployed learner's releases are the simulation's, but for rounding."""

from __future__ import annotations

import numpy as np
import pytest
from studies import parity

import veilstream as vs
from tests.support.catalogue import VARIANTS
from veilstream.learning.tasks import Sample
from veilstream.mechanisms.fine_normals import fine_row
from veilstream.mechanisms.keystream import NoiseKey, Row
from veilstream.mechanisms.normals import TILE, fill_normals, tile_bytes
from veilstream.plans.tasks import task_of
from veilstream.privacy.grid import grid_for
from veilstream.privacy.grid_noise import GridNoise


def check(rounds: int) -> None:
    found = parity.study(rounds)
    assert {(c.mechanism, c.local_steps) for c in found} == {
        (name, tau) for name in vs.mechanisms.MECHANISMS for tau in parity.LOCAL_STEPS
    }
    for c in found:
        assert c.used < 1.0, c
        # A gradient is cut by one unit at most, on average by half of one; then there are the
        # draws, which float32 does not know to a unit; little else differs.
        assert c.prefix_units < 1.0 * rounds * c.local_steps + 2.0 + c.noise_units, c
        assert c.noise_units < 1e-4 * c.largest_units, c
        assert c.largest_units > 10_000 * c.prefix_units, c


def test_releases_and_models_are_the_simulations_to_the_grids_precision():
    check(4)


@pytest.mark.slow
def test_releases_and_models_are_the_simulations_to_the_grids_precision_long():
    check(40)


@pytest.mark.parametrize("metrics", [(), ("accuracy", "clipped", "present")])
@pytest.mark.parametrize("name", ["buffered", "optimal"])
def test_steps_of_several_clients_are_the_simulations_too(name, metrics, tmp_path):
    rounds, tau, many = 4, 2, 5
    plan = parity.parity_plan([name], tau, rounds, metrics, clients_per_step=many)
    simulated = parity.simulate(plan, tmp_path / "run")[name]
    deployed = parity.deploy(plan, tmp_path / "learners", task_of(plan))
    found = parity.compare(name, tau, simulated, deployed)
    assert found.used < 1.0, found
    assert found.prefix_units < many * rounds * tau + 2.0 + found.noise_units, found
    assert found.largest_units > 1_000 * found.prefix_units, found


@pytest.mark.parametrize("name", ["buffered", "tree"])
def test_telemetry_beside_gradients_is_the_simulations_too(name, tmp_path):
    """Telemetry's coordinates of every release, and models that do not notice them."""
    metrics, rounds, tau = ("accuracy", "clipped", "present"), 5, 3
    plan = parity.parity_plan([name], tau, rounds, metrics)
    simulated = parity.simulate(plan, tmp_path / "run")[name]
    assert simulated.releases.shape == (rounds, parity.LEARNERS, parity.DIM + 3)
    deployed = parity.deploy(plan, tmp_path / "learners", task_of(plan))
    found = parity.compare(name, tau, simulated, deployed)
    assert found.used < 1.0, found
    told = np.diff(deployed.prefixes[:, :, parity.DIM :], axis=0, prepend=0.0)
    apart = told - tau * simulated.releases[:, :, parity.DIM :]
    # One client counted otherwise would be 0.3 clip norms: far more than rounding.
    assert np.abs(apart).max() < 1e-3 * 0.3 * parity.CLIP_NORM
    free = told - np.add.reduceat(deployed.noise[:, :, parity.DIM :], range(0, 15, tau), axis=0)
    right = free[:, :, 0] / (0.3 * parity.CLIP_NORM) + tau / 2
    assert np.allclose(right, np.rint(right), atol=1e-3)  # whole clients, no more than there are
    assert 0 <= right.min() < right.max() <= tau + 1e-3


def words_of(row: Row, dim: int) -> np.ndarray:
    """The radius word behind each coordinate, read from the keystream itself, tile by tile."""
    stream, words = row.open(), []
    for first in range(0, dim, TILE):
        pairs = (min(TILE, dim - first) + 1) // 2
        tile = np.frombuffer(stream.update(bytes(tile_bytes(pairs)))[: 4 * pairs], "<u4")
        words.append(np.concatenate([tile, tile])[: min(TILE, dim - first)])
    return np.concatenate(words)


@pytest.mark.parametrize("dim", [1, 2, 7, TILE - 1, 2 * TILE + 5])
def test_a_learner_and_the_simulation_draw_the_same_normals_to_float32_precision(dim):
    """All but those whose radius has its last bits elsewhere: u within 2^-15 of 0 or 1."""
    for step in range(3):
        row = Row(NoiseKey.from_seed(77).secret, step)
        coarse = np.empty(dim, np.float32)
        fill_normals(row.open(), coarse)
        fine = fine_row(row, dim)
        words = words_of(row, dim).astype(np.int64)
        near = np.minimum(words, 2**32 - 1 - words) < 2**17
        assert near.mean() < 3e-4 or dim < 1000
        apart, words = np.abs(coarse - fine)[~near], words[~near]
        # Float32 holds a word to within 128, and a byte of the simulation's own adds as much.
        u_apart = 256.0 / words
        radius = np.sqrt(-2.0 * np.log((words + 0.5) * 2.0**-32))
        assert (apart < u_apart / radius + 6e-7 * (1.0 + radius)).all()
        assert np.sqrt(np.mean(apart**2)) < 1e-6


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_a_learners_noise_prefix_is_the_streams_to_float32_rounding(name):
    """The same program, the same key, float64 and float32; cells are to half a unit exact.

    Most of 2e-5 is the last byte of a float32 draw's radius, which is not among a learner's bits.
    """
    T, dim, std = 40, 300, 1.7
    mechanism = VARIANTS[name](T).with_block_length(1)
    grid = grid_for(1.0, std)
    noise = GridNoise(mechanism.program, std=std, grid=grid, dim=dim)
    stream = mechanism.noise(std=std, dim=dim, seed=5)
    secret = NoiseKey.from_seed(5).secret
    sums = np.zeros(dim)
    size = np.sqrt(mechanism.row_norms_squared())
    for step in range(T):
        noise.step(Row(secret, step))
        sums += stream.step()
        apart = np.abs(noise.cells * grid.step - sums)
        assert apart.max() < 0.5 * grid.step + 2e-5 * std * size[step], step
        if step == 0:
            assert noise.cells.std() * grid.step > 0.1 * std  # there is something to compare


class SlightlyMoreNoise(parity.GivenNoise):
    class Rounds(parity.GivenRounds):
        def row(self, step, secret):
            return parity.Given(super().row(step, secret).draws * 1.001)


class AnotherRow(parity.GivenNoise):
    """Mixes up the last two rows."""

    class Rounds(parity.GivenRounds):
        def row(self, step, secret):
            last = self.terms.rounds * self.terms.local_steps - 1
            return super().row({last: last - 1, last - 1: last}.get(step, step), secret)


class AnotherModel(parity.GivenNoise):
    """Takes its steps from a model that is slightly off."""

    class Rounds(parity.GivenRounds):
        def pin(self, model, digest):
            super().pin(model + np.float32(1e-3), digest)


class ForgetsClients(parity.GivenNoise):
    """Looks at the first client of a round only."""

    def observe_many(self, clients):
        (first, *others) = clients
        nothing = Sample(np.zeros(parity.DIM), 1.0)
        return super().observe_many([first, *((tag, nothing) for tag, _ in others)])


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    plan = parity.parity_plan(["buffered"], 3, 4)
    return plan, parity.simulate(plan, tmp_path_factory.mktemp("parity") / "run")["buffered"]


@pytest.mark.parametrize("broken", [SlightlyMoreNoise, AnotherRow, AnotherModel, ForgetsClients, None])
def test_the_study_finds_a_broken_learner(broken, simulated, tmp_path):
    plan, expected = simulated
    right = parity.deploy(plan, tmp_path / "right", task_of(plan))
    made = right if broken is None else parity.deploy(plan, tmp_path, task_of(plan), broken)
    # The allowance is that of the learner as it should be: a broken one brings no excuse along.
    found = parity.compare("buffered", 3, expected, made, honest=right)
    assert (found.used < 1.0) == (broken is None)
