"""What a column must hold, in words: for people who give records."""

from __future__ import annotations

from veilstream.records.client_names import NAME_RULE
from veilstream.records.schema import Categorical, Numeric, RecordSchema

_MOST_WORDS = 12


def rule_of(schema: RecordSchema, column: str) -> str:
    """What a column of a record must hold."""
    if column == schema.client:
        return NAME_RULE
    if column == schema.label.name:
        label = schema.label
        numbers = f"a number from {label.low:g} to {label.high:g}"
        return numbers if label.classes is None else _one_of(label.classes)
    for feature in schema.features:
        if feature.name == column:
            empty = "" if feature.missing == "refuse" else ", or null"
            if isinstance(feature, Numeric):
                return f"a number from {feature.low:g} to {feature.high:g}{empty}"
            if isinstance(feature, Categorical) and feature.unknown == "refuse":
                return f"{_one_of(feature.vocabulary)}{empty}"
            return f"a text{empty}"
    return f"fields {', '.join(schema.columns)}" if schema.columns else "what data.encode takes"


def _one_of(words: tuple[str, ...]) -> str:
    more = f" or {len(words) - _MOST_WORDS} more" if len(words) > _MOST_WORDS else ""
    return f"one of {', '.join(words[:_MOST_WORDS])}{more}"
