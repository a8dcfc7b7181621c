"""Learners beside a SQLite file and a folder that grow are killed again and again: nobody's row is used twice."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.federation import csv_of, rows_of, table_plan_of
from veilstream.deployment.ledger.inspect import verify
from veilstream.deployment.ledger.store import Ledger
from veilstream.federation.addresses import free_port
from veilstream.federation.demo import direct_processes
from veilstream.federation.keys.new_keys import make_keys

ROUNDS = 60
PEOPLE = 2 * ROUNDS
KILLS = 12
ROWS = rows_of([f"p{i}" for i in range(PEOPLE)])


def insert(path: Path, rows) -> None:
    with sqlite3.connect(path, timeout=10) as db:
        db.execute("PRAGMA journal_mode = WAL")
        columns = ", ".join(ROWS[0])
        db.execute(f"CREATE TABLE IF NOT EXISTS visits (id INTEGER PRIMARY KEY AUTOINCREMENT, {columns})")
        db.executemany(
            f"INSERT INTO visits ({columns}) VALUES ({', '.join('?' * len(ROWS[0]))})", [(*r.values(),) for r in rows]
        )
    db.close()


def put(folder: Path, number: int, rows) -> None:
    """Files whose names do not sort as they come, and every third grows an old one."""
    names = sorted(folder.glob("*.csv"))
    if number % 3 == 2:
        with names[number % len(names)].open("a") as file:
            file.write(csv_of(rows).partition("\n")[2])
    else:
        (folder / f"{(7 * number) % 40:02}.csv").write_text(csv_of(rows))


@pytest.mark.all
def test_a_row_is_used_once_whoever_is_killed_in_the_middle(tmp_path):
    """People may come twice, so a row that was read twice would be a second visit."""
    privacy = {"participations": 2, "min_separation": 1}
    federation = {"min_clients": None, "quorum": 0.5, "deadline_s": 20.0}
    plan = table_plan_of(rounds=ROUNDS, learners=2, privacy=privacy, federation=federation)
    base, folder, dice = tmp_path / "north.sqlite", tmp_path / "south", random.Random(3)
    folder.mkdir()
    insert(base, ROWS[:10])
    put(folder, 0, ROWS[:10])
    make_keys(tmp_path / "keys", ["127.0.0.1", "localhost"], ["north", "south"])
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    sources = {"north": f"sqlite:{base}", "south": str(folder)}
    server, *learners = direct_processes(tmp_path, sources, free_port())
    given, number, kills, until = 10, 1, 0, time.monotonic() + 100
    try:
        for child in (server, *learners):
            child.start()
        next_kill = time.monotonic() + 5.0
        while not (tmp_path / "run/summary.json").exists():
            assert time.monotonic() < until, [child.last_lines() for child in learners]
            if given < PEOPLE:
                more = ROWS[given : given + 7]
                insert(base, more)
                put(folder, number, more)
                given, number = given + len(more), number + 1
            if kills < KILLS and time.monotonic() > next_kill:
                victim = learners[kills % 2]
                if victim.pid is not None:
                    os.killpg(victim.pid, signal.SIGKILL)
                    kills += 1
                next_kill = time.monotonic() + dice.uniform(0.3, 2.0)
            for child in learners:
                if not child.running:
                    assert child.exit_code in (None, 0, -9), child.last_lines()
                    child.start()
            time.sleep(0.1)
    finally:
        for child in (server, *learners):
            child.end()
    assert kills >= KILLS // 3
    for name in sources:
        store = tmp_path / "learners" / name / "store.db"
        assert verify(store).round > 0
        with Ledger(store) as ledger:
            visits = Counter(who for record in ledger.records() for who, _ in record.visits)
        assert len(visits) > PEOPLE // 2
        assert set(visits.values()) == {1}, (name, visits.most_common(3))
