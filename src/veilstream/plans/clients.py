"""From a plan to where clients come from."""

from __future__ import annotations

from pathlib import Path

from veilstream.errors import InputError
from veilstream.plans.plan import Plan
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
