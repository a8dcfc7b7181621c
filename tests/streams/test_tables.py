"""Tables: dialects, encodings, rows that cannot be read, files that grow, shrink or are rotated."""

from __future__ import annotations

import bz2
import codecs
import json
import lzma
import os
import sqlite3

import pytest

from veilstream.errors import InputError
from veilstream.streams.table import Bookmark
from veilstream.streams.tables import RowsTable, check_columns, open_table
from veilstream.strict_json import MOST_NESTED, UNREADABLE


def table(tmp_path, content, name="a.csv", **options):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return open_table(path, **options)


def cells(reader):
    return [row for _, row in reader.rows()]


PLAIN = "who,x\nann,1.5\nbob,2\n"
ANN_BOB = [{"who": "ann", "x": "1.5"}, {"who": "bob", "x": "2"}]


DIALECTS = {
    "plain": PLAIN,
    "no last newline": PLAIN.rstrip("\n"),
    "windows": PLAIN.replace("\n", "\r\n"),
    "mark": "\ufeff" + PLAIN,
    "semicolons": PLAIN.replace(",", ";"),
    "tabs": PLAIN.replace(",", "\t"),
    "bars": PLAIN.replace(",", "|"),
    "utf-16-le": ("\ufeff" + PLAIN).encode("utf-16-le"),
    "utf-16-be": ("\ufeff" + PLAIN).encode("utf-16-be"),
    "no mark": PLAIN.encode("utf-16-le"),
    "CR only": PLAIN.replace("\n", "\r"),
    "CR only, no last": PLAIN.replace("\n", "\r").rstrip("\r"),
    "empty lines first": "\n \n" + PLAIN,
    "quotes": PLAIN.replace("who", '"who"').replace("ann", '"ann"'),
    "empty line": PLAIN.replace("bob", "\nbob"),
    "spaces": PLAIN.replace("who,x", " who , x "),
}


@pytest.mark.parametrize("content", DIALECTS.values(), ids=DIALECTS)
def test_dialects_and_encodings_are_found_out(tmp_path, content):
    reader = table(tmp_path, content)
    assert reader.columns == ("who", "x")
    assert cells(reader) == ANN_BOB


def test_decimal_commas_are_found_out_and_said(tmp_path):
    reader = table(tmp_path, "who;x\nann;1,5\nbob;2,25\n")
    assert reader.decimal_comma
    assert any("semicolons" in notice for notice in reader.notices)
    assert any("3,5" in notice for notice in reader.notices)
    assert not table(tmp_path, PLAIN).decimal_comma


def test_windows_letters_are_read_and_said(tmp_path):
    reader = table(tmp_path, "who,x\nJosé,1\nAnña,2\nZoë,3\n".encode("cp1252"))
    assert [row["who"] for row in cells(reader)] == ["José", "Anña", "Zoë"]
    assert "Windows-1252" in reader.notices[0]


def test_a_header_says_the_encoding_where_no_record_does(tmp_path):
    """As Excel writes a German table whose cells are plain. Of JSON the first line is a person's."""
    rows = "".join(f"G{i},1\n" for i in range(300))
    reader = table(tmp_path, ("Gästenr,Größe\n" + rows).encode("cp1252"))
    assert reader.columns == ("Gästenr", "Größe")
    assert "Windows-1252" in reader.notices[0]
    with pytest.raises(InputError, match="a header in UTF-8"):  # one of the two is not as it should be
        table(tmp_path, "Gästenr,Größe\n".encode("cp1252") + "Zoë,1\n".encode() + rows.encode())
    lines = '{"who": "Zoë"}\n'.encode("cp1252") + b'{"who": "ann"}\n' * 300
    assert cells(table(tmp_path, lines, "a.jsonl"))[:2] == [None, {"who": "ann"}]


def test_one_row_that_is_no_text_is_refused_alone(tmp_path):
    many = "".join(f"p{i},{i}\n" for i in range(300)).encode()
    rows = cells(table(tmp_path, b"who,x\n" + many + b"b\xff\xfe,1\n" + many))
    assert rows[300] is None
    assert sum(row is None for row in rows) == 1


@pytest.mark.parametrize("bad", ["ann", "ann,1,2", '"ann,1'])
def test_rows_of_another_length_cannot_be_read(tmp_path, bad):
    rows = cells(table(tmp_path, f"who,x\nbob,2\n{bad}\n"))
    assert rows == [{"who": "bob", "x": "2"}, None]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "empty"),
        ("who,x,who\n1,2,3\n", "columns 1, 3 of 3 a name is there twice"),
        ("1,2\n3,4\n", "names"),
        (b"w\x81o,x\n1,2\n", "UTF-8"),
    ],
)
def test_headers_that_cannot_be_used(tmp_path, content, says):
    with pytest.raises(InputError, match=says):
        table(tmp_path, content)


def test_json_lines(tmp_path):
    reader = table(tmp_path, '{"who": "ann", "x": 1.5}\n\nnope\n[1]\n{"x": 2}\n', "a.jsonl")
    assert cells(reader) == [{"who": "ann", "x": 1.5}, None, None, {"x": 2}]


def test_a_sqlite_query_keeps_its_order(tmp_path):
    path = tmp_path / "a.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("create table v (who text, x real)")
        connection.executemany("insert into v values (?, ?)", [("bob", 2.0), ("ann", 1.5)])
    reader = open_table(path, query="select * from v order by who")
    assert reader.columns == ("who", "x")
    assert cells(reader) == [{"who": "ann", "x": 1.5}, {"who": "bob", "x": 2.0}]
    with pytest.raises(InputError, match="no such column"):
        open_table(path, query="select nobody from v")


@pytest.mark.parametrize("kind", ["parquet", "feather"])
def test_parquet_and_arrow(tmp_path, kind):
    arrow = pytest.importorskip("pyarrow")
    held = arrow.table({"who": ["ann", "bob"], "x": [1.5, None]})
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(held, path)
    else:
        import pyarrow.feather

        pyarrow.feather.write_feather(held, str(path), compression="uncompressed")
    reader = open_table(path)
    assert reader.columns == ("who", "x")
    assert cells(reader) == [{"who": "ann", "x": 1.5}, {"who": "bob", "x": None}]
    path.write_bytes(b"nothing")
    with pytest.raises(InputError, match="a file of kind"):
        open_table(path)


def test_rows_that_are_appended_are_read_later(tmp_path):
    reader = table(tmp_path, PLAIN, whole=False)
    assert cells(reader) == ANN_BOB
    assert cells(reader) == []
    with (tmp_path / "a.csv").open("a") as file:
        file.write("cy,3\nda")
    assert cells(reader) == [{"who": "cy", "x": "3"}]  # da is being written
    with (tmp_path / "a.csv").open("a") as file:
        file.write("n,4\n")
    assert cells(reader) == [{"who": "dan", "x": "4"}]


def test_a_last_line_without_newline_counts_when_nobody_writes_any_more(tmp_path):
    reader = table(tmp_path, PLAIN.rstrip("\n"), whole=False)
    assert cells(reader) == ANN_BOB[:1]
    before = (tmp_path / "a.csv").stat().st_mtime - 60
    os.utime(tmp_path / "a.csv", (before, before))
    assert cells(reader) == ANN_BOB[1:]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_a_bookmark_goes_on_behind_what_was_read(tmp_path, name):
    lines = [{"who": f"p{i}", "x": i} for i in range(20)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    if name == "a.csv":
        text = "who,x\n" + "".join(f"{line['who']},{line['x']}\n" for line in lines) + "\n\n"
    first = table(tmp_path, text, name)
    rows = first.rows()
    for _ in range(7):
        next(rows)
    mark = Bookmark.parse(first.bookmark.as_text())
    again = open_table(tmp_path / name)
    again.skip_to(mark)
    assert [row["who"] for row in cells(again)] == [f"p{i}" for i in range(7, 20)]
    whole = open_table(tmp_path / name)
    list(whole.rows())
    open_table(tmp_path / name).skip_to(whole.bookmark)  # also behind empty lines at the end


@pytest.mark.parametrize("change", ["shorter", "rewritten", "rotated"])
def test_a_file_that_was_changed_is_not_read_on(tmp_path, change):
    reader = table(tmp_path, PLAIN + "cy,3\n")
    list(reader.rows())
    new = {
        "shorter": PLAIN,
        "rewritten": PLAIN.replace("ann", "eve") + "cy,3\ndan,4\n",
        "rotated": "who,x\nnew,1\nnext,2\nmore,3\nlast,4\n",
    }[change]
    (tmp_path / "a.csv").write_text(new)
    with pytest.raises(InputError, match="put the old content back"):
        open_table(tmp_path / "a.csv").skip_to(reader.bookmark)


def test_a_file_that_shrinks_or_is_deleted_while_it_is_read_is_named(tmp_path):
    reader = table(tmp_path, PLAIN, whole=False)
    list(reader.rows())
    (tmp_path / "a.csv").write_text("who,x\n")
    with pytest.raises(InputError, match="shorter"):
        list(reader.rows())
    (tmp_path / "a.csv").unlink()
    with pytest.raises(InputError, match=r"a\.csv.*it is gone"):
        list(reader.rows())


def test_columns_that_are_not_there_are_named(tmp_path):
    with pytest.raises(InputError, match=r"columns y.*it has who, x"):
        check_columns(table(tmp_path, PLAIN), ("who", "y"), show=True)


def test_a_first_record_in_the_headers_place_is_shown_to_the_screen_only(tmp_path):
    """A learner logs this error: without a header the names of columns are a person's cells."""
    reader = table(tmp_path, "ann,positive\nbob,negative\n")
    with pytest.raises(InputError, match=r"columns who, y.*has 2 columns, and 0 of the 2") as told:
        check_columns(reader, ("who", "y"))
    assert "ann" not in str(told.value)
    assert "positive" not in str(told.value)
    with pytest.raises(InputError, match="among columns 1, 3 of 3 a name is there twice") as told:
        table(tmp_path, "ann,positive,ann\n")
    assert "ann" not in str(told.value)


def test_keys_that_are_there_twice_make_no_record(tmp_path):
    lines = '{"who": "ann", "x": 1, "x": 2}\n{"who": "ann", "x": {"a": 1, "a": 2}}\n{"who": "bob"}\n'
    assert cells(table(tmp_path, lines, "a.jsonl")) == [None, None, {"who": "bob"}]


@pytest.mark.parametrize("content", ['[{"who": "ann"}]', '{\n  "who": "ann"\n}\n', "\n[\n{}\n]"])
def test_json_that_is_no_json_lines_is_refused(tmp_path, content):
    with pytest.raises(InputError, match="one JSON object a line"):
        table(tmp_path, content, "a.json")


def test_a_query_that_names_a_column_twice_or_meets_no_text(tmp_path):
    path = tmp_path / "a.db"
    with sqlite3.connect(path) as connection:
        connection.execute("create table v (who text)")
        connection.execute("insert into v values (cast(x'ff41' as text))")
    with pytest.raises(InputError, match="a name is there twice"):
        open_table(path, query="select who, who from v")
    assert [number for number, _ in open_table(path, query="select who from v").rows()] == [0]


def test_python_rows():
    reader = RowsTable(iter([{"x": 1}, {"x": 2}]))
    assert cells(reader) == [{"x": 1}, {"x": 2}]
    again = RowsTable(iter([{"x": 1}, {"x": 2}, {"x": 3}]))
    again.skip_to(reader.bookmark)
    assert cells(again) == [{"x": 3}]


def test_other_files_are_refused(tmp_path):
    (tmp_path / "a.xlsx").write_bytes(b"PK")
    (tmp_path / "broken.csv").symlink_to(tmp_path / "gone.csv")
    (tmp_path / "folder.csv").mkdir()
    os.mkfifo(tmp_path / "pipe.csv")
    for name, says in (
        ("a.xlsx", "CSV"),
        ("none.csv", "there"),
        ("broken.csv", "a link.*gone.csv"),
        ("folder.csv", "this is a folder"),
        ("pipe.csv", "a pipe"),
    ):
        with pytest.raises(InputError, match=says):
            open_table(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (bz2.compress(PLAIN.encode()), "bzip2"),
        (lzma.compress(PLAIN.encode()), "an xz archive"),
        (b"PK\x03\x04 and more", "Excel"),
        (b"PAR1 and more", r"name it \.parquet"),
        (codecs.BOM_UTF32_LE + PLAIN.encode("utf-32-le"), "UTF-32"),
    ],
    ids=["bzip2", "xz", "zip", "parquet", "utf-32"],
)
def test_files_that_are_no_text_are_named_for_what_they_are(tmp_path, content, says):
    with pytest.raises(InputError, match=says):
        table(tmp_path, content)


@pytest.mark.parametrize(
    "query",
    [
        "VACUUM INTO '{out}'",
        "ATTACH DATABASE '{out}' AS other",
        "PRAGMA writable_schema = 1",
        "CREATE TEMP TABLE t AS SELECT * FROM people",
        "SELECT load_extension('{out}')",
        "SELECT fts3_tokenizer('simple', x'4141414141414141')",
        "DELETE FROM people",
    ],
)
def test_a_plans_query_may_read_and_do_nothing_else(query, tmp_path):
    """`VACUUM INTO` once copied a file of mode 0600 to one of mode 0644, although the connection was read-only."""
    path, out = tmp_path / "a.sqlite", tmp_path / "copy.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE people (name)")
        connection.execute("INSERT INTO people VALUES ('x')")
    connection.close()
    with pytest.raises(InputError, match=r"data\.query"):
        open_table(path, query=query.format(out=out))
    assert not out.exists()


def test_a_plans_query_may_use_everything_that_reads(tmp_path):
    path = tmp_path / "a.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE people (name, age)")
        connection.executemany("INSERT INTO people VALUES (?, ?)", [("b", 2), ("a", 1)])
    connection.close()
    query = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2) SELECT upper(name) AS name, "
        "row_number() OVER (ORDER BY age) AS place FROM people JOIN n ON i = age WHERE json_valid('1') ORDER BY age"
    )
    assert cells(open_table(path, query=query)) == [{"name": "A", "place": 1}, {"name": "B", "place": 2}]


def test_an_open_quote_keeps_a_bounded_text_in_memory(tmp_path):
    """Lines were counted, not their length: 1,000 long ones were kept."""
    path = tmp_path / "a.csv"
    path.write_text("who,x\n" + 'ann,"' + ("y" * (1 << 20) + "\n") * 40)
    with pytest.raises(InputError, match="quotes that are closed"):
        cells(open_table(path))


def test_a_cell_of_parquet_that_python_cannot_hold_spoils_its_own_record_alone(tmp_path):
    """A text that is no UTF-8, or a day in the year 20000, in one person's row: the others are read."""
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    text = arrow.array([b"a", b"\xff\xfe", b"c"]).view(arrow.string())
    day = arrow.array([0, 1, 2**23], arrow.int32()).view(arrow.date32())
    pyarrow.parquet.write_table(
        arrow.table({"who": ["ann", "bob", "cyd"], "t": text, "day": day}), tmp_path / "a.parquet"
    )
    rows = cells(open_table(tmp_path / "a.parquet"))
    assert [row["who"] for row in rows] == ["ann", "bob", "cyd"]
    assert [row["t"] for row in rows] == ["a", UNREADABLE, "c"]
    assert str(rows[1]["day"]) == "1970-01-02"


@pytest.mark.parametrize("depth", [MOST_NESTED + 1, 960, 985, 20_000])
def test_a_line_of_json_that_is_nested_deep_is_one_row_that_cannot_be_read(tmp_path, depth):
    """Whether Python can read it depends on who asks: the digest of what was read would change with a restart."""
    lines = ['{"who": "ann"}', '{"who": "bob", "x": ' + "[" * depth + "]" * depth + "}", '{"who": "cyd"}']
    assert cells(table(tmp_path, "\n".join(lines), "a.jsonl")) == [{"who": "ann"}, None, {"who": "cyd"}]
