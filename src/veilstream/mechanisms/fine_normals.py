"""Standard normals in float64 with a proven error, for what leaves a learner.

Each draw approximates an ideal normal z that has endless random bits (`exact_normals`). The first
64 bits of radius and angle are read here: the 32 that the float32 draw of the same row and
coordinate has (so the two agree to float32 precision), and 32 finer ones. Then, all in float64,

    r = √(-2·ln u),    (c, s) = e^{2πit},    z = r·(c, s).

t is the nearest of 1024 points of the circle, whose (c, s) stand in a table, and a rest of at most
1/2048 turn, for which three terms of Taylor's series are enough.

**Error.** |computed - ideal| <= `DRAW_ERROR` = 2^-46 for a draw of standard deviation one. Of what:

| source | bound |
| --- | --- |
| bits of u beyond the 64th, and u to float64: ln u moves by 2^-53, or at most
  2^-47 where u < 2^-10 and r > 3; u above 1 - 2^-8 is read from its other end | 2^-49.2 |
| logarithm, within 4 units in the last place | 2^-52·r |
| square root, product with std: half a unit each | 2^-52·r |
| table, series, rest and their sum (`circle_error`) | 2^-52·r |
| product r·c | 2^-53·r |

with r <= 10.3 wherever floats are used at all: together below 1e-14 < 2^-46. NumPy's logarithm is
the one thing here that is taken on trust; its documented error is below 1 unit, and
`tests/mechanisms/test_fine_normals.py` measures all of it against arbitrary precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from veilstream.mechanisms.exact_normals import further_words, nearest_float
from veilstream.mechanisms.keystream import DRAWS, FINE, Row
from veilstream.mechanisms.normals import TILE, tile_bytes

Floats = NDArray[np.float64]
PlaceOf = Callable[[int], tuple[Row, int]]  # Row and first coordinate of a pair

_POINTS = 10  # bits of t that the table answers for
_TURN = 2.0 * math.pi
_REST = _TURN / 2**_POINTS  # radians for a rest of one: t - nearest point, in points
_SINE = (_REST, -(_REST**3) / 6.0, _REST**5 / 120.0)
_COSINE = (-(_REST**2) / 2.0, _REST**4 / 24.0)  # less one
_UPPER = np.uint32(1 << 24)  # u above 1 - 2^-8
_LOWER = np.uint32(1 << 16)  # u below 2^-16
_ONE = np.uint64(1)
_HALF_POINT = np.int64(1 << (63 - _POINTS))
_POINT_SHIFT = np.int64(64 - _POINTS)
_POINT_MASK = np.int64(2**_POINTS - 1)
_ZEROS = memoryview(bytes(tile_bytes(TILE // 2)))


class FineNormals:
    """Scratch space that turns rows of keystream into float64 normals, tile by tile."""

    def __init__(self, dim: int) -> None:
        self._dim = dim
        pairs = (min(dim, TILE) + 1) // 2
        self._coarse = memoryview(bytearray(tile_bytes(pairs)))
        self._fine = memoryview(bytearray(8 * pairs))
        self._words = np.empty(pairs, np.uint64), np.empty(pairs, np.int64)
        self._floats = np.empty((6, pairs))
        self._table = _circle()
        self._whole_tile: FineNormals | None = None

    def tiles(self, row: Row, out: Floats, std: float) -> Iterator[slice]:
        """Fill contiguous ``out`` (dim) with the row's draws, times ``std``, and say how far."""
        coarse, fine = row.open(DRAWS), row.open(FINE)
        for first in range(0, self._dim, TILE):
            part = out[first : first + TILE]
            pairs = (len(part) + 1) // 2
            used = tile_bytes(pairs)
            coarse.update_into(_ZEROS[:used], self._coarse[:used])
            fine.update_into(_ZEROS[: 8 * pairs], self._fine[: 8 * pairs])
            high = np.frombuffer(self._coarse, np.uint32, count=2 * pairs).reshape(2, pairs)
            low = np.frombuffer(self._fine, np.uint32, count=2 * pairs).reshape(2, pairs)
            place_of: PlaceOf = partial(_within, row, first)
            for pair in self._fill(place_of, high, low, part, std):
                for place in (pair, pair + pairs):
                    if place < len(part):
                        part[place] = std * nearest_float(row, self._dim, first + place)
            yield slice(first, first + len(part))

    def rows(self, rows: Sequence[Row], std: float) -> Floats:
        """Draws of several rows of at most half a tile, one below the other: the same bits as `tiles` one by one."""
        out = np.empty((len(rows), self._dim))
        at_once = TILE // (2 * ((self._dim + 1) // 2))
        for first in range(0, len(rows), at_once):
            self._some_rows(rows[first : first + at_once], out[first : first + at_once], std)
        return out

    def _some_rows(self, rows: Sequence[Row], out: Floats, std: float) -> None:
        dim, pairs = self._dim, (self._dim + 1) // 2
        high = np.empty((2, len(rows), pairs), np.uint32)
        low = np.empty((2, len(rows), pairs), np.uint32)
        for i, row in enumerate(rows):
            words = row.open(DRAWS).update(_ZEROS[: 8 * pairs])
            high[:, i] = np.frombuffer(words, np.uint32).reshape(2, pairs)
            words = row.open(FINE).update(_ZEROS[: 8 * pairs])
            low[:, i] = np.frombuffer(words, np.uint32).reshape(2, pairs)
        if self._whole_tile is None:
            self._whole_tile = FineNormals(TILE)
        flat = np.empty(2 * len(rows) * pairs)
        exact = self._whole_tile._fill(
            lambda pair: (rows[pair // pairs], pair % pairs), high.reshape(2, -1), low.reshape(2, -1), flat, std
        )
        each = flat.reshape(2, len(rows), pairs)
        out[:, :pairs], out[:, pairs:] = each[0], each[1, :, : dim - pairs]
        for pair in exact:
            i, first = divmod(pair, pairs)
            for place in (first, first + pairs):
                if place < dim:
                    out[i, place] = std * nearest_float(rows[i], dim, place)

    def _fill(
        self, place_of: PlaceOf, high: NDArray[np.uint32], low: NDArray[np.uint32], out: Floats, std: float
    ) -> list[int]:
        """A tile; returns the pairs that need more bits than this."""
        pairs = high.shape[1]
        cosine, sine = out[:pairs], out[pairs:]
        few = len(sine)
        words, turns = self._words[0][:pairs], self._words[1][:pairs]
        _joined(words, high[0], low[0])
        _joined(turns, high[1], low[1])
        radius, rest, square, small, table_c, table_s = self._floats[:, :pairs]
        spare = small.view(np.uint64)

        np.right_shift(words, _ONE, out=spare)  # signed words convert several times as fast
        np.copyto(radius, spare.view(np.int64), casting="unsafe")
        np.multiply(radius, 2.0**-63, out=radius)
        ends = np.flatnonzero(high[0] + _UPPER < _UPPER + _LOWER)  # wraps at 2^32
        radius[ends] = 0.5
        np.log(radius, out=radius)
        exact = _log_near_ends(place_of, ends, words, radius) if len(ends) else []
        np.multiply(radius, -2.0, out=radius)
        np.sqrt(radius, out=radius)
        np.multiply(radius, std, out=radius)

        point = words.view(np.int64)  # no longer needed as words
        np.add(turns, _HALF_POINT, out=point)
        np.right_shift(point, _POINT_SHIFT, out=point)
        np.bitwise_and(point, _POINT_MASK, out=point)
        np.take(self._table[0], point, out=table_c, mode="clip")
        np.take(self._table[1], point, out=table_s, mode="clip")
        np.left_shift(turns, _POINTS, out=turns)  # the rest, signed
        np.copyto(rest, turns, casting="unsafe")
        np.multiply(rest, 2.0**-64, out=rest)

        # With sin = sine of the rest and cos = its cosine less one:
        # c = table_c + (table_c·cos - table_s·sin), s = table_s + (table_s·cos + table_c·sin).
        np.multiply(rest, rest, out=square)
        np.multiply(square, _SINE[2], out=small)
        np.add(small, _SINE[1], out=small)
        np.multiply(small, square, out=small)
        np.add(small, _SINE[0], out=small)
        np.multiply(small, rest, out=small)  # sin
        np.multiply(square, _COSINE[1], out=rest)
        np.add(rest, _COSINE[0], out=rest)
        np.multiply(rest, square, out=rest)  # cos
        np.multiply(table_s[:few], rest[:few], out=sine)
        np.multiply(table_c[:few], small[:few], out=square[:few])
        np.add(sine, square[:few], out=sine)
        np.add(sine, table_s[:few], out=sine)
        np.multiply(sine, radius[:few], out=sine)
        np.multiply(table_c, rest, out=cosine)
        np.multiply(table_s, small, out=small)
        np.subtract(cosine, small, out=cosine)
        np.add(cosine, table_c, out=cosine)
        np.multiply(cosine, radius, out=cosine)
        return exact


def _within(row: Row, first: int, pair: int) -> tuple[Row, int]:
    return row, first + pair


def _joined(words: NDArray[np.uint64] | NDArray[np.int64], high: NDArray[np.uint32], low: NDArray[np.uint32]) -> None:
    halves = words.view("<u4")
    halves[1::2] = high
    halves[::2] = low


@cache
def _circle() -> Floats:
    """Cosine and sine of 1024 points, to nearest."""
    eighth = 2 ** (_POINTS - 3)
    first = [(math.cos(j * _REST), math.sin(j * _REST)) for j in range(eighth + 1)]
    first[eighth] = (math.sqrt(0.5), math.sqrt(0.5))
    quarter = first[:eighth] + [(s, c) for c, s in reversed(first[1:])]
    half = quarter + [(-s, c) for c, s in quarter]
    return np.array(half + [(-c, -s) for c, s in half]).T.copy()


def _log_near_ends(place_of: PlaceOf, ends: NDArray[np.intp], words: NDArray[np.uint64], logs: Floats) -> list[int]:
    """Write ln u where u is near 0 or 1; returns pairs that even this does not settle."""
    near = words[ends]
    upper = near >> np.uint64(63) == 1
    distance = np.where(upper, ~near, near)  # from the nearer end, in 2^-64
    size = distance + 0.5
    exact = []
    for i in np.flatnonzero((distance < 1 << 33) | ~upper):
        # Close to an end, the bits beyond the 64th matter.
        ((more, _),) = further_words(*place_of(int(ends[i])), 1)
        size[i] = float(distance[i]) + ((2**64 - 1 - more if upper[i] else more) + 0.5) * 2.0**-64
        if size[i] < 2.0**-12:
            exact.append(int(ends[i]))
    size *= 2.0**-64
    logs[ends] = np.where(upper, np.log1p(-size), np.log(size))
    return exact


def fine_row(row: Row, dim: int) -> Floats:
    """One row of float64 draws."""
    out = np.empty(dim)
    for _ in FineNormals(dim).tiles(row, out, 1.0):
        pass
    return out


def circle_error() -> float:
    """Bound on the error of c and s.

    A table entry is off by a unit in the last place of numbers below one. The rest turns by at
    most π/1024: its sine and cosine less one, and their products with the table, err by a few
    units of numbers that small, and the cut-off terms are below its seventh power. The last sum
    rounds by half a unit.
    """
    unit, turn = 2.0**-53, math.pi / 2**_POINTS
    cut = turn**6 / 720.0 + turn**7 / 5040.0
    bound: float = unit + (turn + turn**2 / 2.0) * 8.0 * unit + cut + unit
    return bound
