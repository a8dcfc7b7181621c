"""The keyed choice of a step: HMAC-SHA256, uniform, and each client's by itself."""

from __future__ import annotations

import hmac

import numpy as np
import pytest

from veilstream.errors import InputError
from veilstream.records.secret_order import chosen_step, chosen_steps

SECRET = bytes(range(32))


def by_the_standard_library(secret: bytes, tag: bytes, steps: int) -> int:
    return int.from_bytes(hmac.digest(secret, b"veilstream step of a client\0" + tag, "sha256")[:8], "big") % steps


def test_is_hmac_sha256_as_the_standard_library_makes_it() -> None:
    tags = [f"client {i}".encode() * (1 + i % 7) for i in range(500)]
    for steps in (1, 2, 7, 100, 10_000):
        expected = [by_the_standard_library(SECRET, tag, steps) for tag in tags]
        assert chosen_steps(SECRET, tags, steps).tolist() == expected
        assert [chosen_step(SECRET, tag, steps) for tag in tags[:5]] == expected[:5]


def test_words_that_would_favour_the_first_steps_are_drawn_again() -> None:
    """Of 2^64 words and 3·2^62 steps, the last quarter is drawn again: else a third of the steps had half of all."""
    steps = 3 << 62 >> 1  # 2^64 = 2·steps + 2^62, within the range of int64
    found = chosen_steps(SECRET, [b"%d" % i for i in range(4000)], steps)
    again = [by_the_standard_library(SECRET, b"%d" % i, 1 << 64) >= 2 * steps for i in range(4000)]
    assert 0.2 < np.mean(again) < 0.3
    # Without it the lower 2^62 would have three in eight. 4000 draws: 5 standard errors are 0.04.
    assert abs(np.mean(found < 1 << 62) - 2 / 3) < 0.04
    assert ((found >= 0) & (found < steps)).all()


def test_steps_are_uniform_and_independent_of_each_other() -> None:
    """Chi-squared of 10^5 clients over 100 steps, and of pairs over 20 x 20: false alarm below 1e-6 each."""
    tags = [b"c%d" % i for i in range(100_000)]
    counts = np.bincount(chosen_steps(SECRET, tags, 100), minlength=100)
    assert ((counts - 1000) ** 2 / 1000).sum() < 99 + 5.2 * np.sqrt(2 * 99) + 15
    found = chosen_steps(SECRET, tags, 20)
    pairs = np.bincount(20 * found[0::2] + found[1::2], minlength=400)
    assert ((pairs - 125) ** 2 / 125).sum() < 399 + 5.2 * np.sqrt(2 * 399) + 15


def test_another_secret_gives_another_order() -> None:
    tags = [b"c%d" % i for i in range(10_000)]
    both = chosen_steps(SECRET, tags, 100), chosen_steps(SECRET[::-1], tags, 100)
    assert 50 < np.count_nonzero(both[0] == both[1]) < 160  # 100 expected; 5 standard deviations


@pytest.mark.parametrize(("secret", "steps"), [(b"short", 10), (SECRET, 0)])
def test_refuses_what_is_no_secret_or_no_horizon(secret: bytes, steps: int) -> None:
    with pytest.raises(InputError):
        chosen_step(secret, b"a", steps)
