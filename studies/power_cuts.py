"""Power cuts: whatever a disk loses that was not synced, does the learner keep its promise?

    python -m studies.power_cuts --cuts 5000
    python -m studies.power_cuts --cuts 1000 --synchronous NORMAL
    python -m studies.power_cuts --cuts 1000 --forgetful

A learner lives on a simulated disk (`studies.disk`) until the power fails, at a random
event; the next one finds what the disk kept. Its server asks for another x each time; clients who
got no answer come again with other data, and so do some who got one. Outside, everything that was
ever sent or answered is remembered, and compared with what the next learner knows.

With ``--forgetful`` SQLite syncs less (NORMAL) and the witness's syncs do nothing: then store and
witness can go back to the same earlier moment, and only the outside can tell.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import hmac
import json
import re
import sqlite3
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import apsw
import numpy as np

import veilstream.deployment.epochs
import veilstream.deployment.ledger.store
from studies.disk import Disk, PowerCut, ledger_on, mounted, scratch
from veilstream.deployment.epochs import LearnerParts
from veilstream.deployment.learner import Learner
from veilstream.deployment.ledger.store import Ledger
from veilstream.deployment.local_rounds import LocalRounds
from veilstream.deployment.release import Release
from veilstream.deployment.terms import Terms
from veilstream.errors import InputError, PrivacyError, VeilstreamError
from veilstream.learning.tasks import Sample, Task
from veilstream.plans.plan import Plan
from veilstream.progress import progress
from veilstream.records.admission import Answer

__all__ = [
    "BROKEN_PROMISES",
    "KINDS",
    "LOSSES",
    "Findings",
    "NumpyTask",
    "Outside",
    "Setting",
    "Visitor",
    "WatchedLearner",
    "plan_of",
    "small_snapshots",
    "study",
]

D, ROUNDS, TAU = 3, 4, 8
"""Groups of so many that an append to the witness is longer than a sector."""
SNAPSHOT_STEPS = 16
SEGMENT_RECORDS = 5
CUTS_A_STORE = (5, 40)
"""Then another store is begun: some early, for beginnings are a matter of their own; others
later."""

BROKEN_PROMISES = ("two payloads for a round", "noise row met two gradients", "client used twice")
LOSSES = ("answered client lost", "sent payload lost", "acknowledgement lost")
KINDS = (*BROKEN_PROMISES, *LOSSES, "refused to go on", "crashed")


class NumpyTask:
    """The smallest task there is; without JAX."""

    dim = D
    features_shape = (D,)
    labels = (-1.0, 1.0)
    classifies = True

    def host_gradient(self, z: np.ndarray, sample: Sample) -> np.ndarray:
        return np.asarray(z - sample.target * sample.features, np.float32)


def plan_of(rounds: int = ROUNDS, local_steps: int = TAU) -> Plan:
    """A horizon so short that epochs end often."""
    return Plan(
        learning={"rounds": rounds, "local_steps": local_steps, "learners": 1},
        data={"dim": D},
        privacy={"epsilon": 4.0, "delta": 1e-3},
        methods=[{"name": "ours", "mechanism": "buffered", "step_size": 0.1}],
    )


@contextmanager
def small_snapshots() -> Iterator[None]:
    """Snapshots within a horizon of a few steps, and segments of a few records."""
    with (
        mock.patch.object(veilstream.deployment.epochs, "_SNAPSHOT_STEPS", SNAPSHOT_STEPS),
        mock.patch.object(
            veilstream.deployment.ledger.store, "segment_is_due", lambda records, kept: records >= SEGMENT_RECORDS
        ),
    ):
        yield


@dataclass(frozen=True)
class Setting:
    """How much is synced."""

    synchronous: str = "FULL"
    witness_syncs: bool = True

    @property
    def name(self) -> str:
        return self.synchronous + ("" if self.witness_syncs else ", witness not synced")


@dataclass
class Findings:
    """What a study found."""

    setting: Setting
    violations: Counter[str] = field(default_factory=Counter)
    work: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    """Reasons, for whoever has to find out why."""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "synchronous": self.setting.synchronous,
            "witness_syncs": self.setting.witness_syncs,
            "sqlite": apsw.sqlite_lib_version(),
            **self.work,
            "violations": {kind: self.violations[kind] for kind in KINDS},
            "reasons": dict(self.refusals),
            "seconds": round(self.seconds, 1),
        }


class Outside:
    """All that was ever sent, answered or computed: what no power cut can take back."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.payloads: dict[tuple[int, int], set[str]] = {}
        self.sent: set[str] = set()
        self.answered: set[str] = set()
        self.acknowledged: set[str] = set()
        self._gradients: dict[bytes, bytes] = {}
        self._newest: dict[tuple[int, int], tuple[int, str | None]] = {}
        self._left: dict[str, set[int]] = {}

    def count(self, kind: str, number: int = 1) -> None:
        """Another violation."""
        self.findings.violations[kind] += number

    def pairing(self, secret: bytes, gradient: bytes, place: tuple[int, int], who: str | None) -> None:
        """A row of noise meets a gradient, whether or not the sum will ever leave."""
        row = hashlib.sha256(secret).digest()
        self.findings.work["steps"] += 1
        if self._gradients.setdefault(row, gradient) != gradient:
            self.count("noise row met two gradients")
        # A step that is stored is never computed again: what leaves is the newest.
        self._newest[place] = (self.findings.work["steps"], who)

    def payload(self, release: Release, tau: int) -> None:
        """A message leaves, and with it everyone who is in its steps."""
        known = self.payloads.setdefault((release.epoch, release.round), set())
        if release.hash in known:
            return
        if known:
            self.count("two payloads for a round")
        known.add(release.hash)
        self.sent.add(release.hash)
        for step in range(release.round * tau, (release.round + 1) * tau):
            use, who = self._newest[release.epoch, step]
            if who is not None:
                uses = self._left.setdefault(who, set())
                if uses - {use}:
                    self.count("client used twice")
                uses.add(use)

    def compare(self, db: Any) -> None:
        """What a store has lost of all this; each loss is counted once."""
        key, tags, messages, acks = _stored(db)
        lost = {who for who in self.answered if _keyed(key, who) not in tags}
        self._forget("answered client lost", self.answered, lost)
        self._forget("sent payload lost", self.sent, self.sent - messages)
        self._forget("acknowledgement lost", self.acknowledged, self.acknowledged - acks)

    def _forget(self, kind: str, all_of_it: set[str], lost: set[str]) -> None:
        self.count(kind, len(lost))
        all_of_it -= lost


def _keyed(key: bytes, who: str) -> bytes:
    return hmac.new(key, who.encode(), hashlib.sha256).digest()


def _lines(segment: bytes) -> list[str]:
    return zlib.decompress(segment).decode().splitlines()


def _stored(db: Any) -> tuple[bytes, set[bytes], set[str], set[str]]:
    """Key, tags, hashes of messages and of acknowledgements: read from the tables themselves.

    Packed records are read here by hand: compressed lines of kind, hash and body.
    """
    (key,) = db.execute("SELECT value FROM meta WHERE name = 'tag_key'").fetchone()
    tags = {bytes(visit)[:32] for (visit,) in db.execute("SELECT visit FROM visits")}
    messages, acks = set(), set()
    records = [tuple(row) for row in db.execute("SELECT kind, body FROM records")]
    for (content,) in db.execute("SELECT content FROM segments"):
        records += [tuple(line.split("\t")[::2]) for line in _lines(content)]
    for kind, text in records:
        body = json.loads(text)
        if kind == "message":
            messages.add(body["hash"])
        elif kind == "ack":
            acks.add(body["hash"])
        elif kind == "pin" and "acknowledged" in body:
            acks.add(body["acknowledged"][1])
    return bytes(key), tags, messages, acks


class WatchedLearner(Learner):
    """A learner whose every pairing of noise and gradient is seen."""

    outside: Outside
    ledger_type: type[Ledger]
    meetings: list[str | None]
    """Visitors whose gradients are paired next; None for a step without a client."""

    def __init__(self, plan: Plan, store: Path, task: Task, **more: Any) -> None:
        parts = LearnerParts(ledger=self.ledger_type, rounds=functools.partial(WatchedRounds, learner=self))
        super().__init__(plan, store, task, parts=parts, **more)

    def _store_steps(self, steps: Sequence[Sequence[tuple[bytes, Sample | None]]]) -> None:
        self.meetings = [self.visitors.get(clients[0][0]) if clients else None for clients in steps]
        super()._store_steps(steps)

    def expect(self, who: str) -> None:
        """Someone whose steps are to be told apart from others'."""
        self.visitors[self.ledger.keyed(who.encode())] = who

    @cached_property
    def visitors(self) -> dict[bytes, str]:
        """By their keyed tags."""
        return {}


class WatchedRounds(LocalRounds):
    """Tells of every pairing before anything can come of it."""

    def __init__(self, terms: Terms, epoch: int, learner: WatchedLearner) -> None:
        super().__init__(terms, epoch)
        self.learner = learner

    def noisy(self, gradient: Any, secret: bytes) -> Any:
        place, who = (self.epoch, self.step), self.learner.meetings.pop(0)
        self.learner.outside.pairing(secret, gradient.reveal().tobytes(), place, who)
        return super().noisy(gradient, secret)


def learner_class(ledger: type[Ledger], outside: Outside) -> type[WatchedLearner]:
    """Learners on this kind of ledger, seen from here."""
    members = {"ledger_type": ledger, "outside": outside}
    return type("StudiedLearner", (WatchedLearner,), members)


class Visitor:
    """Server and clients, who are as unhelpful as they may be."""

    def __init__(self, outside: Outside, rng: np.random.Generator) -> None:
        self.outside = outside
        self._rng = rng
        self._asked: dict[tuple[int, int], list[np.ndarray]] = {}
        self._last: tuple[int, str] | None = None
        self._unanswered: list[str] = []
        self._number = 0

    def some_round(self, learner: WatchedLearner) -> None:
        """One round, from wherever the learner stands."""
        if learner.round and self._rng.random() < 0.2:
            self._take(learner, learner.finish_round())  # may seal what is open
        if learner.horizon_reached:
            self._take(learner, learner.finish_round())
            learner.new_epoch()
            self.outside.findings.work["epochs ended"] += 1
        self._begin(learner)
        while learner.clients_wanted and self._rng.random() < 0.8:
            self._send_clients(learner, int(self._rng.integers(1, TAU + 1)))
        self._take(learner, learner.finish_round())
        if self._rng.random() < 0.2:
            self._ask_for_sealed(learner)
        if self._last is not None and self._rng.random() < 0.4:
            learner.acknowledge(*self._last)
            self.outside.acknowledged.add(self._last[1])

    def _take(self, learner: WatchedLearner, release: Release) -> None:
        self.outside.payload(release, TAU)
        self._last = (release.round, release.hash)

    def _begin(self, learner: WatchedLearner) -> None:
        """Another x first; if the learner holds an earlier one, those that were asked before."""
        asked = self._asked.setdefault((learner.epoch, learner.round), [])
        pinned = learner.pinned
        told = self._last if self._rng.random() < 0.5 else None
        asked.append(self._rng.standard_normal(D).astype(np.float32))
        for x in reversed(asked):
            try:
                learner.begin_round(learner.round, x, told)
                break
            except PrivacyError as error:
                if "another model" not in str(error):
                    raise
        else:
            raise PrivacyError("pinned to a model that nobody asked for")
        if told is not None and not pinned:
            self.outside.acknowledged.add(told[1])

    def _ask_for_sealed(self, learner: WatchedLearner) -> None:
        """Another x for a round that is sealed."""
        try:
            learner.begin_round(learner.round - 1, self._rng.standard_normal(D))
        except InputError:
            return
        self._take(learner, learner.finish_round())

    def _send_clients(self, learner: WatchedLearner, count: int) -> None:
        people = [self._someone() for _ in range(count)]
        for who in people:
            learner.expect(who)
        group = [(who, Sample(self._rng.standard_normal(D).astype(np.float32), 1.0)) for who in people]
        answers = learner.observe_many(group) if count > 1 else [learner.observe(*group[0])]
        for who, answer in zip(people, answers, strict=False):
            if answer is not Answer.TAKEN:
                raise PrivacyError("an honest client was refused")
            self.outside.answered.add(who)
            if who in self._unanswered:
                self._unanswered.remove(who)

    def _someone(self) -> str:
        """Someone who got no answer, someone who did, or someone new."""
        draw = self._rng.random()
        if draw < 0.4 and self._unanswered:
            return str(self._rng.choice(self._unanswered))
        if draw < 0.55 and self._number:
            return f"client {self._rng.integers(self._number)}"
        self._number += 1
        self._unanswered.append(f"client {self._number - 1}")
        return self._unanswered[-1]


class History:
    """One store and its lives."""

    def __init__(self, root: Path, findings: Findings, rng: np.random.Generator) -> None:
        self._rng = rng
        self._store = root / "store.db"
        self._findings = findings
        self._disk = Disk(root, rng, witness_syncs=findings.setting.witness_syncs)
        self._outside = Outside(findings)
        self._visitor = Visitor(self._outside, rng)
        self._plan = plan_of()

    def run(self, cuts: int, tick: Any) -> int:
        """Live and be cut, so often or until the learner refuses; returns how often."""
        with mounted(self._disk) as vfs, small_snapshots():
            ledger = ledger_on(
                self._disk,
                vfs,
                synchronous=self._findings.setting.synchronous,
                wal_autocheckpoint=int(self._rng.choice([5, 20, 60])),
            )
            learner = learner_class(ledger, self._outside)
            for done in range(cuts):
                if not self._live(learner):
                    return done
                self._findings.work["events"] += self._disk.moment - self._began
                self._findings.work["cuts"] += 1
                tick(1)
                self._disk.restart()
            self._look(learner)
            return cuts

    def _look(self, learner: type[WatchedLearner]) -> None:
        """What the last cut has left."""
        try:
            self._open_and_work(learner)
        except VeilstreamError as error:
            self._end("refused to go on", error)
        except Exception as error:
            self._end("crashed", error)

    def _live(self, learner: type[WatchedLearner]) -> bool:
        """Until the power fails: True. False if it ended in another way, which is a violation."""
        self._began = self._disk.moment
        self._disk.cut_after(int(self._rng.integers(1, self._rng.choice([20, 100, 400]))))
        try:
            while True:
                self._open_and_work(learner)
        except PowerCut:
            return True
        except VeilstreamError as error:
            if self._disk.off:
                return True  # said on the way down
            self._end("refused to go on", error)
        except Exception as error:
            if self._disk.off:
                return True
            self._end("crashed", error)
        return False

    def _open_and_work(self, learner: type[WatchedLearner]) -> None:
        """One learner, for a few rounds; closed in good order unless the power fails."""
        opened = learner(self._plan, self._store, NumpyTask(), create=True)
        try:
            self._outside.compare(opened.ledger._db)
            self._findings.work["starts"] += 1
            while self._rng.random() < 0.9:
                self._visitor.some_round(opened)
                self._findings.work["rounds"] += 1
        finally:
            opened.close()

    def _end(self, kind: str, error: Exception) -> None:
        """Note why, and what the store has lost, whether or not its learner noticed."""
        self._outside.count(kind)
        self._findings.refusals[_reason(error)] += 1
        self._disk.cut_at = None
        try:
            with closing(sqlite3.connect(self._store)) as db:
                self._outside.compare(db)
        except (sqlite3.Error, TypeError):
            return  # nothing can be read: it was refused, and that is counted


def _reason(error: Exception) -> str:
    """Without directories, numbers and hashes, so that equal reasons are equal."""
    words = str(error).split(": nothing was")[0].split()
    plain = " ".join(Path(word).name if "/" in word else word for word in words)
    return f"{type(error).__name__}: " + re.sub(r"'[0-9a-f]{16}'|\b\d+\b", "#", plain)


def study(setting: Setting, cuts: int, seed: int = 0) -> Findings:
    """Cut the power so often, on as many stores as it takes."""
    findings = Findings(setting)
    rng = np.random.default_rng(seed)
    began = time.monotonic()
    with progress(f"power cuts ({setting.name})", cuts) as tick:
        attempts = 0
        while findings.work["cuts"] < cuts and attempts < cuts:
            attempts += 1
            findings.work["stores"] += 1
            left = min(int(rng.choice(CUTS_A_STORE)), cuts - findings.work["cuts"])
            with tempfile.TemporaryDirectory(prefix="power-cuts-", dir=scratch()) as root:
                History(Path(root), findings, rng).run(left, tick)
    findings.seconds = time.monotonic() - began
    return findings


def table(findings: Findings) -> str:
    """For people."""
    work = findings.work
    lines = [
        f"synchronous={findings.setting.name}; SQLite {apsw.sqlite_lib_version()}; {findings.seconds:.0f} s",
        *(
            f"  {work[what]:>9,}  {what}"
            for what in ("cuts", "events", "stores", "starts", "rounds", "steps", "epochs ended")
        ),
        "violations",
        *(f"  {findings.violations[kind]:>9,}  {kind}" for kind in KINDS),
    ]
    lines += [f"             {number} x {why}" for why, number in findings.refusals.most_common(6)]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Exit 0 where what was found is what should be: nothing with FULL, something without."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuts", type=int, default=5000)
    parser.add_argument("--synchronous", choices=["FULL", "NORMAL", "OFF"])
    parser.add_argument("--forgetful", action="store_true", help="the witness's syncs do nothing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    synchronous = given.synchronous or ("NORMAL" if given.forgetful else "FULL")
    setting = Setting(synchronous, witness_syncs=not given.forgetful)
    findings = study(setting, given.cuts, given.seed)
    print(json.dumps(findings.as_dict()) if given.json else table(findings))
    return int(bool(findings.violations.total()) == (setting == Setting()))


if __name__ == "__main__":
    sys.exit(main())
