"""The grid against exact rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from veilstream.errors import InputError, PrivacyError
from veilstream.privacy.clipping import Clipped, clip
from veilstream.privacy.grid import Grid, grid_for

norms = st.floats(1e-6, 1e6)
stds = st.floats(1e-6, 1e6)
reals = st.floats(-1e6, 1e6)


@given(norms, stds, st.lists(reals, min_size=1, max_size=20))
def test_gradients_are_rounded_towards_zero_and_stay_within_the_norm(norm, std, values):
    grid = grid_for(norm, std)
    clipped = clip(np.array(values, np.float32), norm)
    units = grid.gradient(clipped)
    for unit, value in zip(units.tolist(), np.asarray(clipped).tolist(), strict=True):
        assert unit == math.trunc(Fraction(value) / Fraction(grid.step))
    assert sum(u * u for u in units.tolist()) <= (Fraction(norm) / Fraction(grid.step)) ** 2


@given(norms, stds)
def test_the_grid_is_as_fine_as_64_bit_sums_allow_and_coarser_than_the_gradients_digits(norm, std):
    grid = grid_for(norm, std)
    assert math.frexp(grid.step)[0] == 0.5
    assert grid.step >= 2.0**-18 * std
    assert grid.step > 2.0**-21 * norm
    finer = grid.step / 2
    assert finer < 2.0**-18 * std or finer <= 2.0**-21 * norm


def test_the_norm_is_checked_in_integers_to_the_last_unit():
    """3² + 4² = 5²: on the bound is allowed, one unit beyond is not; floats could not tell."""
    grid = Grid(2.0**-20, 5.0)
    exact = np.array([3.0, 4.0])
    assert grid.gradient(Clipped(exact)).tolist() == [3 << 20, 4 << 20]
    with pytest.raises(PrivacyError, match="exceeds its norm"):
        grid.gradient(Clipped(exact + np.array([0.0, 2.0**-20])))


@given(st.lists(st.integers(-(2**31) + 1, 2**31 - 1), min_size=1, max_size=30))
def test_the_integer_norm_is_that_of_big_integers(units):
    square = sum(u * u for u in units)
    grid = Grid(2.0**-31, 1.0)
    clipped = Clipped(np.array(units) * 2.0**-31)
    if square <= 2**62:
        assert grid.gradient(clipped).tolist() == units
    else:
        with pytest.raises(PrivacyError, match="exceeds its norm"):
            grid.gradient(clipped)


def test_what_is_not_finite_and_grids_that_cannot_be_are_refused():
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(PrivacyError, match="not finite"):
            Grid(2.0**-20, 1.0).gradient(Clipped(np.array([bad])))
    for step in (0.3, 2.0**-40, -1.0, 0.0):
        with pytest.raises(InputError, match="step"):
            Grid(step, 1.0)
