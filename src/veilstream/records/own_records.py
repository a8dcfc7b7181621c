"""Records that a function of one's own encodes, behind the interface of `RecordSchema`.

    def encode(row):                 cells by column, without the client's
        return [float(row["age"]) / 100.0, 1.0], row.get("answered") == "yes"

Who a record is of stays a column. The function must be pure: what it returns may depend on its row
and on nothing else, as one client's record would otherwise move another's step. Every row is
encoded twice and one with two answers is refused, which finds running means and random numbers;
what is remembered and repeated (a vocabulary that grows) it cannot find.
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

AS_IT_IS = Label("target", None, low=-1e6, high=1e6, counts=True)
"""The label where nobody says more of it: a number, shown as it is."""

_LARGEST = 1e6


@dataclass(frozen=True, kw_only=True)
class OwnRecords(RecordSchema):
    """A plan's columns where `data.encode` makes features and target of them."""

    function: Callable[[dict[str, object]], Any]
    """Cells by column, without the client's, to (features, target); for a prediction the label's
    column may not be there, and the target is not looked at."""
    shape: tuple[int, ...]
    """Of the task's features."""
    targets: tuple[float, ...] | None = None
    """Targets that the task allows; None for any number."""
    label: Label = AS_IT_IS
    features: tuple[Any, ...] = field(default=(), init=False)
    bias: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """Which columns there are is the function's affair."""

    @property
    def width(self) -> int:
        """How many numbers a record's features are."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def largest_norm(self) -> float:
        """Longer features are cut to it."""
        return self.norm

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that a record must have: who; the others are the function's affair."""
        return () if self.client == EACH_ROW else (self.client,)

    def _encoded(self, row: Mapping[str, object], row_name: str, decimal_comma: bool) -> Encoded:
        client = self._client(row, row_name)
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
