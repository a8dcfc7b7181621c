"""The JAX path runs the same blocks."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.catalogue import VARIANTS
from veilstream.errors import HorizonExhausted
from veilstream.mechanisms.jax_noise import JaxNoise

jax = pytest.importorskip("jax")


@pytest.mark.parametrize("name", sorted(VARIANTS))
@pytest.mark.parametrize("length", [1, 7, 16])
def test_increments_equal_dense_product_of_the_same_draws(name, length):
    f = VARIANTS[name](37).with_block_length(length)
    noise = JaxNoise(f.program)
    key = jax.random.key(3)
    out = np.asarray(noise.all_increments(key, dim=4, std=2.0))
    draws = np.concatenate([noise.draws(key, b, 4) for b in range(f.program.blocks)])[:37]
    expected = 2.0 * f.noising_matrix() @ draws
    np.testing.assert_allclose(out, expected, atol=2e-5 * np.abs(expected).max())


def test_draws_do_not_depend_on_the_blocking():
    f = VARIANTS["toeplitz"](48)
    key = jax.random.key(0)
    one = JaxNoise(f.with_block_length(6).program).all_increments(key, 5)
    two = JaxNoise(f.with_block_length(16).program).all_increments(key, 5)
    np.testing.assert_allclose(one, two, atol=1e-5)


def test_blocks_past_the_horizon_are_refused_or_nan():
    noise = JaxNoise(VARIANTS["tree"](20).program)
    state = noise.initial_state(3)
    key = jax.random.key(0)
    with pytest.raises(HorizonExhausted):
        noise.block(key, state, noise.program.blocks, 1.0)
    _, traced = jax.jit(lambda b: noise.block(key, state, b, 1.0))(noise.program.blocks)
    assert np.isnan(traced).all()


def test_is_marked_for_simulation_only():
    assert JaxNoise.simulation_only
    assert "Simulation only" in __import__("veilstream.mechanisms.jax_noise").mechanisms.jax_noise.__doc__
