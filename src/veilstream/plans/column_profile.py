"""What files of records hold, without a plan: for the person beside them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError, among
from veilstream.plans.column_roles import FEW, Roles, guessed_roles
from veilstream.progress import progress
from veilstream.records.cells import as_number, as_text, has_two_readings, is_missing, plain_numbers, time_of
from veilstream.records.schema import EACH_ROW
from veilstream.streams.table import MANY_ROWS, Block, Cells, Table
from veilstream.wording import counted

_DISTINCT = 10_000
_NUMERIC_SHARE = 0.95
_UNIQUE_SHARE = 0.9
_SPELLINGS = 100
_UNIQUE_ROWS = 10  # fewer cells may differ by chance
_ISO_DATE = re.compile(r"\d{4}-\d{2}(-\d{2}([T ].*)?)?")
_OTHER_DATE = re.compile(r"\d{1,4}[./-]\d{1,2}[./-]\d{1,4}([T ,].*)?")


@dataclass
class Column:
    """What one column holds."""

    name: str
    rows: int = 0
    missing: int = 0
    numbers: int = 0
    whole_numbers: int = 0
    dates: int = 0
    read_dates: int = 0  # that `time_of` reads, so that they sort
    low: float | None = None
    high: float | None = None
    texts: Counter[str] = field(default_factory=Counter)
    two_readings: int = 0  # numbers such as 1.300 beside decimal commas
    many: int = 0  # number of cells after which new ones were no longer counted; 0 if all were

    def take(self, cells: Sequence[object], *, decimal_comma: bool) -> None:
        """Count some cells."""
        if set(map(type, cells)) != {str}:
            for cell in cells:
                self._take(cell, 1, decimal_comma)
            return
        texts: Any = cells
        numbers = plain_numbers(texts, decimal_comma=decimal_comma) if self.many else None
        if numbers is not None and all(map(str.isascii, texts)):
            self._take_numbers(numbers, texts)
            return
        counts = Counter[str](texts)
        if not self.many and len(self.texts) + len(counts) > _DISTINCT:  # which ones are still counted is told by order
            for text in texts:
                self._take(text, 1, decimal_comma)
            return
        for text, count in counts.items():
            self._take(text, count, decimal_comma)

    def _take_numbers(self, numbers: NDArray[np.float64], texts: Sequence[str]) -> None:
        self.rows += len(numbers)
        self.numbers += len(numbers)
        self.whole_numbers += int((numbers == np.floor(numbers)).sum())
        self._widen(float(numbers.min()), float(numbers.max()))
        self.texts.update(text for text in map(str.strip, texts) if text in self.texts)

    def _take(self, value: object, count: int, decimal_comma: bool) -> None:
        self.rows += count
        if is_missing(value):
            self.missing += count
            return
        number = as_number(value, decimal_comma=decimal_comma)
        text = as_text(value)
        if number is not None:
            self.numbers += count
            self.whole_numbers += number.is_integer() * count
            self._widen(number, number)
        elif has_two_readings(value, decimal_comma=decimal_comma):
            self.numbers += count
            self.two_readings += count
        elif text[:1].isdigit():
            read = _ISO_DATE.fullmatch(str(time_of(text))) is not None
            self.read_dates += read * count
            self.dates += (read or _OTHER_DATE.fullmatch(text) is not None) * count
        if text in self.texts or len(self.texts) < _DISTINCT:
            self.texts[text] += count
        elif not self.many:
            self.many = self.there

    def _widen(self, low: float, high: float) -> None:
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)

    @property
    def there(self) -> int:
        """Cells that are not missing."""
        return self.rows - self.missing

    @property
    def distinct(self) -> int:
        """Different cells, as far as they were counted."""
        return len(self.texts)

    @property
    def is_number(self) -> bool:
        """Whether nearly all cells are numbers."""
        return self.there > 0 and self.numbers >= _NUMERIC_SHARE * self.there

    @property
    def is_date(self) -> bool:
        """Whether nearly all cells are dates."""
        return self.there > 0 and self.dates >= _NUMERIC_SHARE * self.there

    @property
    def sorts_as_time(self) -> bool:
        """Whether its cells order rows: numbers, or dates that `time_of` reads."""
        return self.is_number or not self.is_date or self.read_dates == self.dates

    @property
    def classes(self) -> int:
        """Different cells, if upper and lower case are the same."""
        return len({text.casefold() for text in self.texts}) if len(self.texts) <= _SPELLINGS else len(self.texts)

    @property
    def kind(self) -> str:
        """numeric, categorical or hashed, as a feature."""
        if self.is_number and self.distinct > 2:
            return "numeric"
        return "categorical" if self.distinct <= FEW and not self.many else "hashed"

    @property
    def names_people(self) -> bool:
        """Whether more than half of its cells differ."""
        return self.there > 1 and (bool(self.many) or self.distinct > 0.5 * self.there)

    @property
    def nearly_unique(self) -> bool:
        """Whether nearly all cells differ."""
        seen = self.many or self.there
        return seen >= _UNIQUE_ROWS and self.distinct >= _UNIQUE_SHARE * seen

    @property
    def shown(self) -> str:
        """Some values, for this screen only."""
        if self.kind == "numeric":
            return "numbers with two readings" if self.low is None else f"{self.low:g} to {self.high:g}"
        few = ", ".join(f"{text[:60]} ({count})" for text, count in self.texts.most_common(4))
        more = self.distinct - 4
        return few + (f" and {more}{'+' if self.many else ''} more" if more > 0 else "")


@dataclass
class Profile:
    """Some tables without a plan."""

    names: list[str]
    rows: int
    unreadable: int
    columns: dict[str, Column]
    notices: list[str]
    sizes: list[int] = field(default_factory=list)  # rows of each file
    known: dict[str, str] = field(default_factory=dict)  # columns that a person has named: label, client

    @cached_property
    def roles(self) -> Roles:
        """Who, when, where and what is predicted: guesses, but for what is `known`."""
        return guessed_roles(self.columns, one_file=len(self.names) == 1, known=self.known)

    @property
    def people(self) -> int:
        """How many people, as far as they were counted."""
        client = self.columns.get(self.roles.client)
        if client is None:
            return self.rows
        return int(client.distinct * (client.there / client.many if client.many else 1.0))

    @property
    def learners(self) -> int:
        """How many learners: by their column, or one for each file."""
        learner = self.roles.learner
        return len(self.names) if learner is None else self.columns[learner].distinct

    @property
    def fewest(self) -> int:
        """Rows of the learner with the fewest."""
        learner = self.roles.learner
        return min(self.sizes, default=0) if learner is None else min(self.columns[learner].texts.values(), default=0)

    @property
    def title(self) -> str:
        """The files, in short."""
        return self.names[0] if len(self.names) == 1 else f"{len(self.names)} files"

    @cached_property
    def doubts_of_header(self) -> list[str]:
        """Why the first line may be no header; without quoting it."""
        named = [c for c in self.columns.values() if c.there]
        repeated = [c for c in named if as_text(c.name) in c.texts]
        if named and len(repeated) == len(named) > 1:
            often = min(c.texts[as_text(c.name)] for c in repeated)
            return [f"its header is there {counted(often, 'more time')}: were files put together?"]
        odd = [c for c in named if c in repeated or as_number(c.name) is not None or _OTHER_DATE.fullmatch(c.name)]
        if not odd:
            return []
        return [
            f"{counted(len(odd), 'name')} of {len(self.columns)} in its first line look like cells "
            "of a record: is that line a header? Without one, add a line with names"
        ]

    def check_header(self) -> None:
        """Refuse (`InputError`) to write into a plan what may be cells of a person's record."""
        if self.doubts_of_header:
            raise InputError(
                "--write",
                self.title,
                f"a file with a header ({self.doubts_of_header[0]})",
                "a plan is shared, and these may be cells of a record; if they are names, copy "
                "from the proposal by hand",
            )


def profile(tables: Sequence[Table], known: Mapping[str, str] | None = None) -> Profile:
    """Read whole tables; columns of the same name count together. ``known`` maps label and client to columns."""
    found = Profile([table.name for table in tables], 0, 0, {}, [], known=dict(known or {}))
    headers = {table.name: set(table.columns) - {""} for table in tables if table.columns}
    everywhere = set().union(*headers.values())
    for name, own in headers.items():
        if lacking := everywhere - own:
            shown = ", ".join(sorted(lacking)[:12]) + (", ..." if len(lacking) > 12 else "")
            found.notices.append(f"{name} lacks columns that other files have: {shown}")
    for table in tables:
        found.notices += table.notices
        _add_columns(found, table.columns)
        with progress(f"reading {table.name}", None) as tick:
            for block in table.blocks(digests=False, most=MANY_ROWS):
                _take_block(found, block, decimal_comma=table.decimal_comma)
                tick(len(block.rows))
        found.sizes.append(found.rows - sum(found.sizes))
    for role, column in found.known.items():
        if column not in found.columns and (role, column) != ("client", EACH_ROW):
            raise InputError(f"--{role}", column, *among(column, found.columns))
    found.notices += [
        f"{counted(column.two_readings, 'cell')} in {column.name} can be read in two ways, such as 1.300 beside "
        "decimal commas: a learner refuses their records; write 1300 or 1,3"
        for column in found.columns.values()
        if column.two_readings and column.is_number
    ]
    return found


def _take_block(found: Profile, block: Block, *, decimal_comma: bool) -> None:
    waiting: list[Cells] = []
    end, known = found.rows + len(block.rows), {"", *found.columns}
    for number, cells in enumerate(block.rows, found.rows):
        if cells is None:
            found.unreadable += 1
            continue
        if not cells.keys() <= known:  # all rows before lack a column that appears here
            _take_rows(found, waiting, decimal_comma=decimal_comma)
            waiting, found.rows = [], number
            _add_columns(found, cells)
            known = {"", *found.columns}
        waiting.append(cells)
    _take_rows(found, waiting, decimal_comma=decimal_comma)
    found.rows = end


def _take_rows(found: Profile, rows: list[Cells], *, decimal_comma: bool) -> None:
    if rows:
        for name, column in found.columns.items():
            column.take([cells.get(name) for cells in rows], decimal_comma=decimal_comma)


def _add_columns(found: Profile, names: Iterable[str]) -> None:
    """Columns that appear first here: all rows before lack them."""
    for name in names:
        if name and name not in found.columns:
            found.columns[name] = Column(name, rows=found.rows, missing=found.rows)
