"""The world of the SIGKILL study: a server, clients, and a learner process seen from outside."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from studies.kill_lives import DIM, PATIENCE, ROUNDS, STUCK_S, TAU, Diary, Fate, _live, _sha
from veilstream.deployment.release import decode
from veilstream.learning.tasks import Sample
from veilstream.records.admission import Answer

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
        left = int(self.rng.integers(TAU + 2))
        while left > 0:
            together = int(self.rng.integers(1, TAU + 2))
            if together == 1:
                self.visit(life, self._someone())
            else:
                self._visit_together(life, together)
            left -= together
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
        self._told(name, *life.ask("observe", name, self._data()))

    def _visit_together(self, life: Life, count: int) -> None:
        """Whoever waits, new ones, ones who were taken already, and the same one twice."""
        names: list[str] = []
        fresh = 0
        for _ in range(count):
            known = self.taken and self.rng.random() < 0.15
            if known:
                names.append(list(self.taken)[self.rng.integers(len(self.taken))])
            elif names and self.rng.random() < 0.15:
                names.append(names[-1])
            else:
                if fresh == len(self.waiting):
                    self.waiting.append(f"client {len(self.taken)}/{fresh}")
                names.append(self.waiting[fresh])
                fresh += 1
        kind, told = life.ask("observe_many", [(name, self._data()) for name in names])
        if kind == "answers":
            for name, (answer, step) in zip(names, told, strict=False):
                self._told(name, answer, step)

    def _data(self) -> Sample:
        features = self.rng.standard_normal(DIM).astype(np.float32)
        return Sample(features, float(self.rng.choice([-1, 1])))

    def _told(self, name: str, kind: str, step: tuple[int, int] | None) -> None:
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

    def __init__(self, store: Path, diary: Path, fate: Fate, doom: Doom | None, sabotage: str | None) -> None:
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
