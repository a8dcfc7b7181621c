"""Who a client is, as a record says it: one rule for files, callers and simulations.

A client is named by text or by a whole number, in at most `LONGEST_NAME` characters, none of them a
control character (a zero byte, a tab, a line break: what damaged or shifted cells hold) or half a
character (a lone surrogate). Text is brought into one form: Unicode NFC, without white space,
control and invisible format characters (a byte-order mark, a zero-width space) at either end.
"""

from __future__ import annotations

import decimal
import math
import unicodedata
import uuid

import numpy as np

__all__ = ["LONGEST_NAME", "client_name", "is_client_text", "normal_form"]

LONGEST_NAME = 1024


def normal_form(text: str) -> str:
    """The same text in NFC, without outer white space and invisible characters."""
    composed = unicodedata.normalize("NFC", text)
    first, last = 0, len(composed)
    while first < last and _invisible(composed[first]):
        first += 1
    while last > first and _invisible(composed[last - 1]):
        last -= 1
    return unicodedata.normalize("NFC", composed[first:last])


def _invisible(character: str) -> bool:
    return character.isspace() or unicodedata.category(character) in ("Cc", "Cf")


def is_client_text(text: str) -> bool:
    """Whether a text in normal form can name a client."""
    if not 0 < len(text) <= LONGEST_NAME:
        return False
    return text.isprintable() or not any(unicodedata.category(c) in ("Cc", "Cs") for c in text)


def client_name(cell: object) -> str | None:
    """A cell as a client's name; None for what names nobody.

    Objects, lists, true and false, fractions and bytes that are no text name nobody: two people
    could be taken for one, or one for two.
    """
    if isinstance(cell, bytes):
        try:
            cell = cell.decode()
        except UnicodeDecodeError:
            return None
    if isinstance(cell, bool | np.bool_):
        return None
    if isinstance(cell, float | np.floating | decimal.Decimal):
        whole = math.isfinite(cell) and cell == int(cell)
        cell = int(cell) if whole else None
    if not isinstance(cell, str | int | np.integer | uuid.UUID):
        return None
    text = normal_form(str(cell))
    return text if is_client_text(text) else None
