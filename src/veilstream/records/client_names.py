"""A client's name: one rule for tables, for programs that call, and for a learner's own tags.

A name is a text or a whole number; 17, 17.0 and "17" are one person. Text is brought to Unicode NFC, without
white space and invisible format characters at either end. Lists, objects, fractions, bytes that are not text
and control characters are refused: programs differ in them, which would make one person of two, or two of one.
"""

from __future__ import annotations

import numbers
import unicodedata
from decimal import Decimal
from uuid import UUID

LONGEST_NAME = 1024
NAME_RULE = (
    f"a text of 1 to {LONGEST_NAME} characters without control characters, not white space alone, or a whole number"
)

_EXACT = 2.0**53  # above it, a float does not tell neighbouring whole numbers apart


def client_name(told: object) -> str | None:
    """The client's name in one form; None if it is not a name by `NAME_RULE`."""
    if type(told) is str and 0 < len(told) <= LONGEST_NAME and told.isascii() and told.isprintable():
        return told.strip(" ") or None  # in its one form already, as nearly always
    if isinstance(told, bool):
        return None
    if isinstance(told, bytes):  # a text column of some stores
        told = _decoded(told)
    elif isinstance(told, UUID):
        told = str(told)
    if isinstance(told, numbers.Integral):
        told = _digits(int(told))
    elif isinstance(told, numbers.Real | Decimal):
        try:
            number = float(told)
        except (ValueError, ArithmeticError):  # a signalling NaN, a fraction beyond all bounds
            return None
        whole = abs(number) < _EXACT and number == told and number.is_integer()
        told = str(int(number)) if whole else ""
    if not isinstance(told, str) or not 0 < len(told) <= LONGEST_NAME:
        return None
    name = normal_form(told)
    return name if name and not any(map(_is_no_text, name)) else None


def normal_form(text: str) -> str:
    """The same text in NFC, without white space and invisible format characters at its ends."""
    composed = unicodedata.normalize("NFC", text)
    first, last = 0, len(composed)
    while first < last and _invisible(composed[first]):
        first += 1
    while last > first and _invisible(composed[last - 1]):
        last -= 1
    return unicodedata.normalize("NFC", composed[first:last])


def _decoded(text: bytes) -> str | None:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return None


def _digits(number: int) -> str:
    return str(number) if number.bit_length() < 3 * LONGEST_NAME else ""


def _invisible(character: str) -> bool:
    return character.isspace() or unicodedata.category(character) == "Cf"


def _is_no_text(character: str) -> bool:
    """Control characters, and halves of a character (JSON can spell one)."""
    return unicodedata.category(character) in ("Cc", "Cs")
