"""Variances of sums over windows, against the dense matrix of each mechanism."""

from __future__ import annotations

import numpy as np
import pytest

import veilstream as vs
from tests.support.catalogue import VARIANTS
from veilstream.errors import InputError
from veilstream.mechanisms import stationary
from veilstream.mechanisms.window_noise import WindowNoise


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_a_windows_variance_is_that_of_the_rows_of_b(name):
    T = 24
    mechanism = VARIANTS[name](T)
    decoder = mechanism.with_block_length(1).decoder_matrix()
    rows = np.vstack([np.zeros(decoder.shape[1]), decoder])
    noise = WindowNoise(mechanism)
    for first, end in [(0, 1), (0, T), (5, 5), (23, 24), (16, 20), (3, 17), (3, 9)]:
        expected = ((rows[end] - rows[first]) ** 2).sum()
        assert noise.variance(first, end) == pytest.approx(expected, rel=1e-6, abs=1e-12)
        assert noise.variance(first, end) == noise.variance(first, end)


def test_noise_without_an_end_has_windows_too():
    """The first steps of it are a mechanism with an end, whose rows are known."""
    noise = WindowNoise(stationary(0.95))
    rows = stationary(0.95).until(40).with_block_length(1).decoder_matrix()
    assert noise.variance(8, 40) == pytest.approx(((rows[39] - rows[7]) ** 2).sum(), rel=1e-6)


@pytest.mark.parametrize("steps", [(-1, 2), (3, 2), (0, 9)])
def test_steps_that_are_not_there_are_refused(steps):
    with pytest.raises(InputError, match="steps"):
        WindowNoise(vs.mechanisms.tree(8)).variance(*steps)
