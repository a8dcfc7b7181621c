"""Damaged and outdated stores: is anything accepted that is not what was written?

    python -m studies.damage --cases 10000

*Damage*: stores in several states, with and without SQLite's log beside them, get bits flipped, are
truncated, have pages zeroed or swapped; so do the log and the witness. A learner must refuse, or
know exactly what it knew: every table, every blob and client by its key, the noise, the last
message, and the message that follows (seeds are drawn from a counter here, so that two learners
that know the same go on the same, and every case can be repeated).

*Old copies*: copies of the store from every earlier moment, put back under the newest witness, must
be refused when they are opened; with the witness put back too, when the server says what it has
accepted.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import apsw
import numpy as np
from tests.support.known_secrets import known_secrets

import veilstream.deployment.learner
import veilstream.deployment.ledger.store
from studies.disk import scratch
from studies.power_cuts import ROUNDS, D, NumpyTask, plan_of, small_snapshots
from veilstream.deployment.learner import Learner
from veilstream.deployment.ledger.store import Ledger
from veilstream.deployment.ledger.visits import TAG_BYTES
from veilstream.errors import LedgerError, VeilstreamError
from veilstream.learning.tasks import Sample
from veilstream.plans.plan import Plan
from veilstream.progress import progress

__all__ = ["OLD_COPIES", "OUTCOMES", "VIOLATIONS", "Findings", "damage_study", "old_copies_study"]

Files = dict[str, bytes]
"""Content by name, of a store, its log (if there is one) and its witness."""

STORE, LOG, WITNESS = "store.db", "store.db-wal", "store.witness"
_BLOCKS = {STORE: (0, 16384), LOG: (32, 24 + 16384), WITNESS: (0, 96)}
"""Where pages, frames and entries begin, and how long they are."""

FIRST_CLIENT = "client 1"
"""Took part in the first step of every store here (`_advance` numbers them by records)."""

OUTCOMES = ("refused", "refused when used", "nothing changed")
VIOLATIONS = ("accepted with altered content", "crashed")
OLD_COPIES = ("old store refused", "old store and witness refused", "old copy accepted")


@dataclass
class Findings:
    """What a study found."""

    by_kind: dict[str, Counter[str]] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    """Violations, with what it takes to repeat them."""
    seconds: float = 0.0

    def count(self, kind: str, outcome: str) -> None:
        """One more case."""
        self.by_kind.setdefault(kind, Counter())[outcome] += 1

    def total(self, *outcomes: str) -> int:
        """Over all kinds."""
        return sum(counts[outcome] for counts in self.by_kind.values() for outcome in outcomes)

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "outcomes": {kind: dict(counts) for kind, counts in self.by_kind.items()},
            "examples": self.examples[:20],
            "seconds": round(self.seconds, 1),
        }


# --- stores to be damaged ------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """A store at some moment, and what a learner makes of it."""

    name: str
    plan: Plan
    files: Files
    trees: list[list[int]]
    """Leaf pages of every table and index that has several, by number from 0."""
    expected: Any


def _sample(number: int) -> Sample:
    features = np.random.default_rng([7, number]).standard_normal(D).astype(np.float32)
    return Sample(features, 1.0)


def _model(number: int) -> np.ndarray:
    return np.random.default_rng([8, number]).standard_normal(D).astype(np.float32)


@contextmanager
def counted_secrets() -> Iterator[None]:
    """Seeds and keys from a counter: a learner that knows the same does the same."""
    numbers = itertools.count()

    def token(size: int) -> bytes:
        return hashlib.sha256(next(numbers).to_bytes(8, "big")).digest()[:size]

    counter = SimpleNamespace(token_bytes=token)
    with known_secrets(partial(token, 32)), mock.patch.object(veilstream.deployment.ledger.store, "secrets", counter):
        yield


def _advance(learner: Learner, steps: int) -> None:
    """So many more steps, with a message, an acknowledgement and a new epoch where one is due."""
    for _ in range(steps):
        if learner.horizon_reached:
            learner.new_epoch()
        number = learner.ledger.chain.length
        if not learner.pinned:
            learner.begin_round(learner.round, _model(number))
        learner.observe(f"client {number}", _sample(number))
        if not learner.clients_wanted:
            release = learner.finish_round()
            learner.acknowledge(release.round, release.hash)


def _read(root: Path) -> Files:
    names = (STORE, LOG, WITNESS)
    return {name: (root / name).read_bytes() for name in names if (root / name).exists()}


def _write(root: Path, files: Files) -> None:
    for path in root.iterdir():
        path.unlink()
    for name, content in files.items():
        (root / name).write_bytes(content)


def _states(root: Path, *, large: bool = True) -> list[State]:
    """Small stores at several steps; a large one whose tables have several pages each."""
    small = plan_of()
    wanted = [
        ("in the first round", small, 1),
        ("between rounds", small, 2),
        ("after a snapshot", small, 5),
        ("after the epoch", small, 8),
        ("in the second epoch", small, 13),
    ]
    if large:
        wanted.append(("many clients", plan_of(2, 300), 590))
    states = []
    for name, plan, steps in wanted:
        _write(root, {})
        with counted_secrets():
            with Learner(plan, root / STORE, NumpyTask(), create=True) as learner:
                _advance(learner, max(0, steps - 10))
            with Learner(plan, root / STORE, NumpyTask(), create=True) as learner:
                _advance(learner, min(steps, 10))
                with_log = _read(root)
        closed = _read(root)
        for kind, files in ((f"{name}, log", with_log), (name, closed)):
            trees = _trees(root, files)
            states.append(State(kind, plan, files, trees, _outcome(root, plan, files)))
    return states


def _trees(root: Path, files: Files) -> list[list[int]]:
    """From SQLite's own statistics; none while there is a log, which would write over them."""
    if LOG in files:
        return []
    _write(root, files)
    leaves: dict[str, list[int]] = {}
    with closing(apsw.Connection(str(root / STORE))) as db:
        for name, page in db.execute("SELECT name, pageno - 1 FROM dbstat WHERE pagetype = 'leaf'"):
            leaves.setdefault(name, []).append(page)
    return [pages for pages in leaves.values() if len(pages) > 1]


# --- what a learner knows ------------------------------------------------------------------------


def _knowledge(learner: Learner) -> dict[str, Any]:
    """Everything, by reading the tables through and by looking up every key."""
    ledger, local = learner.ledger, learner.local
    tables = {
        name: sorted(ledger._db.execute(f"SELECT * FROM {name}").fetchall())
        for name in ("meta", "records", "segments", "visits", "blobs")
    }
    return {
        **tables,
        "by name": {name: ledger.blob(name) for name in sorted(ledger.chain.kept)},
        "by tag": [ledger.past_visits([visit[:TAG_BYTES]]) for (visit,) in tables["visits"]],
        "messages": _messages(learner),
        "standing": asdict(ledger.chain.standing),
        "place": (learner.epoch, learner.round, local.taken, learner.epochs.snapshot_step),
        "models": (local.pinned, local.sealed_model, local.model.reveal().tobytes()),
        "prefix": local.prefix.tobytes(),
        "noise": local.noise.snapshot(),
        "release": bytes(learner.sealed_release().payload) if learner.round else b"",
    }


def _messages(learner: Learner) -> dict[str, int]:
    """Hashes of all messages, with their rounds; each must be known when it is asked for."""
    ledger = learner.ledger
    found = [record.body for record in ledger.records() if record.kind == "message"]
    return {body.hash: body.round for body in found if ledger.knows_message(body.round, body.hash)}


def _continuation(learner: Learner) -> bytes:
    """The next message, with a client who took part before and one who is new."""
    if learner.horizon_reached:
        learner.new_epoch()
    if not learner.pinned:
        learner.begin_round(learner.round, _model(0))
    learner.observe(FIRST_CLIENT, _sample(2))
    learner.observe("someone new", _sample(1))
    return bytes(learner.finish_round().payload)


def _outcome(root: Path, plan: Plan, files: Files) -> tuple[dict[str, Any], bytes]:
    """What a learner on these files knows, and says next."""
    _write(root, files)
    with counted_secrets(), Learner(plan, root / STORE, NumpyTask(), create=True) as learner:
        known = _knowledge(learner)
        return known, _continuation(learner)


# --- damage --------------------------------------------------------------------------------------


def _flip(content: bytearray, state: State, name: str, rng: np.random.Generator) -> None:
    """One to four bits: anywhere, or of what is in use on one page (most of it is empty)."""
    used = np.arange(len(content))
    if rng.random() < 0.5:
        first, length = _BLOCKS[name]
        start = first + int(rng.integers(max(1, (len(content) - first) // length))) * length
        page = np.frombuffer(content[start : start + length], np.uint8)
        used = start + np.flatnonzero(page)
    for place in rng.choice(used, size=int(rng.integers(1, 5))) if len(used) else []:
        content[place] ^= 1 << int(rng.integers(8))


def _truncate(content: bytearray, state: State, name: str, rng: np.random.Generator) -> None:
    """Anywhere, or at the end of a page."""
    first, length = _BLOCKS[name]
    size = int(rng.integers(len(content)))
    if rng.random() < 0.3:
        size = min(size, first + max(0, size - first) // length * length)
    del content[size:]


def _zero(content: bytearray, state: State, name: str, rng: np.random.Generator) -> None:
    """A sector, or a whole page."""
    first, length = _BLOCKS[name] if rng.random() < 0.5 else (0, 512)
    start = first + int(rng.integers(max(1, (len(content) - first) // length))) * length
    stop = min(start + length, len(content))
    content[start:stop] = bytes(stop - start)


def _swap(content: bytearray, state: State, name: str, rng: np.random.Generator) -> None:
    """Two pages, frames or entries.

    Half of the time two leaves of one table: read from end to end it then holds the same rows, and
    only a search by key goes astray.
    """
    first, length = _BLOCKS[name]
    blocks = list(range((len(content) - first) // length))
    if name == STORE and state.trees and rng.random() < 0.5:
        blocks = state.trees[int(rng.integers(len(state.trees)))]
    if len(blocks) < 2:
        return
    a, b = (first + int(i) * length for i in rng.choice(blocks, size=2, replace=False))
    content[a : a + length], content[b : b + length] = (content[b : b + length], content[a : a + length])


Damage = Callable[[bytearray, State, str, np.random.Generator], None]
DAMAGES: dict[str, tuple[Damage, float]] = {
    "bits flipped": (_flip, 0.6),
    "truncated": (_truncate, 0.2),
    "page zeroed": (_zero, 0.1),
    "pages swapped": (_swap, 0.1),
}
"""And how often each is tried."""


def _damaged(state: State, kind: str, rng: np.random.Generator) -> tuple[str, Files]:
    """The files with one of them damaged, and which."""
    files = state.files
    shares = {STORE: 0.5, LOG: 0.3, WITNESS: 0.2}
    there = [name for name in files if files[name]]
    weights = np.array([shares[name] for name in there])
    name = str(rng.choice(there, p=weights / weights.sum()))
    content = bytearray(files[name])
    DAMAGES[kind][0](content, state, name, rng)
    return name, {**files, name: bytes(content)}


def _verdict(root: Path, state: State, files: Files) -> tuple[str, str]:
    """What a learner makes of damaged files, and what there is to say about it."""
    _write(root, files)
    with ExitStack() as stack:
        stack.enter_context(counted_secrets())
        try:
            learner = stack.enter_context(Learner(state.plan, root / STORE, NumpyTask(), create=True))
        except VeilstreamError:
            return "refused", ""
        except Exception as error:
            return "crashed", f"opening: {error!r}"
        try:
            known = _knowledge(learner)
            expected, message = state.expected
            if changed := [what for what in expected if known[what] != expected[what]]:
                return "accepted with altered content", f"differs in {', '.join(changed)}"
            if _continuation(learner) != message:
                return "accepted with altered content", "goes on otherwise"
        except VeilstreamError:
            return "refused when used", ""
        except Exception as error:
            return "crashed", f"when used: {error!r}"
    return "nothing changed", ""


def damage_study(cases: int, seed: int = 0, *, large: bool = True) -> Findings:
    """So many damaged stores."""
    findings = Findings()
    began = time.monotonic()
    kinds, weights = list(DAMAGES), [share for _, share in DAMAGES.values()]
    with (
        tempfile.TemporaryDirectory(prefix="damage-", dir=scratch()) as place,
        small_snapshots(),
        progress("damaged stores", cases) as tick,
    ):
        root = Path(place)
        states = _states(root, large=large)
        for case in range(cases):
            rng = np.random.default_rng([seed, case])
            state = states[case % len(states)]
            kind = str(rng.choice(kinds, p=weights))
            name, files = _damaged(state, kind, rng)
            verdict, why = _verdict(root, state, files)
            findings.count(f"{kind}: {name}", verdict)
            if verdict in VIOLATIONS:
                told = f"seed {seed} case {case}: {kind}, {name}, {state.name}: {verdict}, {why}"
                findings.examples.append(told)
            tick(1)
    findings.seconds = time.monotonic() - began
    return findings


# --- old copies ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Copy:
    """A store as it once was."""

    records: int
    messages: int
    files: Files


def _history(root: Path, rng: np.random.Generator) -> tuple[list[Copy], tuple[int, str]]:
    """Copies from every moment of a learner's life, and the last message that the server has."""
    copies: list[Copy] = []
    _write(root, {})
    learner = Learner(plan_of(), root / STORE, NumpyTask(), create=True)

    def copy(point: str = "") -> None:
        chain = learner.ledger.chain
        messages = max(chain.epoch, 0) * ROUNDS + chain.standing.rounds
        copies.append(Copy(chain.length, messages, _read(root)))

    with mock.patch.object(Ledger, "reached", staticmethod(copy)):
        for _ in range(int(rng.integers(4, 14))):
            _advance(learner, 1)
            if rng.random() < 0.3:
                learner.close()
                copy()
                learner = Learner(plan_of(), root / STORE, NumpyTask(), create=True)
        copy()
    messages = _messages(learner)
    learner.close()
    if not messages:
        return _history(root, rng)
    digest, r = list(messages.items())[-1]
    return copies, (r, digest)


def _old_store(root: Path, copy: Copy, newest: Copy, findings: Findings) -> None:
    """The newest witness has seen more than this store."""
    _write(root, {**copy.files, WITNESS: newest.files[WITNESS]})
    try:
        Learner(plan_of(), root / STORE, NumpyTask(), create=True).close()
    except LedgerError:
        findings.count("old store", OLD_COPIES[0])
    else:
        findings.count("old store", OLD_COPIES[2])


def _all_old(root: Path, copy: Copy, told: tuple[int, str], findings: Findings) -> None:
    """Only the server knows more than this store and its witness."""
    _write(root, copy.files)
    with Learner(plan_of(), root / STORE, NumpyTask(), create=True) as learner:
        try:
            learner.begin_round(learner.round, _model(0), acknowledged=told)
        except LedgerError:
            findings.count("old store and witness", OLD_COPIES[1])
        else:
            findings.count("old store and witness", OLD_COPIES[2])


def old_copies_study(copies: int, seed: int = 0) -> Findings:
    """Put old copies back, so many in all; an end of the horizon among them."""
    findings = Findings()
    rng = np.random.default_rng([seed, 1])
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="copies-", dir=scratch()) as place,
        small_snapshots(),
        progress("old copies", copies) as tick,
    ):
        root = Path(place)
        while (done := findings.total(*OLD_COPIES)) < copies:
            history, told = _history(root, rng)
            *earlier, newest = history
            for copy in earlier:
                if copy.records < newest.records:
                    _old_store(root, copy, newest, findings)
                if copy.messages < newest.messages:
                    _all_old(root, copy, told, findings)
            tick(findings.total(*OLD_COPIES) - done)
    findings.seconds = time.monotonic() - began
    return findings


# --- the command ---------------------------------------------------------------------------------


def table(title: str, findings: Findings, outcomes: tuple[str, ...]) -> str:
    """For people."""
    width = max(len(kind) for kind in findings.by_kind) + 2
    columns = [f"{outcome:>{len(outcome) + 2}}" for outcome in outcomes]
    lines = [f"{title}; {findings.seconds:.0f} s", " " * width + "".join(columns)]
    for kind, counts in sorted(findings.by_kind.items()):
        cells = "".join(f"{counts[name]:>{len(name) + 2},}" for name in outcomes)
        lines.append(f"{kind:<{width}}{cells}")
    totals = "".join(f"{findings.total(name):>{len(name) + 2},}" for name in outcomes)
    lines.append(f"{'all':<{width}}{totals}")
    return "\n".join([*lines, *findings.examples[:20]])


def main(arguments: list[str] | None = None) -> int:
    """Exit 0 if nothing altered or old was accepted and nothing crashed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--copies", type=int, default=2_000, help="old copies put back")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    damage = damage_study(given.cases, given.seed)
    old = old_copies_study(given.copies, given.seed)
    if given.json:
        print(json.dumps({"damage": damage.as_dict(), "old copies": old.as_dict()}))
    else:
        print(table("damaged files", damage, (*OUTCOMES, *VIOLATIONS)))
        print(table("old copies", old, OLD_COPIES))
    return int(bool(damage.total(*VIOLATIONS) or old.total(OLD_COPIES[2])))


if __name__ == "__main__":
    sys.exit(main())
