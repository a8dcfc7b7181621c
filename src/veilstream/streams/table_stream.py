"""A simulation's clients from tables of records, in the order in which they came.

Every record is one client's visit at one learner. Who it was is known here, so a plan that promises
"once" while people return is refused, as it would be broken; with more visits allowed, records that
come too often or too soon after the person's last are left out, as a deployed learner leaves them
out. Some people are held out, chosen by a hash of their tag: they are measured on, never learned
from.
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
from veilstream.records.schema import EACH_ROW, Encoded, RecordSchema, Refusal, as_text, with_decimal_point
from veilstream.streams.pool import PoolStream
from veilstream.streams.tables import TableReader, check_columns
from veilstream.streams.time_order import TimeOrder, time_of
from veilstream.wording import counted

_HELD_OUT_OF = 1 << 20


@dataclass
class TableReport:
    """What became of the rows; for the person beside the data."""

    rows: int = 0
    used: int = 0
    refused: Counter[Refusal] = field(default_factory=Counter)
    clamped: Counter[str] = field(default_factory=Counter)
    held_out: int = 0
    too_often: int = 0
    """Records of people who had come as often as the promise allows."""
    too_soon: int = 0
    people: int = 0
    returning: int = 0
    """People with more than one record."""
    most_visits: int = 0
    unordered: int = 0
    """Rows whose time lies before that of the row above; a simulation sorts them."""
    learned: dict[str, int] = field(default_factory=dict)
    """Records that a simulation learns from at each learner, held-out people left out."""
    notices: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For a summary."""
        return {
            "rows": self.rows,
            "used": self.used,
            "held_out": self.held_out,
            "refused": {str(refusal): count for refusal, count in self.refused.most_common()},
            "clamped": dict(self.clamped),
            "too_often": self.too_often,
            "too_soon": self.too_soon,
            "people": self.people,
            "returning": self.returning,
            "most_visits": self.most_visits,
            "unordered": self.unordered,
            "learned": self.learned,
            "notices": self.notices,
        }


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

    names: tuple[str, ...] = ()
    """The learners, in order."""
    report: TableReport = field(default_factory=TableReport)


@dataclass
class Visit:
    """One record, and whose it is."""

    client: str
    learner: str
    when: float | str
    record: Encoded


def read_tables(
    tables: Sequence[tuple[str, TableReader]], schema: RecordSchema, *, show: bool = False
) -> tuple[list[Visit], TableReport]:
    """Every record of some tables, encoded; each table comes with its learner's name.

    Args:
        tables: pairs of a learner's name and its table.
        schema: what a record is.
        show: whether an error may name the columns that are there (`check_columns`).

    Returns:
        Visits in the order of the files, and what became of the rows so far.

    Raises:
        InputError: for a table without the schema's columns.

    """
    report, visits = TableReport(), []
    order = TimeOrder()
    for learner, table in tables:
        extra = tuple(c for c in (schema.learner, schema.time) if c)
        check_columns(table, (*schema.columns, *extra), show=show)
        report.notices += table.notices
        for number, cells in table.rows():
            report.rows += 1
            visit = _visit(schema, table, learner, number, cells)
            if isinstance(visit, Refusal):
                report.refused[visit] += 1
                continue
            report.clamped.update(visit.record.clamped)
            if schema.time is not None:
                order.add(visit.learner, visit.when)
            visits.append(visit)
    report.unordered = order.unordered
    if schema.time is not None and order.by_letters:
        report.notices.append(
            f"the times in {schema.time} are text and are sorted letter by letter: 2026-01-31 "
            "sorts as meant, 31.1.2026 does not"
        )
    return visits, report


def _visit(schema: RecordSchema, table: TableReader, learner: str, number: int, cells: Any) -> Visit | Refusal:
    if cells is None:
        return Refusal("not readable")
    record = schema.encode(cells, row_name=f"{table.name}:{number}", decimal_comma=table.decimal_comma)
    if isinstance(record, Refusal):
        return record
    if schema.learner is not None:
        learner = as_text(cells.get(schema.learner, ""))
        if not learner:
            return Refusal("missing", schema.learner)
    when: float | str = number
    if schema.time is not None:
        told = time_of(cells.get(schema.time), decimal_comma=table.decimal_comma)
        if told is None:
            return Refusal("missing", schema.time)
        when = told
    return Visit(record.client, learner, when, record)


def table_stream(
    tables: Sequence[tuple[str, TableReader]],
    schema: RecordSchema,
    *,
    learners: int,
    rounds: int,
    per_round: int,
    visits: int = 1,
    separation: int = 1,
    per_step: int = 1,
    returning: str = "refuse",
    held_out_share: float = 0.2,
) -> TableStream:
    """Tables as a stream of clients.

    Args:
        tables: pairs of a learner's name and its table; the name counts where the schema names no
            column of learners.
        schema: what a record is.
        learners: how many there must be.
        rounds: for how many rounds.
        per_round: clients that a learner meets in a round.
        visits: how often a person may take part (the promise's participation).
        separation: steps between two visits, at least.
        per_step: clients of a step.
        returning: "refuse" people who come more often, or use their "first" records.
        held_out_share: share of people who are measured on and not learned from.

    Returns:
        The stream, with a report of what became of the rows.

    Raises:
        InputError: for tables without usable records, another number of learners, people who come
            more often than the promise allows, or who come to two learners.

    """
    found, report = read_tables(tables, schema)
    dealt = dealt_out(
        found,
        report,
        schema,
        [table.name for _, table in tables],
        learners=learners,
        visits=visits,
        separation=separation,
        per_step=per_step,
        returning=returning,
        held_out_share=held_out_share,
    )
    pool = [record for own in dealt.learned.values() for record in own]
    held, orders, at = dealt.held_out, [], 0
    for own in dealt.learned.values():
        orders.append(np.arange(at, at + len(own), dtype=np.int32))
        at += len(own)
    report.notices += short_of(report.learned, rounds, per_round)
    return TableStream(
        learners=learners,
        rounds=rounds,
        per_round=per_round,
        features=np.stack([e.sample.features for e in pool]),
        targets=np.array([e.sample.target for e in pool], np.float32),
        held_features=np.stack([v.record.sample.features for v in held]),
        held_targets=np.array([v.record.sample.target for v in held], np.float32),
        split=FixedOrder(tuple(orders)),
        names=tuple(dealt.learned),
        report=report,
        provenance=f"records of {', '.join(t.name for _, t in tables)}, in the order they came",
    )


@dataclass(frozen=True)
class DealtOut:
    """Who is learned from at which learner, and who is held out."""

    learned: dict[str, list[Encoded]]
    """By learner, in the order in which they are met."""
    held_out: list[Visit]


def dealt_out(
    found: list[Visit],
    report: TableReport,
    schema: RecordSchema,
    names: list[str],
    *,
    learners: int | None,
    visits: int,
    separation: int,
    per_step: int,
    returning: str,
    held_out_share: float,
) -> DealtOut:
    """The rules of a simulation over records that were read; `data check` asks them too.

    Args:
        found: from `read_tables`.
        report: is filled in.
        schema: what a record is.
        names: of the tables, for errors.
        learners: how many there must be; None for any number.
        visits: see `table_stream`, as for the others.
        separation: steps between two visits, at least.
        per_step: clients of a step.
        returning: "refuse" or "first".
        held_out_share: share of people who are measured on and not learned from.

    Returns:
        Who is where.

    Raises:
        InputError: as `table_stream`.

    """
    _check_some(found, report, names)
    _count_people(found, report)
    by_learner = _by_learner(found, learners)
    _check_people(by_learner, schema)
    learned = {name: [v for v in own if not _is_held_out(v.client, held_out_share)] for name, own in by_learner.items()}
    held = [v for v in found if _is_held_out(v.client, held_out_share)] or found[-1:]
    report.held_out = len(held) if held_out_share > 0.0 else 0  # else only a placeholder
    if returning == "refuse":
        _check_visits(learned, visits)
    kept = {name: allowed(own, visits, separation, per_step, report) for name, own in learned.items()}
    report.learned = {name: len(own) for name, own in kept.items()}
    report.used = sum(report.learned.values())
    if not report.used:
        raise InputError(
            "data.source", names, "records of people to learn from", "all of them are held out: give more records"
        )
    return DealtOut(kept, held)


def short_of(learned: dict[str, int], rounds: int, per_round: int) -> list[str]:
    """What to tell where records do not last for the horizon; empty where they do."""
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
    tables: Sequence[tuple[str, TableReader]], schema: RecordSchema, held_out_share: float
) -> dict[str, list[dict[str, object]]]:
    """Cells of the records that `table_stream` learns from, by learner, in their order.

    For tables of their own: no row of people who are held out, none that cannot be used, no column
    of learners, and a decimal point in every number.
    """
    found: dict[str, list[tuple[Any, dict[str, object]]]] = {}
    for learner, table in tables:
        for number, cells in table.rows():
            visit = _visit(schema, table, learner, number, cells)
            if isinstance(visit, Refusal) or cells is None:
                continue
            if _is_held_out(visit.client, held_out_share):
                continue
            kept = {
                column: with_decimal_point(value) if table.decimal_comma else value
                for column, value in cells.items()
                if column != schema.learner
            }
            found.setdefault(visit.learner, []).append((visit.when, kept))
    for own in found.values():
        own.sort(key=lambda pair: pair[0])
    return {name: [cells for _, cells in found[name]] for name in sorted(found)}


def _check_some(found: list[Visit], report: TableReport, names: list[str]) -> None:
    if found:
        return
    reasons = "; ".join(f"{r}: {count}" for r, count in report.refused.most_common(5))
    raise InputError(
        "data.source",
        names,
        f"records that can be used; of {counted(report.rows, 'row')} none can ({reasons or 'there are none'})",
        "`veilstream data check FILE --plan PLAN` shows each column",
    )


def _count_people(found: list[Visit], report: TableReport) -> None:
    visits = Counter(visit.client for visit in found)
    report.people, report.most_visits = len(visits), max(visits.values())
    report.returning = sum(count > 1 for count in visits.values())


def _by_learner(found: list[Visit], learners: int | None) -> dict[str, list[Visit]]:
    names = sorted({visit.learner for visit in found})
    if learners is not None and len(names) != learners:
        shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
        raise InputError(
            "learning.learners",
            learners,
            f"as many as the records name: {len(names)} ({shown})",
            f"learners = {len(names)}",
        )
    by_learner: dict[str, list[Visit]] = {name: [] for name in names}
    for visit in found:
        by_learner[visit.learner].append(visit)
    for own in by_learner.values():
        if len({isinstance(visit.when, str) for visit in own}) > 1:
            raise InputError("data.time", "numbers and texts", "one kind in all records", "check the column")
        own.sort(key=lambda visit: visit.when)
    return by_learner


def _check_people(by_learner: dict[str, list[Visit]], schema: RecordSchema) -> None:
    """The promise is for one learner's messages: nobody may be at two."""
    seen: dict[str, str] = {}
    if schema.client == EACH_ROW:
        return
    shared = 0
    for name, own in by_learner.items():
        for visit in own:
            shared += seen.setdefault(visit.client, name) != name
    if shared:
        raise InputError(
            "data.client",
            schema.client,
            "people who are at one learner each",
            f"{shared} records are of people who come to another learner too, and the promise is "
            "for one learner's messages: put a person's records at one learner",
        )


def _check_visits(by_learner: dict[str, list[Visit]], visits: int) -> None:
    counts = Counter(visit.client for own in by_learner.values() for visit in own)
    most = max(counts.values(), default=0)
    if most > visits:
        often = sum(count > visits for count in counts.values())
        raise InputError(
            "privacy.participations",
            visits,
            f"at least {most}: {often} people come more often than {counted(visits, 'time')}",
            f'participations = {most} (more noise), or data.returning = "first" (their other records are left out)',
        )


def allowed(own: list[Visit], visits: int, separation: int, per_step: int, report: TableReport) -> list[Encoded]:
    """As a learner would take them: one a step, nobody too often or too soon; counts the others."""
    last: dict[str, int] = {}
    count: Counter[str] = Counter()
    kept: list[Encoded] = []
    for visit in own:
        step = len(kept) // per_step
        if count[visit.client] >= visits:
            report.too_often += 1
        elif visit.client in last and step - last[visit.client] < separation:
            report.too_soon += 1
        else:
            count[visit.client] += 1
            last[visit.client] = step
            kept.append(visit.record)
    return kept


def _is_held_out(client: str, share: float) -> bool:
    hashed = hashlib.blake2b(client.encode("utf-8", "surrogatepass"), digest_size=8, person=b"held-out").digest()
    return int.from_bytes(hashed, "little") % _HELD_OUT_OF < share * _HELD_OUT_OF
