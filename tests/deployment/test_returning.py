"""People who return: every visit of a file counts once, whatever interrupts the learner."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from tests.support.known_secrets import NamedRounds
from veilstream.deployment.epochs import EpochLedger
from veilstream.deployment.learner import Learner
from veilstream.deployment.ledger.inspect import verify
from veilstream.deployment.ledger.store import CRASH_POINTS, Ledger
from veilstream.learning.tasks import Huber
from veilstream.plans.clients import stream_of
from veilstream.plans.data_source import open_file
from veilstream.plans.plan import Plan
from veilstream.simulation.runner import simulate

PEOPLE, VISITS, APART = 16, 8, 14
TAU = 4
ROUNDS = PEOPLE * VISITS // TAU

PLAN = f"""
[learning]
rounds = {ROUNDS}
local_steps = {TAU}
task = "huber"
[data]
kind = "table"
client = "patient"
label = "score"
label_range = [0.0, 50.0]
held_out_share = 0.0
[[data.features]]
name = "age"
low = 0.0
high = 120.0
[[data.features]]
name = "dose"
low = 0.0
high = 10.0
[privacy]
epsilon = 8.0
delta = 1e-5
participations = {VISITS}
min_separation = {APART}
[run]
seeds = 1
[[methods]]
name = "ours"
mechanism = "banded"
step_size = 0.1
"""


class Killed(BaseException):
    """As SIGKILL: nothing after it runs."""


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Everyone in turn, eight times, each visit another record; some rows are of no use."""
    rng = np.random.default_rng(3)
    lines = ["patient,score,age,dose"]
    for visit in range(VISITS):
        for person in range(PEOPLE):
            score = 5 * person % 50 + visit / 10
            lines.append(f"p{person},{score},{30 + person},{rng.uniform(0, 10):.3f}")
            if (visit + person) % 5 == 0:
                lines.append(",,,")  # nobody's: a row without a cell is skipped
    path = tmp_path_factory.mktemp("records") / "visits.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def plan(records) -> Plan:
    return Plan.parse(PLAN, {"data.source": str(records)})


def go_on(plan, store, records, *, resume: bool = True) -> list[bytes]:
    """One life of a learner, from its start to the horizon; what it sealed, as far as it came."""
    task = Huber(3)
    sealed = []
    learner = Learner(plan, store, task, create=True)
    try:
        source = open_file(records, plan)
        if resume:
            source.resume(learner.bookmarks())
        while not learner.horizon_reached:
            if not learner.pinned:
                if not source.ready(1, TAU, learner.may_take):
                    break
                learner.begin_round(learner.round, np.zeros(task.dim, np.float32))
            source.serve(learner.round, learner.observe_many, lambda: learner.clients_wanted)
            learner.note_read(source.bookmark)
            sealed.append(bytes(learner.finish_round().payload))
    finally:
        learner.close()
    return sealed


def visits_of(store) -> Counter[bytes]:
    """How often each client took part, by the records of the chain."""
    with Ledger(store) as ledger:
        return Counter(tag for record in ledger.records() for tag, _ in record.visits)


@pytest.fixture(autouse=True)
def same_draws(monkeypatch):
    monkeypatch.setattr(EpochLedger, "new_rounds", lambda self, epoch: NamedRounds(self.terms, epoch, "same"))


@pytest.fixture(scope="module")
def undisturbed(plan, records, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EpochLedger, "new_rounds", lambda self, epoch: NamedRounds(self.terms, epoch, "same"))
        return go_on(plan, tmp_path_factory.mktemp("whole") / "s.db", records)


def test_a_simulation_and_a_learner_use_every_visit(plan, records, undisturbed, tmp_path):
    report = stream_of(plan).report
    assert (report.used, report.too_often, report.too_soon) == (PEOPLE * VISITS, 0, 0)
    run = simulate(plan, out=tmp_path / "run")
    assert run.summary["final"]
    assert len(undisturbed) == ROUNDS


@pytest.mark.parametrize("point", [p for p in CRASH_POINTS if p != "acknowledged"])
def test_killed_again_and_again_every_visit_counts_once(point, plan, records, undisturbed, tmp_path, monkeypatch):
    """At every 7th visit of each place between two writes; messages are those of a calm run."""
    store, lives, sealed = tmp_path / "s.db", 0, []
    while True:
        left = [7 if lives < 12 else 10**9]

        def reached(here, left=left):
            if here == point:
                left[0] -= 1
                if not left[0]:
                    raise Killed

        monkeypatch.setattr(Ledger, "reached", staticmethod(reached))
        lives += 1
        try:
            sealed = go_on(plan, store, records)
            break
        except Killed:
            continue
    assert lives > 1 or point in ("snapshot-stored", "epoch-closed")
    status = verify(store)
    assert (status.round, status.clients) == (ROUNDS, PEOPLE)
    assert set(visits_of(store).values()) == {VISITS}
    if sealed:
        assert sealed[-1] == undisturbed[-1]


LIFE = """
import os, signal, sys, threading
from pathlib import Path
from tests.deployment import test_returning as here
from tests.support.known_secrets import NamedRounds
from veilstream.deployment.client_steps import ClientSteps
from veilstream.deployment.epochs import EpochLedger
from veilstream.plans.plan import Plan

def rounds(epochs, epoch):
    return NamedRounds(epochs.terms, epoch, "same")

EpochLedger.new_rounds = rounds
noisy, steps = ClientSteps.noisy, []
store, records, delay_s = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])

def counted(self, local, sample, seed):
    steps.append(sample)
    if len(steps) == 30:
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return noisy(self, local, sample, seed)

ClientSteps.noisy = counted
here.go_on(Plan.parse(here.PLAN, {"data.source": str(records)}), store, records)
"""


def test_killed_for_real_every_visit_counts_once(plan, records, undisturbed, tmp_path):
    """SIGKILL in the 30th step of each of three lives, or a little later."""
    store = tmp_path / "s.db"
    for life in range(3):
        command = [sys.executable, "-c", LIFE, str(store), str(records), str(0.001 * life)]
        assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
        # At most the group of that step, and the one being stored, are lost.
        assert (30 - TAU) * (life + 1) <= verify(store).steps < PEOPLE * VISITS
    last = go_on(plan, store, records)
    assert last[-1] == undisturbed[-1]
    assert set(visits_of(store).values()) == {VISITS}


def test_without_the_bookmark_old_records_would_come_again(plan, records, undisturbed, tmp_path):
    """What the check above would miss if it could not fail."""
    store = tmp_path / "s.db"

    learner = Learner(plan, store, Huber(3), create=True)
    source = open_file(records, plan)
    for r in range(8):
        learner.begin_round(r, np.zeros(3, np.float32))
        source.serve(r, learner.observe_many, lambda: learner.clients_wanted)
        learner.finish_round()
    learner.close()
    assert go_on(plan, store, records, resume=False)[-1] != undisturbed[-1]


def test_a_bookmark_says_nothing_of_records_once_it_has_moved(plan, records, tmp_path):
    """The chain keeps salted hashes of bookmarks, and only the newest bookmark itself."""
    with Learner(plan, tmp_path / "s.db", Huber(3), create=True) as learner:
        source = open_file(records, plan)
        learner.begin_round(0, np.zeros(3, np.float32))
        texts = []

        def observe(clients):
            noted = list(itertools.islice(clients, learner.clients_wanted))
            texts.extend(offered.bookmark.text for offered in noted)
            return learner.observe_many(noted)

        source.serve(0, observe, lambda: learner.clients_wanted)
        (kept,) = learner.bookmarks()
        assert kept.text == texts[-1]
        assert kept.source == "visits.csv"
        said = "".join(str(record.body) for record in learner.ledger.records())
    for text in texts:
        assert text.partition(":")[2] not in said
