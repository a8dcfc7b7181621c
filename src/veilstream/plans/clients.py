"""From a plan to where clients come from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from veilstream.errors import InputError
from veilstream.plans.plan import Plan
from veilstream.plans.records import schema_of
from veilstream.streams.stream import Stream
from veilstream.streams.synthetic import RippleStream, SyntheticStream

__all__ = ["stream_of"]


def stream_of(plan: Plan) -> Stream:
    """Where clients come from."""
    learning, data = plan.learning, plan.data
    per_round = learning.local_steps * learning.clients_per_step
    if data.kind == "custom":
        raise InputError(
            "stream", None, "a stream, since data.kind is custom", "run(plan, stream=)"
        )
    if data.kind == "mnist":
        from veilstream.streams.mnist import load_mnist
        from veilstream.streams.pool import mnist_stream

        return mnist_stream(
            load_mnist(None if data.directory is None else Path(data.directory)),
            learners=learning.learners, rounds=learning.rounds, per_round=per_round,
            split=data.split, alpha=data.concentration,
        )  # fmt: skip
    if data.kind == "table":
        return _tables(plan, per_round)
    if data.kind == "ripple":
        return RippleStream(
            learners=learning.learners, rounds=learning.rounds, per_round=per_round, dim=data.dim,
            step=data.walk,
        )  # fmt: skip
    return SyntheticStream(
        learners=learning.learners, rounds=learning.rounds, per_round=per_round, dim=data.dim,
        alpha=data.alpha, beta=data.beta, feature_norm=data.feature_norm, drift=data.drift,
        targets="labels" if learning.task == "logistic" else "values",
    )  # fmt: skip


def _tables(plan: Plan, per_round: int) -> Stream:
    from veilstream.streams.datasets import named_source
    from veilstream.streams.table_stream import table_stream
    from veilstream.streams.tables import open_table

    learning, data = plan.learning, plan.data
    if data.source is None:
        raise InputError(
            "data.source", None, "a file, or several by a pattern, to simulate",
            'source = "records.csv", or "stations/*.csv"',
        )  # fmt: skip
    named = named_source(data.source)
    paths = _files(data.source) if named is None else [named[0]]
    tables = [(Path(path).stem, open_table(path, query=data.query)) for path in paths]
    participation = plan.participation
    stream = table_stream(
        tables, schema_of(plan), learners=learning.learners, rounds=learning.rounds,
        per_round=per_round, per_step=learning.clients_per_step,
        visits=participation.times, separation=participation.min_separation,
        returning=data.returning, held_out_share=data.held_out_share,
    )  # fmt: skip
    return stream if named is None else dataclasses.replace(stream, provenance=named[1])


def _files(source: str) -> list[Path]:
    """Those that a pattern names in their order; a plain path is itself."""
    path = Path(source)
    if not any(character in path.name for character in "*?["):
        return [path]
    found = sorted(path.parent.glob(path.name))
    if not found:
        raise InputError("data.source", source, "a pattern that fits a file", "check the path")
    return found
