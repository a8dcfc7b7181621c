"""CSV with a header; delimiter, encoding, newline and decimal comma are detected.

A quote that is never closed would swallow the rows behind it as one cell. Such a file is refused,
with the line in which the quote opens. A row that cannot be read counts once for each of its lines.

Lines are cut into cells a block at a time where every record in it is one line without doubt; any other block
is read record by record.
"""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from veilstream.errors import InputError
from veilstream.streams.growing_file import is_broken_text, text_lines
from veilstream.streams.table import Cells, Table, check_names
from veilstream.wording import counted

_DELIMITERS = ",;\t|"
_SEPARATOR_LINE = re.compile(r'"?sep=([,;\t|])"?')  # a first line that tells Excel the delimiter
_AROUND_NAMES = " \t\r\n\ufeff\u200b"
_NAMED = {";": "semicolons", "\t": "tabs", "|": "bars"}
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
_DECIMAL_POINT = re.compile(r"[-+]?\d*\.\d+")
_SAMPLE_RECORD = 50  # lines of a record at most, where only the dialect is looked for
_MOST_LINES = 1000  # a cell with more lines than this is a quote that was not closed
_MOST_CHARACTERS = 1 << 24  # likewise; these are kept in memory


class CsvTable(Table):
    """A CSV file."""

    def __init__(self, path: Path, *, whole: bool = True) -> None:
        super().__init__(path.name)
        self._lines = text_lines(path, whole=whole, header=True)
        self.notices += [self._lines.notice] if self._lines.notice else []
        sample = _sample_lines(self._lines.sample)
        self._delimiter = _delimiter(sample)
        if self._delimiter != ",":
            self.notices.append(f"{self.name}: cells are separated by {_NAMED[self._delimiter]}")
        self._ahead: deque[Cells | None] = deque()  # rows of a block that were not given out yet
        self._one_by_one_to = 0  # position in the file up to which records are read singly
        self._begun: list[str] = []  # lines of a record whose last quote is still open
        self._refused: InputError | None = None
        self.columns = self._header()
        self.decimal_comma = self._delimiter != "," and _has_decimal_commas(sample, self._delimiter)
        if self.decimal_comma:
            self.notices.append(f"{self.name}: 3,5 is read as a number")

    def _read(self) -> Iterator[Cells | None]:
        if self._refused is not None:
            raise self._refused  # also when it is asked again: what lies behind is not known
        while True:
            while self._ahead:
                yield self._ahead.popleft()
            if self._read_block():
                continue
            if (lines := self._record()) is None:
                return
            cells = self._row(lines)
            if cells is not None:
                yield cells
                continue
            for line in lines:  # each may have been a row
                yield from [None] * (1 + line.rstrip("\r\n").count("\r"))

    @property
    def rows_left(self) -> int | None:
        """About how many rows follow."""
        left = self._lines.rows_left(self.bookmark.rows + len(self._ahead))
        return None if left is None else left + len(self._ahead)

    def _read_block(self) -> bool:
        """Read many records ahead at once; False where the next one must be read by itself."""
        if self._begun or self._lines.position < self._one_by_one_to:
            return False
        block = self._lines.block()
        rows = self._plain_rows(block) if block else None
        if rows is None:
            self._one_by_one_to = self._lines.position + len(block)
            return False
        self._lines.give_out(block)
        self._ahead.extend(rows)
        return True

    def _plain_rows(self, block: bytes) -> list[Cells | None] | None:
        """Rows of a block in which each record is one line; None if that is not sure."""
        if b"\x00" in block:
            return None
        try:
            text = block.decode(self._lines.encoding)
        except UnicodeDecodeError:
            return None
        if "\r" in text:
            text = text.replace("\r\n", "\n")
        lines = text.split("\n")
        lines.pop()  # what is behind the last newline: nothing
        if "\r" in text or max(map(len, lines)) > csv.field_size_limit():
            return None
        cut = [line.split(self._delimiter) for line in lines] if '"' not in text else self._without_quotes(lines)
        if cut is None:
            return None
        columns, width = self.columns, len(self.columns)
        may_be_blank = width == 1 or self._delimiter.isspace()
        return [
            dict(zip(columns, cells, strict=True)) if len(cells) == width else None
            for line, cells in zip(lines, cut, strict=True)
            if (len(cells) == width and not may_be_blank) or line.strip()
        ]

    def _without_quotes(self, lines: list[str]) -> list[list[str]] | None:
        reader = csv.reader(lines, delimiter=self._delimiter, strict=True)
        cut = []
        try:
            for cells in reader:
                cut.append(cells)
                if reader.line_num != len(cut):  # a cell of several lines
                    return None
        except csv.Error:
            return None
        return cut

    def _header(self) -> tuple[str, ...]:
        lines = self._record()
        if lines is None and self._lines.sample.strip():
            raise self._no_header("its first line has no end yet: end it with a newline, or wait until it is written")
        if lines is None:
            raise self._no_header("the file is empty")
        if _SEPARATOR_LINE.fullmatch(lines[0].strip()):
            return self._header()
        # A file that was marked twice has a byte-order mark in its first name.
        columns = tuple(cell.strip(_AROUND_NAMES) for cell in _cells(lines, self._delimiter) or ())
        if not any(columns):
            raise self._no_header("its first line holds none, or one of more than 131,072 characters")
        check_names(self.name, columns)
        if all(re.fullmatch(r"[-+]?[\d.,]+", column) for column in columns if column):
            raise self._no_header("its first line holds numbers only: add a line with names")
        return columns

    def _no_header(self, way_out: str) -> InputError:
        return InputError("data", self.name, "a header with the columns' names, as a whole line", way_out)

    def _record(self) -> list[str] | None:
        lines, self._begun = self._begun, []
        inside, kept = bool(lines), sum(map(len, lines))
        for line in self._lines:
            inside = ends_in_quotes(line, self._delimiter, inside)
            if not lines and not line.strip():
                continue
            lines.append(line)
            if not inside:
                return lines
            kept += len(line)
            if len(lines) > _MOST_LINES or (len(lines) > 1 and kept > _MOST_CHARACTERS):
                self._refused = self._unclosed(lines)
                raise self._refused
        if len(lines) == 1 and self._lines.settled():
            return lines  # cut off in the middle of a cell
        self._begun = lines  # its other lines may be written later
        if lines and self._lines.settled():
            raise self._unclosed(lines)
        return None

    def _row(self, lines: list[str]) -> Cells | None:
        if len(lines) == 1 and ends_in_quotes(lines[0], self._delimiter, False):
            return None
        cells = _cells(lines, self._delimiter)
        whole = cells is not None and len(cells) == len(self.columns)
        if len(lines) > 1 and self._swallows(lines, whole):
            self._refused = self._unclosed(lines)
            raise self._refused
        if len(lines) > 1 and _reopened(lines, self._delimiter):
            return None
        if cells is None or not whole or any(is_broken_text(line) for line in lines):
            return None
        return dict(zip(self.columns, cells, strict=True))

    def _swallows(self, lines: list[str], whole: bool) -> bool:
        """Whether a later quote has closed an earlier one, so that the lines between look like rows."""
        alone = [_cells([line], self._delimiter) for line in lines[1:]]
        rows = [cells is not None and len(cells) == len(self.columns) > 1 for cells in alone]
        if not whole or _reopened(lines, self._delimiter):
            return any(rows)
        return len(rows) > 1 and len(self.columns) > 2 and all(rows)

    def _unclosed(self, lines: list[str]) -> InputError:
        first = self._lines.number - len(lines) + 1
        taken = counted(len(lines) - 1, "line")
        return InputError(
            "data",
            self.name,
            "quotes that are closed in the cell where they open",
            f"one that opens in line {first} is not, and takes {taken} behind it "
            'with it: close it, or write "" for a quote inside a cell',
        )


def ends_in_quotes(line: str, delimiter: str, inside: bool) -> bool:
    """Whether a quoted cell is still open behind a line, as `csv.reader` sees it."""
    if '"' not in line:
        return inside
    at = 0
    while True:
        if inside:
            at = line.find('"', at)
            if at < 0:
                return True
            if line.startswith('""', at):
                at += 2
                continue
            inside = False
        elif line.startswith('"', at):
            inside, at = True, at + 1
            continue
        at = line.find(delimiter, at) + 1
        if not at:
            return False


def _reopened(lines: list[str], delimiter: str) -> bool:
    """Whether text follows directly behind a closing quote."""
    try:
        list(csv.reader(lines, delimiter=delimiter, strict=True))
    except csv.Error:
        return True
    return False


def _cells(lines: list[str], delimiter: str) -> list[str] | None:
    """Cells of one record; None if it has none, or one of more than 131,072 characters."""
    try:
        return next(csv.reader(lines, delimiter=delimiter), None)
    except csv.Error:
        return None


def _sample_lines(sample: str) -> list[str]:
    lines = re.split(r"(?<=\n)|(?<=\r)(?!\n)", sample)
    return lines[:-1] if len(lines) > 1 else lines


def _sample_rows(lines: list[str], delimiter: str, most: int) -> list[list[str]]:
    rows: list[list[str]] = []
    record: list[str] = []
    inside = False
    for line in lines:
        inside = ends_in_quotes(line, delimiter, inside)
        record.append(line)
        if inside and len(record) < _SAMPLE_RECORD:
            continue
        rows += [cells] if (cells := _cells(record, delimiter)) else []
        record, inside = [], False
        if len(rows) == most:
            break
    return rows


def _delimiter(lines: list[str]) -> str:
    """The one that cuts the first lines into most cells, the same number in each."""
    if lines and (told := _SEPARATOR_LINE.fullmatch(lines[0].lstrip("\ufeff").strip())):
        return told[1]
    best, most = ",", 1
    for delimiter in _DELIMITERS:
        rows = _sample_rows(lines, delimiter, 30)
        if not rows or len(rows[0]) < 2:
            continue
        same = sum(len(row) == len(rows[0]) for row in rows)
        if same >= 0.7 * len(rows) and len(rows[0]) > most:
            best, most = delimiter, len(rows[0])
    return best


def _has_decimal_commas(lines: list[str], delimiter: str) -> bool:
    cells = [cell for row in _sample_rows(lines, delimiter, 200)[1:] for cell in row]
    commas = sum(_DECIMAL_COMMA.fullmatch(cell.strip()) is not None for cell in cells)
    points = sum(_DECIMAL_POINT.fullmatch(cell.strip()) is not None for cell in cells)
    return commas > points
