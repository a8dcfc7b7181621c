"""Records encoded by the user's own function, behind the interface of `RecordSchema`.

The function must be pure: otherwise one client's record would move another's step. Every row is encoded
twice, and a row with two answers is refused. That finds running means and random numbers, but not memory
that repeats itself (a growing vocabulary).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.privacy.clipping import clip
from veilstream.records.cells import with_decimal_point
from veilstream.records.sample import Sample
from veilstream.records.schema import EACH_ROW, Encoded, Label, RecordSchema, RefusedRecord

AS_IT_IS = Label("target", None, low=-1e6, high=1e6, counts=True)  # where the plan says no more

_LARGEST = 1e6


@dataclass(frozen=True, kw_only=True)
class OwnRecords(RecordSchema):
    """A schema where `data.encode` makes features and target."""

    function: Callable[[dict[str, object]], Any]
    """From cells by column, without the client's, to (features, target). For a prediction the label's
    column may be missing, and the target is ignored."""
    shape: tuple[int, ...]  # of the task's features
    targets: tuple[float, ...] | None = None  # targets that the task allows; None for any number
    label: Label = AS_IT_IS
    features: tuple[Any, ...] = field(default=(), init=False)
    bias: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """The function decides which columns there must be."""

    @property
    def width(self) -> int:
        """Numbers in a record's features."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def largest_norm(self) -> float:
        """Longer features are cut to it."""
        return self.norm

    @property
    def columns(self) -> tuple[str, ...]:
        """The client's column; the function decides about others."""
        return () if self.client == EACH_ROW else (self.client,)

    def _encoded(self, row: Mapping[str, object], client: str, decimal_comma: bool) -> Encoded:
        features, target = self._called(row, decimal_comma, with_target=True)
        if self.targets is not None and float(target) not in self.targets:
            raise RefusedRecord("unknown label", "")
        return Encoded(client, Sample(features, target))

    def _features(self, row: Mapping[str, object], comma: bool) -> tuple[NDArray[np.float32], list[str]]:
        return self._called(row, comma, with_target=False)[0], []

    def _called(
        self, row: Mapping[str, object], comma: bool, *, with_target: bool
    ) -> tuple[NDArray[np.float32], np.float32]:
        cells = {k: with_decimal_point(v) if comma else v for k, v in row.items() if k != self.client}
        first = self._read(self.function(dict(cells)), with_target)
        again = self._read(self.function(cells), with_target)
        if not np.array_equal(first[0], again[0]) or first[1] != again[1]:
            raise RefusedRecord("not repeatable", "")
        return first

    def _read(self, answer: Any, with_target: bool) -> tuple[NDArray[np.float32], np.float32]:
        features, target = answer
        numbers = np.asarray(features)
        if numbers.dtype.kind not in "biuf" or numbers.shape != self.shape:
            raise RefusedRecord("other features", "")
        flat = numbers.astype(np.float64).ravel()
        if not (np.abs(flat) <= _LARGEST).all():  # nor NaN
            raise RefusedRecord("not a number", "")
        flat = np.asarray(clip(flat, self.norm))
        # Rounding to float32 may step over the bound again.
        cut = np.asarray(clip(flat.astype(np.float32), self.norm), np.float32)
        known = float(target) if with_target else 0.0
        if not abs(known) <= _LARGEST:
            raise RefusedRecord("not a number", "")
        return cut.reshape(self.shape), np.float32(known)
