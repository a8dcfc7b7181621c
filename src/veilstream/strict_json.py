"""JSON as RFC 8259 defines it, read strictly: every field once, and only finite numbers."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

UNREADABLE = "\udcff"
"""In the place of a value that cannot be read: no text, number or name."""
MOST_NESTED = 64
"""Lists and objects in each other, in a record: how many more Python can read depends on who asks."""

_LONGEST_SHOWN = 32
_MOST_DIGITS = 400  # float has fewer; int() refuses some thousands
_LIST, _REQUEST = 3, 2  # a list of requests, a request, its record (1), a cell (0)
_MOST_REQUESTS = 1024  # of a list; a longer one is not cut any further
_TOKEN = re.compile(r'"(?:[^"\\]|\\.?)*+"?|[][{}:,]', re.DOTALL)  # a text without an end is one too: it is read once


class InvalidJson(ValueError):
    """The text is not strict JSON. The message may be shown to its sender; it quotes no value."""


class _OnePartIsWrong(InvalidJson):
    """A field that is there twice, or nested too deep: it can be cut out of the text."""


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
    except RecursionError:
        raise _OnePartIsWrong("malformed JSON") from None
    except ValueError:
        raise InvalidJson("malformed JSON") from None


def read_values(text: bytes) -> Any:
    """Read records that people's programs send: what JSON cannot have becomes a value that no record may have.

    NaN, infinities and numbers beyond all bounds become such floats, bytes that are not UTF-8 lone surrogates. So
    one record of a list, whatever it holds, spoils no other, and its client can still be told. Likewise a record's
    field that is there twice, or nested too deep, becomes `UNREADABLE`.
    """
    decoded = text.decode(errors="surrogateescape")
    return _read_parts(decoded, _LIST if decoded.lstrip()[:1] == "[" else _REQUEST)


def is_nested_deep(value: object) -> bool:
    """Whether lists and objects lie in each other more than `MOST_NESTED` deep."""
    inside = [value]
    for _ in range(MOST_NESTED):
        inside = [part for held in inside for part in _parts_of(held) if isinstance(part, dict | list)]
        if not inside:
            return False
    return True


def _parts_of(held: object) -> list[Any]:
    return list(held.values()) if isinstance(held, dict) else held if isinstance(held, list) else []


def _read_parts(text: str, levels: int) -> Any:
    try:
        value = read_json(text, parse_int=_any_whole, finite=False)
        if not is_nested_deep(value):
            return value
    except _OnePartIsWrong:
        pass
    if not levels:
        return UNREADABLE
    parts = list(_cut(text))
    if levels == _LIST and len(parts) > _MOST_REQUESTS:
        return [UNREADABLE] * len(parts)
    if text.lstrip()[:1] != "{":
        return [_read_parts(part, levels - 1) for _, part in parts]
    found: dict[str, Any] = {}
    for name, part in parts:
        field = read_json(name)
        if field in found and levels == _REQUEST:
            raise InvalidJson(_twice(field))
        found[field] = UNREADABLE if field in found else _read_parts(part, levels - 1)
    return found


def _cut(text: str) -> Iterator[tuple[str, str]]:
    """The fields (name, value) of an object, or the parts of a list with an empty name, as they are written."""
    depth, name, begins, opened = 0, "", 0, False
    for token in _TOKEN.finditer(text):
        mark = token[0]
        depth += (mark in ("[", "{")) - (mark in ("]", "}"))
        if depth == 1 and mark in ("[", "{") and not opened:
            begins, opened = token.end(), True
        elif depth == 1 and mark == ":":
            name, begins = text[begins : token.start()], token.end()
        elif (depth == 1 and mark == ",") or (depth == 0 and mark in ("]", "}")):
            yield name, text[begins : token.start()]
            name, begins = "", token.end()
    if depth or text[begins:].strip():
        raise InvalidJson("malformed JSON")


def _any_whole(text: str) -> float:
    return int(text) if len(text) <= _MOST_DIGITS else float(text)


def _each_field_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise _OnePartIsWrong(_twice(twice))
    return fields


def _twice(name: str) -> str:
    return f"field {name[:_LONGEST_SHOWN]!a} appears twice in one object"


def _no_constant(text: str) -> float:
    raise InvalidJson(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise InvalidJson("a number is too large")
    return number
