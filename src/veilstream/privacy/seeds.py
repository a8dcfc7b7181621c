"""A guard in front of the noise: seeds that are weak are refused before any noise is made.

Noise from a seed of few bits has the right law; no message shows what is wrong until a seed comes
twice at the same step. So seeds are checked where they are made:

* `check_generator` draws some thousands of seeds that nobody uses and looks for any that come
  twice (a birthday: 16,384 draws find seeds of up to 22 bits, with probability above 1 - 1e-13,
  however well they are hashed) and for byte positions that are not uniform (padding, text, a
  counter, a clock).
* `checked_seed` looks at the one that is about to be used: its length, and whether it is
  obviously structured.

Neither can tell a seed that someone else knows from one that nobody knows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from scipy.special import chdtrc

from veilstream.errors import PrivacyError

SEED_BYTES = 32
_DRAWS = 1 << 14
_LEAST_DISTINCT = 12  # of 32 bytes; fewer in 6e-26 of seeds
_NEVER = 1e-15  # probability of refusing a good generator, for each test
_WAY_OUT = "seeds must come from the operating system, 32 bytes each: check what replaced it"


def checked_seed(seed: bytes) -> bytes:
    """The seed itself, if nothing is obviously wrong with it."""
    if type(seed) is not bytes or len(seed) != SEED_BYTES:
        raise PrivacyError(f"a noise seed is not {SEED_BYTES} bytes: nothing was released ({_WAY_OUT})")
    if len(set(seed)) < _LEAST_DISTINCT:
        raise PrivacyError(
            f"a noise seed has {len(set(seed))} different bytes, at least {_LEAST_DISTINCT} were "
            f"expected: nothing was released ({_WAY_OUT})"
        )
    return seed


def check_generator(draw: Callable[[], bytes], draws: int = _DRAWS) -> None:
    """Refuse a source of seeds that repeats itself or is not uniform; takes about 40 ms."""
    repeats, uniform = generator_p(lambda: checked_seed(draw()), draws)
    if repeats:
        raise PrivacyError(
            f"{repeats} of {draws} noise seeds came twice, so they are drawn from too few: nothing "
            f"was released ({_WAY_OUT})"
        )
    if uniform < _NEVER:
        raise PrivacyError(
            f"the bytes of {draws} noise seeds are not uniform (p = {uniform:.1g}): nothing was released ({_WAY_OUT})"
        )


def generator_p(draw: Callable[[], bytes], draws: int = _DRAWS) -> tuple[int, float]:
    """How many seeds came again, and a p-value for uniform bytes in every position."""
    seeds = [draw() for _ in range(draws)]
    repeats = draws - len(set(seeds))
    table = np.frombuffer(b"".join(seeds), np.uint8).reshape(draws, SEED_BYTES)
    counts = np.stack([np.bincount(column, minlength=256) for column in table.T])
    expected = draws / 256.0
    statistics = ((counts - expected) ** 2 / expected).sum(axis=1)
    p = SEED_BYTES * float(chdtrc(255, statistics.max()))
    return repeats, min(1.0, p)


@cache
def check_generator_once(draw: Callable[[], bytes]) -> None:
    """`check_generator`, for the first learner of a process."""
    check_generator(draw)
