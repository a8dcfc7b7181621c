"""Learners that are killed again and again, and what the world outside saw of them.

    python -m tests.reliability.kills --kills 2000

A learner process (the real `Learner` on a real store and witness) is driven by a hostile world and
dies by SIGKILL: at random times, or at a chosen place of its own code. Another one starts on what
it left behind, and so on. The world is a server that asks for a round with another model each time,
and clients who bring other data each time they have to ask again.

Two accounts outlive every kill: what the world was told (`World`, in this process), and a file to
which a learner appends each pairing of a noise seed with a gradient. When a history of lives ends,
`check` compares both with the ledger. Sabotaged learners (``--sabotage``) show that each of its
counts can be other than zero.

A life costs milliseconds because it is forked, from a process with one thread and without JAX: the
command starts such a process and shows how far it has come.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np

import veilstream.engines.learner as learner_module
import veilstream.ledger.witness as witness_module
from veilstream.engines.learner import Answer, Learner
from veilstream.engines.plan import Plan
from veilstream.engines.release import decode, encode
from veilstream.errors import InputError, LedgerError, PrivacyError, VeilstreamError
from veilstream.learning.tasks import Sample
from veilstream.ledger.inspect import verify
from veilstream.ledger.points import POINTS
from veilstream.ledger.store import Ledger, open_sqlite
from veilstream.ledger.witness import Witness
from veilstream.progress import progress

DIM, ROUNDS, TAU, SNAPSHOT_STEPS = 5, 6, 3, 6
"""So few that every few lives end an epoch, and most rounds meet a kill."""
KILLS_A_HISTORY = 50
"""A start reads the whole chain: short histories keep lives short, and begin stores often."""
PATIENCE = 250
"""Commands after which a place that does not come up is given up for this life."""
STUCK_S = 60.0

# --- where a learner can be made to die ---------------------------------------------------------

FIRST_START = (
    "after CREATE TABLE", "after INSERT meta", "before the witness is made",
    "after the witness is made",
)  # fmt: skip
"""Places that only the first start of a store passes."""
EVERY_START = ("before recovery", "before new seeds", "after recovery")
WRITING = (
    "after BEGIN", "after INSERT records", "after INSERT blobs", "after INSERT tags",
    "after DELETE blobs", "after COMMIT", "after wal_checkpoint", "torn witness",
    "after witness append",
)  # fmt: skip
PLACES = (*POINTS, *WRITING, *EVERY_START)
RANDOM = "a random time"
COMMANDS = ("start", "begin", "observe", "finish", "acknowledge", "new_epoch")
_OFTEN = (0.2, 0.2, 0.25, 0.2, 0.1, 0.05)
_VISITS = {"snapshot-stored": 2} | dict.fromkeys(
    (*FIRST_START[1:], *EVERY_START, "epoch-closed", "after wal_checkpoint", "start", "new_epoch"),
    1,
)
"""How many visits of a place or command a life can outlive at most: 4 where nothing is said."""
SABOTAGES = {
    "same-seeds": "step-computed",
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
    seed: str = ""

    def pairing(self, epoch_step: list[int], gradient: bytes, noisy: Any) -> None:
        """One row of noise and the gradient that it has just been added to."""
        line = json.dumps([self.seed, _sha(gradient), epoch_step, noisy.tolist()])
        os.write(self.handle, line.encode() + b"\n")


def _live(
    store: Path, diary: Diary, fate: Fate, sabotage: str | None, world: Connection
) -> NoReturn:
    """One learner process, from its start until it is told to close or dies."""
    status = 1
    try:
        if sabotage == "same-seeds":
            Learner._reseed = lambda self, done: None
        _place_faults(fate)
        with Learner(plan(), store, NumpyLogistic()) as learner:
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
    learner_module.reached = fate.reached
    learner_module._SNAPSHOT_STEPS = SNAPSHOT_STEPS
    Ledger._connect = staticmethod(lambda path: CutBetweenStatements(open_sqlite(path), fate))
    append, make = Witness.append, witness_module.write_file
    recover, reseed = Learner._recover, Learner._reseed

    def appended(self: Witness, entries: list[Any]) -> None:
        if fate.due("torn witness"):
            os.pwrite(self._handle, entries[-1].pack()[:50], self._end)
            die()
        append(self, entries)
        fate.reached("after witness append")

    def made(path: Path, content: Any) -> None:
        fate.reached("before the witness is made")
        make(path, content)
        fate.reached("after the witness is made")

    def recovered(self: Learner) -> None:
        fate.reached("before recovery")
        recover(self)
        fate.reached("after recovery")

    def reseeded(self: Learner, done: int) -> None:
        fate.reached("before new seeds")
        reseed(self, done)

    Witness.append, witness_module.write_file = appended, made
    Learner._recover, Learner._reseed = recovered, reseeded


def _keep_diary(learner: Learner, diary: Diary) -> None:
    """Note every pairing before anything can come of it."""
    open_row, add_noise = Learner._open_row, learner_module.add_noise

    def opened(step: int) -> Any:
        diary.seed = _sha(learner._ledger.blob(learner._seed_name(step)))
        return open_row(learner, step)

    def added(gradient: Any, noise: Any) -> Any:
        noisy = add_noise(gradient, noise)
        step = learner._round * TAU + learner._taken
        diary.pairing([learner.epoch, step], gradient.reveal().tobytes(), noisy)
        return noisy

    # A stream that exists already has the method bound; new epochs look it up on the learner.
    learner._open_row = learner._noise._open_row = opened
    learner_module.add_noise = added


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
    before, step = learner._taken, learner._round * TAU + learner._taken
    try:
        answer = learner.observe(name, sample)
    except InputError as error:  # the round is full, or none is open
        return "not now", str(error)
    fresh = learner._taken > before
    return answer.value, (learner.epoch, step) if fresh else None


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
    "begin": _begin, "observe": _observe, "finish": _finish, "acknowledge": _acknowledge,
    "new_epoch": _new_epoch,
}  # fmt: skip


def _would_take(learner: Learner, name: str) -> bool:
    spent = learner._spent(learner._ledger.keyed(name.encode()))
    return bool(learner.clients_wanted) and not spent


def _sabotage(kind: str, learner: Learner, world: Connection, fate: Fate) -> None:
    """Break one promise on purpose (two others are broken in `_live` and `_obey`)."""
    if kind == "forget-clients":
        learner._spent = lambda tag: False
    elif kind == "send-first":
        _send_first(learner, world, fate)


def _send_first(learner: Learner, world: Connection, fate: Fate) -> None:
    """Steps without a client and the message are stored when the message has left already."""
    write, late = learner._write, []

    def written(kind: str, body: Any, **more: Any) -> None:
        if kind == "step" and more["tag"] is None:
            late.append((kind, body, more))
        else:
            write(kind, body, **more)

    def reached(point: str) -> None:
        if point == "message-computed":
            steps = (learner.round + 1) * TAU
            payload = encode(
                learner.epoch, learner.round, steps, learner.grid.step, learner._prefix
            )
            world.send(("message", bytes(payload), *_stands(learner)))
            learner.sent_first = True
            fate.reached(point)
            for kind, body, more in late:
                write(kind, body, **more)
            late.clear()
        else:
            fate.reached(point)

    learner._write = written
    learner_module.reached = reached


# --- the world: server and clients ----------------------------------------------------------------


class Died(Exception):
    """The learner is gone."""


class Failed(Exception):
    """The learner gave up where it should have gone on."""


@dataclass
class World:
    """A server and clients over many lives of one learner: all that they were ever told."""

    rng: np.random.Generator
    epoch: int = 0
    round: int = 0
    """The round whose message the server waits for."""
    acknowledged: tuple[int, str] | None = None
    payloads: dict[tuple[int, int], set[bytes]] = field(default_factory=lambda: defaultdict(set))
    models: dict[tuple[int, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    """Hashes of models that a round was begun with."""
    taken: dict[str, tuple[int, int] | None] = field(default_factory=dict)
    """Clients who were told so, and their step where they were told at once."""
    waiting: list[str] = field(default_factory=list)
    """Clients who asked and were not told."""
    noted: set[tuple[int, int, str]] = field(default_factory=set)
    """Acknowledgements that the learner has confirmed."""
    forgotten: set[tuple[Any, ...]] = field(default_factory=set)
    """What a learner had said or been told, and did not know any more."""
    refusals: int = 0

    def go_on(self, life: Life) -> None:
        """One round, or the end of an epoch, as far as the learner lives."""
        if life.epoch != self.epoch:  # begun in a life that died before it could say so
            self.epoch, self.round = life.epoch, 0
        if life.horizon_reached and self.round == ROUNDS:
            life.ask("new_epoch")
            return
        self._ask_for_round(life)
        for _ in range(self.rng.integers(TAU + 2)):
            self.visit(life, self._someone())
        self._fetch(life)

    def _ask_for_round(self, life: Life) -> None:
        """With a new model each time, and sometimes with two at once."""
        for _ in range(1 + (self.rng.random() < 0.25)):
            x = self.rng.standard_normal(DIM).astype(np.float32)
            kind, _why = life.ask("begin", self.round, x, self.acknowledged)
            if kind == "begun":
                self.models[self.epoch, self.round].add(_sha(x.tobytes()))
                if self.acknowledged:
                    epoch = self.epoch if self.round else self.epoch - 1
                    self.noted.add((epoch, *self.acknowledged))
            elif kind == "lost":
                self.forgotten.add(("message", self.acknowledged))
                self.acknowledged = None  # so that a sabotaged learner can go on
            self.refusals += kind == "refused"

    def _someone(self) -> str:
        """Whoever waits for an answer; else a new client, or one who was taken already."""
        if not self.waiting:
            if self.taken and self.rng.random() < 0.15:
                return list(self.taken)[self.rng.integers(len(self.taken))]
            self.waiting.append(f"client {len(self.taken)}")
        return self.waiting[0]

    def visit(self, life: Life, name: str) -> None:
        """Data are new each time: a client has no duty to repeat itself."""
        features = self.rng.standard_normal(DIM).astype(np.float32)
        kind, step = life.ask("observe", name, Sample(features, float(self.rng.choice([-1, 1]))))
        if kind != Answer.TAKEN.value:
            return
        if name in self.taken and step is not None:
            self.forgotten.add(("client", name))
        self.taken.setdefault(name, step)
        if name in self.waiting:
            self.waiting.remove(name)

    def _fetch(self, life: Life) -> None:
        """Have the round sealed; keep its message; perhaps say so."""
        _, payload = life.ask("finish")
        message = decode(payload)
        self.payloads[message.epoch, message.round].add(payload)
        self.acknowledged, self.round = (message.round, message.hash), message.round + 1
        if self.rng.random() < 0.5:
            life.ask("acknowledge", message.round, message.hash)
            self.noted.add((message.epoch, message.round, message.hash))


@dataclass
class Doom:
    """When the world kills a learner: while it works on the n-th command of a kind.

    After `PATIENCE` commands, any will do.
    """

    command: str
    visit: int
    fraction: float
    """Of the time that such a command usually takes."""


class Life:
    """One learner process, as seen from outside."""

    usual_s: ClassVar[Counter[str]] = Counter()
    """How long each command takes, about."""

    def __init__(
        self, store: Path, diary: Path, fate: Fate, doom: Doom | None, sabotage: str | None
    ) -> None:
        self.epoch, self.horizon_reached = 0, False
        self.doom, self.killed_during, self._asked = doom, "", Counter[str]()
        self._world, learners = Pipe()
        handle = os.open(diary, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._pid = os.fork()
        if self._pid == 0:
            self._world.close()
            _live(store, Diary(handle), fate, sabotage, learners)
        os.close(handle)
        learners.close()

    def ask(self, command: str, *values: Any) -> tuple[str, Any]:
        """The answer, also if the learner died after it was sent; else `Died`."""
        try:
            began = time.perf_counter()
            if command != "start":
                self._world.send((command, *values))
            self._asked[command] += 1
            if self.doom and not self.killed_during and self._due(self.doom, command):
                self._kill(self.doom, command)
            answer = self._answer()
        except (EOFError, ConnectionError):
            raise Died from None
        if not self.killed_during:
            usual, took = self.usual_s[command], time.perf_counter() - began
            self.usual_s[command] = 0.8 * usual + 0.2 * took if usual else took
        kind, value, self.epoch, self.horizon_reached = answer
        if kind == "failed":
            raise Failed(value)
        return kind, value

    def _due(self, doom: Doom, command: str) -> bool:
        if self._asked.total() > PATIENCE:
            return True
        return command == doom.command and self._asked[command] == doom.visit

    def _kill(self, doom: Doom, command: str) -> None:
        """At any moment of its work, or a little later."""
        time.sleep(1.3 * doom.fraction * self.usual_s[command])
        os.kill(self._pid, signal.SIGKILL)
        self.killed_during = command

    def _answer(self) -> Any:
        if not self._world.poll(STUCK_S):
            os.kill(self._pid, signal.SIGKILL)
            raise Failed(f"no answer within {STUCK_S} s")
        return self._world.recv()

    def close(self) -> bool:
        """Let it go, or bury it; whether it died by SIGKILL."""
        with suppress(OSError):
            self._world.send(("close",))
        self._world.close()
        _, status = os.waitpid(self._pid, 0)
        return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


# --- many lives -----------------------------------------------------------------------------------


@dataclass
class Study:
    """All histories together."""

    kills: int
    seed: int
    sabotage: str | None
    ticked: Callable[[int], None]
    rng: np.random.Generator = field(init=False)
    at: Counter[str] = field(default_factory=Counter)
    during: Counter[str] = field(default_factory=Counter)
    """What random kills interrupted."""
    totals: Counter[str] = field(default_factory=Counter)
    violations: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    _places: deque[str] = field(init=False)

    def __post_init__(self) -> None:
        self._places = deque([SABOTAGES[self.sabotage]] if self.sabotage else PLACES)
        self.rng = np.random.default_rng(self.seed)

    def run(self, folder: Path) -> dict[str, Any]:
        """Histories until there were enough kills; then the figures."""
        began = time.monotonic()
        _warm_up(folder)
        while self.at.total() < self.kills and len(self.failures) < 100:
            self.totals["histories"] += 1
            self._history(folder / f"{self.totals['histories']}.db")
        everywhere = (*FIRST_START, *PLACES, RANDOM)
        return {
            "kills": self.at.total(), "seed": self.seed, "sabotage": self.sabotage,
            "wall_s": round(time.monotonic() - began, 1),
            "violations": {name: self.violations[name] for name in VIOLATIONS},
            "kills_at": {place: self.at[place] for place in everywhere},
            "random_kills_during": dict(self.during),
            "totals": dict(self.totals), "failures": self.failures[:5],
        }  # fmt: skip

    def _history(self, store: Path) -> None:
        """One store, from its first start to its last; then the accounts are compared."""
        diary = store.with_suffix(".diary")
        world = World(self.rng)
        enough = min(self.kills, self.at.total() + KILLS_A_HISTORY)
        first = deque(FIRST_START)
        try:
            while self.at.total() < enough:
                place = first[0] if first else self._next_place()
                done = self._life(store, diary, world, place)
                if done == place:  # else it did not come up: another life tries again
                    first.popleft() if first else self._places.rotate(-1)
            self._last_life(store, diary, world)
        except Failed as failure:
            self.failures.append(str(failure))
            self.violations["learners that gave up"] += 1
        self.totals += _figures(world)
        self.violations += check(store, diary, world, self.totals)

    def _next_place(self) -> str | None:
        """Random times and chosen places in turn."""
        return None if self.at.total() % 2 else self._places[0]

    def _life(self, store: Path, diary: Path, world: World, place: str | None) -> str:
        """From a start to a death; where it died."""
        target = place or str(self.rng.choice(COMMANDS, p=_OFTEN))
        visit = int(self.rng.integers(1, _VISITS.get(target, 4) + 1))
        fate = Fate(place, visit)
        doom = Doom("" if place else target, visit, self.rng.random())
        life = Life(store, diary, fate, doom, self.sabotage)
        try:
            life.ask("start")
            while True:
                world.go_on(life)
        except Died:
            pass
        finally:
            killed = life.close()
        if not killed:
            raise Failed("ended, and not by SIGKILL")
        where = RANDOM if life.killed_during else str(place)
        self.at[where] += 1
        if life.killed_during:
            self.during[life.killed_during] += 1
        self.ticked(1)
        return where

    def _last_life(self, store: Path, diary: Path, world: World) -> None:
        """Undisturbed: everyone who was ever taken comes back, and the server asks once more."""
        life = Life(store, diary, Fate(), None, self.sabotage)
        try:
            life.ask("start")
            world.go_on(life)
            for name in list(world.taken):
                world.visit(life, name)
            world.go_on(life)
        except Died:
            raise Failed("died without being killed") from None
        finally:
            life.close()


def _warm_up(folder: Path) -> None:
    """Import, solve and cache here what every life needs; see that forking is safe."""
    with Learner(plan(), folder / "warm.db", NumpyLogistic()) as learner:
        learner.learn_round(0, np.zeros(DIM), [])
    assert "jax" not in sys.modules
    tasks = Path("/proc/self/task")
    assert not tasks.exists() or len(list(tasks.iterdir())) == 1


def _figures(world: World) -> Counter[str]:
    return Counter({
        "clients told that they were taken": len(world.taken),
        "messages received": sum(map(len, world.payloads.values())),
        "models refused": world.refusals,
        "acknowledgements confirmed": len(world.noted),
    })  # fmt: skip


# --- the accounts compared ------------------------------------------------------------------------

VIOLATIONS = (
    "rounds with two payloads", "noise rows with two gradients", "clients used twice",
    "lost acknowledgements", "rounds with two models", "wrong chains or prefixes",
    "learners that gave up",
)  # fmt: skip
Records = list[tuple[str, dict[str, Any]]]


def check(store: Path, diary: Path, world: World, totals: Counter[str]) -> Counter[str]:
    """Everything that is not as promised, counted; adds how much was looked at to ``totals``."""
    records, tag_key = _read(store)
    pairings = [json.loads(line) for line in diary.read_text().splitlines()]
    for kind, _ in records:
        totals[f"records: {kind}"] += 1
    totals["pairings of noise and gradient"] += len(pairings)
    used = _used(records)
    told = {_keyed(tag_key, name): step for name, step in world.taken.items()}
    return Counter({
        "rounds with two payloads": _two_payloads(records, world),
        "noise rows with two gradients": _two_gradients(pairings),
        "clients used twice": sum(len(steps) > 1 for steps in used.values()),
        "lost acknowledgements": _lost(records, world) + _lost_clients(used, told),
        "rounds with two models": _two_models(records, world),
        "wrong chains or prefixes": _wrong_chain(store) + _wrong_prefixes(records, pairings, world),
    })  # fmt: skip


def _read(store: Path) -> tuple[Records, bytes]:
    with closing(sqlite3.connect(store)) as db:
        rows = db.execute("SELECT kind, body FROM records ORDER BY number").fetchall()
        (key,) = db.execute("SELECT value FROM meta WHERE name = 'tag_key'").fetchone()
    return [(kind, json.loads(body)) for kind, body in rows], key


def _used(records: Records) -> dict[str, list[tuple[int, int]]]:
    """The steps that each client (as keyed) took part in."""
    used: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for kind, body in records:
        if kind == "step" and "tag" in body:
            used[body["tag"]].append((body["epoch"], body["step"]))
    return used


def _two_payloads(records: Records, world: World) -> int:
    """Of all that was received or is on record."""
    hashes = defaultdict(set)
    for place, payloads in world.payloads.items():
        hashes[place] |= {_sha(payload) for payload in payloads}
    for kind, body in records:
        if kind == "message":
            hashes[body["epoch"], body["round"]].add(body["hash"])
    return sum(len(different) > 1 for different in hashes.values())


def _two_gradients(pairings: list[Any]) -> int:
    gradients = defaultdict(set)
    for seed, gradient, *_ in pairings:
        gradients[seed].add(gradient)
    return sum(len(different) > 1 for different in gradients.values())


def _lost_clients(
    used: dict[str, list[tuple[int, int]]], told: dict[str, tuple[int, int] | None]
) -> int:
    """Clients who were told that they were taken, and have no step, or not the one they had."""
    return sum(
        not used.get(tag) or (step is not None and step not in used[tag])
        for tag, step in told.items()
    )


def _lost(records: Records, world: World) -> int:
    """Messages that left, and acknowledgements that were confirmed, but are not on record."""
    sent, noted = set(), set()
    epoch_of = {}
    for kind, body in records:
        if kind == "message":
            sent.add((body["epoch"], body["round"], body["hash"]))
            epoch_of[body["hash"]] = body["epoch"]
        elif kind == "ack":
            noted.add((body["epoch"], body["round"], body["hash"]))
        elif kind == "pin" and "acknowledged" in body:
            r, digest = body["acknowledged"]
            noted.add((epoch_of.get(digest, -1), r, digest))
    received = {
        (*place, _sha(payload))
        for place, payloads in world.payloads.items()
        for payload in payloads
    }
    return len(received - sent) + len(world.noted - noted) + len(world.forgotten)


def _two_models(records: Records, world: World) -> int:
    """Rounds that answered another model than the one they were begun with."""
    models = defaultdict(set, {place: set(digests) for place, digests in world.models.items()})
    for kind, body in records:
        if kind in ("pin", "message"):
            models[body["epoch"], body["round"]].add(body["x"])
    return sum(len(different) > 1 for different in models.values())


def _wrong_chain(store: Path) -> int:
    try:
        verify(store)
    except VeilstreamError:
        return 1
    return 0


def _wrong_prefixes(records: Records, pairings: list[Any], world: World) -> int:
    """Messages that are not the sum of the noisy steps on record.

    The record has a step's hash only; its content is the one of the diary that has this hash.
    """
    content = {}
    for _, _, (epoch, step), noisy in pairings:
        units = np.array(noisy, np.int64)
        content[epoch, step, _sha(learner_module._pack(units))] = units
    wrong, prefix = 0, np.zeros(DIM, np.int64)
    for kind, body in records:
        if kind == "epoch":
            prefix = np.zeros(DIM, np.int64)
        elif kind == "step":
            (stored,) = body["kept"].values()
            found = content.get((body["epoch"], body["step"], stored))
            wrong += found is None
            prefix = prefix + (0 if found is None else found)
        elif kind == "message":
            for payload in world.payloads.get((body["epoch"], body["round"]), ()):
                wrong += not np.array_equal(decode(payload).prefix, prefix)
    return wrong


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _keyed(tag_key: bytes, name: str) -> str:
    return hmac.new(tag_key, name.encode(), hashlib.sha256).hexdigest()


# --- the command ----------------------------------------------------------------------------------


def main() -> None:
    """Run the study in a process of its own and print its figures."""
    parser = argparse.ArgumentParser(prog="tests.reliability.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sabotage", choices=SABOTAGES)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        _study_here(asked)
        return
    report = _study_elsewhere(sys.argv[1:], asked.kills)
    print(json.dumps(report) if asked.json else _text(report))


def _study_here(asked: argparse.Namespace) -> None:
    def ticked(kills: int) -> None:
        print(kills, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        study = Study(asked.kills, asked.seed, asked.sabotage, ticked)
        print(json.dumps(study.run(Path(folder))), flush=True)


def _study_elsewhere(arguments: list[str], kills: int) -> dict[str, Any]:
    """A progress bar has a thread, and so has a BLAS: neither may be where lives are forked."""
    command = [sys.executable, "-m", "tests.reliability.kills", "--here", *arguments]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    last = ""
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as study,
        progress("kills", kills) as tick,
    ):
        assert study.stdout is not None
        for last in study.stdout:
            if not last.startswith("{"):
                tick(int(last))
    if study.returncode:
        raise SystemExit(study.returncode)
    report: dict[str, Any] = json.loads(last)
    return report


def _text(report: dict[str, Any]) -> str:
    lines = [f"{report['kills']} kills by SIGKILL in {report['wall_s']} s (seed {report['seed']})"]
    for title in ("violations", "kills_at", "random_kills_during", "totals"):
        lines += ["", title.replace("_", " ")]
        lines += [f"  {number:>7}  {name}" for name, number in report[title].items()]
    return "\n".join([*lines, *report["failures"]])


if __name__ == "__main__":
    main()
