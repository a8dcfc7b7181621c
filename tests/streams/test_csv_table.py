"""CSV that is badly quoted, cut or damaged: named by its line, counted, never swallowed."""

from __future__ import annotations

import csv
import os

import pytest
from hypothesis import example, given
from hypothesis import strategies as some

from veilstream.errors import InputError
from veilstream.streams.csv_table import CsvTable, ends_in_quotes


def table(tmp_path, content, **options):
    path = tmp_path / "a.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return CsvTable(path, **options)


def cells(reader):
    return [row for _, row in reader.rows()]


ROWS = [f"p{i},{i},fine" for i in range(100)]


def lines(rows):
    return "who,x,note\n" + "\n".join(rows) + "\n"


@given(some.text(alphabet='a",\n ', min_size=1, max_size=40))
@example('a,"b\n')
@example('"a""\nb"\n')
def test_open_quotes_are_those_that_the_csv_module_would_read_on_in(text):
    """The reference is `csv.reader`: it reads another line into the last cell, or as a row."""
    whole = text + "\n"
    inside = False
    for line in whole.splitlines(keepends=True):
        inside = ends_in_quotes(line, ",", inside)
    *_, last = csv.reader([*whole.splitlines(keepends=True), "END\n"])
    assert inside == (last != ["END"])


@pytest.mark.parametrize("at", [0, 57, 98])
def test_a_quote_that_is_not_closed_is_refused_with_its_line(tmp_path, at):
    rows = list(ROWS)
    rows[at] = rows[at].replace("fine", '"fine')
    with pytest.raises(InputError, match=f"line {at + 2} is not, and takes {99 - at} line"):
        cells(table(tmp_path, lines(rows)))


@pytest.mark.parametrize("later", ['"fine"', '"fi, ne"', '5" pipe', 'fine"'])
def test_a_quote_that_a_later_row_closes_is_refused_too(tmp_path, later):
    rows = list(ROWS)
    rows[57] = rows[57].replace("fine", '"fine')
    rows[60] = rows[60].replace("fine", later)
    reader = table(tmp_path, lines(rows))
    with pytest.raises(InputError, match="line 59 is not"):
        cells(reader)
    with pytest.raises(InputError, match="line 59 is not"):
        cells(reader)  # nor is what lies behind it read when it is asked again


def test_a_quote_without_end_does_not_wait_for_the_end_of_a_large_file(tmp_path):
    rows = ['p,1,"open', *(f"p{i},{i},fine" for i in range(5000))]
    with pytest.raises(InputError, match="line 2 is not, and takes 1000 lines"):
        next(table(tmp_path, lines(rows)).rows())


def test_cells_with_lines_and_quotes_of_their_own_are_read(tmp_path):
    text = 'who,note\nann,"one, two\n\nthree ""four"" \n"\nbob,5" pipe\n'
    assert cells(table(tmp_path, text)) == [
        {"who": "ann", "note": 'one, two\n\nthree "four" \n'},
        {"who": "bob", "note": '5" pipe'},
    ]


def test_what_cannot_be_read_counts_once_for_each_line(tmp_path):
    text = 'who,x\n"a\nb\nc" d,1,2\nann,1\nbob,1\rcy,2\n'
    rows = cells(table(tmp_path, text))
    assert rows == [None, None, None, {"who": "ann", "x": "1"}, None, None]


def test_a_cell_that_is_being_written_is_waited_for(tmp_path):
    reader = table(tmp_path, 'who,note\nann,"first\n', whole=False)
    path = tmp_path / "a.csv"
    assert cells(reader) == []
    with path.open("a") as file:
        file.write('second"\nbob,x\n')
    assert cells(reader) == [{"who": "ann", "note": "first\nsecond"}, {"who": "bob", "note": "x"}]
    with path.open("a") as file:
        file.write('cy,"third\nfourth\n')
    os.utime(path, (1, 1))
    for _ in range(2):
        with pytest.raises(InputError, match="line 5 is not"):
            cells(reader)


def test_a_last_line_that_is_cut_inside_quotes_is_one_row_that_cannot_be_read(tmp_path):
    assert cells(table(tmp_path, 'who,note\nann,x\nbob,"fi')) == [{"who": "ann", "note": "x"}, None]


@pytest.mark.parametrize("size", [131_072, 131_073, 20 << 20])
def test_a_cell_that_is_too_long_is_a_row_that_cannot_be_read(tmp_path, size):
    rows = cells(table(tmp_path, f"who,note\nann,{'x' * size}\nbob,x\n"))
    assert rows[-1] == {"who": "bob", "note": "x"}
    assert (rows[0] is None) == (size > 131_072)


def test_zero_bytes_are_no_text(tmp_path):
    rows = cells(table(tmp_path, b"who,x\nann,1\nb\x00b,2\n\x00\x00\x00\ncy,3\n"))
    assert [row and row["who"] for row in rows] == ["ann", None, None, "cy"]


def test_a_header_is_looked_for_and_said(tmp_path):
    with pytest.raises(InputError, match="the file is empty"):
        table(tmp_path, "\n\n")
    with pytest.raises(InputError, match="its first line has no end yet"):
        table(tmp_path, "who,x", whole=False)
    assert table(tmp_path, "who,x").columns == ("who", "x")


@pytest.mark.parametrize(
    "content", ["sep=;\nwho;x\nann;1\n", '\ufeff"sep=,"\nwho,x\nann,1\n', "\ufeff\ufeffwho,x\nann,1\n"]
)
def test_lines_and_marks_of_excel_are_no_header(tmp_path, content):
    assert cells(table(tmp_path, content)) == [{"who": "ann", "x": "1"}]


@pytest.mark.parametrize("content", ['"', ",,\n1,2,3\n", "x" * 200_000 + ",y\n1,2\n"])
def test_first_lines_without_names_are_named_for_it(tmp_path, content):
    with pytest.raises(InputError, match="its first line holds none, or one of more than 131,072"):
        table(tmp_path, content)


def test_half_a_character_at_the_end_is_a_row_that_cannot_be_read(tmp_path):
    content = "\ufeffwho,x\nann,1\n".encode("utf-16-le") + b"A"
    assert cells(table(tmp_path, content)) == [{"who": "ann", "x": "1"}, None]


def test_ten_thousand_columns(tmp_path):
    names = ",".join(f"c{i}" for i in range(10_000))
    reader = table(tmp_path, f"{names}\n{','.join(['1'] * 10_000)}\n")
    assert len(reader.columns) == 10_000
    assert len(cells(reader)[0]) == 10_000


@pytest.mark.parametrize("length", [1 << 24, (1 << 25) + 3])
def test_a_line_of_any_length_is_one_row(tmp_path, length):
    """Else a long text in somebody's record would take a step more than a short one."""
    path = tmp_path / "long.csv"
    path.write_bytes(b"who,x\nann," + b"z" * length + b"\nbo,1\n" + b"cy," + b"z" * length)
    rows = list(CsvTable(path).rows())
    assert [None if cells is None else cells["who"] for _, cells in rows] == [None, "bo", None]
    with path.open("ab") as file:
        file.write(b"zzz\ndi,2\n")
    assert [cells["who"] for _, cells in CsvTable(path).rows() if cells] == ["bo", "di"]
