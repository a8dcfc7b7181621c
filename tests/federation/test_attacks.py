"""Attacks on the server's memory and files, by strangers, and by those who keep old messages.

Those of single learners on a server are in `test_hostile.py`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import resource
import socket
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

pytest.importorskip("grpc")

from tests.federation.test_hostile import ACTS, LOSSY, NAMES, Stage
from tests.support.federation import DIM, World, plan_of
from veilstream.deployment.release import encode
from veilstream.deployment.terms import Terms
from veilstream.federation.direct import wire
from veilstream.federation.direct.client import StreamClient
from veilstream.federation.keys.identity import ServerKeys
from veilstream.federation.keys.new_keys import make_keys
from veilstream.federation.protocol.fold import ServerFold
from veilstream.federation.protocol.messages import Reply, Request
from veilstream.federation.server.checkpoint import MessageFile, Position, Slots
from veilstream.privacy.gradient_types import Noised

X0 = np.zeros(DIM, np.float32)


def test_a_learner_that_always_answers_from_another_epoch_is_not_asked_without_end(tmp_path):
    stage = Stage(tmp_path, plan_of(rounds=3, federation=LOSSY | {"deadline_s": 1.0}))
    evil = stage.puppets["a"]
    evil.release = lambda raw, _: evil.say_release(raw, 5, 0, np.zeros(DIM, np.int64))
    stage.went_on()
    stage.close()
    assert len(evil.heard) < 10


def test_a_learner_that_never_says_who_it_is_costs_no_memory(stage, monkeypatch):
    monkeypatch.setattr("veilstream.federation.server.coordinator._AGAIN_S", -1.0)
    server = stage.coordinator()
    stage.send = lambda *_: None
    monkeypatch.setattr(stage, "receive", lambda _: [])
    for _ in range(200):
        server.enrol(stage)
        server.after_end(stage)
    assert max(len(asked) for asked in server.server._asked.values()) <= 16


@pytest.fixture
def stage(tmp_path):
    made = Stage(tmp_path, plan_of(rounds=3, federation=LOSSY))
    yield made
    made.close()


@pytest.mark.parametrize("on_disk", [True, False])
def test_an_increment_is_left_out_as_it_was_counted_though_its_learner_began_an_epoch_since(tmp_path, on_disk):
    terms = Terms.of(plan_of(learning={"model_norm_cap": 1.0}), DIM)
    file = MessageFile(tmp_path / "messages.bin", DIM, create=True)
    kept = {name: Slots(file, i) for i, name in enumerate("ab")} if on_disk else None
    fold = ServerFold(terms, X0, "ab", kept=kept)
    reach = int(fold.bounds.coordinate(1) / 2)

    def say(name: str, round_: int, units: int) -> None:
        steps = terms.local_steps * (round_ + 1)
        fold.accept(name, encode(0, round_, steps, terms.grid.step, Noised(np.full(DIM, units))))

    for name in "ab":
        fold.enrol(name, 0, 0)
        say(name, 0, 1000)
    fold.close_round()
    for slots in (kept or {}).values():
        slots.saved()
    expected = fold.x.copy()
    cap = float(np.linalg.norm(expected)) * 1.01
    learning = dataclasses.replace(terms.plan.learning, model_norm_cap=cap)
    fold.terms = dataclasses.replace(terms, plan=dataclasses.replace(terms.plan, learning=learning))
    say("a", 1, reach)
    fold.enrol("a", 1, 0)  # from a second node, in the same round
    assert fold.close_round().dropped == ("a",)
    np.testing.assert_array_equal(fold.x, expected)


def test_a_message_that_cannot_be_written_counts_not_at_all_and_is_taken_later(tmp_path, monkeypatch):
    terms = Terms.of(plan_of(learners=1), DIM)
    file = MessageFile(tmp_path / "messages.bin", DIM, create=True)
    fold = ServerFold(terms, X0, "a", kept={"a": Slots(file, 0)})
    fold.enrol("a", 0, 0)

    def payload(round_: int) -> bytes:
        steps = terms.local_steps * (round_ + 1)
        prefix = Noised(np.full(DIM, 100 * (round_ + 1)))
        return encode(0, round_, steps, terms.grid.step, prefix)

    def save() -> None:
        Position("run", fold.round, fold.x, fold.average, fold.seats, file).save(tmp_path)

    fold.accept("a", payload(0))
    fold.close_round()
    save()
    x = fold.x.copy()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space"):
            fold.accept("a", payload(1))
    assert fold.answered == ()
    fold.close_round()
    save()
    np.testing.assert_array_equal(fold.x, x)
    again = Position.load(tmp_path).seats["a"]
    assert (again.round, again.accepted[0]) == (1, 0)
    assert fold.accept("a", payload(1))
    fold.close_round()
    np.testing.assert_allclose(fold.x, 2 * x)


def test_an_enrolment_that_someone_kept_does_not_lead_a_learner_into_another_run(tmp_path):
    """It would use up an epoch, and bind the next one to a run that nobody holds."""
    with World(tmp_path, plan_of(federation={"epochs": 3})) as world:
        daemon, server = world.start("a"), ServerKeys.load(tmp_path / "keys/server").identity

        def enrol(run: str, follows: tuple[str, ...], age_s: int) -> Reply:
            request = Request(
                "enrol", run, "a", "1", settings=daemon.learner.settings, follows=follows, time=int(time.time()) - age_s
            ).sign(server)
            return Reply.read(daemon.handle(request), world.keys_of("a").identity.public)

        assert enrol("one", (), 0).kind == "enrolled"
        assert enrol("two", ("one",), 5000).kind == "refusal"
        assert (daemon.learner.epoch, daemon.learner.run) == (0, "one")
        assert enrol("one", (), 5000).kind == "enrolled", "its own run may be late"
        assert enrol("two", ("one",), 0).facts["epoch"] == 1


def test_a_runs_name_cannot_act_on_a_learners_terminal(tmp_path, caplog):
    run = ACTS.replace("\ud800", "")
    with World(tmp_path, plan_of(federation={"epochs": 2})) as world:
        daemon, server = world.start("a"), ServerKeys.load(tmp_path / "keys/server").identity
        caplog.set_level(logging.INFO, "veilstream")
        settings = daemon.learner.settings
        for request in (
            Request("enrol", run, "a", "1", settings=settings),
            Request("enrol", run + "2", "a", "2", settings=settings, follows=(run,)),
            Request("end", run + "2", "a", "3"),
            Request("end", run, "a", "4"),
            Request("enrol", run + "3", "a", "5", settings=settings),
        ):
            daemon.handle(request.sign(server))
        assert len(caplog.messages) >= 4
        assert all(line.isprintable() for line in caplog.messages)


def test_a_server_that_asks_without_end_fills_no_memory_of_a_learner():
    """A learner with a live source may need minutes for an answer."""
    read, answer = 0, threading.Event()

    class Call:
        async def read(self) -> bytes:
            nonlocal read
            read += 1
            await asyncio.sleep(0)
            return wire.REQUEST + bytes(1000)

        async def write(self, frame: bytes) -> None:
            pass

    def handle(request: bytes) -> bytes:
        answer.wait(10.0)
        return b"reply"

    async def asked() -> tuple[int, int]:
        client = StreamClient(("127.0.0.1", 1), "a", handle, None, dim=DIM, enrolled=True)
        answering = asyncio.ensure_future(client._answer_all(Call()))
        await asyncio.sleep(0.3)
        first = read
        answer.set()
        await asyncio.sleep(0.3)
        answering.cancel()
        client.close()
        return first, read

    first, later = asyncio.run(asked())
    assert first <= 8
    assert later > first, "it goes on when they have been answered"


FILES = """
    import resource, subprocess, sys, time
    from pathlib import Path
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    from veilstream.federation.direct import DirectServer
    from veilstream.files import write_file

    keys = Path(sys.argv[1])
    server = DirectServer(keys / "server", ("127.0.0.1", 0), dim=6)
    server.start()
    print(server.port, flush=True)
    sys.stdin.readline()
    write_file(keys / "checkpoint", "x")
    print("written", flush=True)
    server.close()
"""


def test_strangers_who_connect_leave_the_server_files_to_write_its_checkpoint(tmp_path):
    """From anywhere, without a byte of TLS: each connection is an open file for ten seconds."""
    make_keys(tmp_path / "keys", ["127.0.0.1"], NAMES)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 600
    command = [sys.executable, "-c", textwrap.dedent(FILES), str(tmp_path / "keys")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        port = int(server.stdout.readline())
        strangers = []
        for _ in range(300):
            stranger = socket.socket()
            stranger.setblocking(False)
            stranger.connect_ex(("127.0.0.1", port))
            strangers.append(stranger)
        time.sleep(1.0)
        server.stdin.write("\n")
        server.stdin.flush()
        said = server.stdout.readline()
        for stranger in strangers:
            stranger.close()
        assert said == "written\n"
