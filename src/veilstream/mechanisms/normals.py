"""Standard normals from a keystream: vectorised Box-Muller in float32, for simulation.

A row is made tile by tile (`TILE` normals from `TILE`/2 pairs), so that all work stays in cache.
Each pair takes one 32-bit word for the radius and one for the angle. The tile size is part of the
definition of the noise (changing it changes every seeded run); blocking and threading are not.

- radius r = sqrt(-2 ln u), u from 32 random bits. A float32 û holds 24 of them, so near u = 1 it
  moves in steps of 2^-24. Eight more bits, a byte in [-128, 128) times 2^-32, are added after the
  logarithm: ln u = ln û + byte·2^-32/û. They fill the steps there and blur u by less than a part in
  500 anywhere; u stays uniform. The 2^-15 of words nearest to 0 or 1 get 32 more bits from
  a reserve instead. The largest |z| is sqrt(2·65·ln 2) = 9.49 (an exact normal exceeds that with
  probability 2.3e-21); small radii go down to 3e-10. Without all this, radii near zero would lie
  on visible rings, from which noise can be told and subtracted.
- the angle has 32 random bits, rounded to float32 in [-π, π].
- results are float32, so near |z| = 1 they move in steps of about 1e-7. That is enough to learn
  from and not enough to hide anyone: cells of a grid of 2^-18 std are reached by so few of these
  numbers that their probabilities are off by a percent. What leaves a learner is drawn by
  `veilstream.mechanisms.fine_normals`.
- cos, sin, log and sqrt are NumPy's float32 kernels: reproducible to the bit on one machine and
  NumPy build; another instruction set may differ in the last place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import CipherContext

Float32s = NDArray[np.float32]

TILE = 32768
_PAIRS = TILE // 2
_NEAR_END = np.uint32(1 << 16)  # words this close to 0 or 2^32 are refined
_RESERVE_WORDS = 32  # a tile needs Binomial(16384, 2^-15) of them: more than 32 in 1e-46 of tiles

_UNIT = np.float32(2.0**-32)
_TURN = np.float32(np.pi * 2.0**-31)


class NormalTiles:
    """Scratch space that turns keystream into tiles of normals. One per thread."""

    def __init__(self, largest: int = TILE) -> None:
        pairs = (min(largest, TILE) + 1) // 2
        self._bytes = memoryview(bytearray(tile_bytes(pairs)))
        self._radius = np.empty(pairs, np.float32)
        self._spare = np.empty(pairs, np.float32)
        self._views: dict[int, _Views] = {}

    def fill(self, row: CipherContext, out: Float32s, std: float = 1.0) -> None:
        """Write the row's next normals into contiguous ``out``, at most `TILE`; ``std`` is in [1e-15, 1e15]."""
        pairs = (len(out) + 1) // 2
        views = self._views.get(pairs)
        if views is None:
            views = self._views[pairs] = _Views(self._bytes, self._radius, self._spare, pairs)
        zeros, stream, words, fine, angle_words, reserve, radius, spare, spare_words = views.all
        row.update_into(zeros, stream)

        np.add(words, _NEAR_END, out=spare_words)  # wraps: both ends become small numbers
        ends = None
        if spare_words.min() < 2 * _NEAR_END:
            ends = np.flatnonzero(spare_words < 2 * _NEAR_END)[:_RESERVE_WORDS]
        np.copyto(radius, words, casting="unsafe")
        np.copyto(spare, fine, casting="unsafe")
        if ends is not None:
            radius[ends] = 1.0  # away from zero; refined below
        np.divide(spare, radius, out=spare)
        np.multiply(radius, _UNIT, out=radius)
        np.log(radius, out=radius)
        np.add(radius, spare, out=radius)
        if ends is not None:
            radius[ends] = _log_near_ends(words[ends], reserve[: len(ends)])
        np.multiply(radius, -round_up(2.0 * std * std), out=radius)
        np.sqrt(radius, out=radius)

        cosine, sine = out[:pairs], out[pairs:]
        np.copyto(cosine, angle_words, casting="unsafe")
        np.multiply(cosine, _TURN, out=cosine)
        np.sin(cosine[: len(sine)], out=sine)
        np.cos(cosine, out=cosine)
        np.multiply(cosine, radius, out=cosine)
        np.multiply(sine, radius[: len(sine)], out=sine)


_ZEROS = memoryview(bytes(4 * (2 * _PAIRS + _RESERVE_WORDS) + _PAIRS))


class _Views:
    """A tile's keystream, cut once per size: radius words, angle words, reserve, and a byte a pair."""

    def __init__(self, scratch: memoryview, radius: Float32s, spare: Float32s, pairs: int) -> None:
        used = tile_bytes(pairs)
        whole = 4 * (2 * pairs + _RESERVE_WORDS)
        words = np.frombuffer(scratch[:whole], dtype=np.uint32)
        self.all = (
            _ZEROS[:used],
            scratch[:used],
            words[:pairs],
            np.frombuffer(scratch[whole:used], dtype=np.int8),
            words[pairs : 2 * pairs].view(np.int32),
            words[2 * pairs :],
            radius[:pairs],
            spare[:pairs],
            spare[:pairs].view(np.uint32),
        )


def tile_bytes(pairs: int) -> int:
    """Keystream that a tile takes up."""
    return 4 * (2 * pairs + _RESERVE_WORDS) + pairs


def _log_near_ends(words: NDArray[np.uint32], extra: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Ln u of 64-bit u, for words within 2^16 of either end."""
    low = words < _NEAR_END
    distance = np.where(low, words, ~words) + (extra + 0.5) * 2.0**-32
    v = distance * 2.0**-32
    logarithm: NDArray[np.float64] = np.where(low, np.log(v), np.log1p(-v))
    return logarithm


def round_up(value: float) -> np.float32:
    """Nearest float32 that is not smaller: rounding never takes noise away."""
    rounded = np.float32(value)
    return rounded if float(rounded) >= value else np.nextafter(rounded, np.float32(np.inf))


def fill_normals(row: CipherContext, out: Float32s) -> None:
    """Fill a whole row, tile by tile. ``row`` must be freshly opened."""
    tiles = NormalTiles(len(out))
    for start in range(0, len(out), TILE):
        tiles.fill(row, out[start : start + TILE])
