"""Standard normals from a keystream: vectorised Box-Muller in float32.

A row is made tile by tile (`TILE` normals from `TILE`/2 pairs), so that all work stays in cache.
Each pair takes one 32-bit word for the radius and one for the angle. The tile size is part of the
definition of the noise (changing it changes every seeded run); blocking and threading are not.

Precision and tail, in plain numbers:

- radius r = sqrt(-2 ln u). u has 32 random bits; the 2^-16 smallest values of u, where 32 bits
  would be coarse, get 32 more from a reserve at the end of the tile. The largest |z| is therefore
  sqrt(2·65·ln 2) = 9.49; an exact normal exceeds that with probability 2.3e-21.
- u is then a float32: near u = 1 it moves in steps of 2^-24, so a pair is exactly (0, 0) with
  probability 2^-25 and the smallest other radius is 3.5e-4.
- the angle has 32 random bits, rounded to float32 in (-π, π].
- cos, sin, log and sqrt are NumPy's float32 kernels, good to a few units in the last place.
  The result is reproducible to the bit on one machine and NumPy build; another instruction set
  may differ in the last place.

`tests/mechanisms/test_normals.py` holds the distribution to Kolmogorov-Smirnov, moment,
tail-count and correlation tests.
"""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import CipherContext
from numpy.typing import NDArray

__all__ = ["TILE", "NormalTiles", "fill_normals", "round_up"]

Float32s = NDArray[np.float32]

TILE = 32768
_PAIRS = TILE // 2
_SMALL_RADIUS_WORD = np.uint32(1 << 16)
_RESERVE_WORDS = 32  # a tile needs Binomial(16384, 2^-16) of them: more than 32 in 1e-56 of tiles

_ZEROS = memoryview(bytes(4 * (2 * _PAIRS + _RESERVE_WORDS)))
_UNIT = np.float32(2.0**-32)
_TURN = np.float32(np.pi * 2.0**-31)


class NormalTiles:
    """Scratch space that turns keystream into tiles of normals. One per thread."""

    def __init__(self, largest: int = TILE) -> None:
        pairs = (min(largest, TILE) + 1) // 2
        self._bytes = memoryview(bytearray(4 * (2 * pairs + _RESERVE_WORDS)))
        self._radius = np.empty(pairs, np.float32)
        self._views: dict[int, _Views] = {}

    def fill(self, row: CipherContext, out: Float32s, std: float = 1.0) -> None:
        """Write the row's next ``len(out)`` <= TILE normals into contiguous ``out``.

        ``std`` must be in [1e-15, 1e15]; it enters with the radius, rounded up.
        """
        pairs = (len(out) + 1) // 2
        views = self._views.get(pairs)
        if views is None:
            views = self._views[pairs] = _Views(self._bytes, self._radius, pairs)
        zeros, stream, radius_words, angle_words, reserve, radius = views.all
        row.update_into(zeros, stream)

        np.copyto(radius, radius_words, casting="unsafe")
        np.multiply(radius, _UNIT, out=radius)
        if radius_words.min() < _SMALL_RADIUS_WORD:
            small = np.flatnonzero(radius_words < _SMALL_RADIUS_WORD)[:_RESERVE_WORDS]
            refined = radius_words[small] + (reserve[: len(small)] + 0.5) * 2.0**-32
            radius[small] = refined * 2.0**-32
        np.log(radius, out=radius)
        np.multiply(radius, -round_up(2.0 * std * std), out=radius)
        np.sqrt(radius, out=radius)

        cosine, sine = out[:pairs], out[pairs:]
        np.copyto(cosine, angle_words, casting="unsafe")
        np.multiply(cosine, _TURN, out=cosine)
        np.sin(cosine[: len(sine)], out=sine)
        np.cos(cosine, out=cosine)
        np.multiply(cosine, radius, out=cosine)
        np.multiply(sine, radius[: len(sine)], out=sine)


class _Views:
    """A tile's parts of the scratch space, cut once per tile size."""

    def __init__(self, scratch: memoryview, radius: Float32s, pairs: int) -> None:
        used = 4 * (2 * pairs + _RESERVE_WORDS)
        words = np.frombuffer(scratch[:used], dtype=np.uint32)
        self.all = (
            _ZEROS[:used],
            scratch[:used],
            words[:pairs],
            words[pairs : 2 * pairs].view(np.int32),
            words[2 * pairs :],
            radius[:pairs],
        )


def round_up(value: float) -> np.float32:
    """Nearest float32 that is not smaller: rounding never takes noise away."""
    rounded = np.float32(value)
    return rounded if float(rounded) >= value else np.nextafter(rounded, np.float32(np.inf))


def fill_normals(row: CipherContext, out: Float32s) -> None:
    """Fill a whole row, tile by tile. ``row`` must be freshly opened."""
    tiles = NormalTiles(len(out))
    for start in range(0, len(out), TILE):
        tiles.fill(row, out[start : start + TILE])
