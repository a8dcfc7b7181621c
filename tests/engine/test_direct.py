"""Over the direct transport: real sockets and TLS on loopback; nobody gets in who should not."""

from __future__ import annotations

import datetime
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import tracemalloc

import numpy as np
import pytest

pytest.importorskip("grpc")

import grpc

from tests.support.direct import DirectWorld, RawStream, dated_certificate, refusal, tls_listener
from tests.support.federation import DIM, Lines, options, plan_of, seeds_by_name, wait_for
from veilstream.errors import InputError
from veilstream.federation.direct import DirectServer, certificates, wire
from veilstream.federation.keys.new_keys import add_learner, make_keys, remove_learner, renew_learner
from veilstream.federation.protocol.sizes import reply_limit, request_limit
from veilstream.federation.protocol.transport import Failure


@pytest.fixture
def world(tmp_path):
    with DirectWorld(tmp_path, plan_of()) as world:
        yield world


@pytest.fixture
def learner_log():
    lines = Lines("veilstream.federation.direct.client")
    yield lines
    lines.end()


def echo(request: bytes) -> bytes:
    return b"re: " + request


def replies(transport, count: int, seconds: float = 10.0):
    found = []
    until = time.monotonic() + seconds
    while len(found) < count:
        assert time.monotonic() < until, found
        found += transport.receive(0.2)
    return found


def connected(world: DirectWorld, *names: str) -> None:
    wait_for(lambda: world.server.nodes() >= set(names))


def test_a_federation_runs_to_the_model_that_its_ledgers_imply(world):
    transport = world.transport()
    world.start_all()
    coordinator = world.coordinator()
    coordinator.go(transport)
    assert coordinator.finished
    world.close()
    np.testing.assert_allclose(coordinator.models.read(6), world.model_by_ledgers(), atol=1e-6)


def test_the_demo_runs_from_the_command_line(tmp_path):
    from veilstream.federation.demo import demo_plan, run_demo

    result = run_demo(tmp_path / "demo", demo_plan(2, 3))
    assert (result.rounds, result.clients) == (3, 2 * 3 * 4)
    stores = [path.name for path in (tmp_path / "demo/learners").rglob("*")]
    assert not [name for name in stores if name.endswith(".sock")]


@pytest.mark.parametrize("restarted", ["server", "learner"])
def test_a_server_or_learner_that_is_started_again_goes_on_to_the_same_model(restarted, tmp_path, monkeypatch):
    seeds_by_name(monkeypatch)
    models = []
    for broken in (False, True):
        with DirectWorld(tmp_path / str(broken), plan_of()) as world:
            transport = world.transport()
            world.start_all()
            coordinator = world.coordinator()
            coordinator.go(transport, until=3)
            if broken and restarted == "server":
                transport.close()
                wait_for(lambda nodes=world.nodes: not any(n.online for n in nodes.values()))
                transport, coordinator = world.transport(), world.coordinator()
            elif broken:
                world.stop("b")
                wait_for(lambda t=transport: t.nodes() == {"a", "c"})
                world.start("b")
            coordinator.go(transport)
            models.append(coordinator.models.read(6))
    assert models[0].tobytes() == models[1].tobytes()


def test_a_silent_learner_holds_nobody_up_beyond_the_deadline(tmp_path):
    plan = plan_of(3, federation={"quorum": 0.6, "deadline_s": 1.0, "patience_s": 0.2})
    with DirectWorld(tmp_path, plan) as world:
        transport = world.transport(answer_within_s=1.0)
        over = threading.Event()
        world.start("a")
        world.start("b")
        world.connect("c", lambda _: bytes(over.wait(60)))
        coordinator = world.coordinator()
        began = time.monotonic()
        coordinator.go(transport)
        took = time.monotonic() - began
        over.set()
    assert coordinator.finished
    assert took < 15.0  # three deadlines of one second; a request's own patience is 5.2 s
    assert any("c: no answer within 1 s" in note or "node c: no answer" in note for note in world.notes)
    rows = (tmp_path / "run/rounds.csv").read_text().splitlines()[1:]
    assert [row.split(",")[2:] for row in rows] == [["2", "c"]] * 3


def test_one_request_is_out_at_a_time_and_the_newest_waits(world):
    transport = world.transport()
    go_on, seen = threading.Event(), []

    def slow(request: bytes) -> bytes:
        seen.append(request)
        go_on.wait(10)
        return request

    world.connect("a", slow)
    connected(world, "a")
    for request in (b"1", b"2", b"3", b"1"):
        transport.send("a", request)
    wait_for(lambda: seen == [b"1"])
    go_on.set()
    # The one that was asked for last waits: it is the same as the one that is out.
    found = replies(transport, 2)
    assert found == [("a", b"1"), ("a", b"3")]
    assert seen == [b"1", b"3"]


def test_a_request_to_someone_who_is_away_fails(world):
    transport = world.transport()
    transport.send("a", b"anyone?")
    assert replies(transport, 1) == [("a", Failure("not connected"))]


def test_a_request_whose_learner_goes_away_fails(world):
    transport, stay = world.transport(), threading.Event()
    world.connect("a", lambda request: request if stay.wait(10) else b"")
    connected(world, "a")
    transport.send("a", b"1")
    time.sleep(0.2)
    world.stop("a")
    ((node, what),) = replies(transport, 1)
    stay.set()
    assert node == "a"
    assert isinstance(what, Failure)


def test_a_handler_that_raises_leaves_the_stream_as_it_is(world, learner_log):
    transport = world.transport()

    def handle(request: bytes) -> bytes:
        if request == b"bad":
            raise ValueError("someone's data")
        return request

    node = world.connect("a", handle)
    connected(world, "a")
    transport.send("a", b"bad")
    wait_for(lambda: "ValueError" in "".join(learner_log))
    assert "someone" not in "".join(learner_log)
    assert node.online


def test_a_request_over_the_limit_is_not_sent(world):
    transport = world.transport()
    world.connect("a", echo)
    connected(world, "a")
    largest = request_limit(DIM)
    transport.send("a", bytes(largest + 1))
    ((node, what),) = replies(transport, 1)
    assert node == "a"
    assert isinstance(what, Failure)
    assert str(largest) in what.why
    transport.send("a", b"still there?")
    assert replies(transport, 1) == [("a", b"re: still there?")]


def test_a_server_and_its_learners_end_quietly(world, caplog):
    for servers_first in [True, False] * 10:
        transport = world.transport()
        for name in world.names:
            world.connect(name, echo)
        connected(world, *world.names)
        if servers_first:
            transport.close()
        for name in world.names:
            world.stop(name)
        transport.close()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_many_rounds_leave_nothing_behind(world):
    transport = world.transport()
    size = request_limit(DIM)
    world.connect("a", echo)
    connected(world, "a")
    tracemalloc.start()
    try:
        for _ in range(5):
            transport.send("a", os.urandom(size - 4))
            replies(transport, 1)
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(200):
            transport.send("a", os.urandom(size - 4))
            replies(transport, 1)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 20 * size  # 200 requests were 200 times as much


def test_the_largest_messages_pass(world):
    transport = world.transport()
    largest = bytes(reply_limit(DIM))
    world.connect("a", lambda _: largest)
    connected(world, "a")
    transport.send("a", bytes(request_limit(DIM)))
    assert replies(transport, 1) == [("a", largest)]


def test_a_reply_over_the_limit_ends_its_own_stream_only(world):
    transport = world.transport()
    world.connect("b", echo)
    with RawStream(world, "a", "a") as hostile:
        assert hostile.read() == wire.WELCOME
        connected(world, "a", "b")
        transport.send("a", b"1")
        assert hostile.read() == b"Q1"
        hostile.send(wire.REPLY + bytes(reply_limit(DIM) + 1))
        assert hostile.status() == grpc.StatusCode.RESOURCE_EXHAUSTED
    ((node, what),) = replies(transport, 1)
    assert node == "a"
    assert isinstance(what, Failure)
    transport.send("b", b"2")
    assert replies(transport, 1) == [("b", b"re: 2")]


@pytest.mark.parametrize("frame", [b"Runasked", b"P", b"", b"Z", b"W"])
def test_what_nobody_asked_for_ends_the_stream(world, frame):
    transport = world.transport()
    with RawStream(world, "a", "a") as hostile:
        assert hostile.read() == wire.WELCOME
        hostile.send(frame)
        assert hostile.status() == grpc.StatusCode.INVALID_ARGUMENT
    assert "what was not asked for" in transport.supervise()
    assert transport.receive(0.1) == []


def test_a_second_learner_of_a_name_is_refused_at_once_and_both_sides_say_so(world):
    transport = world.transport()
    world.connect("a", echo)
    connected(world, "a")
    second = world.node("a", lambda _: b"an intruder")
    began = time.monotonic()
    second.start()
    error = refusal(second)
    assert time.monotonic() - began < 3.0
    second.close()
    assert "'a' is already connected" in str(error)
    assert error.exit_code == 7
    assert "a second learner calls itself 'a'" in transport.supervise()
    transport.send("a", b"who?")
    assert replies(transport, 1) == [("a", b"re: who?")]


def test_the_second_learners_process_ends_with_7(world, tmp_path):
    world.transport()
    (tmp_path / "plan.toml").write_text(world.plan.to_toml())
    world.connect("a", echo)
    connected(world, "a")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "veilstream", "learner"),
            *options(plan="plan.toml", keys="keys/learners/a", server=f"127.0.0.1:{world.port}"),
            *options(data="plan:0", store="second.db", new_store=True),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 7, done.stderr
    assert "a learner called 'a' is already connected" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_same_process_that_connects_anew_takes_its_place_over(world):
    transport = world.transport()
    with RawStream(world, "a", "a", "same") as old, RawStream(world, "b", "b") as other:
        assert old.read() == other.read() == wire.WELCOME
        with RawStream(world, "a", "a", "same") as new:
            assert new.read() == wire.WELCOME
            assert old.status() == grpc.StatusCode.ABORTED
            transport.send("a", b"1")
            assert new.read() == b"Q1"
            new.send(b"Rhere")
            assert replies(transport, 1) == [("a", b"here")]
            assert transport.nodes() == {"a", "b"}


def test_a_first_that_does_not_answer_is_not_yet_a_reason_to_give_up(world):
    world.transport()
    with RawStream(world, "a", "a", "first") as mute:  # its machine may have lost its power
        assert mute.read() == wire.WELCOME
        with RawStream(world, "a", "a", "second") as second:
            assert second.status() == grpc.StatusCode.UNAVAILABLE
        mute.close()
        wait_for(lambda: world.server.nodes() == set())
        with RawStream(world, "a", "a", "second") as second:
            assert second.read() == wire.WELCOME


def test_a_learners_certificate_opens_its_own_place_only(world):
    transport = world.transport()
    for claimed in ("b", "nobody", "\x1b[2J"[1:], ""):
        with RawStream(world, "a", claimed) as liar:
            assert liar.status() == grpc.StatusCode.PERMISSION_DENIED
    assert transport.supervise().count("was refused") == 2  # a line for each reason; more of one are counted
    assert transport.nodes() == set()


def test_without_a_certificate_nobody_gets_in(world):
    world.transport()
    ca = (world.root / "keys/learners/a/ca.pem").read_bytes()
    channel = grpc.secure_channel(f"127.0.0.1:{world.port}", grpc.ssl_channel_credentials(ca))
    with channel, pytest.raises(grpc.RpcError) as error:
        list(channel.stream_stream(wire.PATH)(iter(()), metadata=((wire.LEARNER, "a"),)))
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE


def test_a_server_of_another_ca_is_refused_within_seconds(world, tmp_path):
    world.transport()
    make_keys(tmp_path / "other", ["127.0.0.1"], ["a"])
    began = time.monotonic()
    node = world.connect("a", echo, keys=tmp_path / "other/learners/a")
    error = refusal(node)
    assert time.monotonic() - began < 8.0
    assert "CA did not sign" in str(error)
    assert error.exit_code == 7


def test_a_learner_whose_ca_the_server_does_not_know_is_told(world, tmp_path):
    world.transport()
    make_keys(tmp_path / "other", ["127.0.0.1"], ["a"])
    mixed = tmp_path / "mixed/a"
    shutil.copytree(tmp_path / "other/learners/a", mixed)
    shutil.copy(world.root / "keys/learners/a/ca.pem", mixed / "ca.pem")
    error = refusal(world.connect("a", echo, keys=mixed))
    assert "does not accept this learner's certificate" in str(error)


def test_an_unknown_learner_is_refused_within_seconds(world):
    keys = world.root / "keys"
    add_learner(keys, "d")
    shutil.copytree(keys / "learners/d", world.root / "away/d")
    remove_learner(keys, "d")
    transport = world.transport()
    node = world.node("d", echo, keys=world.root / "away/d")
    node.start()
    error = refusal(node)
    node.close()
    assert "does not know a learner 'd' with these keys" in str(error)
    assert "'d' was refused" in transport.supervise()


def test_a_removed_learners_old_certificate_does_not_open_its_new_place(world):
    keys = world.root / "keys"
    shutil.copytree(keys / "learners/a", world.root / "old/a")
    remove_learner(keys, "a")
    add_learner(keys, "a")
    world.transport()
    node = world.node("a", echo, keys=world.root / "old/a")
    node.start()
    assert "does not know a learner 'a' with these keys" in str(refusal(node))
    node.close()
    world.connect("a", echo)
    connected(world, "a")


def test_a_renewed_certificate_opens_the_same_place(world):
    renew_learner(world.root / "keys", "a")
    world.transport()
    world.connect("a", echo)
    connected(world, "a")


def test_a_learners_certificate_does_not_pass_for_the_servers(world, tmp_path):
    fake = tmp_path / "fake"
    shutil.copytree(world.root / "keys/server", fake)
    for name in ("tls.pem", "tls.key"):
        shutil.copy(world.root / "keys/learners/b" / name, fake / name)
    server = DirectServer(fake, ("127.0.0.1", 0), dim=DIM)
    server.start()
    try:
        world.port = server.port
        assert "CA did not sign" in str(refusal(world.connect("a", echo)))
        assert server.nodes() == set()
    finally:
        server.close()


def test_plaintext_on_the_servers_port_ends_nobody(world):
    transport = world.transport()
    world.start_all()
    over = threading.Event()

    def disturb() -> None:
        while not over.is_set():
            with socket.create_connection(("127.0.0.1", world.port)) as stranger:
                stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        coordinator = world.coordinator()
        coordinator.go(transport)
    finally:
        over.set()
        thread.join()
    assert coordinator.finished
    assert all(node.online for node in world.nodes.values())


def test_once_enrolled_a_learner_waits_for_a_server_that_it_cannot_trust_now(world, tmp_path, learner_log):
    keys = tmp_path / "learner/a"
    make_keys(tmp_path / "other", ["127.0.0.1"], ["a"])
    shutil.copytree(tmp_path / "other/learners/a", keys)
    world.transport()
    node = world.connect("a", echo, keys=keys, enrolled=True)
    until = time.monotonic() + 4.0  # longer than a first contact takes to be refused
    while time.monotonic() < until:
        node.supervise()  # raises if it gives up
        time.sleep(0.05)
    assert "CA did not sign" in "".join(learner_log)
    assert "waiting" in "".join(learner_log)
    for name in ("ca.pem", "tls.pem", "tls.key"):  # someone puts the right ones in place
        shutil.copy(world.root / "keys/learners/a" / name, keys / name)
    connected(world, "a")


def test_what_is_not_a_server_is_named(world):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        world.port = listener.getsockname()[1]

        def chat() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"SSH-2.0-OpenSSH_9.0\r\n")

        threading.Thread(target=chat, daemon=True).start()
        error = refusal(world.connect("a", echo), 20.0)
        listener.shutdown(socket.SHUT_RDWR)
    assert "does not speak TLS" in str(error) or "in the handshake" in str(error)


def test_a_certificates_dates_are_named(tmp_path):
    make_keys(tmp_path, ["127.0.0.1"], [], days=100)
    certificate = certificates.load(tmp_path / "server/tls.pem")
    ends = certificate.not_valid_after_utc
    day = datetime.timedelta(days=1)
    assert certificates.invalid(certificate, "its") is None
    assert certificates.expiring(certificate, "its", ends - 31 * day) == ""
    soon = certificates.expiring(certificate, "its", ends - 29.5 * day)
    assert f"{ends:%Y-%m-%d}" in soon
    assert "in 29 days" in soon
    late = certificates.invalid(certificate, "its", ends + day)
    assert late is not None
    assert "has expired" in late.what
    assert f"{ends:%Y-%m-%d}" in late.what
    early = certificates.invalid(certificate, "its", ends - 200 * day)
    assert early is not None
    assert "not valid yet" in early.what
    assert "clock" in early.way_out


def test_a_server_whose_certificate_has_expired_does_not_start(world):
    dated_certificate(world.root / "keys", -20, -10)
    with pytest.raises(InputError, match=r"has expired \(valid from 20\d\d-"):
        world.transport()


def test_a_server_warns_of_its_certificates_end(world):
    dated_certificate(world.root / "keys", -20, 10)
    assert "certificate ends on 20" in world.transport().supervise()


def test_a_learner_warns_of_its_certificates_end_once_a_day(world, learner_log):
    renew_learner(world.root / "keys", "a", days=10)
    node = world.node("a", echo)
    for _ in range(3):
        node.supervise()
    (line,) = learner_log
    assert "this learner's certificate ends on 20" in line


@pytest.mark.parametrize(("begins", "ends", "words"), [(-20, -10, "has expired"), (10, 20, "is not valid yet")])
def test_a_learner_names_the_dates_of_the_servers_certificate(world, begins, ends, words):
    keys = world.root / "keys"
    dated_certificate(keys, begins, ends)
    with tls_listener(keys) as port:
        mine = [keys / "learners/a" / name for name in ("ca.pem", "tls.pem", "tls.key")]
        trouble = certificates.diagnose(("127.0.0.1", port), *mine)
    assert trouble is not None
    assert f"the server's certificate {words} (valid from 20" in trouble.what


def test_keys_without_a_certificate_name_the_command_that_makes_one(world):
    (world.root / "keys/learners/a/tls.pem").unlink()
    with pytest.raises(InputError, match="keys renew KEYS --learner a"):
        world.node("a", echo)


def test_without_tls_only_on_loopback(world):
    with pytest.raises(InputError, match="a loopback address"):
        DirectServer(world.root / "keys/server", ("0.0.0.0", 0), dim=DIM, insecure=True)
    transport = world.transport(insecure=True)
    world.connect("a", echo, insecure=True)
    connected(world, "a")
    transport.send("a", b"1")
    assert replies(transport, 1) == [("a", b"re: 1")]
