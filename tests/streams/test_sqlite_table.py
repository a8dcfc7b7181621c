"""SQLite: rows that come while it is read, by a key; what is read once is not read again."""

from __future__ import annotations

import logging
import sqlite3
import threading

import pytest

from veilstream.errors import InputError
from veilstream.streams import sqlite_table
from veilstream.streams.table import Bookmark
from veilstream.streams.table_source import check_not_read_before
from veilstream.streams.tables import open_table


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "visits.sqlite"
    run(path, "create table visits (id integer primary key autoincrement, who text, x real)")
    add(path, 3)
    return path


def run(path, *statements):
    with sqlite3.connect(path) as db:
        for statement in statements:
            db.execute(statement)
    db.close()


def add(path, count):
    run(path, *["insert into visits (who, x) values ('p' || (select count(*) from visits), 0.5)"] * count)


def people(table):
    return [cells["who"] for _, cells in table.rows()]


def test_rows_that_are_inserted_later_are_read_by_the_only_table_s_rowid(path):
    table = open_table(path)
    assert table.columns == ("id", "who", "x")
    assert people(table) == ["p0", "p1", "p2"]
    assert people(table) == []
    add(path, 2)
    assert table.rows_left == 2
    assert people(table) == ["p3", "p4"]
    assert table.rows_left == 0


@pytest.mark.parametrize("query", [None, "SELECT id, who FROM visits -- all"])
def test_a_bookmark_goes_on_behind_its_key_and_rows_are_named_by_it(path, query):
    table = open_table(path, query=query, key="id")
    block = next(table.blocks(most=2))
    assert [block.name(place) for place in range(2)] == ["visits.sqlite:1", "visits.sqlite:2"]
    mark = table.mark
    assert mark == block.mark(1)
    add(path, 1)
    again = open_table(path, query=query, key="id")
    again.resume({mark.source: mark.text})
    assert people(again) == ["p2", "p3"]
    assert again.bookmark.rows == 4
    whole = open_table(path, query=query, key="id")
    people(whole)
    assert whole.bookmark == again.bookmark


def test_more_rows_than_one_connection_fetches(path):
    add(path, 2400)
    assert people(open_table(path)) == [f"p{i}" for i in range(2403)]


def test_a_writer_in_wal_mode_is_not_held_up_and_its_rows_are_seen_when_committed(path):
    writer = sqlite3.connect(path, timeout=0.0, isolation_level=None)
    writer.execute("pragma journal_mode = wal")
    table = open_table(path)
    rows = table.rows()
    next(rows)
    writer.execute("begin immediate")
    writer.execute("insert into visits (who, x) values ('later', 1)")
    assert [cells["who"] for _, cells in rows] == ["p1", "p2"]
    writer.execute("commit")
    assert people(table) == ["later"]
    assert writer.execute("pragma wal_checkpoint(truncate)").fetchone()[0] == 0  # nobody reads
    writer.close()


def test_any_thread_may_read_on(path):
    table, found = open_table(path), []
    add(path, 1500)
    rows = table.rows()
    next(rows)
    for _ in range(3):
        thread = threading.Thread(target=lambda: found.append(next(rows)[1]["who"]))
        thread.start()
        thread.join()
    assert found == ["p1", "p2", "p3"]


def resumed(path, mark):
    table = open_table(path)
    table.resume({mark.source: mark.text})
    return table


@pytest.mark.parametrize(
    ("change", "there"),
    [
        ("update visits set x = 7 where id = 2", 3),
        ("delete from visits where id = 2", 2),
        ("insert into visits (id, who) values (0, 'late')", 4),
    ],
)
def test_rows_that_are_changed_behind_the_key_are_said_and_not_read(path, change, there, caplog):
    table = open_table(path)
    people(table)
    run(path, change)
    add(path, 1)
    again = resumed(path, table.mark)
    assert [line.message for line in caplog.records] == [
        f"visits.sqlite: 3 rows were read, and {there} are there now up to the last one: some were changed, deleted "
        "or inserted since. Such rows are not read: what was learned from a row stays, and a row that is to be read "
        "needs a larger key than all before"
    ]
    assert len(people(again)) == 1
    assert again.bookmark.rows == 4


def test_rows_that_go_or_come_behind_the_key_are_counted_while_it_runs(path, caplog, monkeypatch):
    table = open_table(path)
    people(table)
    run(path, "delete from visits where id = 2")
    people(table)
    assert not caplog.records  # not at every look
    monkeypatch.setattr(sqlite_table, "_LOOK_BACK_S", 0.0)
    people(table)
    people(table)
    assert [line.message[:62] for line in caplog.records] == [
        "visits.sqlite: 3 rows were read, and 2 are there now up to the"
    ]


def test_rows_as_they_were_are_no_news(path, caplog):
    table = open_table(path)
    people(table)
    with caplog.at_level(logging.INFO):
        resumed(path, table.mark)
    assert not caplog.records


def test_a_copy_under_another_name_is_found(path, tmp_path):
    table = open_table(path)
    people(table)
    (tmp_path / "other.sqlite").write_bytes(path.read_bytes())
    with pytest.raises(InputError, match=r"its rows 1 to 3 were read as visits\.sqlite"):
        check_not_read_before(open_table(tmp_path / "other.sqlite"), [table.mark])


def test_another_query_does_not_go_on_at_the_key_of_the_first(path):
    table = open_table(path)
    people(table)
    other = open_table(path, query="SELECT id, who FROM visits WHERE x > 0", key="id")
    with pytest.raises(InputError, match="the table or query by which 3 rows of it were read before"):
        other.skip_to(table.bookmark)


def test_a_bookmark_without_a_key_counts_rows(path):
    """As stores of before have it."""
    table = open_table(path, query="SELECT * FROM visits ORDER BY id")
    people(table)
    assert table.bookmark.place == ""
    add(path, 1)
    assert people(resumed(path, table.mark)) == ["p3"]


def test_a_query_without_a_key_is_run_again_and_what_was_read_must_be_there(path):
    table = open_table(path, query="SELECT who, x FROM visits ORDER BY id")
    assert people(table) == ["p0", "p1", "p2"]
    assert people(table) == []
    add(path, 2)
    assert people(table) == ["p3", "p4"]
    run(path, "delete from visits where id = 2")
    with pytest.raises(InputError, match="first 5 rows are as they were read"):
        people(table)


@pytest.mark.parametrize(
    ("statements", "options", "says"),
    [
        (["create table other (x)"], {}, r"which has 2 tables.*--query: other, visits"),
        (["drop table visits"], {}, "which has 0 tables"),
        ([], {"key": "nobody"}, "no such column"),
        ([], {"query": "SELECT who FROM visits", "key": "id"}, "no such column"),
    ],
)
def test_what_cannot_be_polled_is_named(path, statements, options, says):
    run(path, *statements)
    with pytest.raises(InputError, match=says):
        open_table(path, **options)


def test_a_key_that_is_there_twice_or_empty_is_refused(path):
    add(path, 1)
    with pytest.raises(InputError, match=r"different in each row \(it is there twice"):
        people(open_table(path, key="x"))
    run(path, "update visits set x = null")
    with pytest.raises(InputError, match="a cell in it is none"):
        people(open_table(path, key="x"))


def test_tables_without_a_rowid_have_their_primary_key_or_need_one_named(tmp_path):
    path = tmp_path / "a.db"
    run(path, "create table v (who text primary key, x) without rowid", "insert into v values ('b', 1), ('a', 2)")
    table = open_table(path)
    assert people(table) == ["a", "b"]
    run(path, "drop table v", "create table v (a, who, primary key (a, who)) without rowid")
    with pytest.raises(InputError, match="a column that orders the rows"):
        open_table(path)


def test_a_column_called_rowid_is_not_taken_for_the_rowid(tmp_path):
    path = tmp_path / "a.db"
    run(path, "create table v (rowid text, who)", "insert into v values ('z', 'first'), ('a', 'second')")
    assert people(open_table(path)) == ["first", "second"]


def test_sqlite_is_known_by_its_content_and_others_have_no_query(path, tmp_path):
    path.rename(tmp_path / "clinic")
    assert len(people(open_table(tmp_path / "clinic"))) == 3
    (tmp_path / "a.csv").write_text("who,x\nann,1\n")
    with pytest.raises(InputError, match=r"--query.*which is no SQLite file"):
        open_table(tmp_path / "a.csv", query="SELECT 1")


def test_keys_and_bookmarks_survive_as_text(path):
    for key in (7, 1.5, 'a:"b"\udc80'):
        mark = Bookmark(3, "0f", f"[{key!r}]")
        assert Bookmark.parse(mark.as_text()) == mark


COMPUTED = "SELECT id, who, json_extract(said, '$.x') AS x FROM (SELECT * FROM visits JOIN told USING (id))"


def test_a_row_of_which_a_query_cannot_compute_a_column_is_one_record_that_cannot_be_read(path, caplog, monkeypatch):
    """Text that is no JSON in one person's row must stop neither the rows behind it nor the next start."""
    monkeypatch.setattr(sqlite_table, "_AT_ONCE", 7)
    add(path, 17)
    run(path, "create table told (id integer primary key, said text)")
    run(path, "insert into told select id, '{\"x\": ' || id || '}' from visits")
    run(path, "update told set said = '{no' where id in (1, 9, 10, 20)")
    table = open_table(path, query=COMPUTED, key="id")
    found = [(row and row["who"], row and row["x"]) for _, row in table.rows()]
    assert found == [(None, None) if i + 1 in (1, 9, 10, 20) else (f"p{i}", i + 1) for i in range(20)]
    again = open_table(path, query=COMPUTED, key="id")
    again.resume({table.mark.source: table.mark.text})
    assert not caplog.records  # the rows before are as they were
    run(path, "insert into told values (21, 'no'), (22, '{\"x\": 22}')")
    add(path, 2)
    assert [row for _, row in again.rows()] == [None, {"id": 22, "who": "p21", "x": 22}]


def test_a_query_that_fails_on_a_row_and_has_no_key_says_what_to_do(path):
    run(path, "update visits set who = '{no' where id = 2")
    table = open_table(path, query="SELECT json_extract(who, '$.x') AS x FROM visits ORDER BY id")
    with pytest.raises(InputError, match=r"SQLITE_ERROR.*name a key \(data.key, --key\)"):
        list(table.rows())
