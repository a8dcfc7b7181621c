"""A mechanism of one's own: from a matrix, and through the registry."""

from __future__ import annotations

import numpy as np
import pytest

import veilstream as vs
import veilstream.mechanisms as m
from tests.conformance.test_factorizations import check_matrices, check_noise
from tests.support.catalogue import VARIANTS
from veilstream.errors import InputError, UnknownName


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_factorization_from_a_matrix_is_the_same_mechanism(name):
    f = VARIANTS[name](45)
    C = f.strategy_matrix()
    if C.shape[0] != C.shape[1]:
        pytest.skip("not square")
    g = m.from_strategy_matrix("copy", C)
    check_matrices(g)
    check_noise(g)
    assert g.sensitivity() == pytest.approx(f.sensitivity(), rel=1e-6)
    assert g.mean_error() == pytest.approx(f.mean_error(), rel=1e-6)


def test_arbitrary_matrix_needs_many_states_and_works():
    rng = np.random.default_rng(1)
    C = np.tril(rng.standard_normal((24, 24)) * 0.2) + np.eye(24)
    f = m.from_strategy_matrix("random", C)
    np.testing.assert_allclose(f.strategy_matrix(), C, atol=1e-5)
    check_noise(f)
    std, guarantee = vs.calibrate(vs.Budget(1.0, 1e-6), f, clip_norm=1.0)
    assert guarantee.mechanism == "random"
    assert std > 0


@pytest.mark.parametrize(
    "C",
    [
        np.ones((2, 3)),
        np.ones((2, 2)),
        np.array([[1.0, 0.0], [1.0, 0.0]]),
        np.array([[np.nan, 0.0], [1.0, 1.0]]),
        np.zeros((0, 0)),
    ],
)
def test_unsuitable_matrices_are_refused(C):
    with pytest.raises(InputError, match="C = "):
        m.from_strategy_matrix("bad", C)


def test_unknown_mechanism_suggests_the_nearest():
    with pytest.raises(UnknownName, match="did you mean 'toeplitz'") as refusal:
        m.build("toplitz", 8)
    assert "independent" in str(refusal.value)


def test_dense_matrices_are_refused_for_long_horizons():
    f = m.tree(10_000)
    assert f.sensitivity() ** 2 == pytest.approx(14)
    for matrix in (f.strategy_matrix, f.decoder_matrix, f.noising_matrix):
        with pytest.raises(InputError, match="<= 8192"):
            matrix()


@pytest.mark.parametrize(
    "bad", [{"std": 0}, {"std": float("nan")}, {"std": 1e-20}, {"std": 1e16}, {"dim": 0}, {"dim": 2.5}]
)
def test_bad_noise_arguments_are_refused(bad):
    with pytest.raises(InputError, match=next(iter(bad))):
        m.tree(4).noise(**({"dim": 3} | bad))


def test_block_length_must_be_positive():
    with pytest.raises(InputError, match="block_length"):
        m.tree(4).with_block_length(0).noise(dim=1)


def test_std_is_rounded_up_never_down():
    from veilstream.mechanisms.normals import round_up

    for std in (0.1, 1 / 3, 1.0, 2.89048, 1e-30, 3.4e5):
        assert float(round_up(std)) >= std
        assert float(round_up(std)) <= std * (1 + 2e-7)


@pytest.mark.parametrize("std", [1e-15, 0.37, 1.0, 5.57037, 1e15])
def test_std_scales_the_noise(std):
    f = m.tree(16)
    one = np.array(list(f.noise(std=1.0, dim=50, seed=4)))
    np.testing.assert_allclose(list(f.noise(std=std, dim=50, seed=4)), std * one, rtol=2e-6, atol=1e-6 * std)


def test_memory_is_state_plus_block_plus_three_vectors():
    import tracemalloc

    dim = 61_482
    for name in m.MECHANISMS:
        f = m.build(name, 4000 if name == "toeplitz" else 200)
        program = f.program
        tracemalloc.start()
        stream = f.noise(dim=dim)
        for _ in range(2 * program.block_length):
            stream.step()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak <= 4 * dim * (program.state_size + program.block_length + 3), name


def test_interrupted_block_makes_the_stream_unusable_not_wrong():
    from veilstream.errors import PrivacyError

    stream = m.toeplitz(64).noise(dim=40_000, seed=1)
    stream.step()
    stream.take(31)
    calls = 0
    fill = stream._tiles.fill

    def interrupted(*arguments):
        nonlocal calls
        calls += 1
        if calls == 20:
            raise KeyboardInterrupt
        fill(*arguments)

    stream._tiles.fill = interrupted
    with pytest.raises(KeyboardInterrupt):
        stream.step()
    stream._tiles.fill = fill
    for again in (stream.step, stream.next_block, lambda: next(stream)):
        with pytest.raises(PrivacyError, match="interrupted half-way"):
            again()


def test_nothing_that_the_guarantee_rests_on_can_be_written_to():
    f = m.toeplitz_normalised(32)
    for array in (f.column_norms_squared(), f.row_norms_squared(), *f.program.matrices, f.program.row_scale):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


@pytest.mark.parametrize("C", [1e-40 * np.eye(3), 1e46 * np.eye(3), np.eye(90) - 3 * np.eye(90, k=-1)])
def test_matrices_that_float32_cannot_run_are_refused(C):
    with pytest.raises(InputError, match="mechanism"):
        vs.calibrate(vs.Budget(1.0, 1e-6), m.from_strategy_matrix("extreme", C), 1.0)


def test_odd_names_and_objects_are_refused_clearly():
    with pytest.raises(UnknownName, match="mechanism"):
        m.build(None, 8)
    with pytest.raises(UnknownName, match="mechanism"):
        m.build(["tree"], 8)
    with pytest.raises(InputError, match="factorization"):
        vs.calibrate(vs.Budget(1.0, 1e-6), 100, 1.0)
    with pytest.raises(InputError, match="horizon"):
        m.Factorization("mine", 0, m.tree(4).steps)


def test_numpy_integers_are_integers():
    np.testing.assert_array_equal(
        list(m.tree(4).noise(dim=np.int64(3), seed=np.int64(3))), list(m.tree(4).noise(dim=3, seed=3))
    )
    part = m.Participation(np.int8(20), np.int8(50))
    assert type(part.times) is int
    m.tree(2000).sensitivity(part)
