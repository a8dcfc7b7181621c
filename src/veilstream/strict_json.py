"""JSON as RFC 8259 defines it, read strictly: every field once, and only finite numbers."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

_LONGEST_SHOWN = 32
_MOST_DIGITS = 400  # float has fewer; int() refuses some thousands


class InvalidJson(ValueError):
    """The text is not strict JSON. The message may be shown to its sender; it quotes no value."""


def read_json(text: str | bytes, *, parse_int: Callable[[str], float] = int, finite: bool = True) -> Any:
    """The one value in ``text``."""
    try:
        text = text.decode() if isinstance(text, bytes) else text  # json itself would guess the encoding
        return json.loads(
            text,
            object_pairs_hook=_each_field_once,
            parse_int=parse_int,
            parse_float=_finite if finite else None,
            parse_constant=_no_constant if finite else None,
        )
    except InvalidJson:
        raise
    except (ValueError, RecursionError):
        raise InvalidJson("malformed JSON") from None


def read_values(text: bytes) -> Any:
    """Read records that people's programs send: what JSON cannot have becomes a value that no record may have.

    NaN, infinities and numbers beyond all bounds become such floats, bytes that are not UTF-8 lone surrogates. So
    one record of a list, whatever it holds, spoils no other, and its client can still be told.
    """
    return read_json(text.decode(errors="surrogateescape"), parse_int=_any_whole, finite=False)


def _any_whole(text: str) -> float:
    return int(text) if len(text) <= _MOST_DIGITS else float(text)


def _each_field_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise InvalidJson(f"field {twice[:_LONGEST_SHOWN]!a} appears twice in one object")
    return fields


def _no_constant(text: str) -> float:
    raise InvalidJson(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise InvalidJson("a number is too large")
    return number
