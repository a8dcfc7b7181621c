"""How far a table has been read: a count of rows, and a digest of what they said.

The digest is of records, not of bytes: each row counts by its named columns, whatever their order,
delimiter, newline or encoding, and numbers count by their value. So a file that was saved again by
another program is still the same file. Row hashes are added up, modulo 2^128; the digest of any run
of rows is thus the difference of two digests, and rows that were read before are found again at any
place of another file (`SeenBefore`).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from veilstream.errors import InputError
from veilstream.records.cells import as_text, is_missing

Row = tuple[int, Mapping[str, object] | None]
"""Number from 0, and cells by column; None where the row cannot be read."""

_MODULUS = 1 << 128
_LOW = (1 << 64) - 1
_SHORT = 4
"""Letters of a word for a missing cell, at most."""
_BEGINS_A_NUMBER = frozenset("+-.0123456789")
_BY_CHANCE = 10
"""Fewer rows than this may be alike in two files by chance; only at its beginning they count."""


@dataclass(frozen=True)
class Bookmark:
    """How far a table has been read."""

    rows: int = 0
    digest: str = ""
    """Of all that these rows said; see `RowDigest`."""

    def as_text(self) -> str:
        """One line, for a ledger."""
        return f"{self.rows}:{self.digest}"

    @classmethod
    def parse(cls, text: str) -> Bookmark:
        """From `as_text`."""
        rows, _, digest = text.partition(":")
        return cls(int(rows), digest)


class RowDigest:
    """Adds up what rows say; equal for equal records in any spelling of the file."""

    def __init__(self) -> None:
        self._total = 0

    def add(self, cells: Mapping[str, object] | None, *, decimal_comma: bool = False) -> str:
        """The digest with one more row; None is a row that cannot be read."""
        if cells is None:
            content = b"\x00"
        else:
            said = sorted(
                f"{name}\x1e{_said(value, decimal_comma)}"
                for name, value in cells.items()
                if name  # a nameless column is a row number that a program has added
            )
            content = "\x1f".join(said).encode("utf-8", "surrogatepass")
        hashed = hashlib.blake2b(content, digest_size=16, person=b"row").digest()
        self._total = (self._total + int.from_bytes(hashed, "little")) % _MODULUS
        return f"{self._total:032x}"


def _said(value: object, decimal_comma: bool) -> str:
    """A cell in one spelling: 1.50, "1.5" and (where that is a number) "1,5" are the same."""
    text = value.strip() if type(value) is str and value.isascii() else as_text(value)
    if (type(value) is not str or len(text) <= _SHORT) and is_missing(value):
        return ""
    if text[:1] not in _BEGINS_A_NUMBER:
        return text
    number = text.replace(",", ".") if decimal_comma and text.count(",") == 1 else text
    try:
        return repr(float(number))
    except ValueError:
        return text


class SeenBefore:
    """Finds rows that were read under other names in a table that is read now.

    Found are the rows of a bookmark as a whole, in any order among themselves, behind any number of
    other rows. Rows among them that were changed, taken away or put in between make another digest,
    and are not recognised.

    Args:
        bookmarks: names and bookmarks of what was read.
        begins: the digest of this table before its first row that is looked at, as a number.

    """

    def __init__(self, bookmarks: Mapping[str, Bookmark], begins: int = 0) -> None:
        self._marks = {name: (mark.rows, int(mark.digest, 16) & _LOW) for name, mark in bookmarks.items() if mark.rows}
        self._sums = array("Q", [begins & _LOW])

    def look(self, digest: str) -> tuple[str, int] | None:
        """The digest behind the next row; the name and number of rows that end here, if any do."""
        low = int(digest, 16) & _LOW
        self._sums.append(low)
        row = len(self._sums) - 1
        for name, (rows, wanted) in self._marks.items():
            first = row - rows
            counts = first == 0 or (first > 0 and rows >= _BY_CHANCE)
            if counts and (low - self._sums[first]) & _LOW == wanted:
                return name, rows
        return None


def skip_rows(table: Any, bookmark: Bookmark) -> None:
    """Read a table up to a bookmark.

    Raises:
        InputError: what lies before it says something else than it did.

    """
    rows = table.rows()
    while table.bookmark.rows < bookmark.rows:
        if next(rows, None) is None:
            raise InputError(
                "data",
                table.name,
                f"the {bookmark.rows} rows that were read before, and more",
                f"it has {table.bookmark.rows}: put the old content back, or give new records in a "
                "file of another name",
            )
    if bookmark.rows and table.bookmark.digest != bookmark.digest:
        raise InputError(
            "data",
            table.name,
            f"a file whose first {bookmark.rows} rows are as they were read",
            "it was rewritten or rotated: put the old content back, or give new records in a file of another name",
        )
