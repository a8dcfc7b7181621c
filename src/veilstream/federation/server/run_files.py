"""The folder of a server's run: its files at the start, after every round and at the end."""

from __future__ import annotations

import csv
import json
import logging
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.terms import Terms
from veilstream.errors import InputError, RunBusy, StorageError
from veilstream.federation.protocol.fold import ClosedRound, FoldState, ServerFold
from veilstream.federation.protocol.messages import Buffer
from veilstream.federation.protocol.sum_fold import SumFold
from veilstream.federation.server.checkpoint import (
    CHECKPOINT,
    MESSAGES,
    MessageFile,
    ModelFile,
    Position,
    RunHead,
    Slots,
)
from veilstream.federation.server.enrolments import ENROLMENTS, ENROLMENTS_HEADER, drop_superseded, enrolment_line
from veilstream.federation.server.telemetry_files import TELEMETRY_FILES, TelemetryFiles
from veilstream.files import FileLock, write_file
from veilstream.plans.plan import Plan
from veilstream.runs.folder import changed, check_folder, check_version, other_settings, stored_plan, versions
from veilstream.runs.tables import keep_whole_lines

_log = logging.getLogger(__name__)

_TABLES = {
    "rounds.csv": "round,seconds,answered,missing\n",
    "releases.csv": "round,learner,epoch,learner_round,hash\n",
    ENROLMENTS: ENROLMENTS_HEADER,
}
"""Tables that grow by lines, with their headers."""


LOCK_FILE = "server.lock"


def lock_run(folder: Path) -> FileLock:
    """Hold a run's folder until `FileLock.close`: two servers would overwrite each other's files."""
    path = folder / LOCK_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(path, lambda holder: RunBusy(str(folder), holder))
    except OSError as error:
        raise InputError(
            "--out",
            str(path),
            "a file, not a link, that this account may write",
            f"{error.strerror}; name another folder",
        ) from None


def has_checkpoint(folder: Path) -> bool:
    """Whether a run has begun here, so that a server goes on with it."""
    return (folder / CHECKPOINT).exists()


def learners_of(folder: Path) -> frozenset[str] | None:
    """With whom the run in this folder was begun; None where none has begun."""
    return frozenset(seat.name for seat in RunHead.load(folder).seats) if has_checkpoint(folder) else None


class RunFiles:
    """One run in one folder; `run` is its name, the same after a restart."""

    run: str

    def __init__(self, folder: Path, plan: Plan, terms: Terms, start: Mapping[str, Any] | None = None) -> None:
        """``start`` says where x⁰ comes from, if not from the task."""
        self._folder, self._plan, self._terms, self._start = folder, plan, terms, start
        self.models = ModelFile(folder / "models.f32", terms.dim)
        self.telemetry = TelemetryFiles.of(folder, plan, terms)
        self.folder = folder
        self._folds = ServerFold if plan.trust is None else SumFold
        self._digest = str(terms.settings["digest"])
        self._enrolled: dict[tuple[str, int], str] = {}  # lines of enrolments.csv since this start

    def open(self, x0: NDArray[np.float32], learners: list[str]) -> ServerFold:
        """Begin a run in an empty folder, or go on with the one that is there."""
        if has_checkpoint(self._folder):
            check_version(self._folder)
            return self._resume(learners, x0)
        check_folder(self._folder, self._plan, resume=_killed_at_birth(self._folder), besides=frozenset({LOCK_FILE}))
        return self._begin(learners, x0)

    def _begin(self, learners: list[str], x0: NDArray[np.float32]) -> ServerFold:
        self.run = f"{self._plan.name}-{secrets.token_hex(4)}"
        write_file(self._folder / "plan.toml", self._plan.to_toml())
        if self._start is not None:
            write_file(self._folder / "start.json", _json(dict(self._start)))
        write_file(self._folder / "guarantee.json", _json(self._terms.guarantee.as_dict()))
        write_file(self._folder / "versions.json", _json(versions()))
        for name, header in _TABLES.items():
            write_file(self._folder / name, header)
        if self.telemetry is not None:
            self.telemetry.begin()
        self.models.write(0, x0)
        self._messages = MessageFile(self._folder / MESSAGES, self._terms.release_dim, create=True)
        kept = {name: Slots(self._messages, i) for i, name in enumerate(learners)}
        fold = self._folds(self._terms, x0, learners, kept)
        self._save(fold)
        return fold

    @property
    def follows(self) -> tuple[str, ...]:
        """Earlier runs of the same plan, which are over."""
        path = self._folder / "start.json"
        said = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return tuple(said.get("follows", ()))

    def _resume(self, learners: list[str], x0: NDArray[np.float32]) -> ServerFold:
        position = Position.load(self._folder)
        changes = changed(stored_plan(self._folder), self._plan)
        if changes and position.terms != self._digest:
            raise other_settings(self._folder, [f"{key} = {now} (was {was})" for key, (was, now) in changes.items()])
        if set(position.seats) != set(learners) or len(position.x) != len(x0):
            raise InputError(
                "learners",
                learners,
                f"those that the run was begun with: {sorted(position.seats)}",
                "name another folder for another run",
            )
        if position.terms not in ("", self._digest):
            raise InputError(
                "run folder",
                str(self._folder),
                f"the terms that the run was begun under (digest {position.terms[:16]}…, now {self._digest[:16]}…)",
                "another version of veilstream, NumPy or SciPy makes other numbers of the same plan: go on with the "
                "versions in versions.json, or begin a new run in another folder",
            )
        self.run, self._messages = position.run, position.messages
        for name, header in _TABLES.items():
            there = (self._folder / name).exists()  # an earlier version kept no enrolments
            if keep_whole_lines(self._folder / name, header) and there:
                _log.warning("%s: removed an unfinished last line", self._folder / name)
        drop_superseded(self._folder)
        if self.telemetry is not None:
            self.telemetry.resume(position.round)
        state = FoldState(position.round, position.x, position.average, self.models.read(0))
        fold = self._folds.resumed(self._terms, state, dict(position.seats))
        for key, (was, now) in changes.items():  # of those that are not part of the terms
            self.record_operation(fold, "setting", key, f"{was} to {now}")
            _log.warning("%s is %s from here on (it was %s)", key, now, was)
        if changes:
            write_file(self._folder / "plan.toml", self._plan.to_toml())
        if fold.finished and not (self._folder / "summary.json").exists():
            self._sum_up(fold)
        return fold

    def close_round(self, fold: ServerFold, closed: ClosedRound, seconds: float) -> None:
        """Durable when it returns: the released model, and where the run stands.

        Raises:
            StorageError: the folder cannot be written; started again, the server does this round once more.

        """
        try:
            self._close_round(fold, closed, seconds)
        except OSError as error:
            raise StorageError(
                f"the run's folder {self._folder} could not be written ({error})",
                "make room on its disk or repair it, and start the server again: it goes on from its checkpoint",
            ) from error

    def _close_round(self, fold: ServerFold, closed: ClosedRound, seconds: float) -> None:
        with (self._folder / "releases.csv").open("a") as file:  # done again after a kill, it is listed again
            for name, (epoch, round_, link) in sorted(closed.accepted.items()):
                file.write(f"{closed.round},{name},{epoch},{round_},{link}\n")
        with (self._folder / "rounds.csv").open("a") as file:
            missing = " ".join(closed.missing)
            file.write(f"{closed.round},{seconds:.4f},{len(closed.accepted)},{missing}\n")
        if self.telemetry is not None:
            self.telemetry.close_round(closed)
        self.models.write(fold.round, fold.published)
        self._save(fold)  # last: a kill before it has the round done, and listed, once more
        if fold.finished:
            self._sum_up(fold)

    def keep_enrolment(self, learner: str, epoch: int, request: bytes, reply: Buffer) -> None:
        """Durable with the next checkpoint: what a learner signed, and what it answered; the newest of an epoch."""
        self._enrolled[learner, epoch] = enrolment_line(learner, epoch, request, bytes(reply))

    def record_operation(self, fold: ServerFold, operation: str, about: str, why: str) -> None:
        """Durable when it returns: what an operator did between rounds, and what came of it."""
        path = self._folder / "operations.csv"
        begun = path.exists()
        with path.open("a", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            if not begun:
                rows.writerow(["time", "round", "operation", "about", "why"])
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            rows.writerow([now, fold.round, operation, about, why])
        self.models.write(fold.round, fold.published)
        self._save(fold)

    def _save(self, fold: ServerFold) -> None:
        if self._enrolled:  # before the checkpoint, which a statement compares with them
            with (self._folder / ENROLMENTS).open("a") as file:
                file.writelines(self._enrolled.values())
                file.flush()
                os.fsync(file.fileno())
            self._enrolled = {}
        position = Position(self.run, fold.round, fold.x, fold.average, fold.seats, self._messages, self._digest)
        position.save(self._folder)

    def _sum_up(self, fold: ServerFold) -> None:
        seats = fold.seats.values()
        summary = {
            "name": self._plan.name,
            "run": self.run,
            "rounds": fold.round,
            "learners": {s.name: {"epoch": s.epoch, "rounds": s.round} for s in seats},
            "guarantee": self._terms.guarantee.as_dict(),
            **({} if self.telemetry is None else {"telemetry": self.telemetry.as_dicts()}),
        }
        write_file(self._folder / "summary.json", _json(summary))


def _killed_at_birth(folder: Path) -> bool:
    """Whether a server was killed here before its first checkpoint: it may begin again."""
    for stray in folder.glob(".partial-*"):
        stray.unlink(missing_ok=True)
    ours = {"plan.toml", "start.json", "guarantee.json", "versions.json", *_TABLES, *TELEMETRY_FILES}
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return "plan.toml" in found and found <= ours | {"models.f32", MESSAGES, LOCK_FILE}


def _json(value: object) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"
