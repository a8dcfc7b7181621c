"""Correlated noise on the grid, cell by cell with the Gaussian's own probabilities.

What a release needs of its noise is the *law of the cells*: a message shows in which cell of the
grid the noise prefix lies, so every cell must have the probability that the Gaussian gives it,
jointly over steps and coordinates. That reachable values are many is not enough.

With everything in units of the grid, step s of a coordinate is

    n_s = h + c + a·z_s,     a = V·feed_s,    cell_s = ⌊n_s + 1/2⌋                       (*)

- z_s is the *ideal* normal of the row's secret (`mechanisms.exact_normals`), standard normal to the
  last of its endless bits and independent of all before;
- h is the prefix of noise as this object holds it (a whole cell and a float64 fraction), and
  c = output_s·S, computed in float64 from the state that it holds. Both are functions of earlier
  draws alone, whatever they were rounded to.

So, given all earlier draws, the cell has *exactly* the probability of the Gaussian around h + c:
no error at all comes from how the fresh draw was computed. Float64 finds the cell; where it lies
within its own error bound of a boundary, (*) is decided with as many bits as it takes.

What remains is that h + c is not quite the linear function of earlier draws that C stands for.
`veilstream.privacy.noise_law` bounds that, and calibration charges for it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import HorizonExhausted, InputError, PrivacyError
from veilstream.mechanisms.blas import one_blas_thread
from veilstream.mechanisms.exact_normals import enclosures
from veilstream.mechanisms.fine_normals import FineNormals
from veilstream.mechanisms.keystream import Row
from veilstream.mechanisms.normals import TILE
from veilstream.mechanisms.program import DRAW_ERROR, NoiseProgram, advance
from veilstream.privacy.grid import LARGEST, Grid

Floats = NDArray[np.float64]
Int64s = NDArray[np.int64]
Draw = Callable[[Row, Floats, float], Iterator[slice]]

_PIECE = 8192
_NEVER_SPREAD = 1 << 17  # multiplications that no BLAS gives to several threads
_UNIT_ROUNDOFF = 2.0**-53
_LARGEST_DRAW = 23.1  # of `exact_normals.WORDS` words


class GridNoise:
    """The noise prefix of one release: every step's secret is used once and goes.

    ``program`` has blocks of one step, so that no secret is needed before its step. A secret must
    come from the operating system (`keystream.fresh_secret`): any other is a simulation. A study
    may ``draw`` otherwise: from a row, into an array, times V in grid units, tile by tile.
    """

    def __init__(self, program: NoiseProgram, *, std: float, grid: Grid, dim: int, draw: Draw | None = None) -> None:
        if program.block_length != 1:
            raise InputError(
                "program", f"blocks of {program.block_length} steps", "blocks of one step", "with_block_length(1)"
            )
        self._program, self._grid, self._dim, self._own_draw = program, grid, dim, draw
        self._scale = math.nextafter(std / grid.step, math.inf)  # V in units of the grid
        self._position = 0
        self._broken = False
        # State and fresh draws below each other, as a block step takes them; and a tile of the next ones.
        self._held = np.zeros((program.state_size + 1, dim))
        self._next = np.empty((program.state_size + 1, min(dim, TILE)))
        self._cells = np.zeros(dim, np.int64)
        self._fraction = np.zeros(dim)
        self._normals = FineNormals(dim)
        self._drawn: dict[int, tuple[Row, Floats]] = {}
        self._one_thread: Callable[[], AbstractContextManager[object]] = (
            nullcontext if len(self._held) ** 2 * dim <= _NEVER_SPREAD else one_blas_thread
        )
        self._scratch = np.empty((2, min(dim, TILE)))
        self._most = LARGEST / program.horizon  # a step's units, so that all of them fit

    @property
    def position(self) -> int:
        """How many steps have been taken."""
        return self._position

    @property
    def cells(self) -> Int64s:
        """The noise prefix, rounded: whole numbers of grid units. Secret."""
        return self._cells.copy()

    @property
    def fraction(self) -> Floats:
        """What rounding left of the noise prefix, in units of the grid. Secret; to look at."""
        return _shown(self._fraction)

    @property
    def state(self) -> Floats:
        """The program's state vectors, times V in grid units. Secret; to look at."""
        return _shown(self._held[:-1])

    @property
    def known(self) -> Floats:
        """The part of the last increment that earlier draws decided. Secret; to look at."""
        return _shown(self._held[-1])

    @property
    def scale(self) -> float:
        """V in units of the grid, rounded up."""
        return self._scale

    def step(self, row: Row) -> Int64s:
        """What this step adds to the rounded prefix: the difference of two of them. Secret."""
        if self._broken:
            raise PrivacyError(
                "an earlier step was interrupted half-way: nothing was released (start again; a "
                "learner goes on where its store stands)"
            )
        if self._position == self._program.horizon:
            raise HorizonExhausted(self._program.horizon, self._position)
        self._broken = True
        feed, matrix = self._block()
        moved: Int64s = np.empty(self._dim, np.int64)
        with self._one_thread():
            for tile in self._draw(row, self._held[-1]):
                self._advance(matrix, tile)
                self._round(feed, row, tile, moved)
                self._held[:, tile] = self._next[:, : tile.stop - tile.start]
        self._cells += moved
        self._position += 1
        self._broken = False
        return moved

    def prepare(self, rows: Sequence[Row]) -> None:
        """Draw short rows of the next steps together, which costs less; the draws are the same to the bit."""
        if len(rows) < 2 or self._dim > _PIECE or self._own_draw is not None:
            return
        drawn = self._normals.rows(rows, self._scale)
        self._drawn = {id(row): (row, draws) for row, draws in zip(rows, drawn, strict=True)}

    def _block(self) -> tuple[float, Floats]:
        """The step's matrix as [S'; c] = M·[S; z], and the fresh draw's own factor."""
        matrix = self._program.matrix(self._position)
        moved = np.empty(matrix.shape)
        moved[:-1], moved[-1] = matrix[1:], matrix[0]
        moved[-1, -1] = 0.0
        return float(matrix[0, -1]), moved

    def _draw(self, row: Row, out: Floats) -> Iterator[slice]:
        """The step's fresh draws, times V in grid units, tile by tile."""
        if self._own_draw is not None:
            yield from self._own_draw(row, out, self._scale)
            return
        known, draws = self._drawn.pop(id(row), (None, out))
        if known is not row:
            yield from self._normals.tiles(row, out, self._scale)
        else:
            out[...] = draws
            yield slice(0, self._dim)

    def _advance(self, matrix: Floats, tile: slice) -> None:
        """Block step of a tile, in pieces that stay in cache."""
        width = tile.stop - tile.start
        if len(matrix) == 1:
            self._next[0, :width] = 0.0
            return
        held = self._held[:, tile]
        for first in range(0, width, _PIECE):
            piece = slice(first, min(first + _PIECE, width))
            advance(matrix, held[:, piece], out=self._next[:, piece])

    def _round(self, feed: float, row: Row, where: slice, moved: Int64s) -> None:
        """Cells of (*), and what is left of it as fractions."""
        value, whole = self._scratch[:, : where.stop - where.start]
        known, before = self._next[-1, : where.stop - where.start], self._fraction[where]
        np.multiply(self._held[-1, where], feed, out=value)
        np.add(value, known, out=value)
        np.add(value, before, out=value)
        largest = _largest(value)
        if not largest < self._most:
            raise PrivacyError("noise left the grid's range: nothing was released")
        np.rint(value, out=whole)
        np.subtract(value, whole, out=value)
        within = 0.5 - self._uncertainty(abs(feed), largest)
        if _largest(value) > within:
            for i in np.flatnonzero(np.abs(value) > within):
                offset = Fraction(float(before[i])) + Fraction(float(known[i]))
                cell = self._decide(row, where.start + int(i), offset, feed)
                value[i] += whole[i] - cell
                whole[i] = cell
        np.copyto(moved[where], whole, casting="unsafe")
        self._fraction[where] = value

    def _uncertainty(self, feed: float, largest: float) -> float:
        """How far the float64 value of (*) may lie from the exact one, in units of the grid.

        The draw's own error, half a unit in the last place for each of its products with V and
        feed and for the two sums, of numbers no larger than ``largest`` and a draw.
        """
        draw = feed * self._scale
        return draw * DRAW_ERROR + 4.0 * _UNIT_ROUNDOFF * (draw * _LARGEST_DRAW + largest + 1.0)

    def _decide(self, row: Row, coordinate: int, offset: Fraction, feed: float) -> int:
        """⌊offset + a·z + 1/2⌋ with exact arithmetic, for as many bits of z as it takes."""
        a = Fraction(feed) * Fraction(self._scale)
        low = high = 0
        for ends in enclosures(row, self._dim, coordinate):
            low, high = sorted(math.floor(offset + a * Fraction(end) + Fraction(1, 2)) for end in ends)
            if low == high:
                break
        return low  # the bits have run out with probability below 2^-300

    def __reduce__(self) -> NoReturn:
        raise TypeError("noise cannot be copied: it would be used twice")

    def snapshot(self) -> bytes:
        """Everything, between two steps. Secret."""
        if self._broken:
            raise PrivacyError("noise can be kept between two steps only")
        state = self._held[:-1]
        parts = (self._cells.astype("<i8"), self._fraction.astype("<f8"), state.astype("<f8"))
        return struct.pack("<Q", self._position) + b"".join(part.tobytes() for part in parts)

    def restore(self, content: bytes) -> None:
        """Go on from a snapshot of noise of the same mechanism, grid and dimension."""
        d, k = self._dim, len(self._held) - 1
        (position,) = struct.unpack("<Q", content[:8])
        if len(content) != 8 + 8 * d * (2 + k) or position > self._program.horizon:
            raise PrivacyError("this snapshot is not of this mechanism: nothing was released")
        floats = np.frombuffer(content, "<f8", offset=8)
        self._cells[...] = np.frombuffer(content, "<i8", count=d, offset=8)
        self._fraction[...] = floats[d : 2 * d]
        self._held[:-1] = floats[2 * d :].reshape(k, d)
        self._position, self._broken = position, False


def _shown(values: Floats) -> Floats:
    view = values.view()
    view.flags.writeable = False
    return view


def _largest(values: Floats) -> float:
    return max(float(values.max()), -float(values.min()))
