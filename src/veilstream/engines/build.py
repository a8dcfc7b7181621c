"""From a plan to the things that run: task, stream, calibrated methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from veilstream.engines.plan import MethodPlan, Plan
from veilstream.errors import InputError
from veilstream.learning.algorithm import Rule
from veilstream.learning.tasks import LeastSquares, Logistic, Ripple, Sample, Task
from veilstream.mechanisms import Factorization, build
from veilstream.privacy import Guarantee, calibrate
from veilstream.streams.synthetic import RippleStream, SyntheticStream

__all__ = ["Prepared", "Stream", "main_method", "prepare", "stream_of", "task_of"]

_NOT_CLIPPED = 1e15  # the largest bound that a clipper takes


class Stream(Protocol):
    """Where clients come from; one that also has `indices` is a pool (see `PoolStream`)."""

    @property
    def provenance(self) -> str:
        """Where the data come from, for the run folder."""

    def round(self, seed: int, round_: int) -> Sample:
        """The round's clients: features (n, clients, ...), targets (n, clients)."""

    def held_out(self, seed: int, count: int, round_: int) -> Sample:
        """Other clients, to measure on."""


@dataclass(frozen=True)
class Prepared:
    """A method with its noise measured out."""

    plan: MethodPlan
    steps: int
    """Noisy steps of a learner in a round."""
    clients: int
    """Clients averaged in a step."""
    rule: Rule
    factorization: Factorization | None
    noise_std: float
    guarantee: Guarantee | None

    @property
    def shape(self) -> tuple[int, int, bool]:
        """Methods of one shape run as one array."""
        return self.steps, self.clients, self.rule.unit_steps

    @property
    def effective_step_size(self) -> float:
        """η̃ = η·η_g·τ before any decay."""
        return self.plan.step_size * self.plan.server_step_size * self.steps


def main_method(prepared: Sequence[Prepared]) -> int:
    """Which method a run is about: the first that protects anyone, else the first."""
    return next((i for i, p in enumerate(prepared) if p.guarantee), 0)


def task_of(plan: Plan) -> Task:
    """The loss that is learned."""
    if plan.learning.task == "cnn":
        from veilstream.learning.cnn import Cnn

        return Cnn()
    if plan.learning.task in ("edge_features", "random_features"):
        from veilstream.learning.image_features import FeatureSoftmax

        return FeatureSoftmax(plan.learning.task.removesuffix("_features"))
    if plan.learning.task == "custom":
        raise InputError("task", None, "a task, since learning.task is custom", "run(plan, task=)")
    if plan.learning.task == "logistic":
        return Logistic(plan.data.dim, plan.learning.ridge)
    if plan.learning.task == "least_squares":
        return LeastSquares(plan.data.dim, plan.learning.ridge)
    return Ripple(plan.data.dim)


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


def prepare(plan: Plan, method: MethodPlan) -> Prepared:
    """Build the mechanism and calibrate it.

    Averaging c clients in a step divides what one of them can move by c.
    """
    learning = plan.learning
    steps, clients = method.method.steps_and_clients(
        learning.local_steps, learning.clients_per_step
    )
    clip_norm = plan.clip_norm_of(method)
    enforced = clip_norm if method.method.clips else _NOT_CLIPPED
    rule = Rule(enforced, learning.projection_radius, method.method.unit_steps)
    name = method.mechanism_name
    if not method.method.adds_noise or name is None:
        return Prepared(method, steps, clients, rule, None, 0.0, None)
    options = {}
    if method.objective is not None:
        options = {"objective": method.objective, "local_steps": steps}
    factorization = build(name, learning.rounds * steps, **options)
    std, guarantee = calibrate(
        plan.budget_of(method),
        factorization,
        clip_norm,
        neighbours=plan.neighbours,
        accounting=plan.accounting_of(method),
        clients_per_step=clients,
        participation=plan.participation,
    )
    kept = guarantee if method.method.private else None
    return Prepared(method, steps, clients, rule, factorization, std, kept)
