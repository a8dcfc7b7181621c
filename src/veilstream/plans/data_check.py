"""What a file of records holds, and what a plan would make of it: for the person beside the data.

Everything here reads private records and prints for one pair of eyes. Only names and kinds of
columns ever go into a plan (`proposal`): ranges and vocabularies are the person's to fill in from
what anybody knows, since a plan is shared.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from veilstream.learning.records import EACH_ROW, REASONS, as_number, as_text, is_missing
from veilstream.plans.plan import Plan
from veilstream.plans.records import schema_of
from veilstream.streams.table_stream import TableReport, read_tables
from veilstream.streams.tables import TableReader, open_table

__all__ = ["Column", "DataCheck", "Profile", "check_data", "profile", "proposal"]

_DISTINCT = 10_000
_NUMERIC_SHARE = 0.95
_FEW = 20
_WIDTH = 32
_LABELS = ("label", "target", "class", "y", "outcome")
_CLIENTS = ("client", "person", "people", "patient", "user", "customer", "tag", "id", "who", "name")
_TIMES = ("time", "timestamp", "date", "datetime", "when", "day", "period", "hour")
_LEARNERS = ("learner", "station", "site", "hospital", "region", "carrier", "branch", "device")


@dataclass
class Column:
    """What one column holds."""

    name: str
    rows: int = 0
    missing: int = 0
    numbers: int = 0
    low: float | None = None
    high: float | None = None
    texts: Counter[str] = field(default_factory=Counter)
    many: bool = False
    """Whether it has more different cells than are counted."""

    def take(self, value: object, *, decimal_comma: bool) -> None:
        """Count a cell."""
        self.rows += 1
        if is_missing(value):
            self.missing += 1
            return
        number = as_number(value, decimal_comma=decimal_comma)
        if number is not None:
            self.numbers += 1
            self.low = number if self.low is None else min(self.low, number)
            self.high = number if self.high is None else max(self.high, number)
        text = as_text(value)
        if text in self.texts or len(self.texts) < _DISTINCT:
            self.texts[text] += 1
        else:
            self.many = True

    @property
    def there(self) -> int:
        """Cells that say something."""
        return self.rows - self.missing

    @property
    def is_number(self) -> bool:
        """Whether its cells are numbers, but for a few."""
        return self.there > 0 and self.numbers >= _NUMERIC_SHARE * self.there

    @property
    def kind(self) -> str:
        """numeric, categorical or hashed: what it would be as a feature."""
        if self.is_number and len(self.texts) > 2:
            return "numeric"
        return "categorical" if len(self.texts) <= _FEW and not self.many else "hashed"

    @property
    def names_people(self) -> bool:
        """Whether almost every cell is another."""
        return self.there > 1 and (self.many or len(self.texts) > 0.5 * self.there)

    @property
    def shown(self) -> str:
        """Its values, on this screen only."""
        if self.kind == "numeric":
            return f"{self.low:g} to {self.high:g}"
        few = ", ".join(f"{text} ({count})" for text, count in self.texts.most_common(4))
        more = len(self.texts) - 4
        return few + (f" and {more}{'+' if self.many else ''} more" if more > 0 else "")


@dataclass
class Profile:
    """A table without a plan."""

    name: str
    rows: int
    unreadable: int
    columns: dict[str, Column]
    notices: list[str]
    decimal_comma: bool

    def guess(self, names: tuple[str, ...], *, among: list[str]) -> str | None:
        """The column that is called so, if any."""
        for wanted in names:
            for name in among:
                if wanted in re.split(r"[^a-z]+", name.lower()):
                    return name
        return None

    def roles(self) -> dict[str, str | None]:
        """Who, when, where and what is predicted: a guess from names and cells."""
        names = list(self.columns)
        label = self.guess(_LABELS, among=names)
        if label is None:
            last = [n for n in reversed(names) if 2 <= len(self.columns[n].texts) <= _FEW]
            label = last[0] if last else (names[-1] if names else None)
        rest = [name for name in names if name != label]
        client = self.guess(_CLIENTS, among=rest)
        time = self.guess(_TIMES, among=[n for n in rest if n != client])
        if time is not None and not self.columns[time].names_people:
            time = None  # an hour of the day predicts; it orders nothing
        learner = self.guess(_LEARNERS, among=[n for n in rest if n not in (client, time)])
        if learner is not None and len(self.columns[learner].texts) > 1000:
            learner = None
        return {"client": client or EACH_ROW, "time": time, "learner": learner, "label": label}


def profile(table: TableReader) -> Profile:
    """Read a whole table."""
    columns = {name: Column(name) for name in table.columns if name}
    rows = unreadable = 0
    for _, cells in table.rows():
        rows += 1
        if cells is None:
            unreadable += 1
            continue
        for name in cells:
            if name not in columns and name:
                columns[name] = Column(name, rows=rows - 1, missing=rows - 1)
        for name, column in columns.items():
            column.take(cells.get(name), decimal_comma=table.decimal_comma)
    return Profile(table.name, rows, unreadable, columns, table.notices, table.decimal_comma)


def proposal(found: Profile, source: str, task: str | None = None) -> str:
    """A [data] table with names and kinds of columns, as TOML: no cell's value stands in it."""
    roles = found.roles()
    label = roles["label"]
    lines = [
        "# Names and kinds of columns. Ranges and words are yours to fill in, from what anybody",
        "# knows: this file is shared. An empty cell refuses its record; missing = \"zero\" or",
        '# "flag" in a feature keeps it.',
        "[data]", 'kind = "table"', f"source = {_quoted(source)}",
    ]  # fmt: skip
    named = ("learner", "client", "time", "label")
    lines += [f"{role} = {_quoted(str(roles[role]))}" for role in named if roles[role] is not None]
    column = found.columns[label] if label is not None else None
    classes = column is not None and len(column.texts) <= _FEW
    if classes and task in (None, "logistic", "softmax"):
        lines.append('# fill in its texts, the second of two is +1: labels = ["no", "yes"]')
    else:
        lines.append("# fill in what anybody knows of it: label_range = [0.0, 100.0]")
    for name, each in found.columns.items():
        if name in roles.values():
            continue
        lines += ["", "[[data.features]]", f"name = {_quoted(name)}"]
        if each.kind == "numeric":
            lines += ['kind = "numeric"', "# fill in what anybody knows: low = 0.0, high = 100.0"]
        else:
            lines += ['kind = "hashed"', f"width = {_WIDTH}",
                      '# or kind = "categorical" and vocabulary = [...]']  # fmt: skip
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda m: f"\\u{ord(m[0]):04x}", escaped) + '"'


@dataclass
class DataCheck:
    """What a plan makes of a file."""

    report: TableReport
    labels: Counter[str]
    per_learner: dict[str, int]
    """Usable records of each learner."""
    rounds: dict[str, int]
    """How many rounds they feed."""
    unused_columns: list[str]
    needed: int
    """Records that the plan's horizon needs at each learner."""

    @property
    def refused_share(self) -> float:
        """Of all rows."""
        return sum(self.report.refused.values()) / max(self.report.rows, 1)

    def problems(self) -> list[str]:
        """What to look at, worst first."""
        found = []
        report = self.report
        for refusal, count in report.refused.most_common():
            share = 100 * count / max(report.rows, 1)
            where = f" in {refusal.column}" if refusal.column else ""
            found.append(f"{count} rows ({share:.1f}%) refused{where}: {REASONS[refusal.reason]}")
        for column, count in report.clamped.most_common():
            share = 100 * count / max(report.rows, 1)
            if share >= 1:
                found.append(f"{count} numbers ({share:.1f}%) in {column} lie outside its range")
        if len(self.labels) == 1:
            found.append(f"every record has the label {next(iter(self.labels))}")
        for name, rounds in self.rounds.items():
            have = self.per_learner[name]
            if have < self.needed:
                found.append(f"learner {name} has {have} records, enough for {rounds} rounds; the "
                             f"plan's horizon needs {self.needed}")  # fmt: skip
        return found

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            **self.report.as_dict(), "labels": dict(self.labels), "per_learner": self.per_learner,
            "rounds": self.rounds, "unused_columns": self.unused_columns,
            "refused_share": self.refused_share, "problems": self.problems(),
        }  # fmt: skip


def check_data(paths: list[Path], plan: Plan) -> DataCheck:
    """What a plan would make of these files; refuses those that lack its columns.

    Raises:
        InputError: for files that cannot be read, or without the plan's columns.

    """
    schema = schema_of(plan)
    tables = [(path.stem, open_table(path, query=plan.data.query)) for path in paths]
    visits, report = read_tables(tables, schema)
    people = Counter(visit.client for visit in visits)
    report.people, report.most_visits = len(people), max(people.values(), default=0)
    report.returning = sum(count > 1 for count in people.values())
    named = {column for _, table in tables for column in table.columns if column}
    used = {*schema.columns, schema.learner, schema.time}
    times = plan.participation.times
    kept: dict[str, int] = {}
    counted: Counter[tuple[str, str]] = Counter()
    for visit in visits:
        counted[visit.learner, visit.client] += 1
        usable = counted[visit.learner, visit.client] <= times
        kept[visit.learner] = kept.get(visit.learner, 0) + usable
    each = plan.learning.local_steps * plan.learning.clients_per_step
    labels = Counter(
        str(schema.label.in_units(float(visit.record.sample.target))) for visit in visits
    )
    report.used = sum(kept.values())
    report.too_often = len(visits) - report.used
    return DataCheck(
        report, labels if schema.label.classes else Counter(), kept,
        {name: count // each for name, count in kept.items()},
        # Which columns an encoder of one's own uses, nobody here knows.
        sorted(named - used) if plan.data.encode is None else [], plan.learning.rounds * each,
    )  # fmt: skip
