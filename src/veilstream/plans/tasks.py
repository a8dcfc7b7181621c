"""From a plan to the loss that is learned."""

from __future__ import annotations

from veilstream.errors import InputError
from veilstream.learning.tasks import LeastSquares, Logistic, Ripple, Task, check_members
from veilstream.plans.own_code import load_function
from veilstream.plans.plan import Plan


def task_of(plan: Plan) -> Task:
    """The loss that is learned."""
    name, ridge = plan.learning.task, plan.learning.ridge
    if ":" in name:
        return _own(plan, name)
    if name == "cnn":
        from veilstream.learning.cnn import Cnn

        return Cnn()
    if name in ("edge_features", "random_features"):
        from veilstream.learning.image_features import FeatureSoftmax

        return FeatureSoftmax(name.removesuffix("_features"))
    if name == "custom":
        raise InputError("task", None, "a task, since learning.task is custom", "run(plan, task=)")
    if name == "ripple":
        return Ripple(plan.data.dim)
    dim = features_of(plan)
    if name == "logistic":
        return Logistic(dim, ridge)
    if name == "least_squares":
        return LeastSquares(dim, ridge)
    from veilstream.learning.table_tasks import Huber, Poisson, Softmax

    if name == "softmax":
        return Softmax(dim, len(plan.data.labels or ()), ridge)
    return Huber(dim, ridge) if name == "huber" else Poisson(dim, ridge)


def features_of(plan: Plan) -> int:
    """Numbers of one client's features: what the columns come to, or data.dim."""
    return plan.feature_count


def _own(plan: Plan, name: str) -> Task:
    make = load_function("learning.task", name)
    try:
        task = make(plan)
    except Exception as error:  # whatever a stranger's function does
        raise InputError(
            "learning.task",
            name,
            "a function of the plan that returns a task",
            f"it raised {type(error).__name__}: {error}",
        ) from error
    check_members(task)
    checked: Task = task
    return checked
