"""The runs of one plan, one after the other: which folder a server opens, and with which model.

    runs/air      the first; starts from the task's own model, or from the plan's `learning.start`
    runs/air-2    the next, from the last model of the first (`veilstream server --next`)
    runs/air-3    ...

A server that is started opens the newest of them. Each is an epoch of its own at every learner,
with fresh noise and for new clients only; the start.json of a later one names the runs that it
follows, which is what learners are told. How many there may be is `federation.epochs`, in the plan
that both sides agreed on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.federation.server.run_files import has_checkpoint, learners_of
from veilstream.learning.tasks import Task
from veilstream.plans.plan import Plan
from veilstream.runs.folder import OPERATIONAL, changed, check_version, other_settings, stored_plan
from veilstream.runs.start import StartingModel, last_released, starting_model

_MOST_NAMED = 32
"""Earlier runs that learners are told of."""


@dataclass(frozen=True)
class Opening:
    """Where a run lies, and how it begins if it has not."""

    folder: Path
    x0: NDArray[np.float32]
    start: Mapping[str, Any] | None = None
    """For start.json; None where x0 is the task's own, or the run has begun."""
    among: frozenset[str] | None = None
    """Learners of the run before, who go along; None for a first run, and for one that has begun."""


def open_run(first: Path, plan: Plan, task: Task, *, next_run: bool) -> Opening:
    """The newest run of this plan in ``first`` and the folders after it; with ``next_run`` the one after that."""
    number = 1
    while _follows(_folder(first, number + 1)):
        number += 1
    if next_run and (_finished(_folder(first, number)) or number == 1):
        _check_next(first, number, plan)
        number += 1
    folder, x0 = _folder(first, number), np.asarray(task.init(plan.run.first_seed), np.float32)
    if has_checkpoint(folder):
        return Opening(folder, x0)  # it goes on from there
    start: StartingModel | None
    if number > 1:
        before = _folder(first, number - 1)
        start = last_released(before)
        follows = [*_follows(before), str(start.run)][-_MOST_NAMED:]
        return Opening(folder, start.model, {**start.as_dict(), "follows": follows}, learners_of(before))
    start = starting_model(plan, len(x0))
    return Opening(folder, x0) if start is None else Opening(folder, start.model, start.as_dict())


def _folder(first: Path, number: int) -> Path:
    return first if number == 1 else first.with_name(f"{first.name}-{number}")


def _follows(folder: Path) -> list[str]:
    try:
        said = json.loads((folder / "start.json").read_text(encoding="utf-8")).get("follows", [])
    except FileNotFoundError:
        return []
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(
            "out", str(folder / "start.json"), "the file that the run wrote", f"{error}; restore it"
        ) from error
    return [str(run) for run in said]


def _finished(folder: Path) -> bool:
    return (folder / "summary.json").exists()


def _check_next(first: Path, number: int, plan: Plan) -> None:
    newest = _folder(first, number)
    if not _finished(newest):
        raise InputError(
            "--next",
            str(newest),
            "a run that is finished",
            "start the server without --next, which goes on with it or begins it",
        )
    check_version(newest)
    unlike = changed(stored_plan(newest), plan)
    if other := [f"{key} = {now} (was {was})" for key, (was, now) in unlike.items() if key not in OPERATIONAL]:
        raise other_settings(newest, other)
    if not has_checkpoint(newest):
        raise InputError(
            "--next",
            str(newest),
            "a server's run, which learners took part in",
            "a simulation's model is one to start from: [learning] start = \"" + f'{newest}"',
        )
    allowed = plan.federation.epochs
    if number >= allowed:
        raise InputError(
            "federation.epochs",
            allowed,
            f"at least {number + 1} for the run after {newest}",
            "learners go along as far as the plan says that both sides agreed on; further only "
            "with another plan, after `veilstream ledger epoch` on each learner",
        )
