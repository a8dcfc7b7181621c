"""Records encoded together, column by column: what `RecordSchema.encode` says of each, to the bit, at less cost.

Only plain cells are read here: finite numbers, words that are text. A record with anything else in it is left
to `RecordSchema.encode`, which alone decides about it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.records.cells import as_numbers, is_missing
from veilstream.records.client_names import client_name
from veilstream.records.sample import Sample
from veilstream.records.schema import EACH_ROW, Encoded, Feature, Float32s, Numeric, RecordSchema, Refusal

Cells = Mapping[str, object]
Bools = NDArray[np.bool_]

_PLAIN_TYPES = frozenset({str, int, float, type(None)})
_LEAVE = object()  # a cell that `RecordSchema.encode` must look at


@dataclass(frozen=True)
class EncodedGroup:
    """Some records: arrays of those that are plain, and what became of each other one."""

    clients: list[str | None]  # who takes part with each record, also with a refused one
    features: Float32s
    targets: Float32s
    clamped: dict[str, Bools]  # by column: which plain records had to be moved; columns with none are left out
    others: dict[int, Encoded | Refusal]

    def __len__(self) -> int:
        return len(self.clients)

    def __repr__(self) -> str:
        return "EncodedGroup(<hidden>)"  # people's data, not for logs

    @cached_property
    def _moved(self) -> frozenset[int]:
        return frozenset(place for moved in self.clamped.values() for place in np.flatnonzero(moved).tolist())

    def clamped_counts(self, places: list[int]) -> Counter[str]:
        """How many of these records had to be moved, by column."""
        counts = Counter({name: int(moved[places].sum()) for name, moved in self.clamped.items()})
        for place in self.others.keys() & set(places):
            other = self.others[place]
            counts.update(other.clamped if isinstance(other, Encoded) else ())
        return +counts

    def targets_of(self, places: list[int]) -> Counter[float]:
        """How many of these records have each target."""
        plain = [place for place in places if place not in self.others] if self.others else places
        counts = Counter[float](self.targets[plain].tolist() if plain else ())
        for place in self.others.keys() & set(places):
            other = self.others[place]
            counts.update([float(other.sample.target)] if isinstance(other, Encoded) else ())
        return counts

    def record(self, place: int) -> Encoded | Refusal:
        """One of them, as `RecordSchema.encode` returns it."""
        other = self.others.get(place)
        if other is not None:
            return other
        client = self.clients[place]
        assert client is not None
        clamped: tuple[str, ...] = ()
        if place in self._moved:
            clamped = tuple(name for name, moved in self.clamped.items() if moved[place])
        return Encoded(client, Sample(self.features[place], self.targets[place]), clamped)


def encode_group(
    schema: RecordSchema, rows: Sequence[Cells | None], row_names: Callable[[int], str], *, decimal_comma: bool = False
) -> EncodedGroup:
    """Encode records; ``row_names`` names a row by its place here, None is a row that cannot be read."""
    count = len(rows)
    group = _Group(schema, rows, row_names, decimal_comma)
    if type(schema) is RecordSchema and count > 1:
        group.read_columns()
    else:
        group.plain[:] = False
    for place in np.flatnonzero(~group.plain).tolist():
        cells = rows[place]
        found: Encoded | Refusal = Refusal("not readable", client=row_names(place))
        if cells is not None:
            found = schema.encode(cells, row_name=row_names(place), decimal_comma=decimal_comma)
        group.others[place], group.clients[place] = found, found.client
    clamped = {name: moved & group.plain for name, moved in group.clamped.items()}
    return EncodedGroup(group.clients, group.features, group.targets, clamped, group.others)


class _Group:
    def __init__(
        self, schema: RecordSchema, rows: Sequence[Cells | None], row_names: Callable[[int], str], decimal_comma: bool
    ) -> None:
        self._schema, self._rows, self._comma = schema, rows, decimal_comma
        self._row_names = row_names
        self.plain = np.array([row is not None for row in rows], bool)
        self.clients: list[str | None] = [None] * len(rows)
        self.others: dict[int, Encoded | Refusal] = {}
        self.clamped: dict[str, Bools] = {}
        self.features = np.zeros((0, 0), np.float32)
        self.targets = np.zeros(0, np.float32)

    def read_columns(self) -> None:
        schema = self._schema
        self.features = np.zeros((len(self._rows), schema.width), np.float32)
        self.targets = np.zeros(len(self._rows), np.float32)
        try:
            columns = {name: [None if row is None else row[name] for row in self._rows] for name in schema.columns}
        except KeyError:  # rows that name their own columns, and not all of them
            self.plain[:] = False
            return
        self._read_clients(columns.get(schema.client))
        at = 0
        for feature in schema.features:
            self._read_feature(feature, columns[feature.name], self.features[:, at : at + feature.width])
            at += feature.width
        self._read_label(columns[schema.label.name])
        self._finish(at)

    def _read_clients(self, cells: Sequence[object] | None) -> None:
        if cells is None:
            assert self._schema.client == EACH_ROW
            self.clients = [self._row_names(place) for place in range(len(self._rows))]
            return
        self.clients = [None if is_missing(cell) else client_name(cell) for cell in cells]
        self._need([client is not None for client in self.clients])

    def _read_label(self, cells: Sequence[object]) -> None:
        label = self._schema.label

        def read(cell: object) -> Any:
            return _LEAVE if is_missing(cell) else label.read(cell, decimal_comma=self._comma)

        found = _each(cells, read)
        if not self._need([one is not _LEAVE for one in found]):
            found = [(0.0, False) if one is _LEAVE else one for one in found]
        self.targets[:] = [target for target, _ in found]
        self._moved(label.name, np.array([moved for _, moved in found], bool))

    def _read_feature(self, feature: Feature, cells: Sequence[object], into: Float32s) -> None:
        if isinstance(feature, Numeric):
            self._read_numbers(feature, cells, into)
            return
        flagged = feature.width - (feature.missing == "flag")

        def place_of(cell: object) -> Any:
            """Place of the 1, -1 for none, and whether the vocabulary lacks the word."""
            if is_missing(cell):
                return _LEAVE if feature.missing == "refuse" else (flagged if feature.missing == "flag" else -1, False)
            alone = np.zeros(feature.width, np.float32)
            moved = feature.write(cell, alone, decimal_comma=self._comma)
            return (int(alone.argmax()) if alone.any() else -1), moved

        found = _each(cells, place_of)
        if not self._need([one is not _LEAVE for one in found]):
            found = [(-1, False) if one is _LEAVE else one for one in found]
        places = np.array([place for place, _ in found], np.int64)
        there = np.flatnonzero(places >= 0)
        into[there, places[there]] = 1.0
        self._moved(feature.name, np.array([moved for _, moved in found], bool))

    def _read_numbers(self, feature: Numeric, cells: Sequence[object], into: Float32s) -> None:
        values = as_numbers(cells, decimal_comma=self._comma)
        odd = ~np.isfinite(values)
        if odd.any():
            if feature.missing != "refuse":
                for place in np.flatnonzero(odd).tolist():
                    odd[place] = not is_missing(cells[place])
            self._need(~odd)
        with np.errstate(invalid="ignore"):
            inside = np.minimum(np.maximum(values, feature.low), feature.high)
            moved = (inside != values) & np.isfinite(values)
            if feature.outside == "refuse":
                self._need(~moved)
            into[:, 0] = 2.0 * (inside - feature.low) / (feature.high - feature.low) - 1.0
        lacking = ~np.isfinite(values)
        if lacking.any():
            into[lacking, 0] = 0.0
            if feature.missing == "flag":
                into[lacking, -1] = 1.0
        self._moved(feature.name, moved)

    def _finish(self, at: int) -> None:
        schema, into = self._schema, self.features
        places = schema.places
        for a, b in schema.interactions:
            left, right = into[:, places[a]], into[:, places[b]]
            product = (left[:, :, None] * right[:, None, :]).reshape(len(into), -1)
            into[:, at : at + product.shape[1]] = product
            at += product.shape[1]
        if schema.bias:
            into[:, at] = 1.0
        if schema.fit == "scale":
            into *= np.float32(schema.norm / schema.largest_norm)
            return
        wide = into.astype(np.float64)
        nearly = np.sqrt(np.einsum("ij,ij->i", wide, wide)) > schema.norm * (1.0 - 1e-9)
        for place in np.flatnonzero(nearly).tolist():  # the last bit of a norm depends on how it is summed
            norm = float(np.linalg.norm(wide[place]))
            if norm > schema.norm:
                into[place] *= np.float32(schema.norm / norm)

    def _need(self, good: Iterable[bool] | Bools) -> bool:
        """Leave the others out of the plain ones; whether there are no others."""
        found = np.asarray(good if isinstance(good, np.ndarray) else list(good), bool)
        self.plain &= found
        return bool(found.all())

    def _moved(self, name: str, moved: Bools) -> None:
        if moved.any():
            self.clamped[name] = moved


def _each(cells: Sequence[object], read: Callable[[object], Any]) -> list[Any]:
    """What ``read`` says of each cell, asked once for each different one; `_LEAVE` where it raises."""

    def careful(cell: object) -> Any:
        try:
            return read(cell)
        except Exception:  # whatever a cell holds
            return _LEAVE

    if not set(map(type, cells)) <= _PLAIN_TYPES:  # True equals 1, and lists cannot be compared
        return [careful(cell) for cell in cells]
    said = {cell: careful(cell) for cell in set(cells)}
    return [said[cell] for cell in cells]
