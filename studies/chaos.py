"""A federation of real processes, of which any may be killed at any time.

    python -m studies.chaos --rounds 1000 --every 1.5
    python -m studies.chaos --rounds 2000 --every 0         memory of each process on the way

How processes are killed is in `studies.process_kills`. In the end:

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
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from studies import process_kills
from studies.process_kills import Chaos, names_of, run_to_the_end
from veilstream.deployment.ledger.inspect import verify
from veilstream.deployment.ledger.store import Ledger
from veilstream.deployment.release import decode, encode
from veilstream.federation.server.checkpoint import ModelFile, Position
from veilstream.plans.plan import Plan
from veilstream.privacy.gradient_types import Noised

DIM = 20


@dataclass
class Report(process_kills.Report):
    """What was done, and what was found."""

    model_distance: float = 0.0
    """Of the last model to the one that the ledgers imply."""
    missing: int = 0
    """Learners' rounds that the server did without."""


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
    plan, report = chaos_plan(learners, rounds), Report(learners, rounds)
    if run_to_the_end(folder, plan, report, Chaos(every_s, limit_s=limit_s), seed):
        _compare(folder, plan, names_of(learners), report)
    return report


def _compare(folder: Path, plan: Plan, names: list[str], report: Report) -> None:
    """What the server lists against what the ledgers hold."""
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
