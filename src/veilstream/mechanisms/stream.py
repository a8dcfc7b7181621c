"""A noise stream for simulation: a program, a key and a position in time; memory does not depend on the horizon.

Its increments are float32, which hides no one (see `normals`); `veilstream.privacy.grid_noise`
makes the noise of what leaves a learner, from the same program.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import HorizonExhausted, InputError, PrivacyError
from veilstream.mechanisms.blas import blas_controller, one_blas_thread
from veilstream.mechanisms.checks import positive_integer, positive_number
from veilstream.mechanisms.factorization import Factorization
from veilstream.mechanisms.keystream import NoiseKey, RowOpener, row_opener
from veilstream.mechanisms.normals import TILE, NormalTiles
from veilstream.mechanisms.program import NoiseProgram, advance

Float32s = NDArray[np.float32]

_OPERAND = 40 << 10  # floats on the right of a matrix product: 160 KiB, to stay in cache


class NoiseStream(Iterator[Float32s]):
    """The T increments of a mechanism, in order, each exactly once.

    Iteration ends after the horizon. `step` and `next_block` raise `HorizonExhausted` there:
    noise is never repeated, clamped or made up. An interrupted block leaves the stream unusable.
    A stream belongs to one thread of one process.
    """

    def __init__(self, program: NoiseProgram, *, std: float, dim: int, open_row: RowOpener) -> None:
        self.program = program
        self.std = std
        self.dim = dim
        self._open_row = open_row
        if not program.is_identity:
            blas_controller()  # a missing package is noticed now, not in the middle of a block
        self._tiles = NormalTiles(dim)
        self._state = np.zeros((program.state_size, dim), np.float32)
        self._increments = np.empty((program.block_length, dim), np.float32)
        rows = program.state_size + program.block_length
        chunk = 0 if program.is_identity else min(max(512, _OPERAND // rows), dim)
        self._operand = np.empty((rows, chunk), np.float32)
        self._next_block = 0
        self._ready = 0  # increments of the current block not yet handed out
        self._taken = 0
        self._broken = False  # true while a block is being computed

    @property
    def position(self) -> int:
        """How many increments have been handed out."""
        return self._taken

    def next_block(self) -> Float32s:
        """All increments left of the current block, else the next block, (steps, dim); valid until the next call."""
        if self._ready == 0:
            self._compute_block()
        _, length = self.program.span(self._next_block - 1)
        block = self._increments[length - self._ready : length]
        self._taken += self._ready
        self._ready = 0
        return block

    def step(self) -> Float32s:
        """The next increment, as an array of its own."""
        increment: Float32s = self.take(1)[0]
        return increment

    def take(self, count: int, out: Float32s | None = None) -> Float32s:
        """The next ``count`` increments as (count, dim), into ``out`` if given."""
        if self._taken + count > self.program.horizon:
            raise HorizonExhausted(self.program.horizon, self._taken + count - 1)
        if out is None:
            out = np.empty((count, self.dim), np.float32)
        elif out.shape != (count, self.dim):
            raise InputError("out", f"shape {out.shape}", f"shape {(count, self.dim)}", "or none")
        done = 0
        while done < count:
            if self._ready == 0:
                self._compute_block()
            _, length = self.program.span(self._next_block - 1)
            now = min(self._ready, count - done)
            first = length - self._ready
            out[done : done + now] = self._increments[first : first + now]
            self._ready -= now
            self._taken += now
            done += now
        return out

    def __next__(self) -> Float32s:
        if self._taken == self.program.horizon:
            raise StopIteration
        return self.step()

    def _compute_block(self) -> None:
        program = self.program
        if self._broken:
            raise PrivacyError(
                "an earlier block was interrupted half-way, so the state is not the mechanism's: "
                "nothing was released (start the run again, or resume it from its checkpoint)"
            )
        if self._next_block == program.blocks:
            raise HorizonExhausted(program.horizon, self._taken)
        self._broken = True
        start, length = program.span(self._next_block)
        rows = [self._open_row(start + t) for t in range(length)]
        matrix = None if program.is_identity else program.matrix(self._next_block)
        for first in range(0, self.dim, TILE):
            fresh = self._increments[:length, first : first + TILE]
            for t, row in enumerate(rows):
                # The state carries the factor std along: the recurrence is linear.
                self._tiles.fill(row, fresh[t], self.std)
            if matrix is not None:
                with one_blas_thread():
                    self._correlate(matrix, self._state[:, first : first + TILE], fresh)
        self._next_block += 1
        self._ready = length
        self._broken = False

    def _correlate(self, matrix: Float32s, state: Float32s, fresh: Float32s) -> None:
        """Turn fresh draws into increments, and the state into the next, in place."""
        length, dim = fresh.shape
        k = len(state)
        chunk = self._operand.shape[1]
        for first in range(0, dim, chunk):
            columns = slice(first, min(first + chunk, dim))
            operand = self._operand[: k + length, : columns.stop - first]
            operand[:k] = state[:, columns]
            operand[k:] = fresh[:, columns]
            advance(matrix[:length], operand, out=fresh[:, columns])
            if k:
                advance(matrix[length:], operand, out=state[:, columns])


def noise_of(factorization: Factorization, *, std: float, dim: int, seed: int | None) -> NoiseStream:
    """`Factorization.noise`, which documents it."""
    key = NoiseKey.from_operating_system() if seed is None else NoiseKey.from_seed(seed)
    dim = positive_integer("dim", dim, "the number of model parameters")
    checked = positive_number("std", std, "take it from veilstream.calibrate")
    if not 1e-15 <= checked <= 1e15:
        raise InputError("std", std, "in [1e-15, 1e15]", "float32 noise; scale the gradients")
    return NoiseStream(factorization.program, std=checked, dim=dim, open_row=row_opener(key))
