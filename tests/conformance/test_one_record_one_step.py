"""Whatever one record holds, in whatever form it comes: it takes its client's step, and those around it theirs."""

from __future__ import annotations

import csv
import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.federation import DIM, table_plan_of
from veilstream.plans.data_source import open_source
from veilstream.plans.records import schema_of
from veilstream.records.admission import Answer
from veilstream.streams.intake import ClientSource, Offered
from veilstream.streams.iterator_source import IteratorSource

NAMES = [f"x{i}" for i in range(DIM)]
Row = dict[str, Any]


def good(person: str) -> Row:
    return {"person": person, "y": "yes"} | dict.fromkeys(NAMES, 0.5)


def as_csv(folder: Path, rows: list[Row]) -> Path:
    path = folder / "r.csv"
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def as_json_lines(folder: Path, rows: list[Row]) -> Path:
    path = folder / "r.jsonl"
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    return path


def as_sqlite(folder: Path, rows: list[Row]) -> Path:
    path = folder / "r.sqlite"
    with sqlite3.connect(path) as db:
        columns = list(rows[0])
        db.execute(f"CREATE TABLE r ({', '.join(columns)})")
        for row in rows:
            cells = [v.encode(errors="surrogateescape") if isinstance(v, str) else v for v in row.values()]
            marks = ", ".join("CAST(? AS TEXT)" if isinstance(v, bytes) else "?" for v in cells)
            db.execute(f"INSERT INTO r VALUES ({marks})", cells)
    db.close()
    return path


def as_parquet(folder: Path, rows: list[Row]) -> Path:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    def column(name: str) -> Any:  # texts, of which one may be no UTF-8
        cells = [None if row[name] is None else str(row[name]).encode(errors="surrogateescape") for row in rows]
        return arrow.array(cells, arrow.binary()).view(arrow.string())

    pyarrow.parquet.write_table(arrow.table({name: column(name) for name in rows[0]}), folder / "r.parquet")
    return folder / "r.parquet"


FORMS: dict[str, Callable[[Path, list[Row]], Path]] = {
    "csv": as_csv,
    "json lines": as_json_lines,
    "sqlite": as_sqlite,
    "parquet": as_parquet,
}
CELLS: dict[str, Any] = {
    "empty": "",
    "none": None,
    "no number": "tall",
    "nan": "nan",
    "infinite": "1e999",
    "very long": "9" * 200_000,
    "control characters": "\x00\x1b[2J",
    "no UTF-8": "\udcff\udcfe",
    "quotes": '"',
    "delimiters": ",;\t|",
}
COLUMNS = ["x0", "y", "person"]


def tags_of(source: ClientSource) -> list[tuple[str | bytes, bool]]:
    """Whom a round takes, and whether each record can be used."""
    got: list[Offered] = []

    def observe(clients: Any) -> list[Answer]:
        got.extend(Offered(*each) for each in clients)
        return [Answer.TAKEN] * len(got)

    source.serve(0, observe, lambda: 5 - len(got))
    return [(each.tag, each.sample is not None) for each in got]


def check(taken: list[tuple[str | bytes, bool]], column: str) -> None:
    assert [tag for tag, _ in taken if tag in ("ann", "cyd")] == ["ann", "cyd"]
    assert [used for tag, used in taken if tag in ("ann", "cyd")] == [True, True]
    assert len(taken) == 3
    assert taken[1][0] not in ("ann", "cyd")  # bob, or a client of its own where the row or its name cannot be read
    assert not taken[1][1] or column == "person"


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("form", FORMS)
def test_of_a_file_one_record_takes_one_step(form, cell, column, tmp_path):
    rows = [good("ann"), good("bob") | {column: CELLS[cell]}, good("cyd")]
    path = FORMS[form](tmp_path, rows)
    check(tags_of(open_source(str(path), table_plan_of(), whole=True)), column)


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("cell", [*CELLS.values(), [[1]], {}, object(), b"\xff", 10**400, True])
def test_of_an_iterator_one_record_takes_one_step(cell, column):
    def rows(consumed: int) -> Iterator[Row]:
        yield from [good("ann"), good("bob") | {column: cell}, good("cyd")]

    source = IteratorSource(rows, name="m:rows", patience_s=5.0)
    source.schema = schema_of(table_plan_of())
    check(tags_of(source), column)
    source.close()
