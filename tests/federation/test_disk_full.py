"""A learner whose disk is full: it waits, says so to probes, and goes on; nothing is lost or released twice."""

from __future__ import annotations

import csv
import errno
import json
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import numpy as np
import pytest

from tests.support.federation import Plain, World, connect_here, plan_of, wait_for
from veilstream.deployment.ledger.inspect import verify
from veilstream.deployment.ledger.paths import check_room
from veilstream.deployment.ledger.rescue import begin_again
from veilstream.deployment.ledger.store import Ledger
from veilstream.deployment.ledger.witness import Witness
from veilstream.deployment.release import decode
from veilstream.errors import InputError, StorageError
from veilstream.federation.learner import process
from veilstream.federation.learner.access import read_token
from veilstream.federation.learner.process import LearnerService
from veilstream.reports import learner_page


@contextmanager
def running(world: World):
    """A learner's whole service in a thread, and a way to ask its API."""
    made = LearnerService(
        world.plan,
        world.root / "keys/learners/a",
        world.root / "a.db",
        "plan:0",
        ("127.0.0.1", 1),
        learner_api=("127.0.0.1", 0),
        task=Plain(),
        new_store=True,
        pages=learner_page,
    )
    service = connect_here(made, world.handlers)
    stop, ended = threading.Event(), []

    def run() -> None:
        try:
            service.run(stop)
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_for(lambda: ended or "a" in world.handlers)
        yield service, ended
    finally:
        stop.set()
        thread.join(10)


def asked(service: LearnerService, path: str, token: str | None = None) -> tuple[int, bytes]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"http://127.0.0.1:{service._api.port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.fixture
def disk(monkeypatch):
    """A disk that is full while this is set."""
    full, append = threading.Event(), Witness.append

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Witness, "append", lambda self, entries: (no_room if full.is_set() else append)(self, entries))
    monkeypatch.setattr(process, "check_room", lambda *a: (no_room if full.is_set() else check_room)(*a))
    monkeypatch.setattr(process, "_AGAIN_S", (0.05, 0.1))
    return full


@pytest.mark.parametrize("what", ["witness", "store"])
def test_a_learner_whose_disk_was_full_goes_on_and_releases_nothing_twice(what, tmp_path, disk):
    world = World(tmp_path, plan_of(rounds=8, learners=1), names=("a",))
    with world, running(world) as (service, ended):
        coordinator = world.coordinator()
        coordinator.go(world.transport(), until=3)
        token = read_token(tmp_path / "a.token")
        assert asked(service, "/healthz") == (200, b'{"status":"ok"}')
        if what == "witness":
            disk.set()
        else:  # SQLite itself then says that it cannot write, until the store is opened anew
            service._api._daemon.learner.ledger._db.execute("PRAGMA query_only=ON")
        going = threading.Thread(target=coordinator.go, args=(world.transport(),))
        going.start()
        wait_for(lambda: service.health.times_blocked)
        if what == "witness":
            assert asked(service, "/healthz") == (503, b'{"status":"blocked"}')
            status, body = asked(service, "/healthz", token)
            assert (status, "could not be written" in json.loads(body)["why"]) == (503, True)
            assert json.loads(asked(service, "/status", token)[1])["state"] == "blocked"
            page = asked(service, "/page", token)[1].decode()
            assert "takes and sends nothing" in page
            assert "could not be written" in page
            assert b"veilstream_learner_healthy 0.0" in asked(service, "/metrics", token)[1]
            assert "a" not in world.handlers  # the server sees only that it is away
            disk.clear()
        going.join(30)
        assert coordinator.finished
        assert not ended
        wait_for(lambda: asked(service, "/healthz")[0] == 200)
        metrics = asked(service, "/metrics", token)[1]
        assert b"veilstream_learner_healthy 1.0" in metrics
        assert b"veilstream_learner_blocked_total 1.0" in metrics
        assert asked(service, "/metrics")[0] == 401
    assert verify(tmp_path / "a.db").round == 8
    with Ledger(tmp_path / "a.db") as ledger:
        hashes = [r.body.hash for r in ledger.records() if r.kind == "message"]
        message = decode(ledger.blob("message"))
    with (tmp_path / "run/releases.csv").open() as file:
        listed = {int(row["round"]): row["hash"] for row in csv.DictReader(file)}
    assert [listed[r] for r in sorted(listed)] == hashes  # one payload a round, and each of them accepted
    method = world.plan.methods[0]
    size = method.step_size * method.server_step_size
    assert np.allclose(coordinator.fold.x, -size * message.prefix * message.grid, atol=1e-6)


def test_a_disk_that_is_full_at_the_first_start_ends_it_with_a_code_of_its_own(tmp_path, disk):
    world = World(tmp_path, plan_of(rounds=2, learners=1), names=("a",))
    disk.set()
    with world, running(world) as (_, ended):
        wait_for(lambda: bool(ended))
        (error,) = ended
        assert isinstance(error, StorageError)
        assert error.exit_code == 8


def test_another_failure_ends_the_learner_with_its_reason(tmp_path, disk):
    """The store is gone from under it: waiting does not help, and its server must not be told for ever."""
    world = World(tmp_path, plan_of(rounds=8, learners=1), names=("a",))
    with world, running(world) as (_, ended):
        coordinator = world.coordinator()
        coordinator.go(world.transport(), until=2)
        (tmp_path / "a.db").rename(tmp_path / "elsewhere.db")

        def look() -> None:
            if ended:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            coordinator.go(world.transport(), look=look)
        (error,) = ended
        assert error.exit_code == 4
        assert "was moved" in str(error)


def test_a_learner_whose_store_was_lost_is_not_called_an_old_copy(tmp_path):
    """The server asks for the old epoch's next round before it knows."""
    world = World(tmp_path, plan_of(rounds=6, learners=1), names=("a",))
    with world:
        world.start("a")
        coordinator = world.coordinator()
        coordinator.go(world.transport(), until=3)
        world.stop("a")
        world.store("a").unlink()
        with pytest.raises(InputError, match="--witness PATH"):
            begin_again(world.store("a"), tmp_path / "elsewhere.witness")
        begin_again(world.store("a"))
        world.start("a")
        coordinator.go(world.transport(), until=5)
        assert coordinator.fold.seats["a"].epoch == 1
        assert any("a request for epoch 0 at a learner whose epoch is 1" in line for line in world.notes)
        assert not any("not the newest" in line for line in world.notes)
