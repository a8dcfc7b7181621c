"""Real processes under a secret order: learners are killed in the middle, and everybody is in the model once."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.support.federation import csv_of, rows_of, table_plan_of
from veilstream.deployment.ledger.inspect import verify
from veilstream.deployment.ledger.store import Ledger
from veilstream.federation.addresses import free_port
from veilstream.federation.demo import direct_processes
from veilstream.federation.keys.new_keys import make_keys

ROUNDS, MANY, KILLS = 24, 5, 4
PEOPLE = ROUNDS * MANY


@pytest.mark.all
def test_processes_that_are_killed_use_everybody_once_and_say_nothing_of_when(tmp_path):
    plan = table_plan_of(
        rounds=ROUNDS,
        learners=2,
        learning={"local_steps": 1, "clients_per_step": MANY},
        privacy={"order": "secret"},
        method={"mechanism": "independent"},
        federation={"quorum": 0.5, "deadline_s": 30.0},
    )
    make_keys(tmp_path / "keys", ["127.0.0.1", "localhost"], ["north", "south"])
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    sources = {}
    for name in ("north", "south"):
        (tmp_path / f"{name}.csv").write_text(csv_of(rows_of([f"{name}-{i}" for i in range(PEOPLE)])))
        sources[name] = str(tmp_path / f"{name}.csv")
    server, *learners = direct_processes(tmp_path, sources, free_port())
    dice, kills, until = random.Random(5), 0, time.monotonic() + 300
    logs: list[str] = []
    try:
        for child in (server, *learners):
            child.start()
        next_kill = time.monotonic() + 8.0
        while not (tmp_path / "run/summary.json").exists():
            assert time.monotonic() < until, [child.last_lines() for child in learners]
            if kills < KILLS and time.monotonic() > next_kill:
                victim = learners[kills % 2]
                if victim.pid is not None:
                    os.killpg(victim.pid, signal.SIGKILL)
                    kills += 1
                next_kill = time.monotonic() + dice.uniform(1.0, 4.0)
            for child in learners:
                if not child.running:
                    assert child.exit_code in (None, 0, -9), child.last_lines()
                    child.start()
            time.sleep(0.1)
        logs = [str(child.last_lines()) for child in learners]
    finally:
        for child in (server, *learners):
            child.end()
    for name in sources:
        store = tmp_path / "learners" / name / "store.db"
        status = verify(store)
        assert status.clients == PEOPLE
        assert status.round > 0
        with Ledger(store) as ledger:
            visits = [visit for record in ledger.records() for visit in record.visits]
        assert sorted(visits) == visits  # in the order of keyed tags, which has nothing to do with steps
        assert {step for _, step in visits} == {0}
    assert not any(f"{name}-{i}," in log for log in logs for name in sources for i in range(PEOPLE))
