"""Over Flower: the same models as without an engine, whoever is killed; nobody else gets in."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from tests.support.known_secrets import NamedRounds
from veilstream.deployment.learner import Learner
from veilstream.errors import InputError, ProtocolError
from veilstream.federation.addresses import free_port, wait_until_free
from veilstream.federation.identity import LearnerKeys, ServerKeys, make_keys
from veilstream.federation.protocol import frames
from veilstream.federation.protocol.transport import Failure
from veilstream.federation.services.coordinator import Coordinator
from veilstream.federation.services.daemon import Daemon
from veilstream.federation.transports.flower import FlowerNode, FlowerServer
from veilstream.federation.transports.flower.environment import import_quietly
from veilstream.federation.transports.flower.superlink import (
    OPEN,
    SECRET,
    UNKNOWN,
    AccessControl,
    LongPoll,
)
from veilstream.federation.transports.loopback import Loopback
from veilstream.plans.data_source import PlanSource
from veilstream.plans.plan import Plan
from veilstream.plans.tasks import task_of

ROUNDS = 8
DIM = 20
PLAN = Plan(
    learning={"rounds": ROUNDS, "local_steps": 3, "learners": 2},
    data={"dim": DIM},
    privacy={"epsilon": 4.0, "delta": 1e-3},
    methods=[{"name": "ours", "mechanism": "buffered", "step_size": 0.1}],
    federation={"quorum": 1.0, "deadline_s": 300.0, "patience_s": 1.0},
)
NAMES = ("a", "b")


# --- a federation in this process, but for Flower's own ------------------------------------------


@pytest.fixture(scope="module")
def known_draws():
    """The noise depends on the learner and the step alone, so that two runs can be compared."""

    def named(self, epoch):
        return NamedRounds(self.terms, epoch, self.ledger.path.parent.name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "new_rounds", named)
        yield


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("k") / "keys"
    make_keys(folder, ["127.0.0.1"], list(NAMES))
    return folder


@contextmanager
def daemons(folder: Path, keys: Path):
    """Two learners behind sockets."""
    with ExitStack() as stack:
        sockets = {}
        for index, name in enumerate(NAMES):
            learner = Learner(PLAN, folder / name / "store.db", task_of(PLAN), create=True)
            daemon = Daemon(
                learner, LearnerKeys.load(keys / "learners" / name), PlanSource(PLAN, index)
            )
            sockets[name] = folder / name / "s"
            thread = threading.Thread(target=daemon.serve, args=(sockets[name],), daemon=True)
            thread.start()
            stack.callback(thread.join, 10.0)
            stack.callback(daemon.close)
        wait_until(lambda: all(path.exists() for path in sockets.values()))
        yield sockets


@contextmanager
def supervised(*parts):
    """Call `supervise` as the commands do; what it says is kept."""
    said: list[str] = []
    stop = threading.Event()

    def work():
        while not stop.wait(0.5):
            said.extend(line for part in parts if (line := part.supervise()))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield said
    finally:
        stop.set()
        thread.join()


@contextmanager
def started(*parts):
    with ExitStack() as stack:
        for part in parts:
            stack.callback(part.close)
            part.start()
        yield


def coordinator(keys: Path, folder: Path, watch=lambda _: None) -> Coordinator:
    server = ServerKeys.load(keys / "server")
    return Coordinator(PLAN, np.zeros(DIM, np.float32), server, folder, watch=watch)


def wait_until(true, timeout_s: float = 30.0) -> None:
    until = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < until, "took too long"
        time.sleep(0.02)


class Overheard:
    """A transport that notes the sizes of replies and calls someone before each round trip."""

    def __init__(self, transport) -> None:
        self.transport, self.sizes = transport, {name: [] for name in NAMES}

    def nodes(self):
        return self.transport.nodes()

    def send(self, node, request):
        self.transport.send(node, request)

    def receive(self, timeout_s):
        found = self.transport.receive(timeout_s)
        for node, what in found:
            if not isinstance(what, Failure):
                self.sizes[node].append(len(what))
        return found

    def close(self):
        self.transport.close()


@pytest.fixture(scope="module")
def reference(known_draws, keys, tmp_path_factory):
    """All models of the same federation without an engine."""
    folder = tmp_path_factory.mktemp("r")
    with daemons(folder, keys) as sockets:
        coordinator(keys, folder / "run").go(Loopback(sockets))
    return (folder / "run/models.f32").read_bytes()


@pytest.fixture(scope="module")
def server(keys, tmp_path_factory):
    """One SuperLink with TLS for the tests that do it no harm."""
    server = FlowerServer(
        keys / "server", tmp_path_factory.mktemp("sl"), ("127.0.0.1", free_port())
    )
    with started(server), supervised(server):
        yield server


def node_of(server, keys: Path, name: str, socket: Path, state: Path) -> FlowerNode:
    return FlowerNode(keys / "learners" / name, socket, state, (server._host, server._port))


# --- what it carries -----------------------------------------------------------------------------


def test_models_are_those_of_the_same_federation_without_an_engine(
    server, keys, reference, tmp_path
):
    with daemons(tmp_path, keys) as sockets:
        nodes = [node_of(server, keys, n, sockets[n], tmp_path / n / "f") for n in NAMES]
        transport = Overheard(server)
        with started(*nodes), supervised(*nodes):
            coordinator(keys, tmp_path / "run").go(transport)
    assert (tmp_path / "run/models.f32").read_bytes() == reference
    for sizes in transport.sizes.values():  # one to enrol, then the rounds
        assert len(sizes) == 1 + ROUNDS
        assert len(set(sizes[1:])) == 1
    assert not list(tmp_path.rglob("*.fab"))
    for state in (tmp_path / "a/f", server._state):
        assert state.stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_a_run_outlives_the_relay_and_the_superlink(keys, reference, tmp_path):
    server = FlowerServer(keys / "server", tmp_path / "sl", ("127.0.0.1", free_port()))
    kills = {2: ["relay"], 4: ["superlink"], 6: ["relay", "superlink"]}

    def watch(standing):
        if not standing.answered:
            return
        for victim in kills.pop(standing.round, []):  # in the middle of the round
            os.kill({"relay": nodes[0].pid, "superlink": server.pid}[victim], signal.SIGKILL)

    with daemons(tmp_path, keys) as sockets:
        nodes = [node_of(server, keys, n, sockets[n], tmp_path / n / "f") for n in NAMES]
        with started(server, *nodes), supervised(server, *nodes) as said:
            running = coordinator(keys, tmp_path / "run", watch)
            running.go(server)
    assert running.finished
    assert not kills
    assert sum("SuperLink had ended" in line for line in said) == 2
    assert sum("relay had ended" in line for line in said) == 2
    assert (tmp_path / "run/models.f32").read_bytes() == reference


def test_eight_megabytes_and_a_daemon_that_is_away(keys, tmp_path):
    """Without TLS, which is allowed on this machine alone."""
    address = ("127.0.0.1", free_port())
    server = FlowerServer(keys / "server", tmp_path / "sl", address, insecure=True)
    node = FlowerNode(keys / "learners/a", tmp_path / "s", tmp_path / "f", address, insecure=True)
    with started(server, node), supervised(server, node):
        wait_until(lambda: server.nodes() == {"a"})
        server.send("a", b"anyone?")
        ((who, failure),) = server.receive(10.0)
        assert who == "a"
        assert isinstance(failure, Failure)
        assert "cannot be reached" in failure.why
        listener = frames.listen(tmp_path / "s")

        def echo():
            connection, _ = listener.accept()
            with connection:
                frames.send(connection, frames.receive(connection))

        thread = threading.Thread(target=echo)
        thread.start()
        request = os.urandom(8_000_000)
        server.send("a", request)
        assert server.receive(30.0) == [("a", request)]
        thread.join()
        listener.close()
        server.send("b", b"not there")
        assert isinstance(server.receive(5.0)[0][1], Failure)


# --- who gets in ---------------------------------------------------------------------------------


def refusal(node: FlowerNode, within_s: float = 15.0) -> ProtocolError:
    """What `supervise` raises."""
    until = time.monotonic() + within_s
    with started(node):
        while time.monotonic() < until:
            try:
                node.supervise()
            except ProtocolError as error:
                return error
            time.sleep(0.1)
    raise AssertionError("not refused in time")


def test_a_stranger_is_refused_with_a_way_out(server, keys, tmp_path):
    others = tmp_path / "others"
    make_keys(others, ["127.0.0.1"], ["a"])
    wrong_ca = node_of(server, others, "a", tmp_path / "s", tmp_path / "1")
    assert "`veilstream keys`" in str(refusal(wrong_ca))
    right_ca = (keys / "learners/a/ca.pem").read_text()
    (others / "learners/a/ca.pem").write_text(right_ca)
    unknown_key = node_of(server, others, "a", tmp_path / "s", tmp_path / "2")
    assert "node key" in str(refusal(unknown_key))


def test_a_server_that_is_away_is_awaited(keys, tmp_path):
    address = ("127.0.0.1", free_port())
    node = FlowerNode(keys / "learners/a", tmp_path / "s", tmp_path / "f", address)
    with started(node), supervised(node) as said:
        wait_until(lambda: any("no answer" in line for line in said))
        for _ in range(2):  # the second knows nothing of the first
            server = FlowerServer(keys / "server", tmp_path / "sl", address)
            with started(server):
                wait_until(lambda server=server: server.nodes() == {"a"})
    assert not any("relay had ended" in line for line in said)


def test_only_machines_with_keys_may_talk_to_flower(server, keys):
    import ssl

    trusted = ssl.create_default_context(cafile=str(keys / "server/ca.pem"))
    for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/health", OPEN):
        request = urllib.request.Request(
            f"https://127.0.0.1:{server._port}{path}", b"", {SECRET: "guess"}
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, context=trusted, timeout=10)
        with refused.value:
            assert refused.value.code == 403


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "example.org"])
def test_without_tls_only_on_this_machine(keys, tmp_path, host):
    with pytest.raises(InputError, match="insecure"):
        FlowerServer(keys / "server", tmp_path, (host, 1), insecure=True)
    with pytest.raises(InputError, match="insecure"):
        FlowerNode(keys, tmp_path, tmp_path, (host, 1), insecure=True)


def test_an_address_in_use_is_an_error_that_names_it(keys, tmp_path, monkeypatch):
    at_once = functools.partial(wait_until_free, patience_s=0.1)
    monkeypatch.setattr("veilstream.federation.transports.flower.server.wait_until_free", at_once)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = listener.getsockname()
        server = FlowerServer(keys / "server", tmp_path / "sl", address)
        with pytest.raises(InputError, match=str(address[1])):
            server.start()
        server.close()


# --- access control, without Flower -----------------------------------------------------------


def asked(access, path, headers=None, kind="http"):
    """Status and headers that access control, or what is behind it, answers with."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    fields = [(k.encode(), v.encode()) for k, v in (headers or {}).items()]
    asyncio.run(access({"type": kind, "path": path, "headers": fields}, receive, send))
    return sent[0]


def new_access_control():
    async def flower(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    return AccessControl(flower, "secret", {"key-a": "a"})


def test_the_door_opens_to_the_secret_then_to_known_keys():
    access, ours, node = new_access_control(), {SECRET: "secret"}, {"flwr-public-key": "key-a"}
    assert asked(access, "/v1/fleet/activate-node", node)["status"] == 503
    assert asked(access, OPEN, {SECRET: "wrong"})["status"] == 403
    assert asked(access, "/v1/control/start-run", ours)["status"] == 200
    assert asked(access, OPEN, ours)["status"] == 204
    assert asked(access, "/v1/fleet/activate-node", node)["status"] == 200
    stranger = asked(access, "/v1/fleet/activate-node", {"flwr-public-key": "key-b"})
    assert stranger["status"] == 403
    assert (UNKNOWN.encode(), b"1") in stranger["headers"]


@pytest.mark.parametrize(
    "path",
    ["/", "/v1/control/start-run", "/v1/runtime/acquire-task", "/v1/fleet", "/V1/FLEET/x",
     "/v1/fleet/register-node", "/v1/fleet/unregister-node", "/v1/responses"],
)  # fmt: skip
def test_the_door_is_closed_to_machines_but_for_the_fleet(path):
    access = new_access_control()
    asked(access, OPEN, {SECRET: "secret"})
    assert asked(access, path, {"flwr-public-key": "key-a"})["status"] == 403


def test_the_door_knows_no_websockets():
    assert asked(new_access_control(), "/v1/fleet/x", kind="websocket")["type"] == "websocket.close"


def test_a_bell_that_rang_before_is_heard():
    async def scene():
        poll, gone = LongPoll(), asyncio.get_running_loop().create_future()
        await poll.wait(gone)  # never heard before: at once
        poll.ring()
        await asyncio.wait_for(poll.wait(gone), 1.0)
        waiting = asyncio.ensure_future(poll.wait(gone))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        poll.ring()
        await asyncio.wait_for(waiting, 1.0)
        gone.set_result(None)
        await asyncio.wait_for(poll.wait(gone), 1.0)

    asyncio.run(scene())


# --- what is imported ----------------------------------------------------------------------------


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    command = [sys.executable, "-W", "ignore", "-c", code]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


def test_flower_is_imported_only_where_it_is_used():
    flower = "veilstream.federation.transports.flower"
    loaded = modules_after(f"from {flower} import FlowerNode, FlowerServer")
    assert "flwr" not in loaded
    relay = modules_after(f"import {flower}.relay")
    ours = {name for name in relay if name.startswith("veilstream")}
    assert ours == {
        "veilstream", "veilstream.federation", "veilstream.federation.protocol",
        "veilstream.federation.protocol.frames", "veilstream.federation.transports", flower,
        f"{flower}.client", f"{flower}.envelope", f"{flower}.relay",
    }  # fmt: skip


def test_names_of_flower_that_this_engine_rests_on():
    """What has no public interface: an upgrade of flwr must look at each of these."""
    relay = import_quietly("relay")
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
    from flwr.superlink import extensions

    from veilstream.federation.transports.flower import node, superlink

    assert FLEET_HTTP_PUBLIC_KEY_HEADER.encode() == superlink._NODE_KEY
    assert callable(extensions.get_middleware)
    assert relay.REFUSED == node._REFUSED
    assert relay._UNKNOWN == UNKNOWN
