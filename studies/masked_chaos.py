"""A federation of real processes in which only sums are seen, and any process may be killed at any time.

    python -m studies.masked_chaos --rounds 1000 --every 1.5 --learners 10

Server and learners are the commands that people run; whatever dies is started again, and one learner in ten stays away
for some seconds. In the end:

* the run is complete, every ledger verifies, and every round has one certificate: the set that was opened;
* no learner has shared for two sets of a round of which it had no proof that the first can never be opened;
* what each ledger says was opened is what the certificates say, and who is named in one had signed that set;
* nobody was part of a sum whose core was too small.

That the model is what the opened increments give is shown in one process (`tests/federation/test_masked_chaos.py`):
a ledger destroys its increments with the epoch, and no message of one learner exists elsewhere.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from studies.chaos import _again, _kill_one, _lines
from veilstream.deployment.ledger.inspect import verify
from veilstream.deployment.ledger.store import Ledger
from veilstream.federation.addresses import free_port
from veilstream.federation.demo import direct_processes
from veilstream.federation.keys.new_keys import make_keys
from veilstream.federation.masking.rules import Rules
from veilstream.federation.processes import Child
from veilstream.federation.server.masking_files import MaskingFiles
from veilstream.plans.plan import Plan


@dataclass
class Report:
    """What was done, and what was found."""

    learners: int
    rounds: int
    seconds: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)
    absences: int = 0
    attempts: int = 0
    """Rounds that took more than one attempt."""
    parts: int = 0
    """Learners' increments in all sums together."""
    violations: Counter[str] = field(default_factory=Counter)


def plan_of(learners: int, rounds: int) -> Plan:
    """A small run; two thirds of the learners must stay honest and present."""
    return Plan.parse(
        f"""
        name = "masked-chaos"
        [learning]
        rounds = {rounds}
        local_steps = 1
        clients_per_step = 4
        learners = {learners}
        [data]
        dim = 20
        [privacy]
        epsilon = 4.0
        delta = 1e-5
        trust = "sum"
        honest = 1
        [federation]
        quorum = 0.6
        grace_s = 2
        deadline_s = 20
        patience_s = 2
        [[methods]]
        name = "ours"
        mechanism = "buffered"
        step_size = 0.05
        """
    )


def study(
    folder: Path, learners: int = 3, rounds: int = 40, every_s: float = 3.0, seed: int = 0, limit_s: float = 3000.0
) -> Report:
    """Run to the end while processes die, then look at what is left."""
    rng, plan = np.random.default_rng(seed), plan_of(learners, rounds)
    names = [f"learner-{i}" for i in range(learners)]
    make_keys(folder / "keys", ["127.0.0.1", "localhost"], names)
    (folder / "plan.toml").write_text(plan.to_toml())
    sources = {name: f"plan:{place}" for place, name in enumerate(names)}
    children = direct_processes(folder, sources, free_port())
    report, began = Report(learners, rounds), time.monotonic()
    try:
        for child in children:
            child.start()
        _live(children, folder, every_s, rng, report, began + limit_s)
    finally:
        for child in children:
            child.end()
    report.seconds = time.monotonic() - began
    if (folder / "run/summary.json").exists():
        _look(folder, plan, names, report)
    return report


def _live(
    children: list[Child], folder: Path, every_s: float, rng: np.random.Generator, report: Report, until: float
) -> None:
    due, away = 0.0, dict[int, float]()
    while not (folder / "run/summary.json").exists():
        now = time.monotonic()
        if now > until:
            report.violations["not complete"] += 1
            return
        for place, child in enumerate(children):
            if not child.running and child.exit_code not in (None, 0, -9, -15):
                report.violations[f"gave up with {child.exit_code}: {child.last_lines(2)}"] += 1
                return
            if away.get(place, 0.0) < now:
                _again(child)
        if _lines(folder / "run/rounds.csv") > 1 and now > due:
            due = now + rng.exponential(every_s)
            report.kills[_kill_one(children, rng)] += 1
            if rng.random() < 0.1:
                place = 1 + int(rng.integers(report.learners))
                away[place] = now + rng.uniform(1.0, 6.0)
                children[place].end(0.0)
                report.absences += 1
        time.sleep(0.05)


def _look(folder: Path, plan: Plan, names: list[str], report: Report) -> None:
    files, trust = MaskingFiles(folder / "run"), plan.trust
    assert trust is not None
    rules, openings = Rules(trust.learners, trust.honest, trust.colluding), files.openings()
    listed = files.keys()
    assert listed is not None
    if sorted(openings) != list(range(report.rounds)):
        report.violations["rounds without a certificate"] += 1
    hashes = {r: hashlib.sha256(c.opened.pack()).hexdigest() for r, c in openings.items()}
    core = frozenset(range(len(names)))
    for r, certificate in sorted(openings.items()):
        members = certificate.opened.members
        core &= members
        report.attempts += certificate.opened.at.attempt > 1
        report.parts += len(members)
        if len(members) < rules.least or not rules.enough_core(len(core)):
            report.violations[f"a set of round {r} is too small"] += 1
        if len(certificate.signatures.by) < rules.threshold:
            report.violations[f"round {r} was opened by too few"] += 1
    for place, name in enumerate(sorted(names)):
        verify(folder / "learners" / name / "store.db")
        _account(folder / "learners" / name / "store.db", place, hashes, openings, report)


def _account(store: Path, place: int, hashes: dict[int, str], openings: dict, report: Report) -> None:  # type: ignore[type-arg]
    signed, shared = defaultdict[int, set[str]](set), defaultdict[int, set[tuple[int, str]]](set)
    with Ledger(store) as ledger:
        for record in ledger.records():
            body = record.body
            if body.round is None or body.hash is None:
                continue
            if record.kind == "sign":
                signed[body.round].add(body.hash)
            if record.kind == "share":
                shared[body.round].add((body.attempt or 0, body.hash))
            if record.kind == "opened" and hashes.get(body.round) != body.hash:
                report.violations["a ledger and a certificate say otherwise what was opened"] += 1
    for r, sets in shared.items():
        if len({attempt for attempt, _ in sets}) < len(sets):
            report.violations["two sets of one attempt were shared for"] += 1
        if max(sets)[1] != hashes.get(r) and len(sets) > 1:
            report.violations["a set was shared for that was not the last"] += 1
    for r, certificate in openings.items():
        if place in certificate.opened.members and hashes[r] not in signed[r]:
            report.violations["a set was opened that a learner in it did not sign"] += 1


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("learners", 3), ("rounds", 200), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--every", type=float, default=1.5, help="seconds between two kills, on average")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = study(Path(folder), given.learners, given.rounds, given.every, given.seed)
    print(report)
    sys.exit(bool(report.violations))


if __name__ == "__main__":
    main()
