"""The example of docs/in-python.md, attacked: one coordinate tells nothing of the gradient.

Each coordinate of the client's gradient is +v or -v, and the attacker, who knows all else, guesses
which from that coordinate of one release alone. v is so small against the noise that the Gaussian
itself allows 0.2% more than a coin. What floats give away is another matter: with the example of
0.3.0 (float64 gradient + float32 noise) every guess is right, and the same attacks find that here.

The noise is the operating system's, so no seed can be fixed. An honest release falls outside 500 ±
50 of 1,000 with probability 0.0016 a draw; a test fails only if two draws in a row do: at most
4e-6 for each of the attacks. A release that gives the gradient away fails both.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

import veilstream as vs
from tests.support.pages import blocks_in

HORIZON, DIM, RELEASES = 1000, 100, 10
V = 0.0123456789  # on no grid; 0.004 of the noise's standard deviation
BUDGET = vs.Budget(epsilon=2.0, delta=1e-3)

Floats = NDArray[np.float64]
Guess = Callable[[Floats], NDArray[np.bool_]]


def is_float32(values: Floats) -> NDArray[np.bool_]:
    return values.astype(np.float32).astype(np.float64) == values


def trailing_zeros(values: Floats) -> NDArray[np.int64]:
    """Of the significand: how coarse a number is."""
    significand = (np.frexp(values)[0] * 2.0**53).astype(np.int64)
    lowest = significand & -significand
    return np.where(significand == 0, 99, np.log2(np.maximum(lowest, 1))).astype(np.int64)


def by_representability(released: Floats) -> NDArray[np.bool_]:
    """Noise is a float32: with the right gradient taken away, a float32 is left."""
    plus, minus = is_float32(released - V), is_float32(released + V)
    return np.where(plus == minus, released.view(np.uint64) % 2 == 0, plus)


def by_low_order_bits(released: Floats) -> NDArray[np.bool_]:
    """With the right gradient taken away, fewer low-order bits are left."""
    plus, minus = trailing_zeros(released - V), trailing_zeros(released + V)
    return np.where(plus == minus, released > 0, plus > minus)


def by_bits_of_the_rounded_gradient(released: Floats) -> NDArray[np.bool_]:
    """The same, for an attacker who knows that gradients are rounded to the release's own grid."""
    grid = 2.0 ** np.floor(np.log2(np.abs(np.diff(np.unique(released))).min()))
    rounded = np.trunc(V / grid) * grid
    plus, minus = trailing_zeros(released - rounded), trailing_zeros(released + rounded)
    return np.where(plus == minus, released > 0, plus > minus)


def by_likelihood(released: Floats) -> NDArray[np.bool_]:
    """The best that the Gaussian itself allows."""
    return released > 0


ATTACKS = [by_representability, by_low_order_bits, by_bits_of_the_rounded_gradient, by_likelihood]


@pytest.fixture(scope="module")
def mechanism():
    return vs.mechanisms.optimal(HORIZON)


def right_guesses(release: Callable[[Floats], Floats], guess: Guess) -> int:
    """Of 1,000: the first message of ten releases, coordinate by coordinate."""
    signs = np.random.default_rng(1)
    right = 0
    for _ in range(RELEASES):
        plus = signs.integers(2, size=DIM).astype(bool)
        right += int((guess(release(np.where(plus, V, -V))) == plus).sum())
    return right


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: a.__name__)
def test_a_private_sum_leaves_the_attacker_with_a_coin(mechanism, attack):
    def release(gradient: Floats) -> Floats:
        private = vs.PrivateSum(mechanism, BUDGET, clip_norm=1.0, dim=DIM)
        sums = vs.decode(private.add(gradient))
        return np.asarray(sums.prefix * sums.grid, np.float64)

    assert any(450 <= right_guesses(release, attack) <= 550 for _ in range(2))


@pytest.mark.parametrize("attack", ATTACKS[:2], ids=lambda a: a.__name__)
def test_the_same_attacks_break_floats_that_are_added_to_floats(mechanism, attack):
    """So the test above can fail: this is the example as it stood in 0.3.0."""
    std, _ = vs.calibrate(BUDGET, mechanism, clip_norm=1.0)
    seeds = iter(range(RELEASES))

    def release(gradient: Floats) -> Floats:
        noise = next(iter(mechanism.noise(std=std, dim=DIM, seed=next(seeds))))
        return np.asarray(gradient + noise, np.float64)

    assert right_guesses(release, attack) >= 990


def test_v_is_hidden_by_the_gaussian(mechanism):
    """The shift itself gives less than 0.5% more than a coin."""
    from scipy.special import ndtr

    std, _ = vs.calibrate(BUDGET, mechanism, clip_norm=1.0)
    first = std * np.sqrt(mechanism.row_norms_squared()[0])
    assert ndtr(V / first) - 0.5 < 0.005
    assert V * np.sqrt(DIM) < 1.0  # not clipped


def test_no_page_calls_floats_with_noise_private():
    """What the guides release goes through PrivateSum or a Learner."""
    code = "\n".join(blocks_in("docs/in-python.md", "python"))
    assert code.count("PrivateSum(") == 2
    assert "vs.Learner(" in code
    assert ".noise(" not in code
