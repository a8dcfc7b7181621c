"""Tables of a run folder with damage in them: what can be read is, and the rest is said."""

from __future__ import annotations

import pytest

from veilstream.errors import InputError
from veilstream.runs.tables import ListedRound, keep_whole_lines, read_rounds, table_rows

HEADER = "round,seconds,answered,missing\n"
WHOLE = HEADER + "0,0.5,3,\n1,0.25,2,c\n"
FIRST = [ListedRound(0, 0.5, 3, ()), ListedRound(1, 0.25, 2, ("c",))]


def rounds_of(folder, content: str | bytes):
    raw = content if isinstance(content, bytes) else content.encode()
    (folder / "rounds.csv").write_bytes(raw)
    return read_rounds(folder)


@pytest.mark.parametrize("cut", range(1, len("2,0.7511,3,a b")))
def test_a_line_that_a_kill_cut_short_is_left_out_and_counted(tmp_path, cut):
    listed = rounds_of(tmp_path, WHOLE + "2,0.7511,3,a b"[:cut])
    assert listed.rounds == FIRST
    assert listed.unreadable == 1
    assert "1 line of rounds.csv" in listed.remark


@pytest.mark.parametrize(
    "line", ["2,0.2,9,0.3,3,", "x,1,3,", "2,nan,3,", "2,-1,3,", "2,inf,3,", "-2,1,3,", "2,1,1.5,", "", ","]
)
def test_an_edited_line_is_left_out_and_counted(tmp_path, line):
    listed = rounds_of(tmp_path, f"{WHOLE}{line}\n")
    assert (listed.rounds, listed.unreadable) == (FIRST, 1)


def test_bytes_that_are_no_text_are_one_unreadable_line(tmp_path):
    listed = rounds_of(tmp_path, WHOLE.encode() + b"\0\xff\xfe\n")
    assert (listed.rounds, listed.unreadable) == (FIRST, 1)


def test_what_is_whole_has_no_remark_and_a_repeated_round_counts_once(tmp_path):
    assert rounds_of(tmp_path, WHOLE).remark is None
    assert rounds_of(tmp_path, "").remark is None
    again = rounds_of(tmp_path, WHOLE + "1,0.75,3,\n")
    assert again.rounds == [FIRST[0], ListedRound(1, 0.75, 3, ())]
    assert again.unreadable == 0


@pytest.mark.parametrize(
    ("before", "after"), [(WHOLE, WHOLE), (WHOLE + "2,0.7", WHOLE), (HEADER[:9], HEADER), ("", HEADER), (None, HEADER)]
)
def test_a_table_is_cut_to_its_whole_lines(tmp_path, before, after):
    path = tmp_path / "rounds.csv"
    if before is not None:
        path.write_text(before)
    assert keep_whole_lines(path, HEADER) == (before != after)
    assert path.read_text() == after
    assert not keep_whole_lines(path, HEADER)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a,b\n1,2\n3\n", "line 3"),
        (b"a,b\n1,2\n3,4,5\n", "line 3"),
        (b"a,c\n1,2\n", "b missing"),
        (b"", "a, b missing"),
        (b"a,b\n1,2\n\xff\xfe,3\n", "not UTF-8"),
    ],
)
def test_a_damaged_table_is_named_with_its_line_and_the_way_out(tmp_path, content, said):
    path = tmp_path / "history.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match="restore the file") as caught:
        list(table_rows(path, ["a", "b"]))
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
