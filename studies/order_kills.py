"""Learners with a secret order that are killed again and again: is every record in one step, and in the same one?

    python -m studies.order_kills --kills 400 [--window]

A learner process (the real `Learner`, on a real store, witness and index) is asked for round after round, with another
model each time it has to be asked again, through two epochs, and dies by SIGKILL: at every place between two writes of
the ledger, of the list of clients and of the index, and at random times. Another one starts on what it left behind.
With ``--window`` records arrive round by round and are used in the next window; whoever was not answered comes again.

A diary outlives every kill: which records each step was made of, each time it was computed, and which secret of the
noise met which sum of gradients. At the end of a history it is compared with the ledger. Sabotaged learners
(``--sabotage``) show that each count can be other than zero.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import veilstream.deployment.step_index as index_module
from studies.kill_lives import WRITING, Diary, Fate, NumpyLogistic, _keep_diary, _place_faults
from veilstream.deployment.epoch_records import EpochRecords
from veilstream.deployment.learner import Learner
from veilstream.deployment.ledger.inspect import verify
from veilstream.deployment.ledger.store import Ledger
from veilstream.deployment.local_rounds import LocalRounds
from veilstream.deployment.step_index import IndexWriter, _Written
from veilstream.deployment.window_records import WindowRecords
from veilstream.learning.tasks import Sample
from veilstream.plans.plan import Plan

DIM, ROUNDS, TAU, PEOPLE, EPOCHS = 5, 4, 3, 600, 2
"""More people than are written down at once, and some steps of twice as many as others."""
WINDOW_ROUNDS = 1
"""Of a window; the people of the last one are not taken."""
INDEX_PLACES = ("a part of the index is written", "before the index is named", "after the index is named")
ORDER_PLACES = ("clients-stored", "clients-witnessed", "ordered-stored", "ordered-witnessed")
STEP_PLACES = ("pinned", "step-computed", "step-stored", "step-witnessed", "message-computed", "message-stored")
LATE_PLACES = ("message-witnessed", "epoch-closed")
PLACES = (
    *INDEX_PLACES,
    *ORDER_PLACES,
    *STEP_PLACES,
    *LATE_PLACES,
    *(place for place in WRITING if place not in ("after INSERT segments", "after DELETE records")),
)
WINDOW_PLACES = (
    *("arrived-stored", "arrived-witnessed", "window-stored", "window-witnessed"),
    *(place for place in PLACES if place not in (*INDEX_PLACES, *ORDER_PLACES)),
)
RANDOM = "a random time"
SABOTAGES = ("redrawn", "known-records-twice", "same-secrets")
VIOLATIONS = (
    "records in two steps",
    "records lost",
    "steps made of other records after a crash",
    "records outside their window",
    "noise rows with two gradients",
    "rounds with two payloads",
    "clients whom the ledger does not know",
    "learners that gave up",
)
_AT_ONCE = 64
_CALLERS = 40
"""Who come together, where records arrive."""


def plan(window: bool = False) -> Plan:
    """A mechanism with state, and an order that is secret."""
    return Plan(
        learning={"rounds": ROUNDS, "local_steps": TAU, "learners": 1, "clients_per_step": PEOPLE // (ROUNDS * TAU)},
        data={"dim": DIM},
        privacy={"epsilon": 4.0, "delta": 1e-3, "order": "secret", "window": WINDOW_ROUNDS * TAU if window else None},
        methods=[{"name": "ours", "mechanism": "banded", "step_size": 0.1}],
    )


def people(epoch: int) -> list[tuple[str, Sample]]:
    """Of one epoch; the first number of a record says whose it is."""
    found = []
    for i in range(epoch * PEOPLE, (epoch + 1) * PEOPLE):
        features = np.random.default_rng(i).normal(size=DIM).astype(np.float32)
        features[0] = i
        found.append((f"client {i}", Sample(features, float((-1) ** i))))
    return found


# --- a life: everything below until the next line runs in the forked child ------------------------


def _live(store: Path, handle: int, fate: Fate, sabotage: str | None, window: bool, world: Connection) -> NoReturn:
    status, diary = 1, Diary(handle)
    try:
        _place_faults(fate)
        _place_faults_of_the_index(fate)
        with Learner(plan(window), store, NumpyLogistic(), create=True) as learner:
            _keep_diary(learner, diary)
            _note_records(learner, handle)
            if sabotage:
                _sabotage(sabotage, learner)
            _go_on(learner, world, np.random.default_rng(os.getpid()))
        status = 0
    except BaseException as error:
        with suppress(OSError):
            world.send(("failed", f"{type(error).__name__}: {error}"))
    finally:
        os._exit(status)


def _go_on(learner: Learner, world: Connection, rng: np.random.Generator) -> None:
    while True:
        if learner.over:
            if learner.epoch == EPOCHS - 1:
                world.send(("done", None))
                return
            learner.new_epoch()
        everyone = people(learner.epoch)
        if learner.takes_whole_sources:
            learner.use_records(everyone)
        while not learner.horizon_reached:
            if not learner.pinned:
                learner.begin_round(learner.round, rng.normal(size=DIM).astype(np.float32))
            if not learner.takes_whole_sources:
                arrived = everyone[learner.round * PEOPLE // ROUNDS : (learner.round + 1) * PEOPLE // ROUNDS]
                for first in range(0, len(arrived), _CALLERS):
                    learner.observe_many(arrived[first : first + _CALLERS])
            release = learner.finish_round()
            world.send(("release", (release.epoch, release.round, release.hash)))


def _place_faults_of_the_index(fate: Fate) -> None:
    finish, end, write = IndexWriter.finish, _Written.end, index_module._Parts._write
    index_module._BUFFER_BYTES = 256  # small parts are written, too
    index_module._TOGETHER = _AT_ONCE

    def finished(self: IndexWriter, *given: Any) -> Any:
        found = finish(self, *given)
        fate.reached("after the index is named")
        return found

    def ended(self: _Written, told: bytes) -> None:
        end(self, told)
        fate.reached("before the index is named")

    def wrote(self: Any, part: int) -> None:
        write(self, part)
        fate.reached("a part of the index is written")

    IndexWriter.finish, _Written.end, index_module._Parts._write = finished, ended, wrote


def _note_records(learner: Learner, handle: int) -> None:
    """Note which records every step is made of, before anything can come of it."""
    kind: Any = EpochRecords if learner.takes_whole_sources else WindowRecords
    noisy_of, records_of = LocalRounds.noisy, kind.records
    seen: list[int] = []

    def records(self: Any, step: int) -> Iterator[Any]:
        for samples in records_of(self, step):
            seen.extend(int(sample.features[0]) for sample in samples if sample is not None)
            yield samples

    def noisy(self: LocalRounds, gradient: Any, secret: bytes) -> Any:
        step = learner.local.step
        line = json.dumps({"epoch": learner.epoch, "step": step, "records": sorted(seen)})
        os.write(handle, line.encode() + b"\n")
        seen.clear()
        return noisy_of(self, gradient, secret)

    take = Learner._take_records

    def take_anew(self: Learner, order: Any) -> None:
        seen.clear()
        take(self, order)

    kind.records, LocalRounds.noisy, Learner._take_records = records, noisy, take_anew


def _sabotage(kind: str, learner: Learner) -> None:
    if kind == "redrawn":  # the order follows from the process, not from the ledger
        blob = Ledger.blob

        def redrawn(self: Ledger, name: str) -> bytes:
            return hashlib.sha256(str(os.getpid()).encode()).digest() if name == "order/secret" else blob(self, name)

        Ledger.blob = redrawn
    elif kind == "known-records-twice":  # a record stays for the next step as well
        kind: Any = EpochRecords if learner.takes_whole_sources else WindowRecords
        records_of = kind.records

        def twice(self: Any, step: int) -> Iterator[Any]:
            if step:
                yield next(records_of(self, step - 1), [])[:1]
            yield from records_of(self, step)

        kind.records = twice
    elif kind == "same-secrets":  # harmless by itself: the records of a step, too, would be the same again
        _sabotage("redrawn", learner)
        learner._fresh_seeds = lambda count: [
            hashlib.sha256(f"{learner.epoch}/{learner.local.noise.position + i}".encode()).digest()
            for i in range(count)
        ]


# --- many lives -----------------------------------------------------------------------------------


@dataclass
class Study:
    """All histories together."""

    kills: int
    seed: int
    sabotage: str | None
    window: bool = False
    at: Counter[str] = field(default_factory=Counter)
    violations: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def places(self) -> tuple[str, ...]:
        """Where learners are killed."""
        return WINDOW_PLACES if self.window else PLACES

    def run(self, folder: Path) -> dict[str, Any]:
        """Histories until there were enough kills; then the figures."""
        began, rng = time.monotonic(), np.random.default_rng(self.seed)
        places = deque(self.places)
        _warm_up(folder, self.window)
        while self.at.total() < self.kills and len(self.failures) < 20:
            self.totals["histories"] += 1
            self._history(folder / f"{self.totals['histories']}.db", places, rng)
        return {
            "kills": self.at.total(),
            "seed": self.seed,
            "sabotage": self.sabotage,
            "wall_s": round(time.monotonic() - began, 1),
            "violations": {name: self.violations[name] for name in VIOLATIONS},
            "kills_at": {place: self.at[place] for place in (*self.places, RANDOM)},
            "totals": dict(self.totals),
            "failures": self.failures[:5],
        }

    def _history(self, store: Path, places: deque[str], rng: np.random.Generator) -> None:
        diary, told, done = store.with_suffix(".diary"), defaultdict[tuple[int, int], set[str]](set), False
        usual_s = 0.2
        while not done and len(self.failures) < 20:
            place = places[0] if rng.random() < 0.75 else None
            fate = Fate(place, int(rng.integers(1, 4)))
            done, died, usual_s = self._life(store, diary, fate, rng.random() * 1.2 * usual_s, told, usual_s)
            if died:
                self.at[place or RANDOM] += 1
            if place:
                places.rotate(-1)
        self._check(store, diary, told)

    def _life(
        self, store: Path, diary: Path, fate: Fate, doom_s: float, told: dict[tuple[int, int], set[str]], usual_s: float
    ) -> tuple[bool, bool, float]:
        here, there = Pipe()
        handle = os.open(diary, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        began, process = time.monotonic(), os.fork()
        if process == 0:
            here.close()
            _live(store, handle, fate, self.sabotage, self.window, there)
        os.close(handle)
        there.close()
        done = False
        with suppress(EOFError, ConnectionError):
            if fate.place is None and not here.poll(doom_s):
                os.kill(process, signal.SIGKILL)
            while True:
                kind, value = here.recv()
                if kind == "release":
                    told[value[0], value[1]].add(value[2])
                elif kind == "failed":
                    self.failures.append(str(value))
                    self.violations["learners that gave up"] += 1
                done = done or kind == "done"
        _, status = os.waitpid(process, 0)
        here.close()
        died = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        return done, died, usual_s if died else 0.5 * (usual_s + time.monotonic() - began)

    def _check(self, store: Path, diary: Path, told: dict[tuple[int, int], set[str]]) -> None:
        made = defaultdict[tuple[int, int], set[tuple[int, ...]]](set)
        noise = defaultdict[str, set[str]](set)
        for line in diary.read_text().splitlines():
            said = json.loads(line)
            if isinstance(said, dict):
                made[said["epoch"], said["step"]].add(tuple(said["records"]))
            else:
                secret, gradient, *_ = said
                noise[secret].add(gradient)
        self.totals["steps computed"] += sum(map(len, made.values()))
        self.totals["pairings of noise and gradient"] += len(noise)
        self.totals["releases"] += len(told)
        found = Counter[str]()
        taken = PEOPLE - (PEOPLE * WINDOW_ROUNDS // ROUNDS if self.window else 0)
        for epoch in range(EPOCHS):
            steps_of = defaultdict[int, set[int]](set)
            for (of, step), each in made.items():
                if of == epoch:
                    for records in each:
                        for record in records:
                            steps_of[record].add(step)
            found["records in two steps"] += sum(len(steps) > 1 for steps in steps_of.values())
            everyone = range(epoch * PEOPLE, epoch * PEOPLE + taken)
            found["records lost"] += sum(i not in steps_of for i in everyone)
            if self.window:
                found["records outside their window"] += sum(
                    step // (WINDOW_ROUNDS * TAU) != (i % PEOPLE) * ROUNDS // PEOPLE // WINDOW_ROUNDS + 1
                    for i, steps in steps_of.items()
                    for step in steps
                )
        found["steps made of other records after a crash"] = sum(len(each) > 1 for each in made.values())
        found["noise rows with two gradients"] = sum(len(each) > 1 for each in noise.values())
        found["rounds with two payloads"] = sum(len(each) > 1 for each in told.values())
        if not self.failures:
            status = verify(store)
            found["clients whom the ledger does not know"] = abs(EPOCHS * taken - status.clients)
            assert status.secrets == 0
            self.totals["ledgers verified"] += 1
        self.violations += found


def _warm_up(folder: Path, window: bool) -> None:
    """Import, solve and cache here what every life needs."""
    with Learner(plan(window), folder / "warm.db", NumpyLogistic(), create=True) as learner:
        if not window:
            learner.use_records(people(0))
        learner.learn_round(0, np.zeros(DIM), people(0)[:9] if window else None)


def main() -> None:
    """Run the study and print its figures."""
    parser = argparse.ArgumentParser(prog="studies.order_kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sabotage", choices=SABOTAGES)
    parser.add_argument("--window", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Study(asked.kills, asked.seed, asked.sabotage, asked.window).run(Path(folder))
    if asked.json:
        print(json.dumps(report))
        return
    lines = [f"{report['kills']} kills by SIGKILL in {report['wall_s']} s (seed {report['seed']})"]
    for title in ("violations", "kills_at", "totals"):
        lines += ["", title.replace("_", " ")]
        lines += [f"  {number:>7}  {name}" for name, number in report[title].items()]
    print("\n".join([*lines, *report["failures"]]))


if __name__ == "__main__":
    main()
