"""Errors against values from elsewhere: closed forms, brute force, other libraries."""

from __future__ import annotations

import math

import numpy as np
import pytest

import veilstream.mechanisms as m
from tests.support.catalogue import prefix_sums

HORIZONS = (1, 2, 3, 4, 5, 13, 64, 100, 1000, 1023, 1024, 1025)


def square_root_coefficients(T: int) -> np.ndarray:
    """h(j) of eq-exmp-iii, from binomials: h(j) = C(2j, j) / 4^j."""
    return np.array(
        [
            float(math.comb(2 * j, j) * 2 ** (64 - 2 * j)) / 2.0**64
            if j < 33
            else math.exp(math.lgamma(j + 0.5) - math.lgamma(j + 1)) / math.sqrt(math.pi)
            for j in range(T)
        ]
    )


def least_squares_error(C: np.ndarray) -> np.ndarray:
    """Squared row norms of A·C⁺ by NumPy's pseudo-inverse."""
    A = prefix_sums(C.shape[1])
    return ((A @ np.linalg.pinv(C)) ** 2).sum(axis=1)


def all_nodes(T: int) -> np.ndarray:
    """The padded tree, node by node, restricted to the first T leaves."""
    P = 1 << (T - 1).bit_length()
    rows = []
    size = 1
    while size <= P:
        for start in range(0, P, size):
            row = np.zeros(P)
            row[start : start + size] = 1
            rows.append(row[:T])
        size *= 2
    C = np.array(rows)
    return C[C.any(axis=1)]


@pytest.mark.parametrize("T", HORIZONS)
def test_independent_noise_has_its_closed_form(T):
    f = m.independent(T)
    assert f.sensitivity() == 1
    assert f.max_error() == pytest.approx(T, rel=1e-12)
    assert f.mean_error() == pytest.approx((T + 1) / 2, rel=1e-12)


@pytest.mark.parametrize("T", HORIZONS)
def test_tree_counts_binary_digits(T):
    f = m.tree(T)
    digits = np.array([bin(step).count("1") for step in range(1, T + 1)])
    assert f.sensitivity() ** 2 == pytest.approx(math.floor(math.log2(T)) + 1, rel=1e-12)
    np.testing.assert_allclose(f.row_norms_squared(), digits, rtol=1e-12)


def test_tree_of_the_paper():
    """The matrices of eq-bc at T = 4, without the nodes that no prefix uses."""
    f = m.tree(4)
    np.testing.assert_array_equal(f.strategy_matrix(), [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [1, 1, 1, 1]])
    np.testing.assert_array_equal(f.decoder_matrix(), [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]])


@pytest.mark.parametrize("T", HORIZONS)
def test_online_tree_has_honakers_variances(T):
    """A node of level v is estimated with variance 2^v / (2^(v+1) - 1)."""
    f = m.tree_online(T)
    variance = [sum(2.0**v / (2.0 ** (v + 1) - 1) for v in range(20) if step >> v & 1) for step in range(1, T + 1)]
    assert f.sensitivity() ** 2 == pytest.approx(math.floor(math.log2(T)) + 1, rel=1e-12)
    np.testing.assert_allclose(f.row_norms_squared(), variance, rtol=1e-6)
    assert f.released_sensitivity() <= f.sensitivity() * (1 + 1e-7)


@pytest.mark.parametrize("T", [2, 3, 13, 64])
def test_online_tree_released_law_is_less_sensitive_than_published(T):
    """Least sensitivity that explains the noise law B·Bᵀ, by brute force."""
    f = m.tree_online(T)
    B = f.decoder_matrix()
    A = prefix_sums(T)
    needed = np.sqrt(np.diag(A.T @ np.linalg.solve(B @ B.T, A)).max())
    assert f.released_sensitivity() == pytest.approx(needed, rel=1e-6)
    assert needed < f.sensitivity()


@pytest.mark.parametrize("T", [1, 2, 3, 5, 8, 13, 64, 100])
def test_full_tree_is_the_pseudo_inverse(T):
    f = m.tree_full(T)
    C = all_nodes(T)
    assert f.sensitivity() == pytest.approx(np.linalg.norm(C, axis=0).max(), rel=1e-6)
    np.testing.assert_allclose(f.row_norms_squared(), least_squares_error(C), rtol=1e-6)


@pytest.mark.parametrize("T", [*HORIZONS, 4000])
def test_toeplitz_has_its_closed_form(T):
    f = m.toeplitz(T)
    norm = np.cumsum(square_root_coefficients(T) ** 2)
    assert f.sensitivity() ** 2 == pytest.approx(norm[-1], rel=1e-6)
    np.testing.assert_allclose(f.row_norms_squared(), norm, rtol=1e-6)


def test_toeplitz_matrix_is_the_square_root():
    from scipy.linalg import toeplitz

    C = toeplitz(square_root_coefficients(200), np.zeros(200))
    np.testing.assert_allclose(m.toeplitz(200).strategy_matrix(), C, atol=1e-6)
    np.testing.assert_allclose(m.toeplitz(200).decoder_matrix(), C, atol=1e-6)


@pytest.mark.parametrize("T", [4, 64, 1024])
def test_normalised_toeplitz_is_the_toeplitz_matrix_with_unit_columns(T):
    from scipy.linalg import solve_triangular, toeplitz

    C = toeplitz(square_root_coefficients(T), np.zeros(T))
    C /= np.linalg.norm(C, axis=0)
    B = solve_triangular(C.T, prefix_sums(T).T, lower=False).T
    f = m.toeplitz_normalised(T)
    np.testing.assert_allclose(f.row_norms_squared(), (B**2).sum(axis=1), rtol=1e-6)


def test_closed_bounds_of_the_paper_lie_below_the_truth():
    """PAPER-NOTES 1: eq-exmp-iii claims 3.569 at T = 4000; the norm is 3.7063."""
    claimed = 1 + math.log(4 * 4000 / 5) / math.pi
    assert claimed == pytest.approx(3.5690, abs=1e-4)
    assert m.toeplitz(4000).sensitivity() ** 2 == pytest.approx(3.7063, abs=1e-4)


# Computed by an independent implementation (DESIGN.md section 3, PAPER-NOTES 10, 14 and 15).
@pytest.mark.parametrize(
    ("name", "T", "largest", "mean"),
    [
        ("tree", 1024, 110, 55.0107),
        ("toeplitz", 1024, 10.7096, 9.6708),
        ("toeplitz_normalised", 1024, 9.4910, 8.9482),
        ("tree", 4, 6, 3.75),
        ("toeplitz", 4, 2.2150, 1.9083),
        ("toeplitz_normalised", 4, 1.8753, 1.7405),
    ],
)
def test_errors_of_an_independent_implementation(name, T, largest, mean):
    f = m.build(name, T)
    assert f.max_error() == pytest.approx(largest, abs=6e-5)
    assert f.mean_error() == pytest.approx(mean, abs=6e-5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("independent", 2002), ("tree", 59.26), ("tree_full", 14.04), ("toeplitz", 12.562), ("optimal", 11.442)],
)
def test_round_end_errors_of_an_independent_implementation(name, expected):
    digits = 0.5 * 10.0 ** -len(str(expected).partition(".")[2])
    assert m.build(name, 4000).round_error(4) == pytest.approx(expected, abs=1.01 * digits)


class TestBuffered:
    @pytest.mark.parametrize(("T", "buffers"), [(1000, 5), (10_000, 5), (1_000_000, 8)])
    def test_is_within_a_thousandth_of_the_square_root(self, T, buffers):
        f = m.buffered(T, buffers=buffers, normalise=False)
        j = np.arange(1, T)
        norm = 1 + (np.cumprod(1 - 1 / (2 * j)) ** 2).sum()
        assert f.max_error() <= 1.001 * norm**2

    def test_more_buffers_are_no_worse(self):
        errors = [m.buffered(2000, buffers=k, normalise=False).max_error() for k in (1, 2, 3, 4, 6)]
        assert errors == sorted(errors, reverse=True)

    def test_gradient_of_the_tuning_objective_is_right(self):
        from veilstream.mechanisms.buffered import _log_error, _Objective
        from veilstream.mechanisms.participation import ONCE

        rng = np.random.default_rng(3)
        error = _Objective.of(500, "max", None, ONCE)
        checked = 0
        for _ in range(50):
            k = int(rng.integers(1, 6))
            x = np.concatenate([rng.uniform(-6, 0.5, k), rng.uniform(-8, -3, k)])
            value, gradient = _log_error(x, error)
            if value >= 1e3:
                continue
            checked += 1
            for i in range(2 * k):
                step = 1e-5 * np.eye(2 * k)[i]
                slope = (_log_error(x + step, error)[0] - _log_error(x - step, error)[0]) / 2e-5
                assert gradient[i] == pytest.approx(slope, abs=1e-6, rel=1e-5)
        assert checked > 10

    def test_strategy_is_positive_and_decreasing(self):
        c = m.buffered(400, normalise=False).strategy_matrix()[:, 0]
        assert (c > 0).all()
        assert (np.diff(c) < 0).all()


class TestBanded:
    @pytest.mark.parametrize("bands", [1, 2, 5, 12])
    def test_strategy_has_its_bands(self, bands):
        C = m.banded(60, bands=bands).strategy_matrix()
        assert np.abs(np.tril(C, -bands)).max() < 1e-6
        assert bands == 1 or np.abs(np.diagonal(C, -(bands - 1))).min() > 1e-3

    @pytest.mark.parametrize("bands", [1, 2, 5, 12])
    def test_inverse_variant_has_a_banded_inverse(self, bands):
        N = m.banded(60, bands=bands, inverse=True).noising_matrix()
        assert not np.tril(N, -bands).any()

    def test_coefficients_are_a_local_optimum(self):
        from scipy.linalg import toeplitz

        T, bands = 50, 5
        best = m.banded(T, bands=bands, normalise=False)
        rng = np.random.default_rng(0)
        c = best.strategy_matrix()[:bands, 0]
        for _ in range(40):
            other = np.zeros(T)
            other[:bands] = c * (1 + 0.02 * rng.standard_normal(bands))
            C = toeplitz(other, np.zeros(T))
            B = prefix_sums(T) @ np.linalg.inv(C)
            assert (other**2).sum() * (B**2).sum() / T >= best.mean_error() * (1 - 1e-6)

    def test_more_bands_are_better_for_one_participation(self):
        errors = [m.banded(200, bands=b).mean_error() for b in (1, 2, 4, 8, 16, 64)]
        assert errors == sorted(errors, reverse=True)

    def test_inverse_tuned_for_repeats_is_better_at_them(self):
        part = (4, 32)
        tuned = m.banded(128, bands=8, inverse=True, participation=part)
        plain = m.banded(128, bands=8, inverse=True, normalise=False)
        assert tuned.mean_error(part) < plain.mean_error(part)


class TestJaxPrivacy:
    """Another library's matrices and errors; test-only."""

    @pytest.fixture(autouse=True)
    def _library(self):
        pytest.importorskip("jax_privacy")
        import jax

        with jax.enable_x64(True):
            yield

    def test_square_root_coefficients_agree(self):
        from jax_privacy.matrix_factorization import toeplitz

        theirs = np.asarray(toeplitz.optimal_max_error_strategy_coefs(300))
        np.testing.assert_allclose(m.toeplitz(300).strategy_matrix()[:, 0], theirs, atol=1e-6)

    def test_ours_is_no_worse_than_their_dense_optimum(self):
        from jax_privacy.matrix_factorization import dense

        C = np.asarray(dense.optimize(64, epochs=1), np.float64)
        B = prefix_sums(64) @ np.linalg.inv(C)
        theirs = (B**2).sum(axis=1).mean() * np.linalg.norm(C, axis=0).max() ** 2
        ours = m.optimal(64).mean_error()
        assert ours <= theirs * (1 + 1e-6)
        assert ours == pytest.approx(theirs, rel=1e-2)

    def test_buffered_is_as_good_as_theirs(self):
        from jax_privacy.matrix_factorization import buffered_toeplitz as blt

        theirs = blt.optimize(n=1000, min_buffers=3, max_buffers=3)
        loss = float(blt.max_loss(theirs, 1000))
        assert m.buffered(1000, buffers=3, normalise=False).max_error() <= loss * 1.001
