"""The noise program: the one form in which every mechanism makes noise.

A program cuts the horizon into blocks of L steps. With k state vectors S (k×d) and L fresh
standard normal vectors Z (L×d), a block is one small matrix product

    [W; S'] = M · [S; Z]

that gives L increments W and the next state. The float32 matrices M *are* the mechanism: its
strategy matrix C, sensitivity and errors are computed from them in float64
(`veilstream.mechanisms.analysis`), so a guarantee speaks of the noise that really runs.

Another block length is another set of float32 products of the same steps. It changes memory and
speed; the increments agree to float32 rounding, and sensitivity is computed anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.mechanisms.checks import positive_integer
from veilstream.mechanisms.steps import Steps

ENDLESS = 2**62  # The horizon of what has none: a step a nanosecond takes 146 years to get there

DRAW_ERROR = 2.0**-46
"""How far a deployed draw (std one) may lie from the ideal normal that it stands for.

`fine_normals` proves it. It stands here because a server needs the number and must not load code that draws.
"""

Float32s = NDArray[np.float32]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class NoiseProgram:
    """Blocks of increments for a whole horizon."""

    horizon: int
    block_length: int
    state_size: int
    matrices: tuple[Float32s, ...]  # The different blocks, each (length + k, k + length)
    matrix_of_block: NDArray[np.intp]
    row_scale: Float32s | None = None  # One factor per step for its increment (normalised columns)

    @property
    def blocks(self) -> int:
        """Number of blocks; the last one may be short."""
        return len(self.matrix_of_block)

    def span(self, block: int) -> tuple[int, int]:
        """First step of a block and its length."""
        start = block * self.block_length
        return start, min(self.block_length, self.horizon - start)

    def matrix(self, block: int) -> Float32s:
        """The float32 matrix that this block multiplies with."""
        base: Float32s = self.matrices[self.matrix_of_block[block]]
        if self.row_scale is None:
            return base
        start, length = self.span(block)
        scaled: Float32s = base.copy()
        scaled[:length] *= self.row_scale[start : start + length, None]
        return scaled

    @property
    def endless(self) -> bool:
        """Whether one block repeats for ever."""
        return False

    @cached_property
    def is_identity(self) -> bool:
        """Whether increments are the fresh normals themselves."""
        return (
            self.state_size == 0
            and self.row_scale is None
            and all(np.array_equal(m, np.eye(len(m))) for m in self.matrices)
        )


def advance(matrix: Any, state_and_noise: Any, matmul: Any = np.matmul, **options: Any) -> Any:
    """Block step, written once: [W; S'] = M · [S; Z]. ``matmul`` must multiply in full float32."""
    return matmul(matrix, state_and_noise, **options)


def default_block_length(horizon: int, state_size: int) -> int:
    """A block long enough to spread the state update, short enough to stay cheap."""
    return min(horizon, 16 if state_size <= 16 else 32)


def compile_program(
    steps: Steps, horizon: int, block_length: int | None = None, row_scale: Float32s | None = None
) -> NoiseProgram:
    """Multiply steps into float32 blocks."""
    if block_length is None:
        whole = steps.surviving(1)
        block_length = default_block_length(horizon, whole.stop - whole.start)
    length = min(positive_integer("block_length", block_length, "try 16"), horizon)
    live = steps.surviving(length)
    matrices: list[Float32s] = []
    known: dict[object, int] = {}
    matrix_of_block = np.empty(-(-horizon // length), dtype=np.intp)
    for block in range(len(matrix_of_block)):
        start = block * length
        here = min(length, horizon - start)
        kind = steps.kind(start, here)
        if kind not in known:
            known[kind] = len(matrices)
            block_matrix = _keep_live(steps.block(start, here), here, live)
            matrices.append(_as_float32(block_matrix, here, live.stop - live.start))
        matrix_of_block[block] = known[kind]
    return NoiseProgram(horizon, length, live.stop - live.start, tuple(matrices), matrix_of_block, row_scale)


def _as_float32(matrix: Floats, length: int, state_size: int) -> Float32s:
    """The matrix that runs: finite, with draws that reach their own increments, read-only."""
    with np.errstate(over="ignore"):
        rounded = matrix.astype(np.float32)
    own = np.abs(rounded[:length, state_size:].diagonal())
    if not np.isfinite(rounded).all() or own.min() < np.finfo(np.float32).tiny:
        raise InputError(
            "mechanism",
            f"increments with coefficients from {own.min():.2g} to {np.abs(matrix).max():.2g}",
            "coefficients that float32 can hold",
            "scale C; or C grows or decays too fast for its inverse to be run",
        )
    rounded.setflags(write=False)
    return rounded


def _keep_live(full: Floats, length: int, live: slice) -> Floats:
    k = full.shape[0] - length
    columns = np.r_[np.arange(live.start, live.stop), np.arange(k, k + length)]
    rows = np.r_[np.arange(length), length + np.arange(live.start, live.stop)]
    kept: Floats = full[np.ix_(rows, columns)]
    return kept
