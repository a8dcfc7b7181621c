"""Reading stored results, and writing their numbers as the pages show them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

__all__ = ["RESULTS", "Table", "bold", "mean", "mean_error", "mean_std", "read_csv", "read_json", "signed"]

RESULTS = Path(__file__).resolve().parents[1] / "results"


@dataclass(frozen=True)
class Table:
    """A Markdown table: its header, its rows, and one letter a column, l or r, for how it is aligned."""

    header: Sequence[str]
    align: str
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        if any(len(row) != len(self.header) for row in (self.align, *self.rows)):
            raise ValueError(f"a table with the header {self.header} has rows or marks of another length")
        rules = ["---:" if mark == "r" else "---" for mark in self.align]
        return "\n".join(f"| {' | '.join(row)} |" for row in (self.header, rules, *self.rows))


def read_csv(name: str) -> list[dict[str, str]]:
    """Lines of a stored file, by the names of its columns; lines that begin with # are remarks."""
    lines = (RESULTS / name).read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def read_json(name: str) -> Any:
    """A stored file's content."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def mean(values: Iterable[float], digits: int = 3) -> str:
    """The mean, with so many digits."""
    return f"{fmean(values):.{digits}f}"


def mean_std(values: Iterable[float], digits: int = 3) -> str:
    """Mean ± standard deviation over seeds (of the sample)."""
    values = list(values)
    return f"{fmean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def mean_error(values: Iterable[float], digits: int = 4) -> str:
    """Mean ± its standard error, with its sign: what paired differences are shown as."""
    values = list(values)
    return f"{signed(fmean(values), digits)} ± {stdev(values) / len(values) ** 0.5:.{digits}f}"


def signed(value: float, digits: int = 4) -> str:
    """With its sign, also where it is above zero."""
    return f"{value:+.{digits}f}"


def bold(text: str, when: bool = True) -> str:
    """In bold letters, where something says so."""
    return f"**{text}**" if when else text
