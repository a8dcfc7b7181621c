"""The CSV tables of a run folder, read back.

Two rules for two kinds of table. What a simulation writes is written whole, so that a row that
cannot be read is damage: it is named by file and line. A server appends to `rounds.csv` while it
runs, and a kill may cut its last line short: rounds that can be read count, the others are
counted, so that a page can say how many are missing.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from veilstream.errors import InputError
from veilstream.files import write_file


def damaged_table(path: Path, line: int, rule: str, why: object) -> InputError:
    """The error for a table of a run folder that is not as it was written.

    It names the file, the line (0: the table as a whole) and the rule, never the line's content.
    """
    where = f"{path}, line {line}" if line else str(path)
    return InputError("run", where, rule, f"{why}; restore the file, --resume an unfinished run, or run it again")


def numbered_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """The header and all rows of a table, each with the line that it ends in.

    Args:
        path: the table, in UTF-8, with a header.
        columns: those that must be in the header.

    Raises:
        InputError: for a file that cannot be read, a missing column, or a row with more or fewer
            cells than the header.

    """
    line = 1
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.reader(file)
            header = next(rows, [])
            absent = [name for name in columns if name not in header]
            if absent:
                raise damaged_table(path, 1, f"the columns {', '.join(columns)}", f"{', '.join(absent)} missing")
            yield 1, header
            for cells in rows:
                line = rows.line_num
                if len(cells) != len(header):
                    raise damaged_table(path, line, f"{len(header)} cells in every row", f"here are {len(cells)}")
                yield line, cells
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = _reason(error)
        raise damaged_table(path, line, "a table in UTF-8 from here on", reason) from error


def table_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """`numbered_rows` by the names of their columns, without the header."""
    rows = numbered_rows(path, columns)
    _, header = next(rows)
    for line, cells in rows:
        yield line, dict(zip(header, cells, strict=True))


def cell_number(path: Path, line: int, cell: str) -> float:
    """The number in a cell, NaN for an empty one.

    Raises:
        InputError: for anything else, by file and line.

    """
    try:
        return float(cell or "nan")
    except ValueError:
        raise damaged_table(path, line, "a number", "a cell holds something else") from None


def _reason(error: Exception) -> str:
    """Why a file cannot be read, without what is in it."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return error.strerror or "it cannot be read" if isinstance(error, OSError) else str(error)


class ListedRound(NamedTuple):
    """A line of a server's rounds.csv."""

    round: int
    seconds: float
    answered: int
    missing: tuple[str, ...]


class ListedRounds(NamedTuple):
    """What rounds.csv says, and how many of its lines cannot be read."""

    rounds: list[ListedRound]
    unreadable: int

    @property
    def remark(self) -> str | None:
        """A sentence about what could not be read; None where everything could."""
        if not self.unreadable:
            return None
        lines = "1 line" if self.unreadable == 1 else f"{self.unreadable:,} lines"
        return f"{lines} of rounds.csv cannot be read; those rounds are left out here."


def read_rounds(folder: Path) -> ListedRounds:
    """Rounds as a server closed them; of one that a kill had listed twice the last line counts.

    A line that is cut short, not ended or edited into something else is left out and counted; no
    rounds where there is no file.

    Raises:
        InputError: for a file that the system cannot read.

    """
    path = folder / "rounds.csv"
    try:
        content = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise damaged_table(path, 0, "a file that can be read", _reason(error)) from error
    *lines, rest = content.decode("utf-8", errors="replace").split("\n")
    found: dict[int, ListedRound] = {}
    unreadable = int(bool(rest))
    for place, line in enumerate(lines):
        read = _listed(line.rstrip("\r"))
        if read is not None:
            found[read.round] = read
        elif place or not line.startswith("round,"):
            unreadable += 1
    return ListedRounds(list(found.values()), unreadable)


def _listed(line: str) -> ListedRound | None:
    try:
        number, seconds, answered, missing = line.split(",")
        read = ListedRound(int(number), float(seconds), int(answered), tuple(missing.split()))
    except ValueError:
        return None
    sound = read.round >= 0 and read.answered >= 0 and 0 <= read.seconds < math.inf
    return read if sound else None


def keep_whole_lines(path: Path, header: str) -> bool:
    """Cut off what stands behind a table's last whole line, so that the next begins a line.

    A table without a whole line gets its header again. A kill in the middle of a write leaves such
    an end; the round that it belongs to is done again.

    Returns:
        Whether anything was changed.

    """
    content = path.read_bytes() if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if content and whole == content:
        return False
    if whole:
        os.truncate(path, len(whole))
    else:
        write_file(path, header)
    return True
