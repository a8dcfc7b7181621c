"""A simulation's clients from tables of records, in the order in which they came.

A plan that promises "once" is refused if people return. Where more visits are allowed, records that come too
often or too soon are left out, as a deployed learner does. A refused record of a named client keeps its place, with
nobody in it: its step has a zero gradient. `held_out` says which records are measured on instead.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.mechanisms.participation import ONCE, Participation
from veilstream.progress import progress
from veilstream.records.cells import TimeOrder, as_text, is_missing, time_of, with_decimal_point
from veilstream.records.encoded_group import EncodedGroup, encode_group
from veilstream.records.participation import VisitsInMemory
from veilstream.records.sample import Sample
from veilstream.records.schema import EACH_ROW, Encoded, RecordSchema, Refusal
from veilstream.streams.held_out import Parts, is_held_out, parted
from veilstream.streams.pool import PoolStream
from veilstream.streams.table import MANY_ROWS, Block, Table
from veilstream.streams.tables import check_columns
from veilstream.wording import counted

__all__ = [
    "ClientRecord",
    "Dealing",
    "DealtOut",
    "FixedOrder",
    "TableReport",
    "TableStream",
    "Tables",
    "allowed",
    "count_people",
    "deal_out",
    "is_held_out",
    "read_tables",
    "rows_to_learn_from",
    "short_of",
    "table_stream",
]

Tables = Sequence[tuple[str, Table]]  # by learner, where the schema has no column of learners


@dataclass
class TableReport:
    """What became of the rows; for the person beside the data."""

    rows: int = 0
    used: int = 0  # to learn from
    held_out: int = 0
    refused_steps: int = 0  # refused records that take their client's step, with a zero gradient
    refused: Counter[Refusal] = field(default_factory=Counter)
    clamped: Counter[str] = field(default_factory=Counter)
    too_often: int = 0  # records over the visit limit
    too_soon: int = 0
    people: int = 0
    returning: int = 0  # people with more than one record
    most_visits: int = 0
    unordered: int = 0  # rows whose time is before that of the row above; a simulation sorts them
    learned: dict[str, int] = field(default_factory=dict)  # steps with a client by learner, without held-out people
    notices: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For a summary."""
        refused = {str(refusal): count for refusal, count in self.refused.most_common()}
        return {**vars(self), "refused": refused, "clamped": dict(self.clamped)}


@dataclass(frozen=True)
class FixedOrder:
    """Each learner's records in the order in which they came, whatever the seed; -1 for a refused one."""

    orders: tuple[NDArray[np.int32], ...]

    def __call__(self, labels: Any, learners: int, rng: Any) -> list[NDArray[np.int32]]:
        """As `PoolStream` asks."""
        return list(self.orders)

    def __repr__(self) -> str:
        return "FixedOrder(...)"


@dataclass(frozen=True, kw_only=True, eq=False)
class TableStream(PoolStream):
    """`PoolStream` that knows what became of the rows."""

    may_be_empty: ClassVar[bool] = True
    names: tuple[str, ...] = ()  # the learners, in order
    report: TableReport = field(default_factory=TableReport)
    split_by: str = "people"  # how held-out records were chosen
    held_people: NDArray[np.int64] | None = None  # whose each held-out record is; None where each is someone else
    held_previous: NDArray[np.float64] | None = None
    """Target of the learner's record before each held-out one, nan for none; None without a column of times."""


class ClientRecord(NamedTuple):
    """One record, whose it is, and where it belongs."""

    client: str
    learner: str
    when: float | str
    encoded: Encoded | None  # None for a refused record, which keeps its place


@dataclass(frozen=True, kw_only=True)
class Dealing:
    """How a simulation deals records out to learners."""

    learners: int | None  # how many there must be; None for any number
    participation: Participation = ONCE
    per_step: int = 1  # clients of a step
    returning: str = "refuse"  # "refuse" people who come more often than allowed, or use their "first" records
    held_out_share: float = 0.2  # share of people, or of each learner's last records, that are measured on
    held_out_by: str = "people"  # or "time"


@dataclass(frozen=True)
class DealtOut:
    """Who is learned from at which learner, and who is held out."""

    learned: dict[str, list[Encoded | None]]  # by learner, in the order in which they are met; None: refused
    held_out: list[ClientRecord]
    held_out_by: str = "people"
    in_order: dict[str, list[ClientRecord]] = field(default_factory=dict)  # by learner, all that name their client


def read_tables(tables: Tables, schema: RecordSchema, *, show: bool = False) -> tuple[list[ClientRecord], TableReport]:
    """Every record of some tables that names its client, in the order of the files; and what became of the rows."""
    report = TableReport()
    records = [record for some in records_of(tables, schema, report, show=show) for record in some]
    return records, report


USABLE = Encoded("", Sample(None, None))
"""In place of records that can be used, where only that is asked."""


def records_of(
    tables: Tables, schema: RecordSchema, report: TableReport, *, show: bool = False, labels: Counter[str] | None = None
) -> Iterator[list[ClientRecord]]:
    """The same in pieces; ``report`` is whole at the end.

    With ``labels``, texts of labels are counted there, and `USABLE` stands for every record that can be used.
    """
    order = TimeOrder()
    last: dict[str, float | str] = {}  # time of a learner's row above, for a row without one
    with progress("reading records", None) as tick:
        for learner, table in tables:
            extra = tuple(c for c in (schema.learner, schema.time) if c)
            check_columns(table, (*schema.columns, *extra), show=show)
            report.notices += table.notices
            for block in table.blocks(digests=False, most=MANY_ROWS):
                group = _encoded(schema, table, block)
                found: list[ClientRecord] = []
                usable: list[int] = []
                rows = _records(schema, table, learner, block, group, last, light=labels is not None)
                for place, (record, refusal) in enumerate(rows):
                    if refusal is not None:
                        report.refused[refusal.without_client] += 1
                    if record is None:
                        continue
                    if record.encoded is not None:
                        usable.append(place)
                    if schema.time is not None:
                        order.add(record.learner, record.when)
                    found.append(record)
                report.clamped.update(group.clamped_counts(usable))
                if labels is not None and schema.label.classes:
                    for target, count in group.targets_of(usable).items():
                        labels[str(schema.label.in_units(target))] += count
                report.rows += len(block.rows)
                tick(len(block.rows))
                yield found
    report.unordered = order.unordered
    if schema.time is not None:
        report.notices += order.remark_on_zones(schema.time)
    if schema.time is not None and order.by_letters:
        report.notices.append(
            f"the times in {schema.time} are text and are sorted letter by letter: 2026-01-31 "
            "sorts as meant, 31.1.2026 does not"
        )


def _encoded(schema: RecordSchema, table: Table, block: Block) -> EncodedGroup:
    return encode_group(schema, block.rows, block.name, decimal_comma=table.decimal_comma)


def _records(
    schema: RecordSchema,
    table: Table,
    learner: str,
    block: Block,
    group: EncodedGroup,
    last: dict[str, float | str],
    *,
    light: bool = False,
) -> Iterator[tuple[ClientRecord | None, Refusal | None]]:
    """For each row its record, None if it is blank or names no learner; and why the row is refused, if it is."""
    for place, cells in enumerate(block.rows):
        encoded: Encoded | Refusal | None
        if light and place not in group.others:
            encoded, client = USABLE, group.clients[place]
        else:
            encoded, client = group.record(place), group.clients[place]
        if cells is None and schema.learner is not None:  # as in `TableSource`: whose it is cannot be read either
            client = None
        refusal = encoded if isinstance(encoded, Refusal) else None
        if client is None:
            yield None, refusal
            continue
        at = learner
        cells = cells or {}
        if schema.learner is not None:
            told = cells.get(schema.learner, "")
            if is_missing(told):
                yield None, Refusal("missing", schema.learner)
                continue
            at = as_text(told)
        when: float | str = block.first + place
        if schema.time is not None:
            told_time = time_of(cells.get(schema.time), decimal_comma=table.decimal_comma)
            if told_time is None:  # its place is behind the row above
                refusal = refusal or Refusal("missing", schema.time)
            when = last.get(at, -math.inf) if told_time is None else told_time
            last[at] = when
        usable = encoded if isinstance(encoded, Encoded) and refusal is None else None
        yield ClientRecord(client, at, when, usable), refusal


def table_stream(tables: Tables, schema: RecordSchema, dealing: Dealing, *, rounds: int, per_round: int) -> TableStream:
    """Tables as a stream of clients, with a report of what became of the rows."""
    found, report = read_tables(tables, schema)
    names = [table.name for _, table in tables]
    dealt = deal_out(found, report, schema, names, dealing)
    places = [record for own in dealt.learned.values() for record in own]
    pool = [record for record in places if record is not None]
    held = [record.encoded for record in dealt.held_out if record.encoded is not None]
    met = np.array([record is not None for record in places])
    order = np.where(met, np.cumsum(met) - 1, -1).astype(np.int32)
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
        split=FixedOrder(tuple(np.split(order, ends[:-1]))),
        names=tuple(dealt.learned),
        report=report,
        split_by=dealt.held_out_by,
        held_people=None if schema.client == EACH_ROW else _numbered(held),
        held_previous=None if schema.time is None else _targets_before(dealt),
        provenance=f"records of {', '.join(names)}, in the order they came",
    )


def _numbered(held: list[Encoded]) -> NDArray[np.int64]:
    """A number for each record's person; only which are alike is kept."""
    return np.unique([record.client for record in held], return_inverse=True)[1].astype(np.int64)


def _targets_before(dealt: DealtOut) -> NDArray[np.float64]:
    """For each held-out record the target of its learner's usable record before, nan for none."""
    before: dict[int, float] = {}
    for own in dealt.in_order.values():
        last = math.nan
        for record in own:
            before[id(record)] = last
            if record.encoded is not None:
                last = float(record.encoded.sample.target)
    return np.array([before[id(record)] for record in dealt.held_out if record.encoded is not None])


def deal_out(
    found: list[ClientRecord], report: TableReport, schema: RecordSchema, names: list[str], dealing: Dealing
) -> DealtOut:
    """Deal records out to learners as a simulation does; `data check` asks this too."""
    usable = [record for record in found if record.encoded is not None]
    if not usable:
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
    parts: Parts[ClientRecord] = parted(by_learner, share, dealing.held_out_by)
    report.notices += parts.notices
    learned, chosen = parts.learned, {id(r) for own in parts.held_out.values() for r in own}
    held = [r for r in usable if id(r) in chosen] or usable[-1:]
    report.held_out = len(held) if share > 0.0 else 0  # else only a placeholder
    if dealing.returning == "refuse":
        _check_visits(learned, dealing.participation.times)
    kept = {name: allowed(own, dealing.participation, dealing.per_step, report) for name, own in learned.items()}
    report.learned = {name: len(own) for name, own in kept.items()}
    report.used = sum(record is not None for own in kept.values() for record in own)
    report.refused_steps = sum(report.learned.values()) - report.used
    if not report.used:
        raise InputError(
            "data.source", names, "records of people to learn from", "all of them are held out: give more records"
        )
    return DealtOut(kept, held, parts.by, by_learner)


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


def rows_to_learn_from(tables: Tables, schema: RecordSchema, dealing: Dealing) -> dict[str, list[dict[str, object]]]:
    """Cells of the records that `table_stream` learns from, by learner, in order, with decimal points."""
    found: dict[str, list[_Row]] = {}
    last: dict[str, float | str] = {}
    for learner, table in tables:
        for block in table.blocks(digests=False, most=MANY_ROWS):
            records = _records(schema, table, learner, block, _encoded(schema, table, block), last)
            for cells, (record, _) in zip(block.rows, records, strict=True):
                if record is None:
                    continue
                kept = {
                    column: with_decimal_point(value) if table.decimal_comma else value
                    for column, value in ({schema.client: record.client} if cells is None else cells).items()
                    if column != schema.learner
                }
                found.setdefault(record.learner, []).append(_Row(record.client, record.when, kept))
    for own in found.values():
        own.sort(key=lambda row: _sort_key(row.when))
    learned = parted(found, dealing.held_out_share, dealing.held_out_by).learned
    return {name: [row.cells for row in learned[name]] for name in sorted(found)}


@dataclass(frozen=True)
class _Row:
    client: str
    when: float | str
    cells: dict[str, object]


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
        if len({isinstance(record.when, str) for record in own if record.when != -math.inf}) > 1:
            raise InputError("data.time", "numbers and texts", "one kind in all records", "check the column")
        own.sort(key=lambda record: _sort_key(record.when))
    return by_learner


def _sort_key(when: float | str) -> tuple[bool, Any]:
    """A row without a time and without a row above it comes first, whether times are numbers or texts."""
    return when != -math.inf, when


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


def allowed(
    own: list[ClientRecord], participation: Participation, per_step: int, report: TableReport
) -> list[Encoded | None]:
    """The records that a learner takes, `per_step` a step, None for a refused one, whose visit counts as well.

    Counts those over the visit limit and too soon.
    """
    visits = VisitsInMemory(participation)
    kept: list[Encoded | None] = []
    for record in own:
        why = visits.take(record.client, len(kept) // per_step)
        if why is None:
            kept.append(record.encoded)
        elif why == "too often":
            report.too_often += 1
        else:
            report.too_soon += 1
    return kept
