"""Rows to predict, encoded as the plan says: dictionaries, a data frame, a file, or numbers encoded already."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.records.cells import is_missing
from veilstream.records.own_records import OwnRecords
from veilstream.records.schema import EACH_ROW, RecordSchema, Refusal, RefusedRecord

Float32s = NDArray[np.float32]

_ROWS = "a dictionary, a list of them, a data frame, or a file of records"


@dataclass
class EncodedRows:
    """Rows as the model takes them, and what could not be used."""

    features: Float32s  # of the usable rows
    usable: NDArray[np.bool_]  # which rows those are
    refused: dict[int, Refusal] = field(default_factory=dict)  # row, counted from 0, and why
    clamped: Counter[str] = field(default_factory=Counter)  # cells outside range or vocabulary, by column
    targets: NDArray[np.float64] | None = None
    """Of every row, on the task's scale, nan where its label cannot be read; None where no row has a label."""
    named: list[dict[str, object]] = field(default_factory=list)  # what says whose a row is, by column
    single: bool = False  # whether one row was given, not a list


def encode(rows: Any, schema: RecordSchema | None, shape: tuple[int, ...] | None) -> EncodedRows:
    """Encode rows by a plan's columns; an array of numbers is taken as encoded already."""
    if isinstance(rows, np.ndarray) and rows.dtype.kind in "fiu":
        return _as_they_are(rows, shape)
    if schema is None:
        why = "this plan names no columns: give an array with a row of encoded numbers for each record"
        raise InputError("rows", type(rows).__name__, "an array of numbers", why)
    return _encoded(*_records(rows, schema), schema)


def _as_they_are(rows: NDArray[Any], shape: tuple[int, ...] | None) -> EncodedRows:
    single = shape is not None and rows.shape == shape
    given = rows[None] if single else rows
    if shape is not None and given.shape[1:] != shape:
        rule = f"an array of shape (rows, {', '.join(map(str, shape))})"
        raise InputError("rows", f"an array of shape {rows.shape}", rule, "dictionaries by column are encoded for you")
    features = given.astype(np.float32)
    usable = np.asarray(np.isfinite(features.reshape(len(features), -1)).all(axis=1), np.bool_)
    refused = {int(row): Refusal("not a number") for row in np.flatnonzero(~usable)}
    return EncodedRows(features[usable], usable, refused, single=single)


def _records(rows: Any, schema: RecordSchema) -> tuple[Iterable[Any], bool, bool]:
    """Rows one by one, whether 3,5 is a number in them, and whether one was given alone."""
    if isinstance(rows, str | Path):
        from veilstream.streams.tables import check_columns, open_table

        table = open_table(rows)
        check_columns(table, _needed(schema), show=True)
        return (cells for _, cells in table.rows()), table.decimal_comma, False
    if isinstance(rows, Mapping):
        return [rows], False, True
    for way in ("to_dicts", "to_pylist"):  # Polars, Arrow
        if hasattr(rows, way):
            return getattr(rows, way)(), False, False
    if hasattr(rows, "columns") and hasattr(rows, "itertuples"):  # pandas
        names = tuple(map(str, rows.columns))
        _check_names(names, schema)
        return (dict(zip(names, row, strict=True)) for row in rows.itertuples(index=False, name=None)), False, False
    if isinstance(rows, Iterable) and not isinstance(rows, bytes):
        return rows, False, False
    raise InputError("rows", type(rows).__name__, _ROWS, "for one record: {'age': 41, ...}")


def _needed(schema: RecordSchema) -> tuple[str, ...]:
    return () if isinstance(schema, OwnRecords) else tuple(feature.name for feature in schema.features)


def _check_names(names: tuple[str, ...], schema: RecordSchema) -> None:
    missing = [name for name in _needed(schema) if name not in names]
    if missing:
        way_out = f"it has {', '.join(names[:40])}; rename them as the plan does"
        raise InputError("rows", "a data frame", f"columns {', '.join(missing)}", way_out)


def _encoded(records: Iterable[Any], comma: bool, single: bool, schema: RecordSchema) -> EncodedRows:
    made, usable, targets = [], [], []
    refused: dict[int, Refusal] = {}
    clamped: Counter[str] = Counter()
    named: list[dict[str, object]] = []
    names = tuple(_naming(schema))
    for number, row in enumerate(records):
        cells = row if isinstance(row, Mapping) else {}
        found = schema.encode_features(cells, decimal_comma=comma) if row is cells else Refusal("not readable")
        usable.append(not isinstance(found, Refusal))
        targets.append(_target(cells, schema, comma))
        named.append({name: cells[name] for name in names if name in cells})
        if isinstance(found, Refusal):
            refused[number] = found
        else:
            made.append(found[0])
            clamped.update(found[1])
    shape = (schema.width,) if not isinstance(schema, OwnRecords) else schema.shape
    features = np.stack(made) if made else np.zeros((0, *shape), np.float32)
    known = np.array(targets, np.float64)
    labelled = known if np.isfinite(known).any() else None
    return EncodedRows(features, np.array(usable, np.bool_), refused, clamped, labelled, named, single)


def _naming(schema: RecordSchema) -> Iterator[str]:
    for column in (schema.client, schema.learner, schema.time):
        if column is not None and column != EACH_ROW:
            yield column


def _target(cells: Mapping[str, Any], schema: RecordSchema, comma: bool) -> float:
    """The label on the task's scale; nan where there is none that can be read."""
    told = cells.get(schema.label.name)
    if is_missing(told):
        return float("nan")
    try:
        return schema.label.read(told, decimal_comma=comma)[0]
    except RefusedRecord:
        return float("nan")
