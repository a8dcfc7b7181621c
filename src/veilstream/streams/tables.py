"""Tables by their file's name: CSV, JSON lines, Parquet and Arrow (pyarrow), SQLite.

CSV is read by Python's `csv`: pyarrow and DuckDB hand rows to Python more slowly, and neither can stop at a
bookmark in a growing file or tell an unclosed quote from a long cell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from veilstream.errors import InputError, MissingExtra
from veilstream.streams.csv_table import CsvTable
from veilstream.streams.growing_file import check_plain_file, is_broken_text, text_lines
from veilstream.streams.sqlite_table import sqlite_table
from veilstream.streams.table import Cells, Table, check_names
from veilstream.strict_json import UNREADABLE, InvalidJson, is_nested_deep, read_json
from veilstream.wording import counted

_SHOWN = 40  # names of columns that an error lists at most
_SQLITE = (".db", ".sqlite", ".sqlite3")
_SQLITE_BEGINS = b"SQLite format 3\x00"


def is_sqlite(path: Path) -> bool:
    """By its first bytes, and by its name while nothing is in it."""
    try:
        with path.open("rb") as file:
            first = file.read(len(_SQLITE_BEGINS))
    except OSError:
        first = b""
    return first == _SQLITE_BEGINS if first else path.suffix.lower() in _SQLITE


def open_table(path: Path | str, *, whole: bool = True, query: str | None = None, key: str | None = None) -> Table:
    """A table by its file's name; the last line of a ``whole`` file counts without a newline at once."""
    path = Path(path)
    check_plain_file(path)
    if is_sqlite(path):
        return sqlite_table(path, query, key)
    for field, given in (("query", query), ("key", key)):
        if given is not None:
            raise InputError(f"--{field}", given, f"nothing for {path.name}, which is no SQLite file", "leave it out")
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    if suffix in (".parquet", ".arrow", ".feather"):
        return _arrow_table(path)
    if suffix in (".jsonl", ".ndjson", ".json"):
        return JsonLinesTable(path, whole=whole)
    if suffix in (".csv", ".tsv", ".txt", ".data", ""):
        return CsvTable(path, whole=whole)
    raise InputError(
        "data",
        path.name,
        "CSV, JSON lines, Parquet, Arrow or SQLite",
        "name the file by its kind: .csv, .jsonl (also .gz), .parquet, .arrow, .sqlite",
    )


def check_columns(table: Table, wanted: tuple[str, ...], *, show: bool = False) -> None:
    """Refuse a table that lacks columns.

    ``show`` names the columns that are there, too: for the screen of the person beside the data only, since
    without a header these are the first record's cells.
    """
    missing = [column for column in wanted if column not in table.columns]
    if not missing or not table.columns:  # without a header, each row is checked by itself
        return
    if show:
        way_out = f"it has {_listed(table.columns)}; rename them in the file or in the plan"
    else:
        there = counted(len(table.columns), "column")
        way_out = (
            f"it has {there}, and {len(set(wanted)) - len(missing)} of the {len(set(wanted))} that "
            "the plan names: is its first line a header? `veilstream data check FILE` shows it"
        )
    raise InputError("data", table.name, f"columns {_listed(tuple(missing))}, which the plan names", way_out)


def _listed(names: tuple[str, ...]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


class JsonLinesTable(Table):
    """One JSON object a line."""

    def __init__(self, path: Path, *, whole: bool = True) -> None:
        super().__init__(path.name)
        self._lines = text_lines(path, whole=whole)
        first = self._lines.sample.strip().partition("\n")[0].strip()
        if first == "{" or first.startswith("["):
            raise InputError(
                "data",
                self.name,
                "one JSON object a line",
                "its first line is no whole object: `jq -c '.[]'` (of a list) or `jq -c .` writes JSON lines",
            )
        self.notices += [self._lines.notice] if self._lines.notice else []

    def _read(self) -> Iterator[Cells | None]:
        return (_json_object(line) for line in self._lines if line.strip())

    @property
    def rows_left(self) -> int | None:
        """About how many rows follow."""
        return self._lines.rows_left(self.bookmark.rows)


def _json_object(line: str) -> Cells | None:
    try:
        held = None if is_broken_text(line) else read_json(line, finite=False)
    except InvalidJson:
        return None
    return held if isinstance(held, dict) and not is_nested_deep(held) else None


class RowsTable(Table):
    """Rows of a Python iterator, each a mapping: for sources of your own, and for tests."""

    def __init__(self, rows: Iterator[Cells], name: str = "rows", columns: tuple[str, ...] = ()) -> None:
        super().__init__(name, columns)
        self._rows = iter(rows)

    def _read(self) -> Iterator[Cells | None]:
        return self._rows


def _arrow_table(path: Path) -> Table:
    try:
        import pyarrow.dataset as datasets
    except ImportError as error:
        raise MissingExtra("pyarrow", "tables", f"reading {path.suffix} files") from error
    kind = "parquet" if path.suffix.lower() == ".parquet" else "ipc"
    try:
        dataset = datasets.dataset(str(path), format=kind)
        columns = tuple(dataset.schema.names)
    except Exception as error:  # Arrow raises many kinds
        raise InputError("data", path.name, f"a file of kind {kind}", str(error)) from error
    check_names(path.name, columns)
    rows = (row for batch in dataset.to_batches(batch_size=4096) for row in _rows_of(batch))
    return RowsTable(_without_quoting(rows, path.name), path.name, columns)


def _rows_of(batch: Any) -> list[Cells]:
    """A batch's rows; a cell that Python cannot hold spoils its own record alone."""
    try:
        rows: list[Cells] = batch.to_pylist()
    except Exception:  # a text that is no UTF-8, a day in the year 20000
        columns = [[_cell_of(cell) for cell in column] for column in batch.columns]
        rows = [dict(zip(batch.schema.names, cells, strict=True)) for cells in zip(*columns, strict=True)]
    return rows


def _cell_of(cell: Any) -> object:
    for read in (cell.as_py, lambda: cell.cast("string").as_py()):
        with contextlib.suppress(Exception):  # whatever the cell holds
            return read()
    return UNREADABLE


def _without_quoting(rows: Iterator[Cells], name: str) -> Iterator[Cells]:
    """Rows; a driver's own error may quote a person's cells, so it is not shown."""
    try:
        yield from rows
    except Exception as error:
        raise InputError(
            "data",
            name,
            f"rows that can be read to the end ({type(error).__name__})",
            "the file is damaged or busy: copy it again",
        ) from None
