"""Tables read in blocks give the same rows, digests and errors as tables read row by row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from veilstream.errors import InputError
from veilstream.mechanisms.participation import Participation
from veilstream.plans.column_profile import Column
from veilstream.records.sample import Sample
from veilstream.records.schema import Encoded
from veilstream.streams.csv_table import CsvTable
from veilstream.streams.table import Table
from veilstream.streams.table_stream import ClientRecord, TableReport, allowed, count_people
from veilstream.streams.tables import RowsTable, open_table
from veilstream.streams.visit_counts import VisitCounts

_CELLS = st.sampled_from(
    ["1", "2.50", "", "a b", '"q"', '"x,y"', '"two\nlines"', 'in"side', '"', '""', "é", "\r", " ", "\t", "\x00", "3;4"]
)
_LINES = st.lists(st.lists(_CELLS, min_size=1, max_size=4).map(",".join), max_size=30)


class _OneByOne(CsvTable):
    def _read_block(self) -> bool:
        return False


def _everything(table: Table) -> tuple[list[Any], str]:
    rows: list[Any] = []
    try:
        rows.extend((number, cells, table.bookmark) for number, cells in table.rows())
    except InputError as error:
        return rows, str(error)
    return rows, ""


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=_LINES, newline=st.sampled_from(["\n", "\r\n"]), ends=st.booleans(), bad=st.booleans())
def test_csv_blocks_are_the_records_one_by_one(
    tmp_path: Path, lines: list[str], newline: str, ends: bool, bad: bool
) -> None:
    path = tmp_path / "t.csv"
    text = newline.join(["a,b,c", "1,2,3", *lines]) + (newline if ends else "")
    path.write_bytes(text.encode() + (b"4,\xff,5\n" if bad and ends else b""))
    assert _everything(CsvTable(path)) == _everything(_OneByOne(path))


@pytest.mark.parametrize("name", ["t.tsv", "one.csv"])
def test_blank_lines_are_no_rows(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    cells = "a\tb\n1\t2\n\t\n \n3\t4\n" if name == "t.tsv" else "a\n1\n\n  \n2\n"
    path.write_text(cells, encoding="utf-8")
    rows, _ = _everything(CsvTable(path))
    assert len(rows) == 2
    assert rows == _everything(_OneByOne(path))[0]


def test_a_plain_file_is_read_in_blocks(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\n" + "1,2\n" * 50_000, encoding="utf-8")
    table = CsvTable(path)
    calls = 0
    one_record = table._record

    def counted() -> list[str] | None:
        nonlocal calls
        calls += 1
        return one_record()

    table._record = counted  # type: ignore[method-assign]
    assert sum(len(block.rows) for block in table.blocks()) == 50_000
    assert calls == 1  # the one that finds the end


def test_digests_of_a_block_are_those_of_its_rows(tmp_path: Path) -> None:
    rows = [{"a": "1.50", "": "7", "b": "x "}, {"a": "2", "": "8", "b": "-"}, None, {"b": 3.0}] * 200
    one = RowsTable(iter(rows))
    singly = [one.bookmark.digest for _ in one.rows()]
    together = [digest for block in RowsTable(iter(rows)).blocks(most=7) for digest in block.digests]
    assert together == singly
    named = [{"a": f"{i}.0", "b": "\u00e9"} for i in range(300)]
    again = RowsTable(iter(named))
    assert [again.bookmark.digest for _ in again.rows()] == [
        digest for block in RowsTable(iter(named)).blocks() for digest in block.digests
    ]
    # In another order of columns, and another spelling of the numbers.
    turned = [{"b": "e\u0301", "a": str(i)} for i in range(300)]
    assert [d for b in RowsTable(iter(turned)).blocks() for d in b.digests][-1] == again.bookmark.digest


def test_a_block_before_a_failure_is_given_out_first() -> None:
    def failing() -> Any:
        yield {"a": 1}
        raise InputError("data", "x", "y", "z")

    blocks = RowsTable(failing()).blocks()
    assert next(blocks).rows == [{"a": 1}]
    with pytest.raises(InputError):
        next(blocks)


def test_a_bookmark_in_the_middle_of_a_block_is_found(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\n" + "".join(f"{i},{i / 3}\n" for i in range(1000)), encoding="utf-8")
    table = open_table(path)
    marks = [table.bookmark for _ in table.rows()]
    for rows in (0, 1, 255, 256, 257, 700, 1000):
        again = open_table(path)
        again.skip_to(marks[rows - 1] if rows else open_table(path).bookmark)
        assert [cells["a"] for _, cells in again.rows() if cells is not None][:1] == [str(rows)][: rows < 1000]


@settings(max_examples=60, deadline=None)
@given(
    seen=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 1), st.booleans()), max_size=60),
    times=st.integers(1, 3),
    apart=st.integers(1, 4),
    per_step=st.integers(1, 3),
)
def test_visits_are_counted_as_a_list_of_records_is(
    seen: list[tuple[int, int, bool]], times: int, apart: int, per_step: int
) -> None:
    usable = Encoded("", Sample(None, None))
    records = [ClientRecord(f"P{who}", f"L{at}", 0.0, usable if good else None) for who, at, good in seen]
    rule = Participation(times, apart)
    counted, expected = TableReport(), TableReport()
    visits = VisitCounts(rule, per_step)
    for first in range(0, len(records), 7):
        visits.add(records[first : first + 7])
    visits.count_people(counted)
    taken = visits.taken(counted)
    count_people(records, expected)
    for name in sorted({record.learner for record in records}):
        own = allowed([record for record in records if record.learner == name], rule, per_step, expected)
        assert taken[name] == len(own)
        expected.used += sum(record is not None for record in own)
        expected.refused_steps += sum(record is None for record in own)
    assert counted == expected


@pytest.mark.parametrize("kind", ["numbers", "dates", "words", "mixed"])
def test_a_columns_cells_together_are_its_cells_one_by_one(kind: str) -> None:
    cells: dict[str, list[Any]] = {
        "numbers": [f"{i / 8}" for i in range(25_000)],
        "dates": [f"2024-01-{1 + i % 28:02d} {i}" for i in range(12_000)],
        "words": ["a", " b", "", "na", "c"] * 300,
        "mixed": [1, "1", 1.0, True, None, "x", "\u0663"] * 50,
    }
    one, many = Column("x"), Column("x")
    for cell in cells[kind]:
        one.take([cell], decimal_comma=False)
    for first in range(0, len(cells[kind]), 4096):
        many.take(cells[kind][first : first + 4096], decimal_comma=False)
    assert json.dumps(vars(one)) == json.dumps(vars(many))
