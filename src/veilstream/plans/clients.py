"""From a plan to where clients come from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from veilstream.errors import InputError
from veilstream.learning.task_registry import task_kind
from veilstream.plans.plan import Plan
from veilstream.plans.records import schema_of
from veilstream.streams.pool import Stream
from veilstream.streams.synthetic import RippleStream, SyntheticStream

if TYPE_CHECKING:
    from veilstream.streams.table import Table
    from veilstream.streams.table_stream import Dealing, TableStream


def stream_of(plan: Plan) -> Stream:
    """Where clients come from."""
    learning, data = plan.learning, plan.data
    per_round = learning.local_steps * learning.clients_per_step
    if data.kind == "custom":
        raise InputError("stream", None, "a stream, since data.kind is custom", "run(plan, stream=)")
    if data.kind == "mnist":
        from veilstream.streams.mnist import load_mnist, mnist_stream

        return mnist_stream(
            load_mnist(), learners=learning.learners, rounds=learning.rounds, per_round=per_round, split=data.split
        )
    if data.kind == "table":
        return _tables(plan, per_round)
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
        feature_norm=data.feature_norm,
        drift=data.drift,
        targets="labels" if kind is not None and kind.target.classifies else "values",
    )


def learner_rows(plan: Plan) -> dict[str, list[dict[str, object]]]:
    """Cells of the records that a simulation of this plan learns from, by learner, in order.

    Raises:
        InputError: as `stream_of`.

    """
    from veilstream.streams.table_stream import rows_to_learn_from

    return rows_to_learn_from(_open_tables(plan), schema_of(plan), plan.data.held_out_share)


def source_files(plan: Plan) -> list[Path]:
    """The files that `data.source` names, in their order.

    Raises:
        InputError: there is no source, or its pattern fits nothing.

    """
    from veilstream.streams.datasets import named_source

    source = plan.data.source
    if source is None:
        raise InputError(
            "data.source",
            None,
            "a file, or several by a pattern, to simulate",
            'source = "records.csv", or "stations/*.csv"',
        )
    named = named_source(source)
    return _files(source) if named is None else [named[0]]


def named_tables(paths: list[Path], plan: Plan) -> list[tuple[str, Table]]:
    """Files by the names of their learners, opened.

    Raises:
        InputError: a file cannot be read, or two would be one learner.

    """
    from veilstream.streams.tables import open_table

    names = [path.stem for path in paths]
    if plan.data.learner is None and len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(
            "data.source",
            twice,
            "files of different names: each is a learner",
            "rename one, or name a column of learners: data.learner",
        )
    return [(path.stem, open_table(path, query=plan.data.query)) for path in paths]


def _open_tables(plan: Plan) -> list[tuple[str, Table]]:
    return named_tables(source_files(plan), plan)


def _tables(plan: Plan, per_round: int) -> TableStream:
    from veilstream.streams.datasets import named_source
    from veilstream.streams.table_stream import table_stream

    tables, dealing = _open_tables(plan), dealing_of(plan, plan.learning.learners)
    stream = table_stream(tables, schema_of(plan), dealing, rounds=plan.learning.rounds, per_round=per_round)
    named = named_source(plan.data.source or "")
    return stream if named is None else dataclasses.replace(stream, provenance=named[1])


def dealing_of(plan: Plan, learners: int | None) -> Dealing:
    """How a simulation of this plan deals records out to so many learners."""
    from veilstream.streams.table_stream import Dealing

    return Dealing(
        learners=learners,
        participation=plan.participation,
        per_step=plan.learning.clients_per_step,
        returning=plan.data.returning,
        held_out_share=plan.data.held_out_share,
    )


def _files(source: str) -> list[Path]:
    """Those that a pattern names in their order; a plain path is itself."""
    path = Path(source)
    if not any(character in path.name for character in "*?["):
        return [path]
    found = sorted(path.parent.glob(path.name))
    if not found:
        raise InputError("data.source", source, "a pattern that fits a file", "check the path")
    return found
