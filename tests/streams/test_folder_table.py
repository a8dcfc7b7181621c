"""Folders, patterns, partitions and packed files as one learner's table."""

from __future__ import annotations

import gzip
import logging
import os

import pytest

from tests.support.federation import csv_of, rows_of, table_plan_of
from veilstream.errors import InputError
from veilstream.plans.data_source import open_file
from veilstream.streams.folder_table import FolderTable
from veilstream.streams.tables import open_table


def write(path, *people, old=True):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "who,x\n" + "".join(f"{who},1\n" for who in people)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    if old:
        os.utime(path, (1, 1))


def append(path, *people):
    with path.open("a") as file:
        file.writelines(f"{who},1\n" for who in people)


def people(table):
    return [cells["who"] for block in table.blocks() for cells in block.rows]


def folder(path, **options):
    return FolderTable(path, lambda file: open_table(file, whole=False), whole=False, **options)


def test_files_are_read_in_the_order_of_their_names_and_new_ones_when_they_come(tmp_path):
    write(tmp_path / "b.csv", "bob")
    write(tmp_path / "a/x.csv", "ann")
    table = folder(tmp_path)
    assert people(table) == ["ann", "bob"]
    assert people(table) == []
    write(tmp_path / "c.csv", "cyd")
    write(tmp_path / "a/a.csv", "early", "earlier")
    assert people(table) == ["early", "earlier", "cyd"]


def test_a_file_that_has_grown_is_read_on_wherever_it_sorts(tmp_path):
    write(tmp_path / "a.csv", "ann")
    write(tmp_path / "b.csv", "bob")
    table = folder(tmp_path)
    assert people(table) == ["ann", "bob"]
    append(tmp_path / "b.csv", "more")
    append(tmp_path / "a.csv", "late")
    assert people(table) == ["late", "more"]
    append(tmp_path / "a.csv", "later")
    assert people(table) == ["later"]


def test_each_file_has_its_bookmark_and_is_gone_on_with_behind_it(tmp_path):
    write(tmp_path / "a.csv", "ann", "abe")
    write(tmp_path / "b.csv", "bob", "bea", "ben")
    table, marks = folder(tmp_path), {}
    for number, block in enumerate(table.blocks(most=1)):
        assert block.name(0) == ["a.csv:0", "a.csv:1", "b.csv:0", "b.csv:1", "b.csv:2"][number]
        mark = block.mark(0)
        marks[mark.source] = mark.text
        if number == 3:
            break
    write(tmp_path / "aa.csv", "new")
    append(tmp_path / "a.csv", "al")
    again = folder(tmp_path)
    again.resume(marks)
    assert people(again) == ["al", "new", "ben"]


def test_partitions_are_columns(tmp_path):
    write(tmp_path / "day=2026-11-18/site=a%2Fb/x.csv", "ann")
    write(tmp_path / "day=__HIVE_DEFAULT_PARTITION__/site=c/x.csv", "bob")
    table = folder(tmp_path)
    assert table.columns == ("who", "x", "day", "site")
    rows = [row for block in table.blocks() for row in block.rows]
    assert [(row["who"], row["day"], row["site"]) for row in rows] == [("ann", "2026-11-18", "a/b"), ("bob", None, "c")]


def test_partitions_of_parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    for day in (1, 2):
        (tmp_path / f"day={day}").mkdir()
        rows = [{"who": f"p{day}{i}", "x": 0.5} for i in range(300)]
        parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / f"day={day}/part-0.parquet")
    (tmp_path / "_SUCCESS").touch()
    table = folder(tmp_path)
    rows = [row for block in table.blocks() for row in block.rows]
    assert [row["who"] for row in rows[298:302]] == ["p1298", "p1299", "p20", "p21"]
    assert {row["day"] for row in rows} == {"1", "2"}


def test_a_pattern_names_files_of_one_learner(tmp_path):
    for name in ("n-1.csv", "n-2.csv", "s-1.csv"):
        write(tmp_path / name, name)
    assert people(folder(tmp_path / "n-*.csv")) == ["n-1.csv", "n-2.csv"]


def test_packed_files_are_read_and_may_grow_by_members(tmp_path):
    write(tmp_path / "a.csv.gz", *(f"p{i}" for i in range(3000)))
    table = open_table(tmp_path / "a.csv.gz")
    assert table.columns == ("who", "x")
    assert people(table) == [f"p{i}" for i in range(3000)]
    with (tmp_path / "a.csv.gz").open("ab") as file:
        file.write(gzip.compress(b"more,1\n"))
    assert people(table) == ["more"]
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"who": "ann"}\n'))
    assert people(open_table(tmp_path / "b.jsonl.gz")) == ["ann"]


def test_a_packed_file_that_is_cut_is_waited_for_or_refused(tmp_path):
    path = tmp_path / "a.csv.gz"
    dice = "".join(f"{os.urandom(20).hex()},1\n" for _ in range(20000))
    whole = gzip.compress(f"who,x\n{dice}".encode())
    path.write_bytes(whole[: len(whole) // 2])
    growing = open_table(path, whole=False)
    got = people(growing)
    assert 0 < len(got) < 20000
    os.utime(path, (1, 1))
    with pytest.raises(InputError, match="ends in the middle of what is packed"):
        people(growing)
    path.write_bytes(whole)
    assert got + people(growing) == [line.partition(",")[0] for line in dice.splitlines()]
    path.write_bytes(whole[:200] + bytes(500) + whole[700:])
    with pytest.raises(InputError, match=r"damaged|middle|header"):
        people(open_table(path))


def test_a_file_that_cannot_be_read_is_left_out_and_said_until_it_changes(tmp_path, caplog):
    write(tmp_path / "a.csv", "ann")
    (tmp_path / "b.csv").write_text("nobody,x\nbob,1\n")
    (tmp_path / "c.parquet").write_bytes(b"PAR1, half of it")
    write(tmp_path / "d.csv", "dan")
    table = folder(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert people(table) == ["ann", "dan"]
        assert people(table) == []
    said = [line.message for line in caplog.records]
    assert len(said) == 2
    assert (
        "b.csv is left out until it changes: data = 'b.csv': expected the columns of the first file, also who"
        in said[0]
    )
    write(tmp_path / "b.csv", "bob", "bea")
    assert people(table) == ["bob", "bea"]


def test_what_is_no_table_is_not_read_and_said(tmp_path):
    write(tmp_path / "a.csv", "ann")
    write(tmp_path / "_temporary/b.csv", "half")
    write(tmp_path / ".c.csv", "hidden")
    (tmp_path / "README.md").write_text("hello")
    table = folder(tmp_path)
    assert people(table) == ["ann"]
    assert "1 files are not read" in table.notices[-1]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="a folder with a file in it"):
        folder(tmp_path / "empty")


def test_a_copy_of_a_file_that_was_read_is_left_out(tmp_path, caplog):
    write(tmp_path / "a.csv", "ann", "abe")
    table = folder(tmp_path, copies=True)
    people(table)
    write(tmp_path / "b.csv", "ann", "abe", "new")
    write(tmp_path / "c.csv", "other")
    assert people(table) == ["other"]
    assert "its first 2 rows were read as a.csv" in caplog.text


def test_a_line_that_is_being_written_is_not_read_until_it_is_whole(tmp_path):
    write(tmp_path / "a.csv", "ann", old=False)
    with (tmp_path / "a.csv").open("a") as file:
        file.write("bo")
    table = folder(tmp_path)
    assert people(table) == ["ann"]
    append(tmp_path / "a.csv", "b")
    assert people(table) == ["bob"]


def test_a_learner_beside_a_folder_has_the_plan_s_columns(tmp_path):
    rows = rows_of([f"p{i}" for i in range(6)])
    for name, own in (("a", rows[:3]), ("b", rows[3:])):
        (tmp_path / f"{name}.csv").write_text(csv_of(own))
    source, got = open_file(tmp_path, table_plan_of()), []
    source.serve(0, lambda clients: got.extend(clients) or [], lambda: 6)
    assert [offered.tag for offered in got] == [f"p{i}" for i in range(6)]
    assert [offered.bookmark.source for offered in got] == ["a.csv"] * 3 + ["b.csv"] * 3
