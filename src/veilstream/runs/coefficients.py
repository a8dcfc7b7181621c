"""A linear model's parameters by name: in the encoder's units, and in those of the columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from veilstream.errors import InputError
from veilstream.records.own_records import OwnRecords
from veilstream.records.schema import Hashed, Numeric, RecordSchema

if TYPE_CHECKING:
    from veilstream.runs.model import Model

INTERCEPT = "intercept"


def coefficients_of(model: Model) -> dict[str, Any]:
    """Parameters by name; for more than two labels by label, then by name."""
    if not model.linear:
        name = type(model.task).__name__
        raise InputError("coefficients", name, "a linear model", "its numbers are model.parameters")
    names = model.feature_names
    if names is None:
        count = len(model.parameters) // _rows(model)
        names = tuple(f"feature {place}" for place in range(count))
    weights = model.parameters.astype(np.float64).reshape(_rows(model), -1)
    return _by_label(model, [dict(zip(names, row.tolist(), strict=True)) for row in weights])


def coefficients_per_unit(model: Model) -> dict[str, Any] | None:
    """The same for the columns' own units, with an intercept; None where no such list exists."""
    schema = model.schema
    if not model.linear or schema is None or not _simple(schema):
        return None
    scale = schema.norm / schema.largest_norm
    label = schema.label
    numbers = label.classes is None and not label.counts
    unit = label.unit if numbers else 1.0
    middle = 0.5 * (label.low + label.high) if numbers else 0.0
    found = []
    for row in model.parameters.astype(np.float64).reshape(_rows(model), -1) * (scale * unit):
        intercept, own, at = middle + (row[-1] if schema.bias else 0.0), dict[str, float](), 0
        for feature in schema.features:
            own |= dict(zip(feature.names, row[at : at + feature.width].tolist(), strict=True))
            at += feature.width
            if isinstance(feature, Numeric):
                whole = own[feature.name]
                slope = 2.0 * whole / (feature.high - feature.low)
                at_zero = -whole - slope * feature.low
                own[feature.name] = slope
                intercept += at_zero
                if feature.missing != "refuse":  # a missing number counts as the middle of its range, and x as 0
                    gone = f"{feature.name} is missing"
                    own[gone] = own.get(gone, 0.0) - at_zero
        found.append({INTERCEPT: float(intercept), **own})
    return _by_label(model, found)


def _simple(schema: RecordSchema) -> bool:
    if isinstance(schema, OwnRecords) or schema.interactions or schema.fit != "scale":
        return False
    return not any(isinstance(feature, Hashed) for feature in schema.features)


def _rows(model: Model) -> int:
    classes = getattr(model.task, "classes", None)
    return 1 if classes is None else int(classes)


def _by_label(model: Model, rows: list[dict[str, float]]) -> dict[str, Any]:
    if len(rows) == 1:
        return rows[0]
    assert model.classes is not None
    return dict(zip(model.classes, rows, strict=True))
