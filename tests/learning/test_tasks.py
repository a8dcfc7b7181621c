"""Losses, gradients and the traced clipper."""

from __future__ import annotations

from fractions import Fraction

import jax
import numpy as np
import pytest

from veilstream.learning.tasks import LeastSquares, Logistic, Ripple, Sample
from veilstream.privacy import clip
from veilstream.privacy.traced_clipping import clip_traced

TASKS = [Logistic(5), Logistic(5, ridge=0.3), LeastSquares(5), LeastSquares(5, 0.2), Ripple(5)]


@pytest.mark.parametrize("task", TASKS)
def test_gradient_is_the_slope_of_the_loss(task):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        for _ in range(5):
            x = rng.standard_normal(5)
            sample = Sample(rng.standard_normal(5), rng.choice([-1.0, 1.0]))
            gradient = np.asarray(task.gradient(x, sample))
            for i in range(5):
                step = 1e-6 * np.eye(5)[i]
                slope = (task.loss(x + step, sample) - task.loss(x - step, sample)) / 2e-6
                assert gradient[i] == pytest.approx(float(slope), abs=1e-7)


@pytest.mark.parametrize("task", TASKS)
def test_start_is_public_and_zero(task):
    np.testing.assert_array_equal(task.init(), np.zeros(5))


def test_ripple_satisfies_the_assumption_with_its_constants():
    """u·h' >= alpha·h + mu/2·u², on a grid finer than the function can turn in."""
    u = np.linspace(-40, 40, 2_000_001)
    h, slope = 0.5 * (u**2 + 3 * np.sin(u) ** 2), u + 1.5 * np.sin(2 * u)
    assert (u * slope - Ripple.alpha * h - 0.5 * Ripple.mu * u**2).min() >= 0
    curvature = 1 + 3 * np.cos(2 * u)
    assert curvature.max() <= Ripple.smoothness
    assert curvature.min() < 0  # not convex


def within(vector, bound) -> bool:
    return sum(Fraction(float(v)) ** 2 for v in vector) <= Fraction(float(bound)) ** 2


@pytest.mark.parametrize("dim", [1, 2, 100, 257, 70_000])
@pytest.mark.parametrize("bound", [1.0, 0.37, 12.5])
def test_traced_clipping_never_exceeds_the_bound(dim, bound):
    rng = np.random.default_rng(dim)
    for scale in (1e-3, 0.9999, 1.0, 1.0001, 1e6, 1e18):
        g = rng.standard_normal(dim)
        g = (g * (scale * bound / np.linalg.norm(g))).astype(np.float32)
        clipped = np.asarray(jax.jit(clip_traced)(g, np.float32(bound)))
        assert within(clipped, np.float32(bound))
        np.testing.assert_allclose(clipped, clip(g, bound), rtol=2e-4, atol=1e-7 * bound)


@pytest.mark.parametrize("bound", [1e-15, 1e-3, 1.0, 1e6, 1e15])
def test_traced_clipping_holds_for_extreme_numbers(bound):
    """Huge, subnormal and mixed entries, compiled and not; directions of large ones are kept."""
    rng = np.random.default_rng(7)
    exponents = np.concatenate([rng.uniform(-44, 38.5, 200), np.full(20, 38.5), np.full(20, -44)])
    vectors = [np.array([1e38, 1, 1e-30]), np.full(100, 1e38), np.array([3.4e38, -3.4e38])]
    vectors += [np.array([1e-45, 0, 1e-40]), np.zeros(3), np.array([8.6e37]), np.array([1e20, 1e-20])]
    for _ in range(40):
        size = int(rng.integers(1, 12))
        vectors.append(rng.choice([-1, 1], size) * 10 ** rng.choice(exponents, size))
    compiled = jax.jit(clip_traced)
    for vector in vectors:
        g = vector.astype(np.float32)
        for clipper in (clip_traced, compiled):
            clipped = np.asarray(clipper(g, np.float32(bound)))
            assert within(clipped, np.float32(bound)), (g, clipped)
            if np.isfinite(g).all() and np.linalg.norm(g.astype(float)) > 2 * bound:
                assert np.linalg.norm(clipped.astype(float)) > 0.99 * bound, (g, clipped)


def test_traced_clipping_is_total_and_leaves_small_vectors_alone():
    g = np.array([[0.1, 0.2], [np.nan, 1.0], [np.inf, 0.0], [0.0, 0.0]], np.float32)
    clipped = np.asarray(clip_traced(g, 1.0))
    np.testing.assert_array_equal(clipped[0], g[0])
    assert not clipped[1:].any()


@pytest.mark.parametrize("gamma", [1e-3, 0.1, 2.0])
def test_traced_normalising_is_the_exact_clippers_and_never_exceeds_one(gamma):
    rng = np.random.default_rng(11)
    compiled = jax.jit(lambda g: clip_traced(g, np.float32(1.0), gamma))
    for size in (1, 7, 300, 70_000):
        for length in (1e-12, 1e-3, 0.1, 1.0, 1e6, 1e25, 1e37):
            g = rng.standard_normal(size)
            g = (g * (length / np.linalg.norm(g))).astype(np.float32)
            clipped = np.asarray(compiled(g))
            assert within(clipped, 1.0)
            np.testing.assert_allclose(clipped, clip(g, 1.0, gamma=gamma), rtol=2e-4, atol=1e-7)
    bad = np.array([[np.nan, 1.0], [np.inf, 0.0], [0.0, 0.0]], np.float32)
    assert not np.asarray(compiled(bad)).any()
