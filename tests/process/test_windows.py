"""Real processes with callers and a window: learners are killed meanwhile, and nobody who was answered is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.support.federation import rows_of, table_plan_of
from veilstream.deployment.ledger.inspect import part_of_person, verify
from veilstream.deployment.ledger.store import Ledger
from veilstream.federation.addresses import free_port
from veilstream.federation.demo import direct_processes
from veilstream.federation.keys.new_keys import make_keys

ROUNDS, WINDOW, MANY, KILLS = 16, 4, 5, 3


def call(folder: Path, name: str, port: int, told: dict[str, str], done: threading.Event) -> None:
    """Bring one record after the other until the last window; one whose answer was lost comes again."""
    token, people = folder / f"learners/{name}/store.token", iter(rows_of([f"{name}-{i}" for i in range(500)]))
    row = next(people)
    while not done.is_set():
        try:
            headers = {"Authorization": f"Bearer {token.read_text().strip()}"}
            reply = httpx.post(
                f"http://127.0.0.1:{port}/observe", json={"record": row}, headers=headers, timeout=20, trust_env=False
            )
        except (OSError, httpx.HTTPError):  # killed, or not yet there
            time.sleep(0.1)
            continue
        if reply.status_code == 410:
            assert "last window" in reply.json()["why"] or "has ended" in reply.json()["why"]
            return
        if reply.status_code == 200:
            assert reply.json() == {"answer": "taken", "used": "within the next window"}
            told[str(row["person"])] = "taken"
            row = next(people)


@pytest.mark.all
def test_callers_of_learners_that_are_killed_are_in_once_and_hear_nothing_of_when(tmp_path):
    plan = table_plan_of(
        rounds=ROUNDS,
        learners=2,
        learning={"local_steps": 1, "clients_per_step": MANY},
        privacy={"order": "secret", "window": WINDOW},
        method={"mechanism": "independent"},
        federation={"quorum": 0.5, "deadline_s": 30.0, "patience_s": 0.5},
    )
    make_keys(tmp_path / "keys", ["127.0.0.1", "localhost"], ["north", "south"])
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    names = ("north", "south")
    ports = {name: free_port() for name in names}
    server, *learners = direct_processes(tmp_path, dict.fromkeys(names, "live"), free_port())
    for child, name in zip(learners, names, strict=True):
        child.command += ["--learner-api", f"127.0.0.1:{ports[name]}"]
    told: dict[str, dict[str, str]] = {name: {} for name in names}
    done, kills, until = threading.Event(), 0, time.monotonic() + 300
    callers = [threading.Thread(target=call, args=(tmp_path, n, ports[n], told[n], done)) for n in names]
    logs = []
    try:
        for child in (server, *learners):
            child.start()
        for caller in callers:
            caller.start()
        next_kill = time.monotonic() + 10.0
        while not (tmp_path / "run/summary.json").exists():
            assert time.monotonic() < until, [child.last_lines() for child in learners]
            if kills < KILLS and time.monotonic() > next_kill and learners[kills % 2].pid is not None:
                os.killpg(learners[kills % 2].pid, signal.SIGKILL)
                kills, next_kill = kills + 1, time.monotonic() + 3.0
            for child in learners:
                if not child.running:
                    assert child.exit_code in (None, 0, -9), child.last_lines()
                    child.start()
            time.sleep(0.1)
        logs = [str(child.last_lines()) for child in learners]
    finally:
        done.set()
        for child in (server, *learners):
            child.end()
        for caller in callers:
            caller.join(30)
    assert kills
    for name in names:
        store = tmp_path / "learners" / name / "store.db"
        status = verify(store)
        assert status.round > WINDOW
        assert told[name]
        assert all(part_of_person(store, person).times == 1 for person in told[name])
        assert status.clients - len(told[name]) in range(KILLS + 1)  # stored just before a kill, and came again or not
        with Ledger(store) as ledger:
            visits = [visit for record in ledger.records() for visit in record.visits]
        assert len({tag for tag, _ in visits}) == len(visits)
        assert {step for _, step in visits} == {0}
    assert not any(f"{name}-{i}," in log for log in logs for name in names for i in range(500))
