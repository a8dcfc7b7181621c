"""Bookmarks: rows that were read are known again by what they say."""

from __future__ import annotations

import csv
import io
import json
import random

import pytest

from veilstream.errors import InputError
from veilstream.streams.intake import SourceBookmark
from veilstream.streams.table import Bookmark
from veilstream.streams.table_source import check_not_read_before
from veilstream.streams.tables import RowsTable, open_table

RECORDS = [{"who": f"p{i % 7}", "x": i + 0.5, "note": f"a, {i}"} for i in range(40)]


def text_of(records, columns=("who", "x", "note"), **dialect):
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n", **dialect)
    writer.writerow(columns)
    writer.writerows([record[c] for c in columns] for record in records)
    return out.getvalue()


def read(path, rows):
    table = open_table(path)
    given = table.rows()
    for _ in range(rows):
        next(given)
    return SourceBookmark(table.name, table.bookmark.as_text())


def with_row_numbers(records):
    return text_of([r | {"": i} for i, r in enumerate(records)], ("", "who", "x", "note"))


NEW = [{"who": "new", "x": 1, "note": ""}, {"who": "newer", "x": 2, "note": "-"}]
COPIES = {
    "as it was": text_of(RECORDS),
    "Windows": "\ufeff" + text_of(RECORDS).replace("\n", "\r\n"),
    "Mac": text_of(RECORDS).replace("\n", "\r"),
    "utf-16": ("\ufeff" + text_of(RECORDS)).encode("utf-16-le"),
    "semicolons": text_of(RECORDS, delimiter=";"),
    "decimal commas": text_of([r | {"x": str(r["x"]).replace(".", ",")} for r in RECORDS], delimiter=";"),
    "all quoted": text_of(RECORDS, quoting=csv.QUOTE_ALL),
    "columns in another order": text_of(RECORDS, ("x", "note", "who")),
    "row numbers added": with_row_numbers(RECORDS),
    "zeros added": text_of([r | {"x": f"{r['x']:.3f}"} for r in RECORDS]),
    "empty lines": text_of(RECORDS).replace("\n", "\n\n"),
    "new rows first": text_of(NEW + RECORDS),
    "new rows last": text_of(RECORDS + NEW),
    "sorted again": text_of(RECORDS[:30][::-1] + RECORDS[30:]),
    "JSON lines": "".join(json.dumps(record) + "\n" for record in RECORDS),
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_under_another_name_is_not_taken_for_new_records(tmp_path, how):
    (tmp_path / "monday.csv").write_text(text_of(RECORDS))
    mark = read(tmp_path / "monday.csv", 30)
    copy, content = tmp_path / f"tuesday.{'jsonl' if how == 'JSON lines' else 'csv'}", COPIES[how]
    copy.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=r"its rows (1 to 30|3 to 32) were read as monday\.csv"):
        check_not_read_before(open_table(copy), [mark])


def test_rows_that_were_put_behind_ones_own_are_found(tmp_path):
    (tmp_path / "monday.csv").write_text(text_of(RECORDS[:20]))
    (tmp_path / "tuesday.csv").write_text(text_of(RECORDS[20:]))
    marks = [read(tmp_path / "monday.csv", 20), read(tmp_path / "tuesday.csv", 20)]
    assert check_not_read_before(open_table(tmp_path / "tuesday.csv"), marks) is False
    (tmp_path / "tuesday.csv").write_text(text_of(RECORDS[20:] + NEW + RECORDS[:20]))
    with pytest.raises(InputError, match="23 to 42 were read as monday"):
        check_not_read_before(open_table(tmp_path / "tuesday.csv"), marks)


def test_new_records_are_no_copy_and_what_cannot_be_told_is_said(tmp_path):
    """True: another file was read, so a copy with changed rows would not be known."""
    (tmp_path / "monday.csv").write_text(text_of(RECORDS))
    mark = read(tmp_path / "monday.csv", 30)
    dice = random.Random(7)
    others = [r | {"x": dice.random()} for r in RECORDS]
    for records in (others, RECORDS[1:], RECORDS[:20] + NEW + RECORDS[20:]):
        (tmp_path / "tuesday.csv").write_text(text_of(records))
        assert check_not_read_before(open_table(tmp_path / "tuesday.csv"), [mark]) is True
    assert check_not_read_before(open_table(tmp_path / "tuesday.csv"), []) is False


def test_a_few_rows_in_the_middle_may_be_alike_by_chance():
    alike = [{"y": "no"}] * 3
    first = RowsTable(iter(alike), "first")
    list(first.rows())
    mark = SourceBookmark("first", first.bookmark.as_text())
    other = RowsTable(iter([{"y": "yes"}, *alike]), "other")
    assert check_not_read_before(other, [mark]) is True
    with pytest.raises(InputError, match="1 to 3 were read as first"):
        check_not_read_before(RowsTable(iter([*alike, {"y": "yes"}]), "other"), [mark])


def test_a_file_that_was_saved_again_goes_on_where_it_stood(tmp_path):
    path = tmp_path / "monday.csv"
    path.write_text(text_of(RECORDS))
    mark = Bookmark.parse(read(path, 30).text)
    path.write_text(text_of(RECORDS, ("note", "who", "x"), delimiter=";").replace("\n", "\r\n"))
    again = open_table(path)
    again.skip_to(mark)
    assert [row["note"] for _, row in again.rows()] == [r["note"] for r in RECORDS[30:]]
    path.write_text(text_of(NEW + RECORDS))
    with pytest.raises(InputError, match="rewritten or rotated"):
        open_table(path).skip_to(mark)
