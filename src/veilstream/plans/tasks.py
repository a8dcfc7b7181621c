"""From a plan to the loss that is learned."""

from __future__ import annotations

from veilstream.errors import InputError
from veilstream.learning.task_kind import TaskSetting
from veilstream.learning.task_registry import task_kind
from veilstream.learning.tasks import Task, check_members
from veilstream.plans.own_code import load_function
from veilstream.plans.plan import Plan


def task_of(plan: Plan) -> Task:
    """The loss that is learned."""
    name = plan.learning.task
    if name == "custom":
        raise InputError("task", None, "a task, since learning.task is custom", "run(plan, task=)")
    kind = task_kind(name)
    return _own(plan, name) if kind is None else kind.make(task_setting(plan))


def task_setting(plan: Plan) -> TaskSetting:
    """What the plan says that its task may depend on."""
    data = plan.data
    return TaskSetting(
        features=plan.feature_count,
        feature_norm=data.feature_norm,
        ridge=plan.learning.ridge,
        classes=len(data.labels or ()),
        label_range=data.label_range if data.kind == "table" else None,
    )


def _own(plan: Plan, name: str) -> Task:
    make = load_function("learning.task", name)
    try:
        task: Task = make(plan)
    except Exception as error:  # whatever a stranger's function does
        raise InputError(
            "learning.task",
            name,
            "a function of the plan that returns a task",
            f"it raised {type(error).__name__}: {error}",
        ) from error
    check_members(task)
    return task
