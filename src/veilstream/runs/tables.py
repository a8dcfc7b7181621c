"""The CSV tables of a run folder, read back.

A simulation writes its tables whole, so an unreadable row is damage: the error names file and line. A kill
may cut the last line of a server's `rounds.csv`: unreadable lines there are left out and counted.
"""

from __future__ import annotations

import csv
import io
import math
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.files import write_file

Float32s = NDArray[np.float32]


def damaged(path: Path, line: int, rule: str, why: object) -> InputError:
    """The error for a damaged file of a run folder, without its content; line 0 is the whole file."""
    where = f"{path}, line {line}" if line else str(path)
    return InputError("run", where, rule, f"{why}; restore the file, --resume an unfinished run, or run it again")


def numbered_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """The header and all rows of a table, each with its last line's number."""
    line = 1
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.reader(file)
            header = next(rows, [])
            absent = [name for name in columns if name not in header]
            if absent:
                raise damaged(path, 1, f"the columns {', '.join(columns)}", f"{', '.join(absent)} missing")
            yield 1, header
            for cells in rows:
                line = rows.line_num
                if len(cells) != len(header):
                    raise damaged(path, line, f"{len(header)} cells in every row", f"here are {len(cells)}")
                yield line, cells
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = _reason(error)
        raise damaged(path, line, "a table in UTF-8 from here on", reason) from error


def table_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows as dictionaries, with their lines."""
    rows = numbered_rows(path, columns)
    _, header = next(rows)
    for line, cells in rows:
        yield line, dict(zip(header, cells, strict=True))


def changed_settings(folder: Path) -> list[str]:
    """What an operator changed of how people wait for each other, between two starts of a server."""
    path = folder / "operations.csv"
    if not path.exists():
        return []
    rows = table_rows(path, ("time", "round", "operation", "about", "why"))
    return [
        f"{row['about']} from {row['why']}, after round {row['round']}"
        for _, row in rows
        if row["operation"] == "setting"
    ]


def cell_number(path: Path, line: int, cell: str) -> float:
    """The number in a cell, NaN for an empty one."""
    try:
        return float(cell or "nan")
    except ValueError:
        raise damaged(path, line, "a number", "a cell holds something else") from None


def _reason(error: Exception) -> str:
    """Why a file cannot be read, without its content."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return error.strerror or "it cannot be read" if isinstance(error, OSError) else str(error)


def read_history(path: Path) -> dict[str, dict[str, Float32s]]:
    """Columns of a table that `history_csv` wrote: for each method an array (seeds, rounds)."""
    numbers, counts = array("f"), dict[str, dict[str, int]]()
    rows = numbered_rows(path, ["method", "seed", "round"])
    _, header = next(rows)
    if header[:3] != ["method", "seed", "round"]:
        raise damaged(path, 1, "method, seed and round as first columns", "the order was changed")
    columns = header[3:]
    before = ("", "")
    for line, (method, seed, _, *cells) in rows:
        seeds = counts.setdefault(method, {})
        if (method, seed) != before and (seed in seeds or (seeds and method != before[0])):
            why = f"rows of {method}, seed {seed}, are not together"
            raise damaged(path, line, "rows of a method and seed together", why)
        before = method, seed
        seeds[seed] = seeds.get(seed, 0) + 1
        numbers.extend([cell_number(path, line, cell) for cell in cells])
    table = np.array(numbers, np.float32).reshape(-1, len(columns)) if columns else np.empty((0, 0), np.float32)
    history: dict[str, dict[str, Float32s]] = {column: {} for column in columns}
    first = 0
    for method, seeds in counts.items():
        lengths = set(seeds.values())
        if len(lengths) > 1:
            why = f"{method} has {min(lengths)} to {max(lengths)}"
            raise damaged(path, 0, "as many rows for every seed of a method", why)
        last = first + sum(seeds.values())
        values = table[first:last].reshape(len(seeds), lengths.pop(), len(columns))
        for place, column in enumerate(columns):
            history[column][method] = values[..., place]
        first = last
    return history


def history_csv(names: list[str], seeds: list[int], columns: dict[str, NDArray[Any]], rounds: list[int]) -> str:
    """CSV of arrays (methods, seeds, rounds); NaN becomes an empty cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", "seed", "round", *columns])
    stacked = np.stack([np.asarray(values, np.float64) for values in columns.values()], axis=-1)
    for m, name in enumerate(names):
        for s, seed in enumerate(seeds):
            for r, round_ in enumerate(rounds):
                cells = ["" if np.isnan(v) else f"{v:.7g}" for v in stacked[m, s, r]]
                writer.writerow([name, seed, round_, *cells])
    return out.getvalue()


@dataclass(frozen=True)
class ListedEstimate:
    """A line of telemetry.csv: a private estimate of one metric after a round."""

    round: int
    metric: str
    estimate: float
    low: float
    high: float
    window: str
    average: str
    method: str  # empty in a federation, which has one
    seed: str


def read_telemetry(path: Path) -> list[ListedEstimate]:
    """Rows of telemetry.csv; none where there is no file."""
    if not path.exists():
        return []
    found = []
    for line, row in table_rows(path, ["round", "metric", "estimate", "low", "high", "window"]):
        if not row["round"].isdecimal():
            raise damaged(path, line, "a round in every row", "here is none")
        estimate, low, high = (cell_number(path, line, row[name]) for name in ("estimate", "low", "high"))
        words = (row.get(name, "") for name in ("window", "average", "method", "seed"))
        found.append(ListedEstimate(int(row["round"]), row["metric"], estimate, low, high, *words))
    return found


class ListedRound(NamedTuple):
    """A line of a server's rounds.csv."""

    round: int
    seconds: float
    answered: int
    missing: tuple[str, ...]


class ListedRounds(NamedTuple):
    """The rounds in rounds.csv, and how many of its lines cannot be read."""

    rounds: list[ListedRound]
    unreadable: int

    @property
    def remark(self) -> str | None:
        """A sentence about unreadable lines; None where there are none."""
        if not self.unreadable:
            return None
        lines = "1 line" if self.unreadable == 1 else f"{self.unreadable:,} lines"
        return f"{lines} of rounds.csv cannot be read; those rounds are left out here."


def read_rounds(folder: Path) -> ListedRounds:
    """Rounds as a server closed them, the last line of each; damaged lines are left out and counted."""
    path = folder / "rounds.csv"
    try:
        content = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise damaged(path, 0, "a file that can be read", _reason(error)) from error
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
    """Cut off an incomplete last line, which a kill during a write leaves; whether the file was changed."""
    content = path.read_bytes() if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if content and whole == content:
        return False
    if whole:
        os.truncate(path, len(whole))
    else:
        write_file(path, header)
    return True
