"""From a plan to the things that run: task, stream, calibrated methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from veilstream.engines.plan import MethodPlan, Plan
from veilstream.learning.algorithm import Rule
from veilstream.learning.tasks import LeastSquares, Logistic, Ripple, Task
from veilstream.mechanisms import Factorization, build
from veilstream.privacy import Guarantee, calibrate
from veilstream.streams.synthetic import RippleStream, SyntheticStream

__all__ = ["Prepared", "Stream", "main_method", "prepare", "stream_of", "task_of"]

Stream = SyntheticStream | RippleStream


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
    if plan.learning.task == "logistic":
        return Logistic(plan.data.dim, plan.learning.ridge)
    if plan.learning.task == "least_squares":
        return LeastSquares(plan.data.dim, plan.learning.ridge)
    return Ripple(plan.data.dim)


def stream_of(plan: Plan) -> Stream:
    """Where clients come from."""
    learning, data = plan.learning, plan.data
    per_round = learning.local_steps * learning.clients_per_step
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

    Averaging c clients in a step divides what one of them can move by c, so the clip norm that
    counts for the sensitivity is clip_norm / c.
    """
    learning = plan.learning
    steps, clients = method.method.steps_and_clients(
        learning.local_steps, learning.clients_per_step
    )
    rule = Rule(learning.clip_norm, learning.projection_radius, method.method.unit_steps)
    name = method.mechanism_name
    if not method.method.private or name is None:
        return Prepared(method, steps, clients, rule, None, 0.0, None)
    options = {}
    if method.objective is not None:
        options = {"objective": method.objective, "local_steps": steps}
    factorization = build(name, learning.rounds * steps, **options)
    std, guarantee = calibrate(
        plan.budget_of(method),
        factorization,
        learning.clip_norm / clients,
        neighbours=plan.neighbours,
        accounting=plan.accounting_of(method),
    )
    return Prepared(method, steps, clients, rule, factorization, std, guarantee)
