"""Clipping and rounding of PyTorch tensors where they lie, on a CPU or a GPU: `clip_onto_grid` for models of millions.

The rule is that of `veilstream.privacy.clipping` and `veilstream.privacy.grid`, in float64 and whole numbers;
tests hold the two to the same numbers. A tensor's sum may be taken in any order, so what summation can err
by is bounded for the worst one, and clipping stays below the bound by that much.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from veilstream.errors import PrivacyError
from veilstream.privacy.gradient_types import ClippedGradient
from veilstream.privacy.grid import Grid, OnGrid

if TYPE_CHECKING:
    import torch

_UNIT_ROUNDOFF = 2.0**-53
_CACHED, _ON_DEVICE = 1 << 16, 1 << 26  # numbers that are worked on at once


class TensorSum:
    """Adds up clipped gradients of one step, as whole numbers of grid units.

    **Guarantees**, for every float32 input: each row contributes whole numbers whose norm, in exact
    arithmetic, is at most clip_norm / ``clients_per_step`` in units of the grid; a row with an entry that is
    not finite contributes zero; no row's share depends on another row.

    Args:
        grid: of the release.
        clients_per_step: the public number that a step is divided by.
        dim: numbers of a row.
        device: where rows lie.

    """

    def __init__(self, grid: Grid, clients_per_step: int, dim: int, device: torch.device | str = "cpu") -> None:
        import torch

        self._torch: Any = torch
        self._clip_norm = grid.clip_norm
        self._unit = grid.step * clients_per_step
        self._dim = dim
        # n additions in any order err by at most n units of roundoff, relative, since squares have one sign.
        self._slack = 2.0 * (dim + 64) * _UNIT_ROUNDOFF
        self._most = (grid.clip_norm / self._unit) ** 2 * (1.0 - 0.5 * self._slack)
        self._total = torch.zeros(dim, dtype=torch.int64, device=device)
        self.longer = torch.zeros((), dtype=torch.int64, device=device)
        """Gradients that were longer than the clip norm: for this machine only."""

    def add(self, rows: torch.Tensor) -> None:
        """Clip each row of a float32 matrix and add its share."""
        torch = self._torch
        if rows.dtype != torch.float32 or rows.ndim != 2 or rows.shape[1] != self._dim:
            raise PrivacyError(f"gradients of {rows.dtype} and shape {tuple(rows.shape)}: nothing was released")
        squares = self._row_sums(rows, lambda part: part.square_())
        root = squares.sqrt()  # not finite exactly where an entry is not: squares of float32 cannot overflow
        finite = torch.isfinite(root)
        inside = root * (1.0 + self._slack) <= self._clip_norm
        self.longer += (~(root <= self._clip_norm)).sum()
        # Both factors are always computed, as in `clip`.
        scale = self._clip_norm * (1.0 - 2.0 * self._slack) / torch.where(root > 0.0, root, 1.0)
        factor = torch.where(inside, 1.0, torch.where(finite, scale, 0.0))[:, None]
        lengths = torch.zeros_like(root)
        for columns in self._parts(len(rows)):
            part = torch.where(finite[:, None], rows[:, columns], 0.0).double()
            whole = part.mul_(factor).div_(self._unit).trunc_()
            self._total[columns] += whole.long().sum(dim=0)
            lengths += whole.square_().sum(dim=1)
        if not bool((lengths <= self._most).all()):
            raise PrivacyError("a clipped gradient exceeds its norm: nothing was released")

    def gradient(self) -> ClippedGradient:
        """What the step's rows come to, on the host."""
        return ClippedGradient(OnGrid(self._total.cpu().numpy()))

    def _row_sums(self, rows: torch.Tensor, of: Any) -> torch.Tensor:
        total = self._torch.zeros(len(rows), dtype=self._torch.float64, device=rows.device)
        for columns in self._parts(len(rows)):
            total += of(rows[:, columns].double()).sum(dim=1)
        return total

    def _parts(self, count: int) -> list[slice]:
        """Columns to work on at once: in cache on a CPU, few and long ones on a GPU."""
        numbers = _CACHED if self._total.device.type == "cpu" else _ON_DEVICE
        width = max(1024, numbers // max(1, count))
        return [slice(first, min(first + width, self._dim)) for first in range(0, self._dim, width)]
