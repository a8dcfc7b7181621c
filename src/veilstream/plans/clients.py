"""From a plan to a simulation's clients."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from veilstream.errors import InputError
from veilstream.learning.task_registry import task_kind
from veilstream.plans.plan import Plan
from veilstream.plans.records import schema_of
from veilstream.records.schema import EACH_ROW
from veilstream.streams.datasets import SOURCE_PREFIX, named_source
from veilstream.streams.folder_table import FolderTable, names_many
from veilstream.streams.mnist import load_mnist, mnist_stream
from veilstream.streams.pool import Stream
from veilstream.streams.synthetic import RippleStream, SyntheticStream
from veilstream.streams.table import Table
from veilstream.streams.table_stream import Dealing, TableStream, rows_to_learn_from, table_stream
from veilstream.streams.tables import is_sqlite, open_table

SQLITE_PREFIX = "sqlite:"  # of a file that is one anyway


def stream_of(plan: Plan) -> Stream:
    """The stream of clients that a plan describes."""
    learning, data = plan.learning, plan.data
    per_round = learning.local_steps * learning.clients_per_step
    if data.kind == "custom":
        raise InputError("stream", None, "a stream, since data.kind is custom", "run(plan, stream=)")
    if data.kind == "mnist":
        return mnist_stream(
            load_mnist(), learners=learning.learners, rounds=learning.rounds, per_round=per_round, split=data.split
        )
    if data.kind == "table":
        return _table_stream(plan, per_round)
    if data.kind == "ripple":
        return RippleStream(
            learners=learning.learners, rounds=learning.rounds, per_round=per_round, dim=data.dim, step=data.walk
        )
    kind = task_kind(learning.task)
    return SyntheticStream(
        learners=learning.learners,
        rounds=learning.rounds,
        per_round=per_round,
        dim=data.dim,
        alpha=data.alpha,
        beta=data.beta,
        shared=data.shared,
        spread=data.spread,
        feature_norm=data.feature_norm,
        drift=data.drift,
        targets="labels" if kind is not None and kind.target.classifies else "values",
    )


def learner_rows(plan: Plan) -> dict[str, list[dict[str, object]]]:
    """Cells of the records that a simulation of this plan learns from, by learner, in order."""
    return rows_to_learn_from(named_tables(source_files(plan), plan), schema_of(plan), dealing_of(plan, None))


def source_files(plan: Plan) -> list[Path]:
    """The files that `data.source` names, in order."""
    source = plan.data.source
    if source is None:
        raise InputError(
            "data.source",
            None,
            "a file, or several by a pattern, to simulate",
            'source = "records.csv", or "stations/*.csv"',
        )
    if source.startswith(SOURCE_PREFIX):
        return [named_source(source)[0]]
    path = Path(source.removeprefix(SQLITE_PREFIX))
    if not any(character in path.name for character in "*?["):
        return [path]
    found = sorted(path.parent.glob(path.name))
    if not found:
        raise InputError("data.source", source, "a pattern that fits a file", "check the path")
    return found


def named_tables(paths: list[Path], plan: Plan, query: str | None = None) -> list[tuple[str, Table]]:
    """Files, opened, by the names of their learners; ``query`` is of SQLite files, instead of the plan's."""
    names = [_learner_name(path) for path in paths]
    if plan.data.learner is None and len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(
            "data.source",
            twice,
            "files of different names: each is a learner",
            "rename one, or name a column of learners: data.learner",
        )
    return [(_learner_name(path), planned_table(path, plan, query=query)) for path in paths]


def _learner_name(path: Path) -> str:
    return path.name if path.is_dir() else Path(path.name.removesuffix(".gz")).stem


def planned_table(
    path: Path, plan: Plan, *, whole: bool = True, query: str | None = None, key: str | None = None
) -> Table:
    """The table of a file or folder; the plan's query and key are for SQLite files without one of their own."""
    if names_many(path):
        for field, given in (("--query", query), ("--key", key)):
            if given is not None:
                raise InputError(field, given, f"nothing for {path.name}, which is no SQLite file", "leave it out")
        # Where people are known and come once, the ledger knows a copy's records by their people.
        copies = plan.data.client == EACH_ROW or plan.participation.times > 1
        return FolderTable(path, partial(open_table, whole=whole), whole=whole, copies=copies)
    if is_sqlite(path):
        query, key = query or plan.data.query, key or plan.data.key
    return open_table(path, whole=whole, query=query, key=key)


def dealing_of(plan: Plan, learners: int | None) -> Dealing:
    """How a simulation of this plan deals records out to this many learners."""
    return Dealing(
        learners=learners,
        participation=plan.participation,
        per_step=plan.learning.clients_per_step,
        returning=plan.data.returning,
        held_out_share=plan.data.held_out_share,
        held_out_by=plan.data.held_out_by or ("people" if plan.data.time is None else "time"),
    )


def _table_stream(plan: Plan, per_round: int) -> TableStream:
    tables, dealing = named_tables(source_files(plan), plan), dealing_of(plan, plan.learning.learners)
    stream = table_stream(tables, schema_of(plan), dealing, rounds=plan.learning.rounds, per_round=per_round)
    source = plan.data.source or ""
    if source.startswith(SOURCE_PREFIX):
        return dataclasses.replace(stream, provenance=named_source(source)[1])
    return stream
