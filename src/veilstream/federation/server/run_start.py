"""What a run begins with: who its learners are, and its first model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.federation.keys.identity import ServerKeys
from veilstream.learning.tasks import Task
from veilstream.plans.plan import Plan


def server_keys(plan: Plan, keys: ServerKeys | Path | str | None, learners: Iterable[str] | None) -> ServerKeys:
    """Those of this plan's learners; without a folder, messages are not signed."""
    if (keys is None) == (learners is None):
        raise InputError(
            "keys",
            None if keys is None else "<given>",
            "the server's keys, or the names of learners where the transport says who sends",
            'vs.Server(plan, "keys/server"), or vs.Server(plan, learners=["north", "south"])',
        )
    if learners is not None:
        names = list(learners)
        if len(set(names)) < len(names):
            raise InputError("learners", names, "a different name for each", "rename one")
        known = ServerKeys.unsigned(names)
    else:
        known = keys if isinstance(keys, ServerKeys) else ServerKeys.load(Path(str(keys)))
    if len(known.learners) != plan.learning.learners:
        raise InputError(
            "learning.learners",
            plan.learning.learners,
            f"as many as {'have keys' if known.signed else 'are named'} ({len(known.learners)})",
            "`veilstream keys add` makes more, `keys remove` takes one away; weights are 1/n of all",
        )
    return known


def first_model(plan: Plan, task: Task, start: NDArray[Any] | None) -> NDArray[np.float32]:
    """The one that is given, or the task's own."""
    if start is not None:
        return np.asarray(start, np.float32)
    if plan.learning.start is not None:
        raise InputError(
            "start", None, f"the plan's first model (learning.start = {plan.learning.start!r})", "read it and pass it"
        )
    return np.asarray(task.init(plan.run.first_seed), np.float32)
