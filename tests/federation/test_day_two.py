"""After the last round, over the direct transport: every side closes, and goes on together."""

from __future__ import annotations

import dataclasses
import json
import logging
import socket
import threading
from functools import partial

import numpy as np
import pytest

pytest.importorskip("grpc")

import veilstream as vs
from tests.support.direct import DirectWorld
from tests.support.federation import DIM, Plain, csv_of, plan_of, rows_of, table_plan_of, wait_for
from veilstream.deployment.ledger.inspect import verify
from veilstream.errors import InputError
from veilstream.federation.keys.identity import PrivateKey, ServerKeys
from veilstream.federation.keys.new_keys import make_keys
from veilstream.federation.learner.daemon import Daemon
from veilstream.federation.learner.process import LearnerService
from veilstream.federation.protocol.messages import Reply, Request
from veilstream.federation.server.coordinator import Coordinator
from veilstream.federation.server.process import ServerService
from veilstream.federation.server.successive_runs import open_run
from veilstream.runs.released_model import model_sha256
from veilstream.streams.intake import AlwaysReady

EPOCHS = 3


@pytest.fixture
def plan():
    return plan_of(rounds=3, federation={"quorum": 0.6, "deadline_s": 1.0, "epochs": EPOCHS})


@pytest.fixture
def world(tmp_path, plan):
    with DirectWorld(tmp_path, plan) as made:
        yield made


def coordinator_of(world, folder, **more) -> Coordinator:
    keys = ServerKeys.load(world.root / "keys/server")
    return Coordinator(world.plan, np.zeros(DIM, np.float32), keys, world.root / folder, **more)


def where(daemon: Daemon) -> tuple[int, int, bool]:
    learner = daemon.learner
    return learner.epoch, learner.round, learner.over


def test_a_learner_that_missed_the_last_round_closes_its_epoch_and_destroys_its_secrets(world):
    transport = world.transport()
    world.start_all()
    coordinator = coordinator_of(world, "run")
    coordinator.go(transport, until=2)
    world.stop("c")
    coordinator.go(transport)
    assert coordinator.finished
    assert coordinator.end_all(transport, within_s=0.5) == ("c",)
    late = world.start("c")
    assert where(late) == (0, 2, False)
    assert late.ended is None
    assert coordinator.end_all(transport, within_s=20.0) == ()
    assert late.ended == "epoch 0 has ended after 2 of 3 rounds; another may begin later"
    assert all(daemon.dismissed for daemon in world.daemons.values())
    world.close()
    for name, rounds in (("a", 3), ("b", 3), ("c", 2)):
        status = verify(world.store(name))
        assert (status.round, status.ended, status.secrets) == (rounds, True, 0)


def test_the_end_is_confirmed_again_by_whoever_is_asked_again(world):
    transport = world.transport()
    world.start_all()
    coordinator = coordinator_of(world, "run")
    coordinator.go(transport)
    for server in (coordinator, coordinator_of(world, "run")):  # the second after a restart
        assert server.end_all(transport, within_s=20.0) == ()


def say(world, daemon: Daemon, key: PrivateKey | None = None, **request) -> Reply:
    key = key or ServerKeys.load(world.root / "keys/server").identity
    name = next(n for n, d in world.daemons.items() if d is daemon)
    public = ServerKeys.load(world.root / "keys/server").learners[name]
    fields = {"learner": "", "nonce": "n"} | request
    return Reply.read(daemon.handle(Request(**fields).sign(key)), public)


@pytest.fixture
def one(world):
    """A learner in the middle of its epoch, which belongs to run-1."""
    world.transport()
    daemon = world.start("a")
    settings = daemon.learner.settings
    assert say(world, daemon, kind="enrol", run="run-1", settings=settings).kind == "enrolled"
    x = np.zeros(DIM, "<f4").tobytes()
    reply = say(world, daemon, kind="round", run="run-1", learner="a", body=x)
    assert reply.kind == "release"
    return daemon


@pytest.mark.parametrize("request_", [{"run": "run-2"}, {"run": "run-1", "learner": "b"}], ids=["run", "learner"])
def test_an_end_that_is_not_this_learners_ends_nothing(world, one, request_):
    assert say(world, one, kind="end", **request_).kind == "refusal"
    assert where(one) == (0, 1, False)


def test_an_end_that_the_server_did_not_sign_ends_nothing(world, one):
    assert say(world, one, PrivateKey(bytes(32)), kind="end", run="run-1").kind == "refusal"
    assert where(one) == (0, 1, False)


def test_an_end_before_the_horizon_costs_rounds_and_nothing_else(world, one):
    before = one.learner.sealed_release()
    for _ in range(2):
        reply = say(world, one, kind="end", run="run-1")
        assert (reply.kind, reply.facts) == ("ended", {"epoch": 0, "round": 1})
    x = np.ones(DIM, "<f4").tobytes()
    assert say(world, one, kind="round", run="run-1", learner="a", round=1, body=x).kind == "refusal"
    assert one.learner.sealed_release() == before
    assert one.learner.ledger.names("seed/") == []


def test_a_server_that_forces_epochs_gets_each_client_once_and_no_epoch_beyond_the_plans(world):
    """Rounds of run after run are asked for, ends and runs made up; the same people always come."""
    people = [f"person {i}" for i in range(4)]

    class Crowd(AlwaysReady):
        def serve(self, round_, observe, wanted):
            from veilstream.learning.tasks import Sample

            for person in people:
                if wanted():
                    observe([(person, Sample(np.ones(DIM, np.float32), 1.0))])

    world.transport()
    daemon = world.start("a", source=Crowd())
    settings, x = daemon.learner.settings, np.zeros(DIM, "<f4").tobytes()
    runs = [f"run-{i}" for i in range(8)]
    begun = set()
    for i, run in enumerate(runs):
        ask = partial(say, world, daemon, run=run)
        reply = ask(kind="enrol", settings=settings, follows=tuple(runs[:i]))
        if reply.kind == "enrolled":
            begun.add(reply.facts["epoch"])
            # Nothing leads out of a run but its end: not even the plan's further epochs.
            other = say(world, daemon, kind="enrol", run="other", settings=settings)
            assert other.kind == "refusal"
            for r in range(1 + i % 2):
                ask(kind="round", learner="a", round=r, body=x)
        else:
            assert "at most 3 epochs" in reply.facts["why"]
    assert begun == {0, 1, 2}
    epochs: dict[str, set[int]] = {}
    for record in daemon.learner.ledger.records():
        for tag, _ in record.visits:
            epochs.setdefault(tag.hex(), set()).add(record.body.epoch)
    assert len(epochs) == len(people)
    assert all(len(seen) == 1 for seen in epochs.values())
    world.close()
    assert verify(world.store("a")).secrets == 0


def test_another_number_of_epochs_is_refused_at_enrolment(world, plan):
    world.transport()
    daemon = world.start("a")
    more = dataclasses.replace(plan.federation, epochs=EPOCHS + 5)
    theirs = coordinator_of(world, "run").terms
    settings = dataclasses.replace(theirs, plan=dataclasses.replace(plan, federation=more)).settings
    reply = say(world, daemon, kind="enrol", run="run-1", settings=settings)
    assert reply.kind == "refusal"
    assert "epochs: server 8, learner 3" in reply.facts["why"]


def data_of(path, clients: int):
    """A file of people, of whom nobody comes twice."""
    path.write_text(csv_of(rows_of(f"{path.stem}-{person}" for person in range(clients))))
    return str(path)


def test_one_command_leads_every_side_into_the_next_epoch(tmp_path):
    """Services as the commands start them, over TLS; learners are started once."""
    names = ("a", "b", "c")
    plan = table_plan_of(rounds=3, federation={"epochs": 2})
    make_keys(tmp_path / "keys", ["127.0.0.1"], list(names))
    with socket.create_server(("127.0.0.1", 0)) as free:
        at = free.getsockname()
    learners = [
        LearnerService(
            plan,
            tmp_path / "keys/learners" / name,
            tmp_path / f"{name}.db",
            data_of(tmp_path / f"{name}.csv", 12),
            at,
            task=Plain(),
            new_store=True,
            exit_when_done=True,
        )
        for name in names
    ]
    stop = threading.Event()
    threads = [threading.Thread(target=learner.run, args=(stop,)) for learner in learners]
    for thread in threads:
        thread.start()
    try:
        folder, runs = tmp_path / "runs/small", []
        for next_run in (False, True):
            service = ServerService(
                plan, tmp_path / "keys/server", folder, at, task=Plain(), exit_when_done=True, next_run=next_run
            )
            runs.append(service.run())
        for thread in threads:
            thread.join(10.0)
        assert not any(thread.is_alive() for thread in threads)  # each ended by itself
    finally:
        stop.set()
    first, second = runs
    start = json.loads((tmp_path / "runs/small-2/start.json").read_text())
    last = first.models.read(3)
    assert (start["follows"], start["run"], start["round"]) == ([first.run], first.run, 3)
    assert start["sha256"] == model_sha256(last)
    np.testing.assert_array_equal(second.models.read(0), last)
    assert second.finished
    assert second.run != first.run
    for name in names:
        status = verify(tmp_path / f"{name}.db")
        assert (status.epoch, status.round, status.ended, status.secrets) == (1, 3, True, 0)
        assert status.clients == 12  # nobody twice, and every step had someone
    model = vs.load(tmp_path / "runs/small-2")  # one served model: the second day's, in the folder and at every learner
    assert (model.sha256, model.run, model.round) == (model_sha256(second.models.read(3)), second.run, 3)
    assert {vs.load(tmp_path / f"{name}.model.npz").sha256 for name in names} == {model.sha256}
    with pytest.raises(InputError, match=r"federation\.epochs = 2: .*at least 3 .*small-2"):
        ServerService(plan, tmp_path / "keys/server", folder, at, task=Plain(), next_run=True).run()


def test_a_next_run_goes_on_after_a_restart_and_begins_only_after_a_finished_one(tmp_path, plan):
    first = tmp_path / "small"
    with pytest.raises(InputError, match=r"--next.*a run that is finished"):
        open_run(first, plan, Plain(), next_run=True)
    assert open_run(first, plan, Plain(), next_run=False).folder == first
    keys = tmp_path / "keys"
    make_keys(keys, ["127.0.0.1"], ["a", "b", "c"])
    begin = partial(Coordinator, plan, keys=ServerKeys.load(keys / "server"))
    run = begin(x0=np.zeros(DIM, np.float32), folder=first)
    with pytest.raises(InputError, match=r"--next.*a run that is finished"):
        open_run(first, plan, Plain(), next_run=True)
    model = np.arange(DIM, dtype=np.float32)
    for r in range(4):
        run.models.write(r, model)
    summary = {"run": run.run, "rounds": 3, "learners": {}, "guarantee": run.terms.guarantee.as_dict()}
    (first / "summary.json").write_text(json.dumps(summary))
    opening = open_run(first, plan, Plain(), next_run=True)
    np.testing.assert_array_equal(opening.x0, model)
    second = begin(x0=opening.x0, folder=opening.folder, start=opening.start)
    assert opening.folder == tmp_path / "small-2"
    for next_run in (False, True):  # not finished, so either command goes on with it
        again = open_run(first, plan, Plain(), next_run=next_run)
        assert (again.folder, again.start) == (opening.folder, None)
        assert begin(x0=again.x0, folder=again.folder, start=again.start).run == second.run
    # Killed before its first checkpoint, it begins again in the same way.
    for left in ("checkpoint.bin", "messages.bin", "models.f32"):
        (opening.folder / left).unlink()
    again = open_run(first, plan, Plain(), next_run=False)
    assert (again.folder, again.start) == (opening.folder, opening.start)
    begin(x0=again.x0, folder=again.folder, start=again.start)


def test_a_server_starts_from_another_servers_model_api(tmp_path, plan):
    from veilstream.federation.server.model_api import ModelApi

    keys, model = tmp_path / "keys/server", np.linspace(-1, 1, DIM).astype(np.float32)
    make_keys(tmp_path / "keys", ["127.0.0.1"], ["a", "b", "c"])
    earlier = Coordinator(plan, model, ServerKeys.load(keys), tmp_path / "earlier")
    api = ModelApi(earlier, plan, ("127.0.0.1", 0), (keys / "tls.pem", keys / "tls.key"))
    start = {"start": f"https://127.0.0.1:{api.port}", "start_ca": str(keys / "ca.pem")}
    later = dataclasses.replace(plan, learning=dataclasses.replace(plan.learning, **start))
    try:
        opening = open_run(tmp_path / "later", later, Plain(), next_run=False)
    finally:
        api.close()
    np.testing.assert_array_equal(opening.x0, model)
    run = partial(Coordinator, later, keys=ServerKeys.load(keys), folder=tmp_path / "later")
    begun = run(x0=opening.x0, start=opening.start)
    said = json.loads((tmp_path / "later/start.json").read_text())
    assert said == {"start": start["start"], "run": earlier.run, "round": 0, "sha256": model_sha256(model)}
    again = open_run(tmp_path / "later", later, Plain(), next_run=False)  # nobody answers any more
    resumed = run(x0=again.x0, start=again.start)
    assert resumed.run == begun.run
    np.testing.assert_array_equal(resumed.fold.x, model)


def test_a_connection_is_news_and_not_a_warning(world, caplog):
    logging.getLogger("veilstream").propagate = True
    with caplog.at_level(logging.INFO, logger="veilstream"):
        world.transport()
        world.connect("a", lambda request: request)
        wait_for(lambda: "connected to" in caplog.text)
    levels = {r.levelname for r in caplog.records if "connected to" in r.getMessage()}
    assert levels == {"INFO"}
