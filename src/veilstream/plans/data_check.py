"""What a plan would make of files of records, by the rules of a simulation and a deployed learner themselves."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from veilstream.errors import InputError
from veilstream.plans.clients import dealing_of, named_tables, source_files
from veilstream.plans.column_roles import column_of_people
from veilstream.plans.plan import Plan
from veilstream.plans.records import schema_of
from veilstream.records.cells import as_text, is_missing
from veilstream.records.schema import EACH_ROW, REASONS
from veilstream.streams.table import MANY_ROWS
from veilstream.streams.table_stream import ClientRecord, TableReport, deal_out, records_of, short_of
from veilstream.streams.visit_counts import VisitCounts
from veilstream.wording import counted


@dataclass
class DataCheck:
    """What a plan makes of some files."""

    report: TableReport
    labels: Counter[str]
    per_learner: dict[str, int]  # records that take a step at each deployed learner, refused ones as well
    rounds: dict[str, int]  # rounds that these records are enough for
    unused_columns: list[str]
    needed: int  # records that the plan's horizon needs at each learner
    per_round: int
    learned: dict[str, int] = field(default_factory=dict)  # by learner, without held-out people
    run_refuses: str | None = None  # what `veilstream run` would say of these files
    notes: list[str] = field(default_factory=list)
    each_row: bool = False  # whether the plan takes each row for another person

    @property
    def refused_share(self) -> float:
        """Of all rows."""
        return sum(self.report.refused.values()) / max(self.report.rows, 1)

    def problems(self) -> list[str]:
        """What to look at, worst first."""
        found: list[str] = []
        report = self.report
        if self.run_refuses is not None:
            found.append(f"`veilstream run` refuses these records: {self.run_refuses}")
        for refusal, count in report.refused.most_common():
            where = f" in {refusal.column}" if refusal.column else ""
            found.append(f"{counted(count, 'row')} ({self._percent(count)}) refused{where}: {REASONS[refusal.reason]}")
        if report.refused_steps:
            found.append(
                f"{counted(report.refused_steps, 'step')} of refused records: a client who is named takes a step "
                "whatever the record says, and that step teaches nothing"
            )
        found += [
            f"{counted(count, 'cell')} ({self._percent(count)}) in {column} outside the plan's range or vocabulary"
            for column, count in report.clamped.most_common()
            if 100 * count >= report.rows
        ]
        if len(self.labels) == 1:
            found.append(f"every record has the label {next(iter(self.labels))}")
        found += [
            f"learner {name} has {counted(have, 'record')}, enough for {counted(self.rounds[name], 'round')}; "
            f"the plan's horizon needs {counted(self.needed, 'record')} ({self.per_round} a round)"
            for name, have in self.per_learner.items()
            if have < self.needed
        ]
        return found + self.notes

    def _percent(self, count: int) -> str:
        return f"{100 * count / max(self.report.rows, 1):.1f}%"

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            **self.report.as_dict(),
            "labels": dict(self.labels),
            "per_learner": self.per_learner,
            "rounds": self.rounds,
            "unused_columns": self.unused_columns,
            "learned": self.learned,
            "needed": self.needed,
            "refused_share": self.refused_share,
            "run_refuses": self.run_refuses,
            "problems": self.problems(),
        }


MOST_SIMULATED = 500_000
"""Records up to which a check also applies the rules of a simulation, which needs all of them at once."""


def check_data(paths: list[Path], plan: Plan, query: str | None = None) -> DataCheck:
    """What a plan would make of these files; ``query`` is of SQLite files, instead of the plan's."""
    schema, learning = schema_of(plan), plan.learning
    tables = named_tables(paths, plan, query)
    per_round = learning.local_steps * learning.clients_per_step
    report, labels = TableReport(), Counter[str]()
    visits = VisitCounts(plan.participation, learning.clients_per_step)
    held: list[ClientRecord] | None = []
    for some in records_of(tables, schema, report, show=True, labels=labels):
        visits.add(some)
        if held is not None:
            held += some
            held = held if len(held) <= MOST_SIMULATED else None
    visits.count_people(report)
    simulated = copy.deepcopy(report)
    kept = visits.taken(report)
    named = {column for _, table in tables for column in table.columns if column}
    used = {*schema.columns, schema.learner, schema.time}
    checked = DataCheck(
        report,
        labels,
        kept,
        {name: count // per_round for name, count in kept.items()},
        # Which columns an encoder of one's own uses is not known here.
        sorted(named - used) if plan.data.encode is None else [],
        learning.rounds * per_round,
        per_round,
    )
    checked.notes += plan.remarks()
    checked.each_row = schema.client == EACH_ROW
    if checked.each_row:
        checked.notes += _people_by_name(paths, plan, query, sorted(named - used))
    if held is None:
        checked.notes.append(
            f"more than {MOST_SIMULATED:,} records: what `veilstream run` says of them was not looked at, since it "
            "holds all of them in memory"
        )
    else:
        _simulate(checked, held, simulated, paths, plan)
    if report.unordered:
        checked.notes.append(
            f"{counted(report.unordered, 'row')} lie behind a later {schema.time}: `veilstream run` sorts them, a "
            "deployed learner takes them in the order of the file; sort the file before its first start if the order "
            "matters"
        )
    return checked


def _people_by_name(paths: list[Path], plan: Plan, query: str | None, unused: list[str]) -> list[str]:
    """What a column that looks like a person's name says of people who return, where the plan names nobody."""
    column = column_of_people(unused)
    if column is None:
        return []
    visits = Counter(
        hash(as_text(cells[column]))
        for _, table in named_tables(paths, plan, query)
        for block in table.blocks(digests=False, most=MANY_ROWS)
        for cells in block.rows
        if cells is not None and not is_missing(cells.get(column))
    )
    return_, most = sum(count > 1 for count in visits.values()), max(visits.values(), default=0)
    return [
        f'client = "#row" takes each row for another person, so nobody is known to return; column {column} looks like '
        f"who: {len(visits)} people, {return_} of them return, one up to {counted(most, 'time')}. "
        f'If it says who, set client = "{column}": with "#row" the promise protects each of their rows alone'
    ]


def _simulate(
    checked: DataCheck, records: list[ClientRecord], report: TableReport, paths: list[Path], plan: Plan
) -> None:
    """Apply the rules of `veilstream run`; the number of learners counts only if all files are here."""
    found, wanted = len(checked.per_learner), plan.learning.learners
    some = found < wanted and not _all_files(paths, plan)
    if some:
        checked.report.notices.append(f"these are the records of {found} of the plan's {counted(wanted, 'learner')}")
    names = [path.name for path in paths]
    try:
        dealt = deal_out(records, report, schema_of(plan), names, dealing_of(plan, None if some else wanted))
    except InputError as error:
        checked.run_refuses = str(error)
        return
    checked.learned = {name: len(own) for name, own in dealt.learned.items()}
    held = {name: count for name, count in checked.learned.items() if checked.per_learner[name] >= checked.needed}
    checked.notes += [
        f"in `veilstream run`, which holds records out to measure on, {notice}"
        for notice in short_of(held, plan.learning.rounds, checked.per_round)
    ]


def _all_files(paths: list[Path], plan: Plan) -> bool:
    try:
        named = source_files(plan)
    except InputError:
        return False
    return {path.resolve() for path in named} <= {path.resolve() for path in paths}
