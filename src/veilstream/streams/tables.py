"""Tables of records, read row by row: CSV and JSON lines here, other formats beside.

    table = open_table("stations.csv")
    for number, cells in table.rows():      cells is None for a row that cannot be read
        ...
    table.bookmark                          where it stands; `skip_to` goes on from there

`rows` ends where the file ends now; called again, it goes on with what was appended since. A
bookmark holds a hash of all that was read, so a file that was rewritten or rotated is noticed and
not read as if it were the old one.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from veilstream.errors import InputError

__all__ = [
    "Bookmark",
    "CsvTable",
    "JsonLinesTable",
    "Row",
    "RowsTable",
    "TableReader",
    "check_columns",
    "open_table",
]

Row = tuple[int, Mapping[str, object] | None]
"""Number from 0, and cells by column; None where the row cannot be read."""

_SAMPLE_BYTES = 1 << 18
_CHUNK_BYTES = 1 << 20
_SETTLED_S = 2.0
"""A last line without its newline is whole once the file has not changed for so long."""
_LONGEST_LINE = 1 << 24
_LAST_BYTES = 256
"""So much of what was read last is compared before more is read."""
_DELIMITERS = ",;\t|"
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
_DECIMAL_POINT = re.compile(r"[-+]?\d*\.\d+")


@dataclass(frozen=True)
class Bookmark:
    """How far a table has been read."""

    rows: int = 0
    digest: str = ""
    """Of all bytes that were read for these rows."""

    def as_text(self) -> str:
        """One line, for a ledger."""
        return f"{self.rows}:{self.digest}"

    @classmethod
    def parse(cls, text: str) -> Bookmark:
        """From `as_text`."""
        rows, _, digest = text.partition(":")
        return cls(int(rows), digest)


class TableReader(Protocol):
    """A table that is read once, from top to bottom."""

    name: str
    columns: tuple[str, ...]
    """By the header; () where rows name their own."""
    decimal_comma: bool
    """Whether 3,5 is a number."""
    notices: list[str]
    """What the person beside it should know of how it is read."""

    bookmark: Bookmark
    """Behind the last row that was given out."""

    @property
    def rows_left(self) -> int | None:
        """About how many follow; None where nobody knows."""

    def rows(self) -> Iterator[Row]:
        """Those from here to the end as it is now."""

    def skip_to(self, bookmark: Bookmark) -> None:
        """Go on behind a bookmark; an error if what lies before it has changed."""


def open_table(path: Path | str, *, whole: bool = True, query: str | None = None) -> TableReader:
    """A table by its file's name.

    Args:
        path: .csv, .tsv, .txt, .jsonl, .ndjson, .parquet, .arrow, .feather, .db, .sqlite.
        whole: whether the file is complete: its last line counts without a newline at once.
        query: of a SQLite file: which rows, in order.

    Raises:
        InputError: for a file that is missing, of another kind, or without a usable header.

    """
    path = Path(path)
    if not path.is_file():
        raise InputError("data", str(path), "a file that is there", "check the path")
    suffix = path.suffix.lower()
    if suffix in (".parquet", ".arrow", ".feather", ".db", ".sqlite", ".sqlite3"):
        from veilstream.streams.binary_tables import open_binary_table

        return open_binary_table(path, query)
    if query is not None:
        raise InputError("data.query", query, "nothing unless the source is SQLite", "remove it")
    if suffix in (".jsonl", ".ndjson", ".json"):
        return JsonLinesTable(path, whole=whole)
    if suffix in (".csv", ".tsv", ".txt", ".data", ""):
        return CsvTable(path, whole=whole)
    raise InputError(
        "data", path.name, "CSV, JSON lines, Parquet, Arrow or SQLite",
        "name the file by its kind: .csv, .jsonl, .parquet, .arrow, .sqlite",
    )  # fmt: skip


def check_columns(table: TableReader, wanted: tuple[str, ...]) -> None:
    """Refuse a table that lacks columns, naming them and those that are there."""
    if not table.columns:
        return  # every row is looked at by itself
    missing = [column for column in wanted if column not in table.columns]
    if missing:
        raise InputError(
            "data", table.name, f"columns {', '.join(missing)}, which the plan names",
            f"it has {', '.join(table.columns[:40])}; rename them in the file or in the plan",
        )  # fmt: skip


class _Lines:
    """A growing file of lines: bytes in, text out, hashed on the way; holds no file open."""

    def __init__(self, path: Path, *, whole: bool) -> None:
        self.path, self._whole = path, whole
        with path.open("rb") as file:
            sample = file.read(_SAMPLE_BYTES)
        self.encoding, self.bom, self.notice = _encoding(sample, path.name)
        self.sample = sample[self.bom :].decode(self.encoding, "replace")
        self._hash = hashlib.blake2b(digest_size=16)
        self._newline = "\n".encode(self.encoding)
        self._position = self.bom
        self._buffer = b""  # what follows there, as far as it has been fetched
        self._at = 0
        self._last = b""  # the end of what has been fetched
        self._file_number = path.stat().st_ino

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        end = self._end_of_line()
        while end < 0 and self._fetch():
            end = self._end_of_line()
        if end < 0:
            end = len(self._buffer)
            if end == self._at or not self._settled():
                raise StopIteration
        line = self._buffer[self._at : end]
        self._at = end
        self._position += len(line)
        self._hash.update(line)
        return line.decode(self.encoding, "surrogateescape")

    def rows_left(self, rows: int) -> int | None:
        """About how many follow, if all are as long as those that were read."""
        try:
            size = self.path.stat().st_size
        except OSError:
            return None
        if not rows:
            return None if size > self._position else 0
        return round(max(0, size - self._position) * rows / max(1, self._position - self.bom))

    def _end_of_line(self) -> int:
        """Behind the next newline in the buffer; -1 where there is none."""
        width = len(self._newline)
        found = self._buffer.find(self._newline, self._at)
        while found >= 0 and (found - self._at) % width:  # half a character
            found = self._buffer.find(self._newline, found + 1)
        if found < 0 and len(self._buffer) - self._at > _LONGEST_LINE:
            return self._at + _LONGEST_LINE
        return -1 if found < 0 else found + width

    def _fetch(self) -> bool:
        """More of the file into the buffer; whether there was more."""
        size, number = self.path.stat().st_size, self.path.stat().st_ino
        known = self._position + len(self._buffer) - self._at
        if number != self._file_number:
            raise self._changed("is another file now")
        if size < known:
            raise self._changed("has become shorter")
        with self.path.open("rb") as file:
            file.seek(known - len(self._last))
            if file.read(len(self._last)) != self._last:
                raise self._changed("was written over")
            more = file.read(_CHUNK_BYTES)
        self._last = (self._last + more)[-_LAST_BYTES:]
        self._buffer, self._at = self._buffer[self._at :] + more, 0
        return bool(more)

    def _changed(self, what: str) -> InputError:
        return InputError(
            "data", str(self.path), f"a file that only grows; it {what}",
            "put the old content back, or give new records in a file of another name",
        )  # fmt: skip

    def _settled(self) -> bool:
        """Whether a last line without its newline is all there."""
        return self._whole or time.time() - self.path.stat().st_mtime >= _SETTLED_S


class CsvTable:
    """CSV with a header; delimiter, encoding and decimal comma are found out."""

    def __init__(self, path: Path, *, whole: bool = True) -> None:
        self.name = path.name
        self._lines = _Lines(path, whole=whole)
        self.notices = [self._lines.notice] if self._lines.notice else []
        self._delimiter = _delimiter(self._lines.sample)
        if self._delimiter != ",":
            named = {";": "semicolons", "\t": "tabs", "|": "bars"}[self._delimiter]
            self.notices.append(f"{self.name}: cells are separated by {named}")
        self._reader = csv.reader(self._lines, delimiter=self._delimiter)
        header = next(self._reader, None)
        if not header:
            raise InputError("data", self.name, "a header with the columns' names", "it is empty")
        self.columns = tuple(cell.strip() for cell in header)
        _check_header(self.name, self.columns)
        self.decimal_comma = self._delimiter != "," and _has_decimal_commas(
            self._lines.sample, self._delimiter
        )
        if self.decimal_comma:
            self.notices.append(f"{self.name}: 3,5 is read as a number")
        self.bookmark = Bookmark()

    def rows(self) -> Iterator[Row]:
        """Those from here to the end as it is now."""
        # A csv.reader that has met the end is spent; another goes on with the same lines.
        reader = csv.reader(self._lines, delimiter=self._delimiter)
        while True:
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error:
                cells = ["\udc80"]
            if not cells:
                continue  # an empty line is nobody
            number = self.bookmark.rows
            self.bookmark = Bookmark(number + 1, self._lines.digest)
            yield number, self._row(cells)

    @property
    def rows_left(self) -> int | None:
        """About how many follow."""
        return self._lines.rows_left(self.bookmark.rows)

    def _row(self, cells: list[str]) -> Mapping[str, object] | None:
        if len(cells) != len(self.columns) or any(_broken(cell) for cell in cells):
            return None
        return dict(zip(self.columns, cells, strict=True))

    def skip_to(self, bookmark: Bookmark) -> None:
        """Go on behind a bookmark; an error if what lies before it has changed."""
        _skip(self, bookmark)


class JsonLinesTable:
    """One JSON object a line."""

    decimal_comma = False

    def __init__(self, path: Path, *, whole: bool = True) -> None:
        self.name, self.columns = path.name, ()
        self._lines = _Lines(path, whole=whole)
        self.notices = [self._lines.notice] if self._lines.notice else []
        self.bookmark = Bookmark()

    columns: tuple[str, ...]

    def rows(self) -> Iterator[Row]:
        """Those from here to the end as it is now."""
        for line in self._lines:
            if not line.strip():
                continue
            number = self.bookmark.rows
            self.bookmark = Bookmark(number + 1, self._lines.digest)
            yield number, self._row(line)

    @property
    def rows_left(self) -> int | None:
        """About how many follow."""
        return self._lines.rows_left(self.bookmark.rows)

    def _row(self, line: str) -> Mapping[str, object] | None:
        try:
            held = None if _broken(line) else json.loads(line)
        except (ValueError, RecursionError):
            return None
        return held if isinstance(held, dict) else None

    def skip_to(self, bookmark: Bookmark) -> None:
        """Go on behind a bookmark; an error if what lies before it has changed."""
        _skip(self, bookmark)


class RowsTable:
    """Rows of a Python iterator, each a mapping: for sources of your own, and for tests."""

    decimal_comma = False

    def __init__(self, rows: Iterator[Mapping[str, object]], name: str = "rows") -> None:
        self.name, self.columns, self.notices = name, (), []
        self._rows = iter(rows)
        self._hash = hashlib.blake2b(digest_size=16)
        self.bookmark = Bookmark()

    columns: tuple[str, ...]
    notices: list[str]
    rows_left: int | None = None

    def rows(self) -> Iterator[Row]:
        """Those from here to the end as it is now."""
        for cells in self._rows:
            self._hash.update(repr(sorted(cells.items(), key=lambda item: str(item[0]))).encode())
            number = self.bookmark.rows
            self.bookmark = Bookmark(number + 1, self._hash.hexdigest())
            yield number, cells

    def skip_to(self, bookmark: Bookmark) -> None:
        """Go on behind a bookmark; an error if what lies before it has changed."""
        _skip(self, bookmark)


def _skip(table: Any, bookmark: Bookmark) -> None:
    rows = table.rows()
    while table.bookmark.rows < bookmark.rows:
        if next(rows, None) is None:
            raise InputError(
                "data", table.name, f"the {bookmark.rows} rows that were read before, and more",
                f"it has {table.bookmark.rows}: put the old content back, or give new records in a "
                "file of another name",
            )  # fmt: skip
    if bookmark.rows and table.bookmark.digest != bookmark.digest:
        raise InputError(
            "data", table.name, f"a file whose first {bookmark.rows} rows are as they were read",
            "it was rewritten or rotated: put the old content back, or give new records in a file "
            "of another name",
        )  # fmt: skip


def _broken(text: str) -> bool:
    """Whether bytes in it were no text."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _encoding(sample: bytes, name: str) -> tuple[str, int, str]:
    """Encoding, bytes of the mark before the text, and a notice."""
    if sample.startswith(b"\xef\xbb\xbf"):
        return "utf-8", 3, ""
    for mark, encoding in ((b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        if sample.startswith(mark):
            return encoding, 2, f"{name}: read as {encoding.upper()}"
    cut = sample.rfind(b"\n") + 1 or len(sample)
    lines = sample[:cut].splitlines()
    bad = sum(not _is_utf8(line) for line in lines)
    if bad and bad > max(1, len(lines) // 100) and not _has_controls(sample):
        return "cp1252", 0, f"{name}: no UTF-8, read as Windows-1252"
    return "utf-8", 0, ""


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _has_controls(sample: bytes) -> bool:
    return any(byte in sample for byte in (b"\x81", b"\x8d", b"\x8f", b"\x90", b"\x9d", b"\x00"))


def _delimiter(sample: str) -> str:
    """The one that cuts the first lines into most cells, the same number in each."""
    best, most = ",", 1
    for delimiter in _DELIMITERS:
        rows = list(csv.reader(io.StringIO(sample), delimiter=delimiter))[:30]
        rows = [row for row in rows[:-1] or rows if row]
        if not rows or len(rows[0]) < 2:
            continue
        same = sum(len(row) == len(rows[0]) for row in rows)
        if same >= 0.7 * len(rows) and len(rows[0]) > most:
            best, most = delimiter, len(rows[0])
    return best


def _has_decimal_commas(sample: str, delimiter: str) -> bool:
    cells = [cell for row in list(csv.reader(io.StringIO(sample), delimiter=delimiter))[1:200]
             for cell in row]  # fmt: skip
    commas = sum(_DECIMAL_COMMA.fullmatch(cell.strip()) is not None for cell in cells)
    points = sum(_DECIMAL_POINT.fullmatch(cell.strip()) is not None for cell in cells)
    return commas > points


def _check_header(name: str, columns: tuple[str, ...]) -> None:
    doubled = sorted({column for column in columns if column and columns.count(column) > 1})
    if doubled:
        raise InputError(
            "data", name, "a header that names each column once",
            f"{', '.join(doubled)} is there twice: rename one",
        )  # fmt: skip
    if any(_broken(column) for column in columns):
        raise InputError("data", name, "a header in UTF-8", "save the file as UTF-8")
    if all(re.fullmatch(r"[-+]?[\d.,]+", column) for column in columns if column):
        raise InputError(
            "data", name, "a header with the columns' names",
            "its first line holds numbers only: add a line with names",
        )  # fmt: skip
