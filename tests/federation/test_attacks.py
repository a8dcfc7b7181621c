"""Attacks by aggregators, by learners behind them, by strangers and by whoever keeps old messages.

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

from tests.federation.test_aggregator import NAMES, Side
from tests.federation.test_hostile import ACTS, LOSSY, Stage, until
from tests.support.direct import DirectWorld
from tests.support.federation import DIM, Plain, World, plan_of, wait_for
from veilstream.deployment.release import decode, encode
from veilstream.deployment.terms import Terms
from veilstream.errors import ProtocolError, RunBusy
from veilstream.federation.aggregator import AggregatorService
from veilstream.federation.direct import DirectServer, wire
from veilstream.federation.direct.branch import SUM, Branch, pack
from veilstream.federation.direct.client import StreamClient
from veilstream.federation.keys.identity import (
    AggregatorKeys,
    LearnerKeys,
    ServerKeys,
    add_aggregator,
    add_learner,
    make_keys,
    remove_learner,
)
from veilstream.federation.protocol.fold import ServerFold
from veilstream.federation.protocol.messages import Part, Reply, Request, Sum
from veilstream.federation.protocol.transport import Inbox
from veilstream.federation.server.checkpoint import Position
from veilstream.federation.server.coordinator import Coordinator
from veilstream.federation.server.message_file import MessageFile, Slots
from veilstream.privacy.gradient_types import Noised

X0 = np.zeros(DIM, np.float32)


class Between(Stage):
    """Puppets behind an aggregator that sends whatever a test wants as their sum."""

    def __init__(self, root, plan) -> None:
        super().__init__(root, plan)
        add_aggregator(root / "keys", "g", ["127.0.0.1"], list(self.puppets))
        self.keys = ServerKeys.load(root / "keys/server")
        self.own = AggregatorKeys.load(root / "keys/aggregators/g")
        self.summed: dict[str, Reply] = {}

    def send(self, node: str, raw: bytes) -> None:
        request = Request.read(raw, self.keys.identity.public)
        if request.kind != "round":
            super().send(node, raw)
            return
        puppet = self.puppets[node]
        said = puppet.handle(raw, request)
        self.summed[node] = Reply.read(said, puppet.identity.public)
        if len(self.summed) == len(self.puppets):
            self.send_sum(self.said_sum())
            self.summed.clear()

    def said_sum(self) -> Sum:
        messages = {name: decode(reply.body) for name, reply in self.summed.items()}
        parts = tuple(
            Part(name, m.epoch, m.round, m.hash, self.server.fold.seats[name].accepted) for name, m in messages.items()
        )
        total = np.full(DIM, 1000 * len(parts), "<i8").tobytes()
        return Sum("g", self.server.run, parts, total)

    def send_sum(self, said: Sum) -> None:
        self.inbox.put("@g", said.sign(self.own.identity))

    def begin(self) -> Coordinator:
        self.server = self.coordinator()
        return self.server


@pytest.fixture
def between(tmp_path):
    made = Between(tmp_path, plan_of(rounds=3, federation=LOSSY))
    yield made
    made.close()


@pytest.fixture
def side(tmp_path):
    make_keys(tmp_path / "keys", ["127.0.0.1"], NAMES)
    add_aggregator(tmp_path / "keys", "g", ["127.0.0.1"], NAMES)
    return Side(tmp_path / "store", tmp_path / "keys", Terms.of(plan_of(), DIM))


# --- an aggregator that lies ----------------------------------------------------------------------


@pytest.mark.parametrize("hashed", ["\ud800", "x\n9,a,0,0,forged", ""])
def test_a_sum_whose_hashes_are_other_texts_neither_ends_the_server_nor_reaches_its_files(between, hashed):
    server, lies = between.begin(), iter([True])
    honest = between.said_sum

    def said_sum() -> Sum:
        said = honest()
        if next(lies, False):
            wrong = dataclasses.replace(said.parts[0], hash=hashed)
            between.send_sum(dataclasses.replace(said, parts=(wrong, *said.parts[1:])))
        return said

    between.said_sum = said_sum
    between.went_on(server)
    assert server.messages_refused["ProtocolError"] == 1
    rows = (between.root / "run/releases.csv").read_text().splitlines()
    assert all(len(row.split(",")[4]) == 64 for row in rows[1:])
    between.coordinator()  # and it can be opened again


def test_a_sum_counts_only_for_learners_that_were_asked(between):
    """Also one who has never been there, and one whose seat waits for its next enrolment."""
    server = between.begin()
    parts = tuple(Part(name, 0, 0, "0" * 64, None) for name in between.puppets)
    between.send_sum(Sum("g", server.run, parts, bytes(8 * DIM)))
    server.enrol(between)
    assert server.fold.answered == ()
    assert server.messages_refused["ProtocolError"] == 1
    assert between.went_on(server).fold.seats["a"].accepted[1] != "0" * 64


def test_an_aggregator_that_reads_nothing_has_the_server_keep_one_request_a_learner():
    async def stalled() -> int:
        class Context:
            async def write(self, frame: bytes) -> None:
                if frame != wire.WELCOME:
                    await asyncio.Event().wait()

        branch = Branch("g", "i", frozenset(NAMES), Inbox())
        writing = asyncio.ensure_future(branch.write_all(Context()))
        for r in range(500):
            body = bytes([r % 256]) * 64
            for name in NAMES:
                branch.take(name, b"head", body)
            await asyncio.sleep(0)
        held = [own for own in vars(branch).values() if isinstance(own, dict | asyncio.Queue)]
        writing.cancel()
        return sum(own.qsize() if isinstance(own, asyncio.Queue) else len(own) for own in held)

    assert asyncio.run(stalled()) <= 2 * len(NAMES)


def test_an_aggregator_that_sends_without_end_fills_no_memory(tmp_path):
    import grpc

    make_keys(tmp_path / "keys", ["127.0.0.1"], NAMES)
    add_aggregator(tmp_path / "keys", "g", ["127.0.0.1"], NAMES)
    inbox = Inbox()
    server = DirectServer(tmp_path / "keys/server", ("127.0.0.1", 0), dim=DIM, insecure=True, inbox=inbox)
    server.start()
    frame = SUM + pack([("parts", b"[]"), ("sum", b"s" * 1000)])
    stop = threading.Event()

    def flood():
        while not stop.is_set():
            yield frame

    try:
        channel = grpc.insecure_channel(f"127.0.0.1:{server.port}")
        call = channel.stream_stream(wire.PATH)(flood(), metadata=((wire.AGGREGATOR, "g"), (wire.INSTANCE, "i")))
        assert next(call) == wire.WELCOME
        time.sleep(1.0)
        assert 0 < inbox.waiting < 200
        for _ in range(20):
            server.receive(0.1)
        wait_for(lambda: inbox.waiting > 0)  # it goes on when they have been read
    finally:
        stop.set()
        channel.close()
        server.close()


def test_two_aggregators_do_not_write_to_one_store(tmp_path):
    """The one that comes later would read what the other has written over."""
    make_keys(tmp_path / "keys", ["127.0.0.1"], NAMES)
    add_aggregator(tmp_path / "keys", "g", ["127.0.0.1"], NAMES)
    stop = threading.Event()
    services = [
        AggregatorService(
            plan_of(),
            tmp_path / "keys/aggregators/g",
            tmp_path / "store",
            ("127.0.0.1", 0),
            ("127.0.0.1", 1),
            insecure=True,
            task=Plain(),
        )
        for _ in range(2)
    ]
    first = threading.Thread(target=services[0].run, args=(stop,))
    first.start()
    try:
        wait_for(lambda: (tmp_path / "store/messages.bin").exists())
        with pytest.raises(RunBusy):
            services[1].run(stop)
    finally:
        stop.set()
        first.join(20.0)


# --- a learner behind an aggregator ---------------------------------------------------------------


def test_a_release_of_another_epoch_is_kept_out_of_the_others_sum(side):
    """The server refuses a sum with such a part as a whole: one learner could void all others'."""
    for name in "bc":
        assert side.sums.take(name, side.reply(name, side.ask(name)))
    steps, grid = side.terms.local_steps, side.terms.grid.step
    body = encode(7, 0, steps, grid, Noised(np.zeros(DIM, np.int64)))
    request = side.ask("a")
    with pytest.raises(ProtocolError, match="epoch 7"):
        side.sums.take("a", side.reply("a", request, body))
    assert side.fold.accept_sum(side.sum())
    assert side.fold.answered == ("b", "c")


def test_a_stolen_key_that_was_replaced_opens_nothing_at_the_aggregator_either(tmp_path):
    keys = tmp_path / "keys"
    make_keys(keys, ["127.0.0.1"], NAMES)
    add_aggregator(keys, "g", ["127.0.0.1"], ["a", "b"])
    stolen = LearnerKeys.load(keys / "learners/a").identity.public.raw
    remove_learner(keys, "a")
    assert set(AggregatorKeys.load(keys / "aggregators/g").learners) == {"b"}
    assert ServerKeys.load(keys / "server").aggregators["g"][1] == {"b"}
    add_learner(keys, "a")
    new = LearnerKeys.load(keys / "learners/a").identity.public.raw
    known = AggregatorKeys.load(keys / "aggregators/g").learners
    assert known["a"].raw == new != stolen
    assert ServerKeys.load(keys / "server").aggregators["g"][1] == {"a", "b"}
    add_aggregator(keys, "h", ["127.0.0.1"], ["b"])
    assert set(AggregatorKeys.load(keys / "aggregators/g").learners) == {"a"}


def test_learners_behind_an_aggregator_hear_of_the_end_and_destroy_their_secrets(tmp_path):
    plan = plan_of(rounds=4, federation={"quorum": 0.6, "deadline_s": 1.0, "patience_s": 0.1})
    with DirectWorld(tmp_path, plan) as world:
        add_aggregator(tmp_path / "keys", "g", ["127.0.0.1"], list(world.names))
        transport, stop = world.transport(), threading.Event()
        server_port = world.port
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            world.port = probe.getsockname()[1]
        service = AggregatorService(
            plan,
            tmp_path / "keys/aggregators/g",
            tmp_path / "g.store",
            ("127.0.0.1", world.port),
            ("127.0.0.1", server_port),
            task=Plain(),
        )
        thread = threading.Thread(target=service.run, args=(stop,))
        thread.start()
        try:
            for name in world.names:
                world.start(name)
            coordinator = world.coordinator()
            coordinator.go(transport, until=3, look=until(30.0))
            world.nodes.pop("c").close()  # it misses the last round
            coordinator.go(transport, look=until(30.0))
            late = world.daemons["c"]
            assert not late.learner.over
            world.connect("c", late.handle)
            assert coordinator.end_all(transport, 20.0, until(30.0)) == ()
            assert late.learner.over
            assert late.learner.ledger.names("seed/") == []
        finally:
            stop.set()
            thread.join(20.0)


# --- a learner at the server ----------------------------------------------------------------------


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
    assert max(len(asking.asked) for asking in server._enrolling.values()) <= 16
    assert max(len(asking.asked) for asking in server._ending.values()) <= 16


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
    fold.terms = dataclasses.replace(terms, model_norm_cap=float(np.linalg.norm(expected)) * 1.01)
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


# --- old messages and texts of a server -----------------------------------------------------------


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


# --- strangers ------------------------------------------------------------------------------------


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
