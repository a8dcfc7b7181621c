"""The model API over real sockets: every form of a model, metrics, fetching, slow callers."""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import time
from contextlib import closing, contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.federation import DIM, World, plan_of, wait_for
from veilstream.errors import InputError, ProtocolError, VeilstreamError
from veilstream.federation.http.asgi_server import Limits
from veilstream.federation.http.model_check import check_plan
from veilstream.federation.keys.new_keys import make_keys, renew_server
from veilstream.federation.server.model_api import ModelApi
from veilstream.federation.server.open_round import Standing
from veilstream.federation.server.server_metrics import CountedTransport, ServerMetrics
from veilstream.runs.model_download import fetch_model
from veilstream.runs.released_model import ReleasedModel, plan_digest


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Three of six rounds are done; the API has the server's certificate."""
    with World(tmp_path_factory.mktemp("world"), plan_of()).start_all() as world:
        metrics = ServerMetrics()
        coordinator = world.coordinator()
        coordinator._watch = metrics.standing
        coordinator.go(CountedTransport(world.transport(), metrics), 3)
        keys = world.root / "keys/server"
        tls = (keys / "tls.pem", keys / "tls.key")
        api = ModelApi(coordinator, world.plan, ("127.0.0.1", 0), tls, metrics=metrics)
        yield SimpleNamespace(
            coordinator=coordinator,
            api=api,
            plan=world.plan,
            ca=keys / "ca.pem",
            keys=world.root / "keys",
            url=f"https://127.0.0.1:{api.port}",
            run=world.root / "run",
        )
        api.close()


def get(world, path: str, method: str = "GET", **headers):
    context = ssl.create_default_context(cafile=str(world.ca))
    connection = http.client.HTTPSConnection("127.0.0.1", world.api.port, context=context)
    with closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


def test_every_released_model_is_published_with_its_guarantee(world):
    status, headers, body = get(world, "/model/latest")
    latest = json.loads(body)
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert (latest["round"], latest["rounds"], latest["dim"]) == (3, 6, DIM)
    assert (latest["run"], latest["plan"]) == (world.coordinator.run, plan_digest(world.plan))
    assert latest["guarantee"]["epsilon"] == 4.0
    np.testing.assert_array_equal(np.float32(latest["model"]), world.coordinator.models.read(3))
    assert json.loads(get(world, "/model/0.json")[2])["model"] == [0.0] * DIM
    assert json.loads(get(world, "/status")[2])["rounds"] == 6


def test_healthz_says_whether_the_server_still_looks_for_messages(world, monkeypatch):
    monkeypatch.setattr(world.coordinator, "_looked_at", time.monotonic())
    assert get(world, "/healthz")[::2] == (200, b'{"status":"ok"}')
    monkeypatch.setattr(world.coordinator, "_looked_at", time.monotonic() - 3600.0)
    assert get(world, "/healthz")[::2] == (503, b'{"status":"stuck"}')


def test_a_certificate_that_is_renewed_is_shown_to_the_next_caller(world):
    """And the days that it lasts stand in /status."""
    assert json.loads(get(world, "/status")[2])["certificate_days"] == 824
    renew_server(world.keys, [], days=100)
    assert json.loads(get(world, "/status")[2])["certificate_days"] == 99
    context = ssl.create_default_context(cafile=str(world.ca))
    raw = socket.create_connection(("127.0.0.1", world.api.port))
    with context.wrap_socket(raw, server_hostname="127.0.0.1") as connection:
        ends = ssl.cert_time_to_seconds(connection.getpeercert()["notAfter"])
    assert 99 < (ends - time.time()) / 86400 < 100


def test_a_model_is_raw_numbers_or_one_file_where_that_is_asked_for(world):
    expected = world.coordinator.models.read(2)
    for path, accept in (("/model/2.f32", "*/*"), ("/model/2", "application/octet-stream")):
        _, headers, raw = get(world, path, Accept=accept)
        assert raw == expected.tobytes()
        assert headers["Veilstream-Round"] == "2"
        assert headers["Veilstream-Plan"] == plan_digest(world.plan)
        assert json.loads(headers["Veilstream-Guarantee"])["epsilon"] == 4.0
    for path, accept in (("/model/2.npz", "*/*"), ("/model/2", "text/html, application/x-npz;q=1")):
        _, headers, data = get(world, path, Accept=accept)
        assert headers["Content-Type"] == "application/x-npz"
        found = ReleasedModel.from_bytes(data, path)
        np.testing.assert_array_equal(found.model, expected)
        assert (found.round, found.rounds, found.run) == (2, 6, world.coordinator.run)
        assert found.plan == world.plan
        assert found.guarantee["delta"] == 1e-3


@pytest.mark.parametrize(
    "path",
    [
        "/model/4",
        "/model/x",
        "/",
        "/model/99999999999",
        "/model/2.exe",
        "/model/²",
        "/model/latest/npz",
        "/model/-1",
        "/../plan.toml",
    ],
)
def test_what_is_not_there_is_404(path, world):
    status, _, body = get(world, path.replace("²", "%C2%B2"))
    assert (status, set(json.loads(body))) == (404, {"error"})


def test_nothing_can_be_written(world):
    for method in ("POST", "PUT", "DELETE"):
        assert get(world, "/model/latest", method)[0] == 405
    status, headers, body = get(world, "/model/latest.f32", "HEAD")
    assert (status, headers["Content-Length"], body) == (200, str(4 * DIM), b"")


def test_a_model_that_a_caller_has_is_not_sent_again(world):
    tags = set()
    for path in ("/model/latest", "/model/latest.npz", "/model/3.f32", "/model/2"):
        tag = get(world, path)[1]["ETag"]
        tags.add(tag)
        for shown in (tag, f'"other", {tag}', f"W/{tag}"):
            status, headers, body = get(world, path, **{"If-None-Match": shown})
            assert (status, headers["ETag"], body) == (304, tag, b"")
        assert get(world, path, **{"If-None-Match": '"other"'})[0] == 200
    assert len(tags) == 4


def test_answers_are_not_held_back_until_the_caller_acknowledges(world):
    """Without TCP_NODELAY a kept connection waits 40 ms for every second piece."""
    context = ssl.create_default_context(cafile=str(world.ca))
    with (
        socket.create_connection(("127.0.0.1", world.api.port)) as raw,
        context.wrap_socket(raw, server_hostname="127.0.0.1"),
    ):
        wait_for(lambda: world.api._server.connections == 1)
        (connection,) = world.api._server._connections.open
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\\\|\\"|\\n)*"'
_SAMPLE = re.compile(rf"({_NAME})(\{{{_LABEL}(?:,{_LABEL})*\}})? (\S+)")


def parsed(text: str) -> dict[str, float]:
    """Samples of a page in Prometheus' text format; an assertion for anything else."""
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    samples: dict[str, float] = {}
    family = kind = ""
    seen: set[str] = set()
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            family = line.split(" ")[2]
            assert re.fullmatch(_NAME, family)
            assert family not in seen
            seen.add(family)
        elif line.startswith("# TYPE "):
            _, _, named, kind = line.split(" ")
            assert (named, kind in {"gauge", "counter", "summary"}) == (family, True)
        else:
            match = _SAMPLE.fullmatch(line)
            assert match, line
            name, labels, value = match.groups()
            ends = {"", "_sum", "_count"} if kind == "summary" else {""}
            assert name.removeprefix(family) in ends, line
            assert kind != "counter" or name.endswith("_total")
            assert name + (labels or "") not in samples
            samples[name + (labels or "")] = float(value)
    return samples


def test_metrics_are_what_the_server_knows(world):
    world.coordinator.messages_refused['odd "reason"\\'] += 2
    status, headers, body = get(world, "/metrics")
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    found = {k.removeprefix("veilstream_"): v for k, v in parsed(body.decode()).items()}
    assert (found["rounds_done"], found["rounds_planned"]) == (3, 6)
    assert (found["learners_planned"], found["learners_seated"]) == (3, 3)
    assert (found["learners_answered"], found["learners_refused"]) == (0, 0)
    assert found[r'messages_refused_total{reason="odd \"reason\"\\"}'] == 2
    assert found["messages_received_total"] == 3 + 3 * 3  # enrolments, then releases
    assert found["messages_sent_total"] >= 12
    assert found["message_received_bytes_total"] > 9 * 8 * DIM
    assert found["message_sent_bytes_total"] > 9 * 4 * DIM
    assert found["round_seconds_count"] == 3
    assert 0 < found['round_seconds{quantile="0.5"}'] <= found["round_seconds_sum"]
    assert found["resident_memory_bytes"] > 10e6
    assert "north" not in body.decode()


def test_metrics_before_the_first_round_are_valid(world):
    found = parsed(ServerMetrics().text(world.coordinator))
    assert found["veilstream_round_seconds_count"] == 0


def test_rounds_are_timed_from_one_to_the_next(world):
    times = iter([100.0, 101.0, 101.5, 103.0, 103.0, 104.0])
    metrics = ServerMetrics(clock=lambda: next(times))  # 100
    for round_ in (0, 0, 1, 1):  # 101, 101.5, 103, 103
        metrics.standing(Standing(round_, 6, (), ()))
    found = parsed(metrics.text(world.coordinator))
    assert found["veilstream_round_seconds_sum"] == 2.0
    assert found["veilstream_uptime_seconds"] == 4.0


def test_a_model_is_fetched_over_a_checked_connection(world):
    for url in (world.url, f"{world.url}/", f"{world.url}/model/latest", f"{world.url}/model/3.f32"):
        model = fetch_model(url, ca=world.ca)
        np.testing.assert_array_equal(model.model, world.coordinator.models.read(3))
        check_plan(model, world.plan)
    assert fetch_model(f"{world.url}/model/1", ca=world.ca).round == 1
    assert fetch_model(world.url, ca=world.ca, known=model) is model
    assert fetch_model(f"{world.url}/model/1", ca=world.ca, known=model).round == 1
    with pytest.raises(InputError, match="a round whose model is released"):
        fetch_model(f"{world.url}/model/4", ca=world.ca)


def test_a_server_that_nobody_vouches_for_is_refused(world, tmp_path):
    make_keys(tmp_path / "keys", ["127.0.0.1"], ["a"])
    for ca in (None, tmp_path / "keys/server/ca.pem"):
        with pytest.raises(ProtocolError, match=r"the certificate of .*--ca"):
            fetch_model(world.url, ca=ca)
    with pytest.raises(ProtocolError, match="the certificate of"):
        fetch_model(world.url.replace("127.0.0.1", "localhost"), ca=world.ca)  # another name
    with pytest.raises(InputError, match=r"--ca.*PEM"):
        fetch_model(world.url, ca=tmp_path / "none.pem")


@pytest.mark.parametrize(
    "url",
    [
        "http://fl.example.org:8480",
        "fl.example.org:8480",
        "https://",
        "ftp://x",
        "https://x:y",
        "https://x/other",
        "https://x/model/9/9",
        "https://u:p@x/",
        "https://x/model/../y",
    ],
)
def test_addresses_that_cannot_be_are_refused_before_anything_is_sent(url):
    with pytest.raises(InputError, match="URL"):
        fetch_model(url)


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(VeilstreamError, match=r"127.0.0.1:1.*is the server running"):
        fetch_model("http://127.0.0.1:1")


def test_a_model_of_another_plan_or_with_another_promise_is_refused(world):
    model = fetch_model(world.url, ca=world.ca)
    with pytest.raises(ProtocolError, match="a model of another plan"):
        check_plan(model, plan_of(rounds=7))
    better = {**model.guarantee, "epsilon": 0.1}
    told = ReleasedModel(model.model, 3, 6, model.run, model.plan_toml, better)
    with pytest.raises(ProtocolError, match="not what its plan gives"):
        check_plan(told, world.plan)


def test_a_file_holds_what_was_fetched_and_nothing_else_is_taken_for_one(world, tmp_path):
    path = tmp_path / "model.npz"
    model = fetch_model(world.url, ca=world.ca)
    model.save(path)
    again = ReleasedModel.load(path)
    np.testing.assert_array_equal(again.model, model.model)
    assert (again.plan, again.guarantee, again.run) == (world.plan, model.guarantee, model.run)
    with np.load(path) as stored:  # for whoever has NumPy alone
        assert str(stored["plan"]) == world.plan.to_toml()
        assert json.loads(str(stored["guarantee"]))["epsilon"] == 4.0
    whole = path.read_bytes()
    packed, other = tmp_path / "packed.npz", tmp_path / "other.npz"
    np.savez_compressed(packed, model=np.zeros(10**6, np.float32))
    np.savez(other, model=np.zeros(3))
    damaged = [b"", b"no", whole[:-30], whole[: len(whole) // 2], packed.read_bytes(), other.read_bytes()]
    for data in damaged:
        with pytest.raises(InputError, match="model fetch"):
            ReleasedModel.from_bytes(data, "x")
    broken = np.float32([np.nan])
    with pytest.raises(InputError, match="finite"):
        ReleasedModel.from_bytes(ReleasedModel(broken, 1, 1, "r", "", {}).to_bytes(), "x")
    with pytest.raises(InputError, match="No such file"):
        ReleasedModel.load(tmp_path / "none.npz")


def test_the_models_of_a_run_have_the_mode_of_its_other_files(world):
    modes = {path.name: path.stat().st_mode & 0o777 for path in world.run.iterdir()}
    assert set(modes.values()) == {0o600}, modes


@contextmanager
def large_model(limits: Limits):
    """A server with a model of 10 MB, whose answers do not fit into a socket's buffers."""
    numbers = np.random.default_rng(0).standard_normal(2_500_000).astype(np.float32)
    terms = SimpleNamespace(rounds=1, dim=len(numbers), guarantee=SimpleNamespace(as_dict=lambda: {"epsilon": 1.0}))
    models = SimpleNamespace(read=lambda _: numbers)
    coordinator = SimpleNamespace(run="large", round=1, terms=terms, models=models)
    api = ModelApi(coordinator, plan_of(), ("127.0.0.1", 0), limits=limits)
    try:
        yield api, numbers
    finally:
        api.close()


def hold(port: int) -> socket.socket:
    """Asks for a model and reads none of it."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", port))
    raw.sendall(b"GET /model/latest.f32 HTTP/1.1\r\nHost: x\r\n\r\n")
    return raw


def test_64_callers_who_do_not_read_stop_nobody_and_are_cut(world):
    with large_model(Limits(answer_s=3.0)) as (api, numbers):
        held = [hold(api.port) for _ in range(64)]
        open_ = api._server._connections.open
        try:
            wait_for(lambda: len(open_) == 64 and all(c.waiting for c in list(open_)))
            for number in range(31):
                connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=10)
                connection.request("GET", "/status" if number else "/model/latest.f32")
                body = connection.getresponse().read()
                assert number or body == numbers.tobytes()
                connection.close()
            wait_for(lambda: api._server.connections == 0)
        finally:
            for raw in held:
                raw.close()


def test_too_many_connections_cost_the_longest_waiting_of_the_address_that_has_most():
    with large_model(Limits(connections=6, connections_per_address=4)) as (api, _):

        def connect(source: str) -> socket.socket:
            return socket.create_connection(("127.0.0.1", api.port), source_address=(source, 0))

        crowd = [connect("127.0.0.1") for _ in range(4)]
        other = connect("127.0.0.2")
        try:
            wait_for(lambda: api._server.connections == 5)
            crowd.append(connect("127.0.0.1"))  # the fifth of its address
            wait_for(lambda: ended(crowd[0]))
            others = [connect("127.0.0.3") for _ in range(2)]  # the second is the seventh of all
            wait_for(lambda: ended(crowd[1]))
            assert api._server.connections == 6
            for raw in (*crowd[2:], other, *others):
                assert not ended(raw)
            for raw in others:
                raw.close()
        finally:
            for raw in (*crowd, other):
                raw.close()


def ended(raw: socket.socket) -> bool:
    """Whether the server has cut it, without reading what may still come."""
    return raw.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0 or tcp_state(raw) != 1


def tcp_state(raw: socket.socket) -> int:
    """1 is established."""
    return raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def test_addresses_that_cannot_be_listened_at_are_named(world):
    for address in (("127.0.0.1", world.api.port), ("192.0.2.1", 0)):
        with pytest.raises(InputError, match=r"--model-api.*an address to listen at"):
            ModelApi(world.coordinator, world.plan, address)


def test_connections_that_never_shake_hands_are_counted_when_they_are_accepted(world):
    """The limits once applied after the TLS handshake: 1,100 silent connections took every open file."""
    keys = world.ca.parent
    tls = (keys / "tls.pem", keys / "tls.key")
    limits = Limits(connections_per_address=8, handshake_s=2.0)
    with closing(ModelApi(world.coordinator, world.plan, ("127.0.0.1", 0), tls, limits=limits)) as api:
        silent = [socket.create_connection(("127.0.0.1", api.port)) for _ in range(100)]
        try:
            wait_for(lambda: sum(map(ended, silent)) == 92)
            assert api._server.connections == 8
            got = fetch_model(f"https://127.0.0.1:{api.port}", ca=world.ca)  # others still get in
            assert got.round == 3
            wait_for(lambda: all(map(ended, silent)), 10)  # the handshake's deadline
            wait_for(lambda: api._server.connections == 0)
        finally:
            for raw in silent:
                raw.close()
