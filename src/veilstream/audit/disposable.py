"""Learners that exist to be audited. Each has a temporary store, and none can join a run."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.epochs import LearnerParts, secret_name
from veilstream.deployment.learner import Learner
from veilstream.deployment.local_rounds import LocalRounds
from veilstream.deployment.terms import Terms
from veilstream.errors import InputError
from veilstream.learning.tasks import Task
from veilstream.mechanisms.keystream import Row
from veilstream.plans.plan import Plan
from veilstream.privacy.gradient_types import ClippedGradient, RawGradient
from veilstream.privacy.grid import OnGrid

_ROOM = 4 << 30  # bytes


class Disposable(Learner):
    """A learner whose store is made for it, in ``parent`` if given, and goes with it."""

    def __init__(
        self, plan: Plan, task: Task, parent: Path | None = None, *, parts: LearnerParts | None = None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="veilstream-audit-", dir=parent)
        try:
            super().__init__(
                plan, Path(self._folder.name) / "store.db", task, create=True, parts=parts or LearnerParts()
            )
        except BaseException:
            self._folder.cleanup()
            raise

    def close(self) -> None:
        """Let go of the store, for good."""
        super().close()
        self._folder.cleanup()


def in_memory(plan: Plan, task: Any) -> Disposable:
    """One whose store is in memory, where there is room: what it writes is only thrown away."""
    return Disposable(plan, task, quick_folder())


def quick_folder() -> Path | None:
    """A folder in memory, where there is one with room; else None, for the usual temporary folder."""
    folder = Path("/dev/shm")
    room = os.access(folder, os.W_OK) and shutil.disk_usage(folder).free >= _ROOM
    return folder if room else None


class Apart(Disposable):
    """Every coordinate is a run of its own, of dimension one.

    **Why this is the deployed code.** A `Learner` treats coordinates alike and apart, with
    independent normals for each, but in three places: it clips the gradient as one vector, it looks
    at the norm of the model that the server sends, and it projects if the plan says so. For
    dimension one the norm is the absolute value, so here the gradient is clipped number by number,
    by the same `clip_onto_grid`. The cap on the server's model is a refusal before any data are
    read, and projection is post-processing of noisy steps; plans that project are refused. All
    else (ledger, witness, seeds, noise stream, grid, messages) is inherited.
    """

    def __init__(self, plan: Plan, task: Task, *, parts: LearnerParts | None = None) -> None:
        if plan.learning.projection_radius is not None:
            raise InputError(
                "learning.projection_radius",
                plan.learning.projection_radius,
                "none in an audit",
                "leave it out: it is post-processing and changes no promise",
            )
        super().__init__(plan, task, parts=parts or LearnerParts(rounds=OneByOne))


class OneByOne(LocalRounds):
    """Clips every number by itself."""

    def clip(self, raw: RawGradient, weights: NDArray[np.float32] | None = None) -> ClippedGradient:
        """`clip_onto_grid` of each number as the vector of one that it is, and the sum over clients.

        An audit has no ``weights`` (`programme.auditable`).
        """
        clients = np.atleast_2d(raw.reveal())
        different, where = np.unique(clients, return_inverse=True)
        clip = super().clip
        each = [clip(RawGradient(value.reshape(1))).reveal()[0] for value in different]
        return ClippedGradient(OnGrid(np.array(each, np.int64)[where].reshape(clients.shape).sum(axis=0)))


class Twin(Disposable):
    """One of two with the same draws, from a key that the operating system drew for the pair."""

    def __init__(self, plan: Plan, task: Task, pair: bytes) -> None:
        rounds = functools.partial(_Paired, pair=pair)
        super().__init__(plan, task, parts=LearnerParts(rounds=rounds))


class _Paired(LocalRounds):
    def __init__(self, terms: Terms, epoch: int, pair: bytes) -> None:
        super().__init__(terms, epoch)
        self._pair = pair

    def row(self, step: int, secret: bytes) -> Row:
        own = hashlib.sha256(self._pair + secret_name(self.epoch, step).encode()).digest()
        return Row(own, step)
