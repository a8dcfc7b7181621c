"""Checks of plain numbers at the public border; each error names field, value, rule, way out."""

from __future__ import annotations

import math
import numbers

from veilstream.errors import InputError


def positive_integer(field: str, value: object, way_out: str) -> int:
    """``value`` as an int >= 1; NumPy integers count, booleans and floats do not."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise InputError(field, value, "an integer >= 1", way_out)
    return int(value)


def positive_number(field: str, value: object, way_out: str) -> float:
    """``value`` as a finite float > 0."""
    number = _finite(value)
    if number is None or number <= 0:
        raise InputError(field, value, "a finite number > 0", way_out)
    return number


def non_negative(field: str, value: object, way_out: str) -> float:
    """``value`` as a finite float >= 0."""
    number = _finite(value)
    if number is None or number < 0:
        raise InputError(field, value, "a finite number >= 0", way_out)
    return number


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    return float(value) if math.isfinite(value) else None


def checked_horizon(horizon: object) -> int:
    """The number of steps T = R·τ."""
    return positive_integer("horizon", horizon, "the number of steps R·τ, try 4000")
