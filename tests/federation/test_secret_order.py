"""A learner's files under a secret order: read at once, bound to the epoch, and silent about who is used when."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.federation import DIM, Plain, World, csv_of, rows_of, table_plan_of
from tests.support.known_secrets import NamedRounds
from veilstream.deployment.epochs import DEPLOYED, LearnerParts
from veilstream.deployment.learner import Learner
from veilstream.deployment.ledger.inspect import verify
from veilstream.errors import InputError
from veilstream.federation.learner.daemon import Daemon
from veilstream.federation.learner.local_account import LocalAccount
from veilstream.federation.learner.process import LearnerService
from veilstream.federation.learner.reply_times import SLOT_S, secret_order_replies
from veilstream.plans.data_source import open_file

ROUNDS, TAU = 3, 2
SECRET = bytes(range(60, 92))
NAMED = LearnerParts(rounds=lambda terms, epoch: NamedRounds(terms, epoch, "same"), order_secret=lambda: SECRET)
MANY = 50


def secret_plan(rounds: int = ROUNDS, learners: int = 1, **changes):
    privacy = {"order": "secret"} | changes.pop("privacy", {})
    learning = {"clients_per_step": 10} | changes.pop("learning", {})
    method = {"mechanism": "independent"}
    return table_plan_of(rounds, learners, privacy=privacy, method=method, learning=learning, **changes)


def people_of(count: int = MANY, first: int = 0) -> list[dict[str, object]]:
    return rows_of([f"p{i}" for i in range(first, first + count)])


def write_csv(path: Path, rows) -> None:
    path.write_text(csv_of(rows))


def write_json(path: Path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_sqlite(path: Path, rows) -> None:
    db = sqlite3.connect(path)
    names = ", ".join(rows[0])
    db.execute(f"CREATE TABLE people (id INTEGER PRIMARY KEY, {names})")
    places = ", ".join("?" * len(rows[0]))
    db.executemany(f"INSERT INTO people ({names}) VALUES ({places})", [tuple(row.values()) for row in rows])
    db.commit()
    db.close()


def write_parquet(path: Path, rows) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(arrow.Table.from_pylist(rows), path)


def write_folder(path: Path, rows) -> None:
    path.mkdir()
    for number, first in enumerate(range(0, len(rows), 20)):
        write_csv(path / f"{number}.csv", rows[first : first + 20])


KINDS = {
    "people.csv": write_csv,
    "people.jsonl": write_json,
    "people.sqlite": write_sqlite,
    "people.parquet": write_parquet,
    "people": write_folder,
}


def releases(store: Path, data: Path, plan=None, *, rounds=range(ROUNDS), parts=NAMED) -> list[bytes]:
    plan = plan or secret_plan()
    with Learner(plan, store, Plain(), create=True, parts=parts) as learner:
        learner.use_records(open_file(data, plan, whole=True))
        return [learner.learn_round(r, np.full(DIM, 0.1 * r, np.float32)).payload for r in rounds]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What records in memory give."""
    folder = tmp_path_factory.mktemp("expected")
    write_csv(folder / "people.csv", people_of())
    return releases(folder / "s.db", folder / "people.csv")


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_table_gives_the_same_steps(name, expected, tmp_path):
    """Sorted otherwise, too: the order of the file has no part in who is used when."""
    rows = people_of()
    KINDS[name](tmp_path / name, rows[::-1] if name == "people.csv" else rows)
    assert releases(tmp_path / "s.db", tmp_path / name) == expected


@pytest.mark.parametrize("name", KINDS)
def test_a_restart_goes_on_with_the_same_file_and_refuses_another(name, expected, tmp_path):
    data, store, rows = tmp_path / name, tmp_path / "s.db", people_of()
    KINDS[name](data, rows)
    begun = releases(store, data, rounds=[0])
    changed = [*rows[:30], rows[30] | {"x3": 0.987}, *rows[31:]]
    for other in (changed, [*rows, *people_of(1, first=900)], rows[:-1]):
        if data.is_dir():
            for part in data.iterdir():
                part.unlink()
            data.rmdir()
        else:
            data.unlink()
        KINDS[name](data, other)
        with pytest.raises(InputError, match=r"changed since they were indexed.*put the old content back"):
            releases(store, data, rounds=[1])
    if data.is_dir():
        for part in data.iterdir():
            part.unlink()
        data.rmdir()
    else:
        data.unlink()
    KINDS[name](data, rows)
    assert begun + releases(store, data, rounds=[1, 2]) == expected
    assert verify(store).clients == MANY


def test_refused_rows_keep_their_place_and_a_second_row_of_a_person_is_left_out(tmp_path):
    rows = people_of()
    rows[3] = rows[3] | {"x0": "not a number"}
    rows.append(rows[5] | {"x0": 0.5})
    write_csv(tmp_path / "people.csv", rows)
    (tmp_path / "people.csv").write_text((tmp_path / "people.csv").read_text() + "\n\n")
    plan = secret_plan()
    with Learner(plan, tmp_path / "s.db", Plain(), create=True) as learner:
        source = open_file(tmp_path / "people.csv", plan, whole=True)
        told = learner.use_records(source)
        assert (told.records, told.unusable, told.again) == (MANY, 1, 1)
        assert source.counts.rows == MANY + 1
        assert sum(source.counts.refused.values()) == 1


def test_day_two_reads_on_in_a_file_that_has_grown(tmp_path):
    data, store, plan = tmp_path / "people.csv", tmp_path / "s.db", secret_plan()
    write_csv(data, people_of())
    releases(store, data, parts=DEPLOYED)
    write_csv(data, [*people_of(), *people_of(20, first=900), people_of(1, first=3)[0]])
    with Learner(plan, store, Plain(), create=True) as learner:
        learner.new_epoch()
        assert learner.use_records(open_file(data, plan, whole=True)).records == 20
        learner.learn_round(0, np.zeros(DIM, np.float32))
    with Learner(plan, store, Plain(), create=True) as learner:  # its index is lost
        (store.with_suffix(".order") / "records").unlink()
        assert learner.use_records(open_file(data, plan, whole=True)).records == 20
    assert verify(store).clients == MANY + 20


def test_rows_behind_those_that_an_epoch_takes_may_come_later_and_are_for_the_next_one(tmp_path):
    data, store, plan = tmp_path / "people.csv", tmp_path / "s.db", secret_plan(learning={"clients_per_step": 5})
    rows = people_of()
    write_csv(data, rows[:32])
    releases(store, data, plan, rounds=[0], parts=DEPLOYED)
    write_csv(data, rows)
    releases(store, data, plan, rounds=[1, 2], parts=DEPLOYED)
    assert verify(store).clients == 30
    with Learner(plan, store, Plain(), create=True) as learner:
        learner.new_epoch()
        assert learner.use_records(open_file(data, plan, whole=True)).records == 20


def world_of(tmp_path, rounds: int = ROUNDS, **changes) -> World:
    plan = secret_plan(rounds, learners=2, **changes)
    world = World(tmp_path, plan, ("a", "b"))
    for place, name in enumerate(world.names):
        write_csv(tmp_path / f"{name}.csv", people_of(MANY, first=100 * place))
    return world


def start(world: World, name: str, **options) -> Daemon:
    return world.start(name, source=open_file(world.root / f"{name}.csv", world.plan, whole=True), **options)


def test_a_federation_learns_from_files_and_nobody_is_used_twice(tmp_path):
    with world_of(tmp_path) as world:
        for name in world.names:
            start(world, name)
        coordinator = world.coordinator()
        coordinator.go(world.transport())
        assert coordinator.finished
        model = coordinator.models.read(coordinator.round)
    np.testing.assert_allclose(model, world.model_by_ledgers(), rtol=1e-6)
    for name in world.names:
        assert verify(world.store(name)).clients == MANY


def test_a_file_that_changes_under_a_running_learner_stops_its_rounds_until_it_is_put_back(tmp_path):
    with world_of(tmp_path, federation={"quorum": 0.5, "deadline_s": 1.0}) as world:
        daemons = {name: start(world, name) for name in world.names}
        coordinator = world.coordinator()
        transport = world.transport()
        coordinator.go(transport, until=1)
        data = world.root / "a.csv"
        content = data.read_text()
        data.write_text(content.replace("0.", "1.", 3))
        coordinator.go(transport, until=2)
        assert (daemons["a"].learner.round, daemons["b"].learner.round) == (1, 2)
        assert not daemons["a"].wait_here()
        assert "changed since they were indexed" in daemons["a"]._said_why
        data.write_text(content)
        coordinator.go(transport)
        assert daemons["a"].learner.round == 2


def test_what_a_server_hears_of_a_file_that_is_refused_is_no_number(tmp_path):
    with world_of(tmp_path) as world:
        write_csv(tmp_path / "a.csv", people_of(5))  # and 6 steps
        daemon = start(world, "a")
        assert not daemon.wait_here()
        assert "at least 6 people" in daemon._said_why
        assert daemon.learner.ledger.chain.visits.value().count == 0


def test_live_records_and_functions_are_refused_before_anything_is_made(tmp_path):
    world = world_of(tmp_path)
    world.close()
    path = tmp_path / "plan.toml"
    path.write_text(world.plan.to_toml())
    for data in ("live", "json:loads"):
        service = LearnerService(
            world.plan, tmp_path / "keys/learners/a", tmp_path / "s.db", data, ("127.0.0.1", 1), new_store=True
        )
        with pytest.raises(InputError, match=r"--data = .*all there before an epoch begins.*privacy\.window = W"):
            service.run(threading.Event())
        assert not (tmp_path / "s.db").exists()


def test_the_local_account_counts_all_at_once(tmp_path):
    """No count of it changes by what a round used."""
    world = world_of(tmp_path)
    with world:
        plan, name = world.plan, "a"
        learner = Learner(plan, world.store(name), Plain(), create=True)
        source = open_file(world.root / "a.csv", plan, whole=True)
        account = LocalAccount(learner, source)
        daemon = Daemon(learner, world.keys_of(name), source, replies="when done", account=account)
        assert daemon.wait_here()
        before = {key: account.as_dict()[key] for key in ("used", "refused_steps", "returning", "empty_steps")}
        assert before == {"used": MANY, "refused_steps": 0, "returning": 0, "empty_steps": 0}
        learner.begin_round(0, np.zeros(DIM, np.float32))
        daemon.take(0)
        learner.finish_round()
        assert {key: account.as_dict()[key] for key in before} == before
        daemon.close()


class FailsOnSome(Plain):
    """Long gradients, and an error for a record of one label in telemetry."""

    def host_gradient(self, z, sample):
        return super().host_gradient(z, sample) * np.float32(1e6)

    def predict(self, params, features):
        if np.any(np.asarray(features)[..., 0] > 0.0):
            raise KeyError("of one record")
        return super().predict(params, features)


def test_nothing_that_is_shown_after_a_round_depends_on_who_was_in_it(tmp_path, caplog):
    """Neither clipped gradients nor failures of telemetry are counted or logged as rounds use records."""
    write_csv(tmp_path / "people.csv", people_of())
    plan = replace(secret_plan(), telemetry={"metrics": ["accuracy"]})
    with Learner(plan, tmp_path / "s.db", FailsOnSome(), create=True) as learner:
        source = open_file(tmp_path / "people.csv", plan, whole=True)
        learner.use_records(source)
        account, shown = LocalAccount(learner, source), []
        account.wrote_down(learner.write_down_clients())
        for r in range(ROUNDS):
            learner.begin_round(r, np.zeros(DIM, np.float32))
            learner.take_round()
            account.round_ends()
            learner.finish_round()
            account.round_is_sealed()
            told = account.as_dict()
            shown.append({key: told[key] for key in told if key not in ("rounds_left", "seconds_left")})
        assert learner.steps.clipped > 0
        assert learner.steps.metrics_failed > 0
    assert all(each == shown[0] for each in shown)
    assert shown[0]["clipped_share"] is None
    assert "telemetry" not in caplog.text


def test_a_round_is_stored_after_all_its_work(tmp_path, monkeypatch):
    """So the time of a write, which a disk or a page shows, says no more than that of a reply; it is done once."""
    done = []
    with Learner(secret_plan(), tmp_path / "s.db", Plain(), create=True) as learner:
        write_csv(tmp_path / "people.csv", people_of())
        learner.use_records(open_file(tmp_path / "people.csv", learner.plan, whole=True))
        learner.write_down_clients()
        learner.begin_round(0, np.zeros(DIM, np.float32))
        fill_up, write = learner.steps.fill_up, learner.epochs.write_steps
        monkeypatch.setattr(learner.steps, "fill_up", lambda *given: (done.append("work"), fill_up(*given)))
        monkeypatch.setattr(
            learner.epochs, "write_steps", lambda *given, **more: (done.append("write"), write(*given, **more))
        )
        learner.take_round()
        learner.finish_round()
    assert done == ["work", "write"]


@pytest.mark.parametrize("work_s", [0.0, 0.004, 0.05, 3.3])
def test_replies_leave_at_a_time_that_was_fixed_before_the_first_round(work_s):
    """Whole slots, several times the work; two rounds that take unlike times are answered after the same."""
    replies = secret_order_replies(work_s)
    assert replies.after_s >= 3 * work_s + SLOT_S
    assert replies.after_s / SLOT_S == pytest.approx(round(replies.after_s / SLOT_S))
    assert replies.tells_of_late_replies == (work_s > 0.0)
    assert replies.due(10.0, 10.0) == replies.due(10.0, 10.0 + 2.9 * work_s) == 10.0 + replies.after_s


def test_a_daemon_fixes_its_replies_by_the_work_of_made_up_records(tmp_path):
    with world_of(tmp_path) as world:
        daemon = start(world, "a", replies="by source")
        assert daemon.wait_here()
        first = daemon._replies
        assert first is not None
        assert SLOT_S <= first.after_s < 5.0
        assert daemon.wait_here()
        assert daemon._replies is first
        assert daemon.learner.local.noise.position == 0  # what was measured is no step of the epoch


def test_a_pattern_of_files_and_files_that_were_only_touched_are_the_same(tmp_path):
    write_folder(tmp_path / "many", people_of())
    store, pattern = tmp_path / "s.db", tmp_path / "many" / "*.csv"
    whole = releases(tmp_path / "whole.db", pattern)
    begun = releases(store, pattern, rounds=[0])
    os.utime(tmp_path / "many" / "1.csv", (1, 1))
    assert begun + releases(store, pattern, rounds=[1, 2]) == whole
