"""The learner process of the SIGKILL study: where it can be made to die, and its sabotages."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sqlite3
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from tests.support.known_secrets import unguarded

import veilstream.deployment.learner_epochs as learner_module
import veilstream.deployment.ledger.store as store_module
import veilstream.deployment.ledger.witness as witness_module
import veilstream.deployment.local_rounds as local_rounds
from veilstream.deployment import epochs as epochs_module
from veilstream.deployment.epochs import EpochLedger, secret_name
from veilstream.deployment.learner import Learner
from veilstream.deployment.ledger.database import open_sqlite
from veilstream.deployment.ledger.store import CRASH_POINTS, Ledger
from veilstream.deployment.ledger.witness import Witness
from veilstream.deployment.local_rounds import LocalRounds
from veilstream.errors import InputError, LedgerError, PrivacyError
from veilstream.learning.tasks import Sample
from veilstream.plans.plan import Plan

DIM, ROUNDS, TAU, SNAPSHOT_STEPS, SEGMENT_RECORDS = 5, 6, 5, 10, 8
"""So few that every few lives end an epoch, and most rounds meet a kill."""
KILLS_A_HISTORY = 50
"""Short histories begin stores often."""
PATIENCE = 250
"""Commands after which a place that does not come up is given up for this life."""
STUCK_S = 60.0


# --- where a learner can be made to die ---------------------------------------------------------

FIRST_START = ("after CREATE TABLE", "after INSERT meta", "before the witness is made", "after the witness is made")
"""Places that only the first start of a store passes."""
EVERY_START = ("before recovery", "after recovery")
STEPPING = ("after a secret is drawn",)
WRITING = (
    "after BEGIN",
    "after INSERT records",
    "after INSERT blobs",
    "after UPDATE",
    "after INSERT visits",
    "after INSERT segments",
    "after DELETE records",
    "after DELETE blobs",
    "after COMMIT",
    "after wal_checkpoint",
    "torn witness",
    "half a witness append",
    "after witness append",
)
PLACES = (*CRASH_POINTS, *STEPPING, *WRITING, *EVERY_START)
RANDOM = "a random time"
COMMANDS = ("start", "begin", "observe", "observe_many", "finish", "acknowledge", "new_epoch")
_OFTEN = (0.2, 0.15, 0.1, 0.25, 0.15, 0.1, 0.05)
_VISITS = {"snapshot-stored": 2} | dict.fromkeys(
    (
        *FIRST_START[1:],
        *EVERY_START,
        "epoch-closed",
        "after wal_checkpoint",
        "start",
        "new_epoch",
        "after INSERT segments",
        "after DELETE records",
    ),
    1,
)
"""How many visits of a place or command a life can outlive at most: 4 where nothing is said."""
SABOTAGES = {
    "same-secrets": "step-computed",
    "answer-first": "step-computed",
    "send-first": "message-computed",
    "forget-clients": "step-witnessed",
}
"""Promises that a learner can be made to break, and where a kill brings it to light."""


def plan() -> Plan:
    """A mechanism with state, so that a restart has something to get wrong."""
    return Plan(
        learning={"rounds": ROUNDS, "local_steps": TAU, "learners": 1},
        data={"dim": DIM},
        privacy={"epsilon": 4.0, "delta": 1e-3},
        methods=[{"name": "ours", "mechanism": "buffered", "step_size": 0.1}],
    )


class NumpyLogistic:
    """Logistic regression without JAX, which must not be in a process that forks."""

    dim = DIM
    features_shape = (DIM,)
    labels = (-1.0, 1.0)
    classifies = True

    def host_gradient(self, z: Any, sample: Sample) -> Any:
        """Of log(1 + exp(-y a·z))."""
        a, y, *_ = sample
        return (-y * a / (1.0 + np.exp(y * (a @ z)))).astype(np.float32)


@dataclass
class Fate:
    """What becomes of one life: death at the n-th visit of a place, or none of its own doing."""

    place: str | None = None
    visit: int = 1

    def reached(self, place: str) -> None:
        """Die here if this is the place."""
        if self.due(place):
            die()

    def due(self, place: str) -> bool:
        """Whether this visit is the last."""
        if place == self.place:
            self.visit -= 1
        return place == self.place and self.visit == 0


def die() -> NoReturn:
    """No handler, no flush, no goodbye."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("survived SIGKILL")


class CutBetweenStatements:
    """A connection that can die after any statement that changes the store."""

    def __init__(self, db: sqlite3.Connection, fate: Fate) -> None:
        self._db, self._fate = db, fate

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        """Run it, then perhaps die."""
        cursor = self._db.execute(statement, *values)
        self._fate.reached(f"after {_what(statement)}")
        return cursor

    def executemany(self, statement: str, rows: list[Any]) -> None:
        """Row by row, so that it can die in the middle of a group."""
        for row in rows:
            self.execute(statement, row)

    def close(self) -> None:
        """As SQLite does."""
        self._db.close()


def _what(statement: str) -> str:
    """ "INSERT OR REPLACE INTO blobs ..." is "INSERT blobs"."""
    words = statement.split("(")[0].split()
    if words[0] == "PRAGMA":
        return words[1].split("=")[0]
    if "INTO" in words or "FROM" in words:
        place = words.index("INTO" if "INTO" in words else "FROM")
        return f"{words[0]} {words[place + 1]}"
    return " ".join(words[:2]) if words[0] == "CREATE" else words[0]


# --- a life: everything below until the next line runs in the forked child ------------------------


@dataclass
class Diary:
    """Appends facts to a file; what `os.write` has taken, a SIGKILL cannot take back."""

    handle: int
    secret: str = ""
    """The newest; only this study has a file for it."""

    def pairing(self, epoch_step: list[int], gradient: bytes, noisy: Any) -> None:
        """One row of noise and the gradient that it has just been added to."""
        line = json.dumps([self.secret, _sha(gradient), epoch_step, noisy.tolist()])
        os.write(self.handle, line.encode() + b"\n")


def _live(store: Path, diary: Diary, fate: Fate, sabotage: str | None, world: Connection) -> NoReturn:
    """One learner process, from its start until it is told to close or dies."""
    status = 1
    try:
        _place_faults(fate)
        with Learner(plan(), store, NumpyLogistic(), create=True) as learner:
            _keep_diary(learner, diary)
            if sabotage:
                _sabotage(sabotage, learner, world, fate)
            world.send(("ready", None, *_stands(learner)))
            _obey(learner, world, answer_first=sabotage == "answer-first")
        status = 0
    except BaseException:
        with suppress(OSError):
            world.send(("failed", traceback.format_exc(limit=-4), 0, False))
    finally:
        os._exit(status)  # nothing of the parent may run in its copy


def _place_faults(fate: Fate) -> None:
    Ledger.reached = staticmethod(fate.reached)
    epochs_module._SNAPSHOT_STEPS = SNAPSHOT_STEPS
    store_module.segment_is_due = lambda records, kept: records >= SEGMENT_RECORDS
    Ledger._connect = staticmethod(lambda path: CutBetweenStatements(open_sqlite(path), fate))
    append, make = Witness.append, witness_module.write_file
    recover, draw = EpochLedger._recover, learner_module.fresh_secret

    def appended(self: Witness, entries: list[Any]) -> None:
        data = b"".join(entry.pack() for entry in entries)
        for place, written in (("torn witness", 50), ("half a witness append", len(data) // 2 + 7)):
            if fate.due(place):
                os.pwrite(self._handle, data[:written], self._end)
                die()
        append(self, entries)
        fate.reached("after witness append")

    def made(path: Path, content: Any, **options: Any) -> None:
        fate.reached("before the witness is made")
        make(path, content, **options)
        fate.reached("after the witness is made")

    def recovered(self: EpochLedger) -> None:
        fate.reached("before recovery")
        recover(self)
        fate.reached("after recovery")

    def drawn() -> bytes:
        secret = draw()
        fate.reached("after a secret is drawn")
        return secret

    Witness.append, witness_module.write_file = appended, made
    EpochLedger._recover, learner_module.fresh_secret = recovered, drawn
    learner_module.check_generator_once = unguarded  # done, for all lives, before they are forked


def _keep_diary(learner: Learner, diary: Diary) -> None:
    """Note every pairing before anything can come of it."""
    noisy_of, add_noise = LocalRounds.noisy, local_rounds.add_noise

    def noisy(self: LocalRounds, gradient: Any, secret: bytes) -> Any:
        diary.secret = secret.hex()
        return noisy_of(self, gradient, secret)

    def added(gradient: Any, noise: Any) -> Any:
        units = add_noise(gradient, noise)
        step = learner.local.step
        diary.pairing([learner.epoch, step], gradient.reveal().tobytes(), units)
        return units

    LocalRounds.noisy, local_rounds.add_noise = noisy, added


def _stands(learner: Learner) -> tuple[int, bool]:
    return learner.epoch, learner.horizon_reached


def _obey(learner: Learner, world: Connection, answer_first: bool) -> None:
    while True:
        command, *values = world.recv()
        if command == "close":
            return
        if answer_first and command == "observe" and _would_take(learner, values[0]):
            world.send(("taken", None, *_stands(learner)))
            _observe(learner, *values)
            continue
        if answer_first and command == "observe_many" and _would_take(learner, values[0][0][0]):
            world.send(("answers", [("taken", None)], *_stands(learner)))
            _observe_many(learner, *values)
            continue
        kind, value = _COMMANDS[command](learner, *values)
        if kind != "sent":
            world.send((kind, value, *_stands(learner)))


def _begin(learner: Learner, r: int, x: Any, acknowledged: Any) -> tuple[str, Any]:
    try:
        learner.begin_round(r, x, acknowledged)
    except LedgerError as error:
        return "lost", str(error)
    except (InputError, PrivacyError) as error:
        return "refused", str(error)
    return "begun", None


def _observe(learner: Learner, name: str, sample: Sample) -> tuple[str, Any]:
    """With the step that took this client, if one did just now."""
    before, step = learner.local.taken, learner.local.step
    try:
        answer = learner.observe(name, sample)
    except InputError as error:  # the round is full, or none is open
        return "not now", str(error)
    fresh = learner.local.taken > before
    return answer.value, (learner.epoch, step) if fresh else None


def _observe_many(learner: Learner, people: list[tuple[str, Sample]]) -> tuple[str, Any]:
    """For each that was looked at, the answer, and the step that took it if one did just now."""
    step = learner.local.step
    try:
        outcomes = learner.take_many(people)
    except InputError as error:
        return "not now", str(error)
    told = []
    for outcome in outcomes:
        told.append((outcome.answer.value, (learner.epoch, step) if outcome.used else None))
        step += outcome.used
    return "answers", told


def _finish(learner: Learner) -> tuple[str, Any]:
    release = learner.finish_round()
    if getattr(learner, "sent_first", False):
        learner.sent_first = False
        return "sent", None
    return "message", bytes(release.payload)


def _acknowledge(learner: Learner, r: int, digest: str) -> tuple[str, Any]:
    learner.acknowledge(r, digest)
    return "noted", None


def _new_epoch(learner: Learner) -> tuple[str, Any]:
    learner.new_epoch()
    return "begun", None


_COMMANDS: dict[str, Callable[..., tuple[str, Any]]] = {
    "begin": _begin,
    "observe": _observe,
    "finish": _finish,
    "acknowledge": _acknowledge,
    "new_epoch": _new_epoch,
    "observe_many": _observe_many,
}


def _would_take(learner: Learner, name: str) -> bool:
    spent = not learner.may_take(name)
    return bool(learner.clients_wanted) and not spent


def _sabotage(kind: str, learner: Learner, world: Connection, fate: Fate) -> None:
    """Break one promise on purpose (another is broken in `_obey`)."""
    if kind == "same-secrets":
        _same_secrets(learner)
    elif kind == "forget-clients":
        learner._spent = lambda *_: False
    elif kind == "send-first":
        _send_first(learner, world, fate)


def _same_secrets(learner: Learner) -> None:
    """A step's secret follows from the store and the step: computed again, it is the same."""

    def derived(count: int) -> list[bytes]:
        first = learner.local.noise.position
        places = [secret_name(learner.epoch, first + i).encode() for i in range(count)]
        return [hashlib.sha256(learner.ledger.tag_key + place).digest() for place in places]

    learner._fresh_seeds = derived


def _send_first(learner: Learner, world: Connection, fate: Fate) -> None:
    """Steps without a client and the message are stored when the message has left already."""
    write, late = learner.epochs.write, []

    def written(kind: str, body: Any, **more: Any) -> None:
        if kind in ("step", "steps") and not more.get("tag") and not any(more.get("tags", ())):
            late.append((kind, body, more))
        else:
            write(kind, body, **more)

    def reached(point: str) -> None:
        if point == "message-computed":
            release = learner.local.message()
            world.send(("message", bytes(release.payload), *_stands(learner)))
            learner.sent_first = True
            fate.reached(point)
            for kind, body, more in late:
                write(kind, body, **more)
            late.clear()
        else:
            fate.reached(point)

    learner.epochs.write = written
    Ledger.reached = staticmethod(reached)


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
