"""A federation of real processes, of which any may be killed at any time.

    python -m studies.chaos --rounds 1000 --every 1.5
    python -m studies.chaos --rounds 2000 --every 0         memory of each process on the way

Server and learners are the commands that people run; this process is their init system and starts
again what has died. Victims are drawn at random from all of their processes. In the end:

* the run is complete and every ledger verifies;
* no round of any learner has two payloads: the ledgers have one message a round, and every hash
  that the server ever listed is the ledger's;
* the model is the one that the ledgers imply (sums of all noisy steps);
* no round was lost: a server that is killed goes on with the round in flight.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from veilstream.deployment.ledger.inspect import verify
from veilstream.deployment.ledger.store import Ledger
from veilstream.deployment.release import decode, encode
from veilstream.federation.addresses import free_port
from veilstream.federation.demo import direct_processes
from veilstream.federation.keys.new_keys import make_keys
from veilstream.federation.processes import Child
from veilstream.federation.server.checkpoint import ModelFile, Position
from veilstream.plans.plan import Plan
from veilstream.privacy.gradient_types import Noised
from veilstream.progress import progress

DIM = 20


@dataclass
class Report:
    """What was done, and what was found."""

    learners: int
    rounds: int
    seconds: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)
    violations: Counter[str] = field(default_factory=Counter)
    model_distance: float = 0.0
    """Of the last model to the one that the ledgers imply."""
    missing: int = 0
    """Learners' rounds that the server did without."""
    back_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By what was killed: seconds until two more rounds were closed, where nobody else died in
    between."""
    memory_mib: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Of server and learners, ten times on the way."""


def chaos_plan(learners: int, rounds: int) -> Plan:
    return Plan.parse(
        f"""
        name = "chaos"
        [learning]
        rounds = {rounds}
        local_steps = 2
        learners = {learners}
        [data]
        dim = {DIM}
        [privacy]
        epsilon = 4.0
        delta = 1e-5
        [federation]
        quorum = 0.6
        deadline_s = 30
        patience_s = 5
        [[methods]]
        name = "ours"
        mechanism = "buffered"
        step_size = 0.05
        """
    )


def study(
    folder: Path, learners: int = 3, rounds: int = 60, every_s: float = 4.0, seed: int = 0, limit_s: float = 3000.0
) -> Report:
    """Run to the end while processes die, then compare the accounts."""
    rng = np.random.default_rng(seed)
    plan = chaos_plan(learners, rounds)
    names = [f"learner-{i}" for i in range(learners)]
    port = free_port()
    make_keys(folder / "keys", ["127.0.0.1", "localhost"], names)
    (folder / "plan.toml").write_text(plan.to_toml())
    sources = {name: f"plan:{place}" for place, name in enumerate(names)}
    children = direct_processes(folder, sources, port)
    report = Report(learners, rounds)
    began = time.monotonic()
    try:
        for child in children:
            child.start()
        _live(children, folder, rounds, every_s, rng, report, began + limit_s)
    finally:
        for child in children:
            child.end()
    report.seconds = time.monotonic() - began
    _compare(folder, plan, names, report)
    return report


def _live(
    children: list[Child],
    folder: Path,
    rounds: int,
    every_s: float,
    rng: np.random.Generator,
    report: Report,
    until: float,
) -> None:
    done, due = 0, 0.0
    killed: tuple[str, float, int] | None = None
    with progress("rounds", rounds) as tick:
        while not (folder / "run/summary.json").exists():
            if time.monotonic() > until:
                report.violations["not complete"] += 1
                return
            for child in children:
                if not child.running and child.exit_code not in (None, 0, -9, -15):
                    report.violations[f"gave up with {child.exit_code}: {child.last_lines(2)}"] += 1
                    return
                _again(child)
            now = max(0, _lines(folder / "run/rounds.csv") - 1)
            tick(max(0, now - done))
            done = max(done, now)
            if done * 10 // rounds > len(report.memory_mib["server"]):
                _weigh(children, report)
            if killed and done >= killed[2] + 2:
                report.back_s[killed[0]].append(round(time.monotonic() - killed[1], 2))
                killed = None
            if done and time.monotonic() > due:
                due = time.monotonic() + (rng.exponential(every_s) if every_s else math.inf)
                if every_s:
                    victim = _kill_one(children, rng)
                    report.kills[victim] += 1
                    killed = victim, time.monotonic(), done
            time.sleep(0.05)


def _again(child: Child) -> None:
    """Start again a process that has died."""
    if not child.running:
        child.end()
        child.start()


def _weigh(children: list[Child], report: Report) -> None:
    for place, child in enumerate(children):
        name = "server" if place == 0 else f"learner {place - 1}"
        try:
            memory = psutil.Process(child.pid).memory_info().rss if child.pid else 0
        except psutil.NoSuchProcess:
            memory = 0
        report.memory_mib[name].append(round(memory / 2**20, 1))


def _kill_one(children: list[Child], rng: np.random.Generator) -> str:
    """SIGKILL for one process of the whole family, whichever it is."""
    family: list[tuple[str, int]] = []
    for place, child in enumerate(children):
        if child.pid is None:
            continue
        side = "server" if place == 0 else "learner"
        family.append((side, child.pid))
        family += [(f"{side}: {name}", pid) for name, pid in _descendants(child.pid)]
    if not family:
        return "nobody"
    name, pid = family[int(rng.integers(len(family)))]
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return "nobody"
    return name


def _descendants(root: int) -> list[tuple[str, int]]:
    """All processes that descend from one, with a short name for each."""
    try:
        processes = psutil.Process(root).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [(_short_name(process), process.pid) for process in processes]


def _short_name(process: psutil.Process) -> str:
    try:
        words = process.cmdline()
    except psutil.Error:
        return "gone"
    modules = [word for word in words if "veilstream" in word]
    last = [m.rpartition("/")[2] for m in modules if m.count(".") > 1 and "/" not in m]
    return last[0] if last else "process"


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _compare(folder: Path, plan: Plan, names: list[str], report: Report) -> None:
    """What the server lists against what the ledgers hold."""
    if not (folder / "run/summary.json").exists():
        return
    listed: dict[tuple[str, int, int], set[str]] = defaultdict(set)
    with (folder / "run/releases.csv").open() as file:
        for row in csv.DictReader(file):
            key = (row["learner"], int(row["epoch"]), int(row["learner_round"]))
            listed[key].add(row["hash"])
    report.violations["rounds with two payloads"] += sum(len(h) > 1 for h in listed.values())
    position = Position.load(folder / "run")
    total = np.zeros(DIM)
    for name in names:
        store = folder / "learners" / name / "store.db"
        verify(store)
        with Ledger(store, create=True) as ledger:
            known = {
                (record.body.epoch, record.body.round): record.body.hash
                for record in ledger.records()
                if record.kind == "message"
            }
            grid = decode(ledger.blob("message")).grid
        for (learner, *key), hashes in listed.items():
            if learner == name and hashes != {known.get((key[0], key[1]))}:
                report.violations["releases that the ledger does not know"] += 1
        # What the server holds of a learner is what that learner's ledger has a hash of.
        seat = position.seats[name]
        last = seat.round - 1
        steps = seat.round * plan.learning.local_steps
        payload = encode(seat.epoch, last, steps, grid, Noised(seat.prefix))
        if hashlib.sha256(payload).hexdigest() != known.get((seat.epoch, last)):
            report.violations["sums that the ledger does not know"] += 1
        total += seat.prefix * grid
        report.missing += plan.learning.rounds - seat.round
    method = plan.methods[0]
    implied = -method.step_size * method.server_step_size * total / len(names)
    model = ModelFile(folder / "run/models.f32", DIM).read(plan.learning.rounds)
    report.model_distance = float(np.abs(model - implied).max())
    if report.model_distance > 1e-5 * max(1.0, float(np.abs(implied).max())):
        report.violations["a model that the ledgers do not imply"] += 1
    rounds = [int(line.split(",")[0]) for line in _text(folder / "run/rounds.csv")[1:]]
    if sorted(set(rounds)) != list(range(plan.learning.rounds)):
        report.violations["rounds that are missing from the list"] += 1


def _text(path: Path) -> list[str]:
    return path.read_text().splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learners", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--every", type=float, default=4.0, help="mean seconds between kills; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder to leave everything in")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        folder = asked.keep or Path(temporary)
        report = study(folder, asked.learners, asked.rounds, asked.every, asked.seed)
    print(json.dumps(vars(report), indent=2))
    sys.exit(1 if any(report.violations.values()) else 0)


if __name__ == "__main__":
    main()
