"""Tables of records, read row by row: JSON lines and Python's rows here, other formats beside.

    table = open_table("stations.csv")
    for number, cells in table.rows():      cells is None for a row that cannot be read
        ...
    table.bookmark                          where it stands; `skip_to` goes on from there

`rows` ends where the file ends now; called again, it goes on with what was appended since. A
bookmark holds a digest of all that was read, so a file that was rewritten or rotated is noticed and
not read as if it were the old one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from veilstream.errors import InputError
from veilstream.streams.bookmarks import Bookmark, Row, RowDigest, skip_rows
from veilstream.streams.growing_file import GrowingLines, check_plain_file, is_broken_text
from veilstream.strict_json import InvalidJson, read_json
from veilstream.wording import counted

_SHOWN = 40
"""Names of columns that an error lists at most."""


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
    check_plain_file(path)
    suffix = path.suffix.lower()
    if suffix in (".parquet", ".arrow", ".feather", ".db", ".sqlite", ".sqlite3"):
        from veilstream.streams.binary_tables import open_binary_table

        return open_binary_table(path, query)
    if query is not None:
        raise InputError("data.query", query, "nothing unless the source is SQLite", "remove it")
    if suffix in (".jsonl", ".ndjson", ".json"):
        return JsonLinesTable(path, whole=whole)
    if suffix in (".csv", ".tsv", ".txt", ".data", ""):
        from veilstream.streams.csv_table import CsvTable

        return CsvTable(path, whole=whole)
    raise InputError(
        "data",
        path.name,
        "CSV, JSON lines, Parquet, Arrow or SQLite",
        "name the file by its kind: .csv, .jsonl, .parquet, .arrow, .sqlite",
    )


def check_columns(table: TableReader, wanted: tuple[str, ...], *, show: bool = False) -> None:
    """Refuse a table that lacks columns.

    Args:
        table: which.
        wanted: by the plan.
        show: name the columns that are there, too. For the screen of the person beside the data
            only: where the header is missing these are the first record's cells.

    Raises:
        InputError: naming those that are missing.

    """
    if not table.columns:
        return  # every row is looked at by itself
    missing = [column for column in wanted if column not in table.columns]
    if not missing:
        return
    if show:
        way_out = f"it has {_listed(table.columns)}; rename them in the file or in the plan"
    else:
        there = counted(len(table.columns), "column")
        way_out = (
            f"it has {there}, and {len(set(wanted)) - len(missing)} of the {len(set(wanted))} that "
            "the plan names: is its first line a header? `veilstream data check FILE` shows it"
        )
    rule = f"columns {_listed(tuple(missing))}, which the plan names"
    raise InputError("data", table.name, rule, way_out)


def _listed(names: tuple[str, ...]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


class JsonLinesTable:
    """One JSON object a line."""

    decimal_comma = False

    def __init__(self, path: Path, *, whole: bool = True) -> None:
        self.name, self.columns = path.name, ()
        self._lines = GrowingLines(path, whole=whole)
        first = self._lines.sample.strip().partition("\n")[0].strip()
        if first == "{" or first.startswith("["):
            raise InputError(
                "data",
                self.name,
                "one JSON object a line",
                "its first line is no whole object: `jq -c '.[]'` (of a list) or `jq -c .` writes JSON lines",
            )
        self.notices = [self._lines.notice] if self._lines.notice else []
        self.bookmark = Bookmark()
        self._digest = RowDigest()

    columns: tuple[str, ...]

    def rows(self) -> Iterator[Row]:
        """Those from here to the end as it is now."""
        for line in self._lines:
            if not line.strip():
                continue
            number, cells = self.bookmark.rows, self._row(line)
            self.bookmark = Bookmark(number + 1, self._digest.add(cells))
            yield number, cells

    @property
    def rows_left(self) -> int | None:
        """About how many follow."""
        return self._lines.rows_left(self.bookmark.rows)

    def _row(self, line: str) -> Mapping[str, object] | None:
        try:
            held = None if is_broken_text(line) else read_json(line, finite=False)
        except InvalidJson:
            return None
        return held if isinstance(held, dict) else None

    def skip_to(self, bookmark: Bookmark) -> None:
        """Go on behind a bookmark; an error if what lies before it has changed."""
        skip_rows(self, bookmark)


class RowsTable:
    """Rows of a Python iterator, each a mapping: for sources of your own, and for tests."""

    decimal_comma = False

    def __init__(self, rows: Iterator[Mapping[str, object]], name: str = "rows") -> None:
        self.name, self.columns, self.notices = name, (), []
        self._rows = iter(rows)
        self._digest = RowDigest()
        self.bookmark = Bookmark()

    columns: tuple[str, ...]
    notices: list[str]
    rows_left: int | None = None

    def rows(self) -> Iterator[Row]:
        """Those from here to the end as it is now."""
        for cells in self._rows:
            number = self.bookmark.rows
            self.bookmark = Bookmark(number + 1, self._digest.add(cells))
            yield number, cells

    def skip_to(self, bookmark: Bookmark) -> None:
        """Go on behind a bookmark; an error if what lies before it has changed."""
        skip_rows(self, bookmark)
