"""Standard normals from a keystream: vectorised Box-Muller in float32.

A row is made tile by tile (`TILE` normals from `TILE`/2 pairs), so that all work stays in cache.
Each pair takes one 32-bit word for the radius and one for the angle. The tile size is part of the
definition of the noise (changing it changes every seeded run); blocking and threading are not.

Precision and tail, in plain numbers:

- radius r = sqrt(-2 ln u). u has 32 random bits; the 2^-14 smallest values of u, where 32 bits
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

__all__ = ["TILE", "NormalTiles", "fill_normals"]

Float32s = NDArray[np.float32]

TILE = 16384
_PAIRS = TILE // 2
_SMALL_RADIUS_WORD = np.uint32(1 << 18)
_RESERVE_WORDS = 32  # a tile needs Binomial(8192, 2^-14) of them: more than 32 in 1e-46 of tiles

_UNIT = np.float32(2.0**-32)
_TURN = np.float32(np.pi * 2.0**-31)
_MINUS_TWO = np.float32(-2.0)


class NormalTiles:
    """Scratch space that turns keystream into tiles of normals. One per thread."""

    def __init__(self) -> None:
        size = 4 * (2 * _PAIRS + _RESERVE_WORDS)
        self._zeros = bytes(size)
        self._bytes = bytearray(size)
        self._words = np.frombuffer(self._bytes, dtype=np.uint32)
        self._radius = np.empty(_PAIRS, np.float32)
        self._angle = np.empty(_PAIRS, np.float32)

    def fill(self, row: CipherContext, out: Float32s) -> None:
        """Write the row's next ``len(out)`` <= TILE normals into contiguous ``out``."""
        pairs = (len(out) + 1) // 2
        used = 4 * (2 * pairs + _RESERVE_WORDS)
        row.update_into(memoryview(self._zeros)[:used], memoryview(self._bytes)[:used])
        words = self._words
        radius, angle = self._radius[:pairs], self._angle[:pairs]

        np.multiply(words[:pairs], _UNIT, out=radius, casting="unsafe", dtype=np.float32)
        small = np.flatnonzero(words[:pairs] < _SMALL_RADIUS_WORD)
        if small.size:
            small = small[:_RESERVE_WORDS]
            extra = words[2 * pairs : 2 * pairs + small.size]
            refined = words[small] + (extra + 0.5) * 2.0**-32
            radius[small] = refined * 2.0**-32
        np.log(radius, out=radius)
        np.multiply(radius, _MINUS_TWO, out=radius)
        np.sqrt(radius, out=radius)

        turn = words[pairs : 2 * pairs].view(np.int32)
        np.multiply(turn, _TURN, out=angle, casting="unsafe", dtype=np.float32)
        sines = len(out) - pairs
        np.cos(angle, out=out[:pairs])
        np.sin(angle[:sines], out=out[pairs:])
        np.multiply(out[:pairs], radius, out=out[:pairs])
        np.multiply(out[pairs:], radius[:sines], out=out[pairs:])


def fill_normals(row: CipherContext, out: Float32s) -> None:
    """Fill a whole row, tile by tile. ``row`` must be freshly opened."""
    tiles = NormalTiles()
    for start in range(0, len(out), TILE):
        tiles.fill(row, out[start : start + TILE])
