"""A table of records, read once from top to bottom, and a bookmark of how far.

`Table.rows` ends where the file ends now; called again, it goes on with what was appended since. A bookmark
is a count of rows and a digest of what they said: named columns in any order, numbers by their value. So a
file that another program saved again is still the same, and one that was rewritten or rotated is noticed.
Row hashes are added up, modulo 2^128; the digest of any run of rows is the difference of two digests.
"""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from veilstream.errors import InputError
from veilstream.progress import progress
from veilstream.records.cells import as_text, is_missing
from veilstream.streams.growing_file import is_broken_text
from veilstream.streams.intake import SourceBookmark

Cells = Mapping[str, object]  # one row: its cells by column

BLOCK_ROWS = 256
MANY_ROWS = 4096  # of a block where nothing waits for the first ones
_MODULUS = 1 << 128
_SEPARATES = "\x1e"  # a column's name from what its cell says
_SHORT = 4  # letters of a word for a missing cell, at most
_BEGINS_A_NUMBER = frozenset("+-.0123456789")
PUT_BACK = "put the old content back, or give new records in a file of another name"


@dataclass(frozen=True)
class Bookmark:
    """How far a table has been read."""

    rows: int = 0
    digest: str = ""  # of all that these rows said; see `RowDigest`
    place: str = ""  # where the next row is, in the table's own words; "" where the number of rows says it

    def as_text(self) -> str:
        """One line, for a ledger."""
        return f"{self.rows}:{self.digest}" + (f":{self.place}" if self.place else "")

    @classmethod
    def parse(cls, text: str) -> Bookmark:
        """From `as_text`."""
        rows, digest, place = (*text.split(":", 2), "")[:3]
        return cls(int(rows), digest, place)


@dataclass(frozen=True)
class Block:
    """Some rows that follow each other."""

    source: str  # the name under which a ledger knows where they are from
    first: int  # number of the first one, from 0
    rows: list[Cells | None]  # None for one that cannot be read
    digests: list[str]  # behind each row; empty if not asked for
    places: list[str]  # `Bookmark.place` behind each row; empty where its number says it
    names: list[str]  # of rows that have others than their number

    def __repr__(self) -> str:
        return "Block(<hidden>)"  # people's data, not for logs

    def mark(self, place: int) -> SourceBookmark:
        """Behind one of them, as a ledger keeps it."""
        where = self.places[place] if self.places else ""
        return SourceBookmark(self.source, Bookmark(self.first + place + 1, self.digests[place], where).as_text())

    def name(self, place: int) -> str:
        """One of them: the same whenever it is read."""
        return f"{self.source}:{self.names[place] if self.names else self.first + place}"


class RowDigest:
    """Adds up what rows say; equal for equal records in any spelling of the file."""

    def __init__(self, behind: str = "") -> None:
        self._total = int(behind or "0", 16)

    def add(self, rows: Sequence[Cells | None], *, decimal_comma: bool = False) -> list[str]:
        """The digests behind each of some more rows; None is a row that cannot be read."""
        digests = []
        for said in _said_by_rows(rows, decimal_comma):
            content = b"\x00" if said is None else "\x1f".join(said).encode("utf-8", "surrogatepass")
            hashed = hashlib.blake2b(content, digest_size=16, person=b"row").digest()
            self._total = (self._total + int.from_bytes(hashed, "little")) % _MODULUS
            digests.append(f"{self._total:032x}")
        return digests


def _said_by_rows(rows: Sequence[Cells | None], decimal_comma: bool) -> Iterator[Sequence[str] | None]:
    """For each row its columns' names and what they say, in one order; None for a row that cannot be read."""
    first = rows[0] if rows else None
    if len(rows) > 1 and first is not None and _SEPARATES not in "".join(first):
        names = first.keys()
        if all(row is not None and row.keys() == names for row in rows):
            columns = [_said_of_column(name, rows, decimal_comma) for name in sorted(filter(None, names), key=_sorts)]
            yield from zip(*columns, strict=True) if columns else [()] * len(rows)
            return
    for row in rows:
        if row is None:
            yield None
        else:
            named = row.items()  # a nameless column is a row number that a program has added
            yield sorted(f"{name}{_SEPARATES}{_said(value, decimal_comma)}" for name, value in named if name)


def _sorts(name: str) -> str:
    return name + _SEPARATES


def _said_of_column(name: str, rows: Sequence[Cells | None], decimal_comma: bool) -> list[str]:
    """The same for one column, spelled once for each different text."""
    cells = [row[name] for row in rows if row is not None]
    if set(map(type, cells)) == {str}:
        said = {text: f"{name}{_SEPARATES}{_said(text, decimal_comma)}" for text in set(cells)}
        return [said[cell] for cell in cells]
    return [f"{name}{_SEPARATES}{_said(cell, decimal_comma)}" for cell in cells]


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


class Table(ABC):
    """A table that is read once; a format says how its rows are read."""

    decimal_comma = False  # whether 3,5 is a number

    def __init__(self, name: str, columns: tuple[str, ...] = ()) -> None:
        self.name = name
        self.columns = columns  # by the header; () where rows name their own
        self.notices: list[str] = []  # how it is read, for the person beside the data
        self.bookmark = Bookmark()  # behind the last row that was given out
        self._digest = RowDigest()

    @abstractmethod
    def _read(self) -> Iterator[Cells | None]:
        """Rows from here to the end as it is now; None for one that cannot be read."""

    @property
    def rows_left(self) -> int | None:
        """About how many rows follow; None if unknown."""
        return None

    def rows(self) -> Iterator[tuple[int, Cells | None]]:
        """Number from 0, and cells, of the rows from here to the end as it is now."""
        for cells in self._read():
            number = self.bookmark.rows
            (digest,) = self._digest.add([cells], decimal_comma=self.decimal_comma)
            places, _ = self._places(1)
            self.bookmark = Bookmark(number + 1, digest, "".join(places))
            yield number, cells

    @property
    def mark(self) -> SourceBookmark:
        """Behind the last row that was given out, as a ledger keeps it."""
        return SourceBookmark(self.name, self.bookmark.as_text())

    def resume(self, marks: Mapping[str, str]) -> None:
        """Go on behind what a ledger knows of, by name."""
        if self.name in marks:
            self.skip_to(Bookmark.parse(marks[self.name]))

    def _places(self, rows: int) -> tuple[list[str], list[str]]:
        """`Block.places` and `Block.names` of the rows that `_read` gave last."""
        return [], []

    def blocks(self, *, digests: bool = True, most: int = BLOCK_ROWS) -> Iterator[Block]:
        """The same in blocks, which cost less; without ``digests`` the table can give no bookmark any more."""
        ended, rows = False, self._read()
        while not ended:
            found: list[Cells | None] = []
            failure: Exception | None = None
            try:
                for cells in itertools.islice(rows, most):
                    found.append(cells)  # noqa: PERF402 - kept where the next one fails
            except Exception as error:
                failure = error
            ended = len(found) < most
            if found:
                first = self.bookmark.rows
                told = self._digest.add(found, decimal_comma=self.decimal_comma) if digests else []
                places, names = self._places(len(found))
                self.bookmark = Bookmark(first + len(found), told[-1] if told else "", places[-1] if places else "")
                yield Block(self.name, first, found, told, places, names)
            if failure is not None:
                raise failure

    def skip_to(self, bookmark: Bookmark) -> None:
        """Read up to a bookmark."""
        with progress(f"reading {self.name} up to where it was left", None) as tick:
            while (missing := bookmark.rows - self.bookmark.rows) > 0:
                block = next(self.blocks(most=min(missing, BLOCK_ROWS)), None)
                if block is None:
                    raise InputError(
                        "data",
                        self.name,
                        f"the {bookmark.rows} rows that were read before, and more",
                        f"it has {self.bookmark.rows}: {PUT_BACK}",
                    )
                tick(len(block.rows))
        if bookmark.rows and self.bookmark.digest != bookmark.digest:
            raise InputError(
                "data",
                self.name,
                f"a file whose first {bookmark.rows} rows are as they were read",
                f"it was rewritten or rotated: {PUT_BACK}",
            )


def check_names(name: str, columns: tuple[str, ...]) -> None:
    """Refuse an unusable header by places, not names: without a header these would be a person's cells."""
    twice = {column for column, count in Counter(columns).items() if column and count > 1}
    if twice:
        places = [str(i + 1) for i, column in enumerate(columns) if column in twice]
        shown = ", ".join(places[:12]) + (", ..." if len(places) > 12 else "")
        raise InputError(
            "data",
            name,
            "a header that names each column once",
            f"among columns {shown} of {len(columns)} a name is there twice: rename one",
        )
    if any(is_broken_text(column) for column in columns):
        raise InputError("data", name, "a header in UTF-8", "save the file as UTF-8")
