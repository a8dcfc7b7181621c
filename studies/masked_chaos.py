"""A federation of real processes in which only sums are seen, and any process may be killed at any time.

    python -m studies.masked_chaos --rounds 1000 --every 1.5 --learners 10

How processes are killed and stay away is in `studies.process_kills`. In the end:

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
import json
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from studies import process_kills
from studies.process_kills import Chaos, names_of, run_to_the_end
from veilstream.deployment.ledger.inspect import verify
from veilstream.deployment.ledger.store import Ledger
from veilstream.federation.masking.rules import Rules
from veilstream.federation.server.masking_files import MaskingFiles
from veilstream.plans.plan import Plan


@dataclass
class Report(process_kills.Report):
    """What was done, and what was found."""

    attempts: int = 0
    """Rounds that took more than one attempt."""
    parts: int = 0
    """Learners' increments in all sums together."""
    core: int = 0
    """Learners that were in every sum."""


def plan_of(learners: int, rounds: int) -> Plan:
    """A small run, with one learner in ten colluding."""
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
        colluding = {learners // 10}
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
    folder: Path,
    learners: int = 3,
    rounds: int = 40,
    every_s: float = 3.0,
    absent: float = 0.1,
    seed: int = 0,
    limit_s: float = 3000.0,
) -> Report:
    """Run to the end while processes die, then look at what is left."""
    plan, report = plan_of(learners, rounds), Report(learners, rounds)
    if run_to_the_end(folder, plan, report, Chaos(every_s, absent, limit_s), seed):
        _look(folder, plan, names_of(learners), report)
    return report


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
    report.core = len(core)
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
    parser.add_argument("--every", type=float, default=1.5, help="mean seconds between kills; 0: none")
    parser.add_argument("--absent", type=float, default=0.1, help="share of learners that are away at any time")
    parser.add_argument("--limit", type=float, default=3000.0, help="seconds")
    parser.add_argument("--keep", type=Path, help="folder to leave everything in")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        folder = given.keep or Path(temporary)
        report = study(folder, given.learners, given.rounds, given.every, given.absent, given.seed, given.limit)
    print(json.dumps(vars(report), indent=2))
    sys.exit(bool(report.violations))


if __name__ == "__main__":
    main()
