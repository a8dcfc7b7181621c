"""From a plan to the loss that is learned."""

from __future__ import annotations

from veilstream.errors import InputError
from veilstream.learning.tasks import LeastSquares, Logistic, Ripple, Task
from veilstream.plans.plan import Plan

__all__ = ["task_of"]


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
