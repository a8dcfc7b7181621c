"""Curves as pages carry them."""

from __future__ import annotations

import base64
import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from veilstream.reports.charts import pack, thinned, unpack, window_means

NUMBERS = st.floats(-1e6, 1e6) | st.just(float("nan"))


@given(arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 30)), elements=NUMBERS))
def test_every_number_comes_back_to_within_a_step_of_the_scale(values):
    packed = json.loads(json.dumps(pack(values), allow_nan=False))
    back = unpack(packed)
    np.testing.assert_array_equal(np.isnan(back), np.isnan(values))
    there = values[np.isfinite(values)]
    if not there.size:
        return
    if packed["log"]:
        step = (np.log(there.max()) - np.log(there.min())) / 65534
        np.testing.assert_allclose(np.log(back[np.isfinite(values)]), np.log(there), atol=step)
    else:
        span = there.max() - there.min()
        np.testing.assert_allclose(back[np.isfinite(values)], there, atol=span / 65534 + 1e-9 * abs(there).max())


def test_the_code_is_what_the_pages_script_reads():
    """Little-endian sixteen bits; 0 is the least, 65534 the greatest, 65535 no number."""
    packed = pack(np.array([[0.0, 1.0, np.nan, 0.5]]))
    codes = struct.unpack("<4H", base64.b64decode(packed["codes"]))
    assert codes == (0, 65534, 65535, 32767)
    assert (packed["low"], packed["span"], packed["log"], packed["shape"]) == (0, 1, False, [1, 4])


def test_wide_ranges_keep_their_small_numbers():
    values = np.array([[1e-6, 1.0, 1e6]])
    np.testing.assert_allclose(unpack(pack(values)), values, rtol=1e-3)


def test_infinite_becomes_none():
    assert np.isnan(unpack(pack(np.array([1.0, np.inf, -np.inf])))[1:]).all()


@given(st.integers(1, 5000), st.integers(2, 600))
def test_thinning_keeps_both_ends(points, most):
    kept = thinned(points, most)
    assert kept[0] == 0
    assert kept[-1] == points - 1
    assert len(kept) == min(points, most)


def test_windows_are_means_of_what_is_there():
    ends, means = window_means(np.array([[1.0, 3.0, np.nan, 5.0, np.nan, np.nan]]), 3)
    assert ends.tolist() == [2, 4, 6]
    assert means[0, :2].tolist() == [2.0, 5.0]
    assert np.isnan(means[0, 2])
    _, all_ = window_means(np.arange(7.0)[None], 100)
    assert all_.tolist() == [pytest.approx(np.arange(7.0).tolist())]
