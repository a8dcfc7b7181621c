"""From a plan to where clients come from."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from veilstream.errors import InputError
from veilstream.learning.tasks import Sample
from veilstream.plans.plan import Plan
from veilstream.streams.synthetic import RippleStream, SyntheticStream

__all__ = ["Stream", "stream_of"]


class Stream(Protocol):
    """Where clients come from; one that also has `indices` is a pool (see `PoolStream`)."""

    @property
    def provenance(self) -> str:
        """Where the data come from, for the run folder."""

    def round(self, seed: int, round_: int) -> Sample:
        """The round's clients: features (n, clients, ...), targets (n, clients)."""

    def held_out(self, seed: int, count: int, round_: int) -> Sample:
        """Other clients, to measure on."""


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
