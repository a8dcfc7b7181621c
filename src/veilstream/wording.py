"""Numbers with their nouns, as every message writes them."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """1 row, 2 rows, 0 rows."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
