"""Clipping: exact, total, vectorised. Norms are checked in rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from veilstream.errors import InputError
from veilstream.privacy import clip

BOUNDS = (1.0, 0.1, 1 / 3, math.pi, 1e-30, 1e-45, 1e-150, 1e30, 1e300)


def within(vector: np.ndarray, bound: float) -> bool:
    """Whether ‖vector‖ <= bound, exactly."""
    return sum(Fraction(float(x)) ** 2 for x in vector) <= Fraction(bound) ** 2


def check_norms(data, dtype, bound, gamma=None):
    width = 32 if dtype is np.float32 else 64
    shape = hnp.array_shapes(min_dims=1, max_dims=2, max_side=40)
    elements = st.floats(width=width, allow_nan=True, allow_infinity=True, allow_subnormal=True)
    raw = data.draw(hnp.arrays(dtype, shape, elements=elements))
    clipped = clip(raw, bound, gamma=gamma)
    assert clipped.dtype == raw.dtype
    assert clipped.shape == raw.shape
    for before, after in zip(np.atleast_2d(raw), np.atleast_2d(clipped), strict=True):
        assert within(after, bound)
        if not np.isfinite(before).all():
            assert not after.any()


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    data=st.data(),
    dtype=st.sampled_from([np.float32, np.float64]),
    bound=st.one_of(st.sampled_from(BOUNDS), st.floats(1e-12, 1e12)),
)
def test_norm_never_exceeds_the_bound_not_even_by_one_ulp(data, dtype, bound):
    check_norms(data, dtype, bound)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    data=st.data(),
    dtype=st.sampled_from([np.float32, np.float64]),
    gamma=st.sampled_from([1e-300, 1e-30, 1e-9, 0.1, 1.0, 1e30]),
)
def test_normalised_gradients_never_exceed_the_bound(data, dtype, gamma):
    check_norms(data, dtype, 1.0, gamma)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bound", [1.0, 0.7, 1 / 3, 123.456])
def test_random_vectors_at_many_scales_and_sizes(dtype, bound):
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 10, 1000, 61_482):
        for scale in (1e-3, 0.999999, 1.0, 1.000001, 1e3, 1e30):
            g = rng.standard_normal(size)
            g = (g * (scale * bound / np.linalg.norm(g))).astype(dtype)
            assert within(clip(g, bound), bound)


def test_memory_order_does_not_matter():
    rng = np.random.default_rng(4)
    g = np.asfortranarray(rng.standard_normal((5, 100_000)))
    for row in clip(g, 1.0):
        assert within(row, 1.0)
    np.testing.assert_array_equal(clip(g, 1.0), clip(np.ascontiguousarray(g), 1.0))


def test_direction_and_length_are_kept():
    rng = np.random.default_rng(1)
    g = rng.standard_normal((50, 200)) * 1e200
    clipped = clip(g, 2.0)
    np.testing.assert_allclose(np.linalg.norm(clipped, axis=1), 2.0, rtol=1e-12)
    cosine = (clipped * (g / np.linalg.norm(g / 1e200, axis=1, keepdims=True) / 1e200)).sum(axis=1)
    np.testing.assert_allclose(cosine, 2.0, rtol=1e-12)


def test_vectors_inside_are_untouched_bit_for_bit():
    rng = np.random.default_rng(2)
    for dtype in (np.float32, np.float64):
        g = rng.standard_normal((30, 20)).astype(dtype)
        g /= 1.01 * np.linalg.norm(g, axis=1, keepdims=True)
        np.testing.assert_array_equal(clip(g, 1.0), g)
        np.testing.assert_array_equal(clip(np.zeros(5, dtype), 1.0), 0)


def test_each_vector_is_clipped_by_itself():
    g = np.array([[3.0, 4.0], [0.3, 0.4], [np.nan, 1.0], [np.inf, 0.0], [1e308, 1e308]])
    clipped = clip(g, 1.0)
    np.testing.assert_allclose(clipped[0], [0.6, 0.8], rtol=1e-12)
    np.testing.assert_array_equal(clipped[1], g[1])
    assert not clipped[2:4].any()
    np.testing.assert_allclose(clipped[4], math.sqrt(0.5), rtol=1e-12)


def test_input_is_not_changed():
    g = np.array([3.0, 4.0])
    clip(g, 1.0)
    np.testing.assert_array_equal(g, [3.0, 4.0])


def test_what_cannot_be_clipped_is_refused():
    for bound in (0, -1, 5e-324, math.nan, math.inf, "1"):
        with pytest.raises(InputError, match="clip_norm"):
            clip(np.ones(3), bound)
    for gamma in (0.0, -1.0, math.nan, math.inf, "0.1"):
        with pytest.raises(InputError, match="gamma"):
            clip(np.ones(3), 1.0, gamma=gamma)
    for bad in (np.ones(3, int), np.ones(3, complex), np.float64(1.0)):
        with pytest.raises(InputError, match="gradients"):
            clip(bad, 1.0)


def test_empty_vectors_pass():
    assert clip(np.zeros((4, 0)), 1.0).shape == (4, 0)


@pytest.mark.parametrize("length", [1e-30, 1e-3, 0.1, 1.0, 50.0, 1e30])
def test_normalising_is_the_formula_in_rational_arithmetic(length):
    """A vector of 3-4-12 proportions has the rational norm 13."""
    raw = np.array([3.0, -4.0, 12.0]) * length
    gamma = Fraction(1, 8)
    norm = sum(Fraction(x) ** 2 for x in raw)
    root = Fraction(math.isqrt(norm.numerator * 2**400), 1) / math.isqrt(norm.denominator * 2**400)
    expected = [float(Fraction(x) / (root + gamma)) for x in raw]
    np.testing.assert_allclose(clip(raw, 1.0, gamma=0.125), expected, rtol=1e-12)
