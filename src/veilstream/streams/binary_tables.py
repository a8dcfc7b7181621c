"""Tables that are no text: Parquet and Arrow (pyarrow, an extra), and SQLite by a query."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from veilstream.errors import InputError, MissingExtra
from veilstream.streams.csv_table import check_names
from veilstream.streams.tables import RowsTable, TableReader


def open_binary_table(path: Path, query: str | None) -> TableReader:
    """By its file's name; a query belongs to SQLite."""
    if path.suffix.lower() in (".db", ".sqlite", ".sqlite3"):
        if query is None:
            raise InputError(
                "data.query",
                None,
                "which records of the SQLite file, in order",
                'query = "SELECT * FROM visits ORDER BY time"',
            )
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        connection.text_factory = lambda held: held.decode("utf-8", "surrogateescape")
        return query_table(connection, query, path.name)
    return _arrow_table(path)


def query_table(connection: Any, query: str, name: str = "query") -> TableReader:
    """The rows of a query over any DB-API connection; say an order in it."""
    cursor = connection.cursor()
    try:
        cursor.execute(query)
    except Exception as error:  # whatever the driver raises
        raise InputError("data.query", query, "a query that can be run", str(error)) from error
    columns = tuple(str(column[0]) for column in cursor.description or ())
    if not columns:
        raise InputError("data.query", query, "a query that returns rows", "SELECT ... FROM ...")
    check_names(name, columns)

    def rows() -> Iterator[Mapping[str, object]]:
        while (row := cursor.fetchone()) is not None:
            yield dict(zip(columns, row, strict=True))

    table = RowsTable(_named_errors(rows(), name), name)
    table.columns = columns
    return table


def _arrow_table(path: Path) -> TableReader:
    try:
        import pyarrow.dataset as datasets
    except ImportError as error:
        raise MissingExtra("pyarrow", "tables", f"reading {path.suffix} files") from error
    kind = "parquet" if path.suffix.lower() == ".parquet" else "ipc"
    try:
        dataset = datasets.dataset(str(path), format=kind)
        columns = tuple(dataset.schema.names)
    except Exception as error:  # whatever Arrow raises on a file that is none
        raise InputError("data", path.name, f"a file of kind {kind}", str(error)) from error
    check_names(path.name, columns)

    def rows() -> Iterator[Mapping[str, object]]:
        for batch in dataset.to_batches(batch_size=4096):
            yield from batch.to_pylist()

    table = RowsTable(_named_errors(rows(), path.name), path.name)
    table.columns = columns
    return table


def _named_errors(rows: Iterator[Mapping[str, object]], name: str) -> Iterator[Mapping[str, object]]:
    """Rows; what a driver says of one that it cannot read may quote it, and is left out."""
    try:
        yield from rows
    except Exception as error:
        raise InputError(
            "data",
            name,
            f"rows that can be read to the end ({type(error).__name__})",
            "the file is damaged or busy: copy it again",
        ) from None
