"""What every factorization must satisfy, whatever the horizon."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.catalogue import VARIANTS, prefix_sums
from veilstream.errors import HorizonExhausted, InputError
from veilstream.mechanisms import MECHANISMS
from veilstream.mechanisms.keystream import NoiseKey, open_row
from veilstream.mechanisms.normals import fill_normals

SEED = 7
HORIZONS = (1, 2, 3, 4, 5, 7, 8, 16, 17, 33, 100)
# Twelve of 1..300, drawn once: tests that share them solve each mechanism once.
horizons = st.sampled_from(np.random.default_rng(12).integers(1, 301, 12).tolist())
per_mechanism = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(params=sorted(VARIANTS))
def build(request):
    return partial(built, request.param)


@cache
def built(name: str, T: int):
    """Factorizations are values: one for all tests of a horizon."""
    return VARIANTS[name](T)


def draws(T: int, dim: int, seed: int = SEED) -> np.ndarray:
    """The fresh normals that a stream with this seed consumes, read row by row."""
    key = NoiseKey.from_seed(seed)
    Z = np.empty((T, dim), np.float32)
    for step in range(T):
        fill_normals(open_row(key, step), Z[step])
    return Z


def check_matrices(f) -> None:
    T = f.horizon
    B, C = f.decoder_matrix(), f.strategy_matrix()
    np.testing.assert_allclose(B @ C, prefix_sums(T), atol=1e-9)
    np.testing.assert_allclose(f.column_norms_squared(), (C**2).sum(axis=0), rtol=1e-9)
    # tree_online states the published float64 decoder; the program has it in float32.
    np.testing.assert_allclose(f.row_norms_squared(), (B**2).sum(axis=1), rtol=1e-6)
    assert f.sensitivity() == pytest.approx(np.linalg.norm(C, axis=0).max(), rel=1e-9)
    worst = (B**2).sum(axis=1)
    s2 = f.sensitivity() ** 2
    assert f.max_error() == pytest.approx(s2 * worst.max(), rel=1e-6)
    assert f.mean_error() == pytest.approx(s2 * worst.mean(), rel=1e-6)
    tau = min(3, T)
    assert f.round_error(tau) == pytest.approx(s2 * worst[tau - 1 :: tau].mean(), rel=1e-6)


def check_noise(f, dim: int = 5) -> None:
    T = f.horizon
    streamed = np.array(list(f.noise(std=1.5, dim=dim, seed=SEED)))
    expected = 1.5 * f.noising_matrix() @ draws(T, dim).astype(np.float64)
    assert streamed.dtype == np.float32
    assert streamed.shape == (T, dim)
    scale = 1.5 * np.sqrt((f.noising_matrix() ** 2).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(streamed / scale, expected / scale, atol=5e-6)


@pytest.mark.parametrize("T", HORIZONS)
def test_factors_multiply_to_prefix_sums(build, T):
    check_matrices(build(T))


@per_mechanism
@given(T=horizons)
def test_factors_multiply_to_prefix_sums_at_random_horizons(build, T):
    check_matrices(build(T))


@pytest.mark.parametrize("T", HORIZONS)
def test_streamed_increments_equal_dense_product(build, T):
    check_noise(build(T))


@per_mechanism
@given(T=horizons, length=st.integers(1, 80))
def test_block_length_changes_nothing_but_rounding(build, T, length):
    f = build(T)
    g = f.with_block_length(length)
    assert g.program.block_length == min(length, T)
    check_matrices(g)
    check_noise(g)
    assert g.sensitivity() == pytest.approx(f.sensitivity(), rel=1e-6)
    ours = np.array(list(f.noise(dim=3, seed=1)))
    theirs = np.array(list(g.noise(dim=3, seed=1)))
    np.testing.assert_allclose(ours, theirs, atol=2e-5 * np.abs(ours).max())


@pytest.mark.parametrize("T", [1, 5, 40])
def test_stepping_past_the_horizon_raises(build, T):
    stream = build(T).noise(dim=2, seed=0)
    for _ in range(T):
        stream.step()
    assert stream.position == T
    for _ in range(2):
        with pytest.raises(HorizonExhausted, match=f"horizon of {T} steps"):
            stream.step()
        with pytest.raises(HorizonExhausted):
            stream.next_block()
    assert list(stream) == []


def test_blocks_and_steps_can_be_mixed(build):
    f = build(37)
    one_by_one = np.array(list(f.noise(dim=4, seed=3)))
    stream = f.noise(dim=4, seed=3)
    parts = [stream.step()[None], stream.take(5), stream.take(0)]
    while stream.position < 30:
        parts.append(stream.next_block().copy())
    with pytest.raises(HorizonExhausted):
        stream.take(38 - stream.position)
    parts.append(stream.take(37 - stream.position))
    np.testing.assert_array_equal(np.concatenate(parts), one_by_one)


def test_seeds_reproduce_and_differ(build):
    f = build(20)
    first = np.array(list(f.noise(dim=6, seed=1)))
    np.testing.assert_array_equal(first, list(f.noise(dim=6, seed=1)))
    assert not np.isclose(first, list(f.noise(dim=6, seed=2))).any()


def test_unseeded_noise_never_repeats(build):
    f = build(9)
    one, two = f.noise(dim=8), f.noise(dim=8)
    assert not np.isclose(one.step(), two.step()).any()


@pytest.mark.parametrize("T", [0, -3, 2.5, "8", True, None, float("nan")])
@pytest.mark.parametrize("name", MECHANISMS)
def test_bad_horizon_is_refused(name, T):
    with pytest.raises(InputError, match=r"horizon = .*: expected an integer >= 1 \(.*\)"):
        MECHANISMS[name](T)


def test_columns_of_normalised_mechanisms_have_norm_one():
    for name in ("optimal", "toeplitz_normalised", "buffered", "banded", "banded_inverse"):
        norms = VARIANTS[name](200).column_norms_squared()
        assert norms == pytest.approx(np.ones(200), rel=1e-6), name


def test_empirical_covariance_of_prefix_sums_agrees(build):
    """False alarm: 210 entries x 14 mechanisms at 6 standard errors, below 1e-5 in all."""
    T, dim = 20, 100_000
    f = build(T)
    sums = np.cumsum(np.array(list(f.noise(dim=dim, seed=11)), np.float64), axis=0)
    B = f.decoder_matrix()
    expected = B @ B.T
    seen = sums @ sums.T / dim
    spread = np.sqrt((np.outer(expected.diagonal(), expected.diagonal()) + expected**2) / dim)
    assert (np.abs(seen - expected) / spread).max() < 6.0
