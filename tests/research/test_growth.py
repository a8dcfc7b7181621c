"""(α, μ) of asm-noncvx: found by brute force on waves, and refused outside the corollary."""

import numpy as np
import pytest

from tests.research.problems import some_constants
from veilstream.errors import InputError
from veilstream.research import theory
from veilstream.research.theory import Constants

GRID = np.concatenate([np.linspace(-30, 30, 600_001), np.geomspace(1e-6, 1, 1000)])
GRID = GRID[GRID != 0]


def wave(a):
    """h(u) = u² + a·sin²u, optimum 0, h'' = 2 + 2a·cos 2u."""
    return GRID**2 + a * np.sin(GRID) ** 2, 2 * GRID + a * np.sin(2 * GRID)


def largest_mu(a, alpha):
    """The best μ of asm-noncvx by brute force: α·h - h'·u + μ/2·u² <= 0 everywhere."""
    h, slope = wave(a)
    return (2 * (slope * GRID - alpha * h) / GRID**2).min()


@pytest.mark.parametrize("a", [1.02, 1.05, 1.2, 1.6])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.9])
def test_growth_constants_hold_on_nonconvex_waves(a, share):
    h, slope = wave(a)
    L, weak = 2 + 2 * a, 2 * a - 2
    assert weak > 0
    measured = {
        "quadratic_growth": (2 * h / GRID**2).min(),
        "polyak_lojasiewicz": (slope**2 / (2 * h)).min(),
        "error_bound": (slope / GRID).min(),
    }
    tried = 0
    for name, constant in measured.items():
        c = {"quadratic_growth": constant, "polyak_lojasiewicz": constant / 2, "error_bound": constant**2 / (2 * L)}[
            name
        ]
        if c <= weak:
            continue
        tried += 1
        alpha = share * (c - weak) / L
        known = {name: constant, "weak_convexity": weak, "smoothness": L, "alpha": alpha}
        ours = theory.assumption_constants(**known)
        printed = theory.assumption_constants(**known, as_printed=True)
        assert ours == (alpha, pytest.approx(c - weak - alpha * L))
        assert printed == (alpha, pytest.approx(ours.mu / 2))
        assert ours.mu <= largest_mu(a, alpha)
        Constants(**(vars(some_constants()) | {"smoothness": L} | ours._asdict()))
    assert tried >= (3 if a < 1.1 else 1)


def test_a_wave_outside_the_corollary_can_still_satisfy_the_assumption():
    # h = u² + 3sin²u: quadratic growth 2, weak convexity 4, yet (α, μ) exist.
    with pytest.raises(InputError, match=r"weak_convexity = 4\.0: expected < c = 2"):
        theory.assumption_constants(quadratic_growth=2.0, weak_convexity=4.0, smoothness=8.0, alpha=0.1)
    mu = largest_mu(3, 0.3)
    assert mu > 0
    some_constants(smoothness=8.0, alpha=0.3, mu=mu)


@pytest.mark.parametrize("curvature", [0.3, 1.0, 7.0])
def test_quasi_strong_convexity_is_tight_on_quadratics(curvature):
    alpha, mu = theory.quasi_strong_convexity(curvature)
    h, slope = curvature / 2 * GRID**2, curvature * GRID
    gap = alpha * h - slope * GRID + mu / 2 * GRID**2
    assert abs(gap).max() < 1e-10 * curvature * GRID.max() ** 2
    assert (alpha * h - slope * GRID + 1.01 * mu / 2 * GRID**2 > 0).all()


def test_growth_constants_outside_the_corollary_are_refused():
    inside = {"quadratic_growth": 1.0, "smoothness": 4.0, "alpha": 0.1}
    assert theory.assumption_constants(**inside) == (0.1, pytest.approx(0.6))
    refused = {
        "conditions": ({"quadratic_growth": None}, {"error_bound": 1.0}),
        "quadratic_growth": ({"quadratic_growth": -1.0}, {"quadratic_growth": 4.1}),
        "weak_convexity": ({"weak_convexity": 1.0}, {"weak_convexity": -0.1}),
        "alpha": ({"alpha": 0.25}, {"alpha": 0.0}),
        "smoothness": ({"smoothness": 0.0},),
    }
    for field, changed in refused.items():
        for changes in changed:
            with pytest.raises(InputError) as caught:
                theory.assumption_constants(**(inside | changes))
            assert caught.value.field == field
