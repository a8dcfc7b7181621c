"""The tasks that plans can name. Each file of tasks lists its own; packages add others (`veilstream.tasks`)."""

from __future__ import annotations

from veilstream.learning import cnn, image_features, linear_tasks, ripple
from veilstream.learning.task_kind import TaskKind
from veilstream.registry import Registry

TASKS: Registry[TaskKind] = Registry(
    "veilstream.tasks",
    "task",
    {kind.name: kind for kind in (*linear_tasks.KINDS, *ripple.KINDS, *cnn.KINDS, *image_features.KINDS)},
    lambda found: isinstance(found, TaskKind),
)


def task_kind(name: str) -> TaskKind | None:
    """The kind of this name; None for a task of one's own ("custom", "package.module:function")."""
    own = name == "custom" or ":" in name
    return None if own else TASKS[name]
