"""A simulation's clients from tables of records, in the order in which they came.

A plan that promises "once" is refused if people return. Where more visits are allowed, records that come too
often or too soon are left out, as a deployed learner does. Held-out people are chosen by a hash of their tag.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.mechanisms.participation import ONCE, Participation
from veilstream.records.cells import TimeOrder, as_text, time_of, with_decimal_point
from veilstream.records.participation import VisitsInMemory
from veilstream.records.schema import EACH_ROW, Encoded, RecordSchema, Refusal
from veilstream.streams.pool import PoolStream
from veilstream.streams.table import Cells, Table
from veilstream.streams.tables import check_columns
from veilstream.wording import counted

_HELD_OUT_OF = 1 << 20
Tables = Sequence[tuple[str, Table]]  # by learner, where the schema has no column of learners


@dataclass
class TableReport:
    """What became of the rows; for the person beside the data."""

    rows: int = 0
    used: int = 0
    held_out: int = 0
    refused: Counter[Refusal] = field(default_factory=Counter)
    clamped: Counter[str] = field(default_factory=Counter)
    too_often: int = 0  # records over the visit limit
    too_soon: int = 0
    people: int = 0
    returning: int = 0  # people with more than one record
    most_visits: int = 0
    unordered: int = 0  # rows whose time is before that of the row above; a simulation sorts them
    learned: dict[str, int] = field(default_factory=dict)  # by learner, without held-out people
    notices: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For a summary."""
        refused = {str(refusal): count for refusal, count in self.refused.most_common()}
        return {**vars(self), "refused": refused, "clamped": dict(self.clamped)}


@dataclass(frozen=True)
class FixedOrder:
    """Each learner's records in the order in which they came, whatever the seed."""

    orders: tuple[NDArray[np.int32], ...]

    def __call__(self, labels: Any, learners: int, rng: Any) -> list[NDArray[np.int32]]:
        """As `PoolStream` asks."""
        return list(self.orders)

    def __repr__(self) -> str:
        return "FixedOrder(...)"


@dataclass(frozen=True, kw_only=True, eq=False)
class TableStream(PoolStream):
    """`PoolStream` that knows what became of the rows."""

    names: tuple[str, ...] = ()  # the learners, in order
    report: TableReport = field(default_factory=TableReport)


@dataclass(frozen=True)
class ClientRecord:
    """One record, whose it is, and where it belongs."""

    client: str
    learner: str
    when: float | str
    encoded: Encoded


@dataclass(frozen=True, kw_only=True)
class Dealing:
    """How a simulation deals records out to learners."""

    learners: int | None  # how many there must be; None for any number
    participation: Participation = ONCE
    per_step: int = 1  # clients of a step
    returning: str = "refuse"  # "refuse" people who come more often than allowed, or use their "first" records
    held_out_share: float = 0.2  # share of people who are measured on and not learned from


@dataclass(frozen=True)
class DealtOut:
    """Who is learned from at which learner, and who is held out."""

    learned: dict[str, list[Encoded]]  # by learner, in the order in which they are met
    held_out: list[ClientRecord]


def read_tables(tables: Tables, schema: RecordSchema, *, show: bool = False) -> tuple[list[ClientRecord], TableReport]:
    """Every record of some tables, encoded, in the order of the files; and what became of the rows so far."""
    report, records = TableReport(), []
    order = TimeOrder()
    for learner, table in tables:
        extra = tuple(c for c in (schema.learner, schema.time) if c)
        check_columns(table, (*schema.columns, *extra), show=show)
        report.notices += table.notices
        for number, cells in table.rows():
            report.rows += 1
            record = _record(schema, table, learner, number, cells)
            if isinstance(record, Refusal):
                report.refused[record] += 1
                continue
            report.clamped.update(record.encoded.clamped)
            if schema.time is not None:
                order.add(record.learner, record.when)
            records.append(record)
    report.unordered = order.unordered
    if schema.time is not None and order.by_letters:
        report.notices.append(
            f"the times in {schema.time} are text and are sorted letter by letter: 2026-01-31 "
            "sorts as meant, 31.1.2026 does not"
        )
    return records, report


def _record(
    schema: RecordSchema, table: Table, learner: str, number: int, cells: Cells | None
) -> ClientRecord | Refusal:
    if cells is None:
        return Refusal("not readable")
    encoded = schema.encode(cells, row_name=f"{table.name}:{number}", decimal_comma=table.decimal_comma)
    if isinstance(encoded, Refusal):
        return encoded
    if schema.learner is not None:
        learner = as_text(cells.get(schema.learner, ""))
        if not learner:
            return Refusal("missing", schema.learner)
    if schema.time is None:
        return ClientRecord(encoded.client, learner, number, encoded)
    when = time_of(cells.get(schema.time), decimal_comma=table.decimal_comma)
    if when is None:
        return Refusal("missing", schema.time)
    return ClientRecord(encoded.client, learner, when, encoded)


def table_stream(tables: Tables, schema: RecordSchema, dealing: Dealing, *, rounds: int, per_round: int) -> TableStream:
    """Tables as a stream of clients, with a report of what became of the rows."""
    found, report = read_tables(tables, schema)
    names = [table.name for _, table in tables]
    dealt = deal_out(found, report, schema, names, dealing)
    pool = [record for own in dealt.learned.values() for record in own]
    held = [record.encoded for record in dealt.held_out]
    ends = np.cumsum([len(own) for own in dealt.learned.values()])
    report.notices += short_of(report.learned, rounds, per_round)
    return TableStream(
        learners=len(dealt.learned),
        rounds=rounds,
        per_round=per_round,
        features=np.stack([e.sample.features for e in pool]),
        targets=np.array([e.sample.target for e in pool], np.float32),
        held_features=np.stack([e.sample.features for e in held]),
        held_targets=np.array([e.sample.target for e in held], np.float32),
        split=FixedOrder(tuple(np.split(np.arange(len(pool), dtype=np.int32), ends[:-1]))),
        names=tuple(dealt.learned),
        report=report,
        provenance=f"records of {', '.join(names)}, in the order they came",
    )


def deal_out(
    found: list[ClientRecord], report: TableReport, schema: RecordSchema, names: list[str], dealing: Dealing
) -> DealtOut:
    """Deal records out to learners as a simulation does; `data check` asks this too."""
    if not found:
        reasons = "; ".join(f"{r}: {count}" for r, count in report.refused.most_common(5))
        raise InputError(
            "data.source",
            names,
            f"records that can be used; of {counted(report.rows, 'row')} none can ({reasons or 'there are none'})",
            "`veilstream data check FILE --plan PLAN` shows each column",
        )
    count_people(found, report)
    by_learner = _by_learner(found, dealing.learners)
    if schema.client != EACH_ROW:
        _check_one_learner_each(found, schema.client)
    share = dealing.held_out_share
    learned = {name: [r for r in own if not is_held_out(r.client, share)] for name, own in by_learner.items()}
    held = [r for r in found if is_held_out(r.client, share)] or found[-1:]
    report.held_out = len(held) if share > 0.0 else 0  # else only a placeholder
    if dealing.returning == "refuse":
        _check_visits(learned, dealing.participation.times)
    kept = {name: allowed(own, dealing.participation, dealing.per_step, report) for name, own in learned.items()}
    report.learned = {name: len(own) for name, own in kept.items()}
    report.used = sum(report.learned.values())
    if not report.used:
        raise InputError(
            "data.source", names, "records of people to learn from", "all of them are held out: give more records"
        )
    return DealtOut(kept, held)


def short_of(learned: dict[str, int], rounds: int, per_round: int) -> list[str]:
    """A notice if some learners have too few records for every round; else nothing."""
    needed = rounds * per_round
    short = {name: count for name, count in learned.items() if count < needed}
    if not short:
        return []
    shown = ", ".join(f"{name}: {count}" for name, count in list(short.items())[:12])
    more = ", ..." if len(short) > 12 else ""
    least = min(short.values()) // per_round
    return [
        f"the horizon is {rounds} rounds of {per_round} records, {needed} records at each learner, "
        f"and these have fewer to learn from: {shown}{more}. Steps without a record add noise and "
        f"teach nothing: set learning.rounds = {max(least, 1)}, or give more records"
    ]


def rows_to_learn_from(
    tables: Tables, schema: RecordSchema, held_out_share: float
) -> dict[str, list[dict[str, object]]]:
    """Cells of the records that `table_stream` learns from, by learner, in order, with decimal points."""
    found: dict[str, list[tuple[Any, dict[str, object]]]] = {}
    for learner, table in tables:
        for number, cells in table.rows():
            record = _record(schema, table, learner, number, cells)
            if isinstance(record, Refusal) or cells is None or is_held_out(record.client, held_out_share):
                continue
            kept = {
                column: with_decimal_point(value) if table.decimal_comma else value
                for column, value in cells.items()
                if column != schema.learner
            }
            found.setdefault(record.learner, []).append((record.when, kept))
    for own in found.values():
        own.sort(key=lambda pair: pair[0])
    return {name: [cells for _, cells in found[name]] for name in sorted(found)}


def count_people(found: list[ClientRecord], report: TableReport) -> None:
    """Count people and their visits into the report."""
    visits = Counter(record.client for record in found)
    report.people, report.most_visits = len(visits), max(visits.values(), default=0)
    report.returning = sum(count > 1 for count in visits.values())


def _by_learner(found: list[ClientRecord], learners: int | None) -> dict[str, list[ClientRecord]]:
    names = sorted({record.learner for record in found})
    if learners is not None and len(names) != learners:
        shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
        raise InputError(
            "learning.learners",
            learners,
            f"as many as the records name: {len(names)} ({shown})",
            f"learners = {len(names)}",
        )
    by_learner: dict[str, list[ClientRecord]] = {name: [] for name in names}
    for record in found:
        by_learner[record.learner].append(record)
    for own in by_learner.values():
        if len({isinstance(record.when, str) for record in own}) > 1:
            raise InputError("data.time", "numbers and texts", "one kind in all records", "check the column")
        own.sort(key=lambda record: record.when)
    return by_learner


def _check_one_learner_each(found: list[ClientRecord], column: str) -> None:
    """The promise covers one learner's messages: nobody may be at two."""
    seen: dict[str, str] = {}
    shared = sum(seen.setdefault(r.client, r.learner) != r.learner for r in sorted(found, key=lambda r: r.learner))
    if shared:
        raise InputError(
            "data.client",
            column,
            "people who are at one learner each",
            f"{shared} records are of people who come to another learner too, and the promise is "
            "for one learner's messages: put a person's records at one learner",
        )


def _check_visits(by_learner: dict[str, list[ClientRecord]], visits: int) -> None:
    counts = Counter(record.client for own in by_learner.values() for record in own)
    most = max(counts.values(), default=0)
    if most > visits:
        often = sum(count > visits for count in counts.values())
        raise InputError(
            "privacy.participations",
            visits,
            f"at least {most}: {often} people come more often than {counted(visits, 'time')}",
            f'participations = {most} (more noise), or data.returning = "first" (their other records are left out)',
        )


def allowed(own: list[ClientRecord], participation: Participation, per_step: int, report: TableReport) -> list[Encoded]:
    """The records that a learner takes, `per_step` a step; counts those over the visit limit and too soon."""
    visits = VisitsInMemory(participation)
    kept: list[Encoded] = []
    for record in own:
        why = visits.take(record.client, len(kept) // per_step)
        if why is None:
            kept.append(record.encoded)
        elif why == "too often":
            report.too_often += 1
        else:
            report.too_soon += 1
    return kept


def is_held_out(client: str, share: float) -> bool:
    """Whether a person is measured on: a hash of the tag decides."""
    hashed = hashlib.blake2b(client.encode("utf-8", "surrogatepass"), digest_size=8, person=b"held-out").digest()
    return int.from_bytes(hashed, "little") % _HELD_OUT_OF < share * _HELD_OUT_OF
