"""The learner API over real sockets: who may ask, what is refused, and who cannot hold it up."""

from __future__ import annotations

import http.client
import json
import logging
import os
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.federation import DIM, World, plan_of, table_plan_of, wait_for
from veilstream.errors import InputError
from veilstream.federation.http.asgi_server import Limits
from veilstream.federation.learner.access import open_token, tell_to_pause, token_path
from veilstream.federation.learner.learner_api import LearnerApi
from veilstream.federation.learner.local_account import LocalAccount
from veilstream.federation.learner.process import LearnerService
from veilstream.plans.plan import Plan
from veilstream.reports import learner_page
from veilstream.streams.waiting_source import CAPACITY, LiveSource

TOKEN = "k" * 43
ROW = {"client": "t", "features": [0.5] * DIM, "target": 1}
FEATURES = {"features": [1.0] * DIM}
KEPT = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}


class Served:
    """A learner whom people call, its API, and a server that asks for rounds when told to."""

    def __init__(
        self,
        root: Path,
        limits: Limits | None = None,
        rounds: int = 6,
        plan: Plan | None = None,
        min_clients: int = 0,
        taken_within_s: float = 0.3,
        capacity: int = CAPACITY,
    ) -> None:
        self.source = LiveSource(5.0, capacity)
        plan = plan_of(rounds=rounds, learners=1) if plan is None else plan
        self.world = World(root, plan, names=("a",))
        self.daemon = self.world.start("a", source=self.source, replies="when done", min_clients=min_clients)
        more = {} if limits is None else {"limits": limits}
        more["taken_within_s"] = taken_within_s
        self.api = LearnerApi(self.daemon, self.source, ("127.0.0.1", 0), TOKEN, learner_page, **more)
        self.port = self.api.port
        self._coordinator = self.world.coordinator()
        self._going: threading.Thread | None = None

    def open_round(self, *, now: bool = True) -> None:
        if self._going is not None:
            self._going.join(10)
        self._going = threading.Thread(
            target=self._coordinator.go, args=(self.world.transport(), self._coordinator.round + 1), daemon=True
        )
        self._going.start()
        if now:
            wait_for(lambda: self.source.is_open)

    def fill_round(self, *tags: str) -> None:
        self.open_round()
        for tag in tags:
            assert self.post("/observe", {**ROW, "client": tag}) == (200, {"answer": "taken"})
        assert self._going is not None
        self._going.join(10)

    def ask(self, method: str, path: str, body: bytes | None = None, headers=None):
        """Status, headers and body; headers are sent as they are, and Host by default."""
        # Longer than the ten seconds that a record waits for a round, which may be the answer.
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def post(self, path: str, body, **changes) -> tuple[int, dict]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {k: v for k, v in {**KEPT, **changes}.items() if v is not None}
        status, _, answer = self.ask("POST", path, data, headers)
        return status, json.loads(answer)

    def calls(self, *bodies) -> tuple[list[threading.Thread], list[tuple[int, dict]]]:
        """Callers who observe at the same time, not started; and what they are told."""
        told: list[tuple[int, dict]] = []
        return [threading.Thread(target=lambda b=b: told.append(self.post("/observe", b))) for b in bodies], told

    def raw(self, line: str, **headers) -> bytes:
        """A request's head as it goes over the wire."""
        fields = {"Host": f"127.0.0.1:{self.port}", **headers}
        return (line + " HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in fields.items()) + "\r\n").encode()

    def close(self) -> None:
        self.source.close()  # an open round would be waited for
        self.api.close()
        self.world.close()


@contextmanager
def served(root: Path, **options):
    here = Served(root, **options)
    try:
        yield here
    finally:
        here.close()


def test_it_takes_records_and_predicts(tmp_path):
    with served(tmp_path) as here:
        status, headers, body = here.ask("POST", "/observe", json.dumps(ROW).encode(), KEPT)
        assert (status, headers["Retry-After"], json.loads(body)) == (503, "1", {"answer": "wait"})
        assert here.post("/predict", FEATURES)[0] == 503  # no model yet
        here.open_round()
        assert here.post("/observe", ROW) == (200, {"answer": "taken"})
        assert here.post("/observe", ROW) == (200, {"answer": "taken"})  # not used
        assert here.daemon.learner.clients_wanted == 1
        assert here.post("/observe", {**ROW, "client": "u"}) == (200, {"answer": "taken"})
        wait_for(lambda: here.daemon.learner.round == 1)
        status, answer = here.post("/predict", FEATURES)
        assert (status, answer["prediction"], answer["model"]["round"]) == (200, 1.0, 0)
        assert here.post("/other", {})[0] == 404
        assert here.ask("GET", "/observe", headers=KEPT)[0] == 405


def test_without_the_token_nothing_is_answered_and_no_step_is_used(tmp_path):
    with served(tmp_path) as here:
        here.fill_round("known", "u")
        here.open_round()
        wrong = [None, "", "Bearer", "Bearer ", "Bearer é", TOKEN]
        wrong += [f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}x", f"Basic {TOKEN}"]
        answers = set()
        for shown in wrong:
            for path, body in (
                ("/observe", {**ROW, "client": "known"}),
                ("/observe", {**ROW, "client": "new"}),
                ("/observe", {"client": "known"}),
                ("/predict", FEATURES),
                ("/none", {}),
            ):
                status, answer = here.post(path, body, Authorization=shown)
                assert status == 401
                answers.add(json.dumps(answer))
        status, headers, _ = here.ask("GET", "/status")
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert len(answers) == 1  # the same whatever was asked, and about whom
        assert here.daemon.learner.clients_wanted == 2
        assert here.post("/observe", ROW, Authorization=f"bearer {TOKEN}")[0] == 200


ELSEWHERE = [
    ("Host", "evil.example"),
    ("Host", "evil.example:{port}"),  # a name that now resolves to 127.0.0.1
    ("Host", "127.0.0.1:1"),
    ("Host", "127.0.0.1"),
    ("Host", "127.0.0.1@evil.example:{port}"),
    ("Host", "127.0.0.1:{port}.evil.example"),
    ("Host", ""),
    ("Origin", "https://evil.example"),
    ("Origin", "null"),
    ("Origin", "http://localhost:1"),
]


def test_a_person_pauses_and_goes_on(tmp_path):
    with served(tmp_path) as here:
        daemon = here.daemon
        assert here.post("/pause", b"")[0] == 404  # it counts nothing, and so keeps no pause
        daemon.account = LocalAccount(daemon.learner, here.source, path=tmp_path / "a.json")
        assert here.post("/pause", b"", Authorization=None)[0] == 401
        assert not daemon.paused
        address = ("127.0.0.1", here.port)
        assert tell_to_pause(address, TOKEN, pause=True)
        assert daemon.paused
        status = json.loads(here.ask("GET", "/status", headers=KEPT)[2])
        assert (status["local"]["paused"], status["local"]["warnings"]) == (True, [])
        assert not tell_to_pause(address, TOKEN, pause=False)
        assert not daemon.paused


def test_a_page_in_a_browser_reaches_nothing(tmp_path):
    """Cross-site requests and DNS rebinding, even with the token."""
    with served(tmp_path) as here:
        for header, value in ELSEWHERE:
            changes = {header: value.format(port=here.port)}
            before = here.api.refusals.get(header, 0)
            for path, body in (("/observe", ROW), ("/predict", FEATURES)):
                assert here.post(path, body, **changes)[0] == 403, (header, value)
            assert here.api.refusals[header] == before + 2
        for host in (f"localhost:{here.port}", f"[::1]:{here.port}", f"127.0.0.1:{here.port}"):
            same = here.post("/observe", ROW, Host=host, Origin=f"http://{host}")
            assert same == (503, {"answer": "wait"})


def test_a_form_that_a_page_may_send_without_asking_is_refused(tmp_path):
    with served(tmp_path) as here:
        here.open_round()
        for kind in ("text/plain", "application/x-www-form-urlencoded", "", None):
            changes = {"Content-Type": kind}
            assert here.post("/observe", ROW, **changes)[0] == 415
        assert here.daemon.learner.clients_wanted == 2
        changes = {"Content-Type": "application/json; charset=utf-8"}
        assert here.post("/observe", ROW, **changes)[0] == 200


MALFORMED = [
    b"not json",
    b"[]",
    b"",
    b"[" * 5000,
    b"\xff",
    {},
    {"features": ["x"]},
    {**ROW, "target": 7},
    {**ROW, "client": 5.5},
    {**ROW, "client": None},
    {**ROW, "client": " "},
    {**ROW, "client": ["t"]},
    {**ROW, "features": None},
    {**ROW, "features": [1]},
    {**ROW, "features": [1e300] * DIM},
    {**ROW, "features": [10**400] * DIM},
    {**ROW, "more": 1},
]


def test_what_is_malformed_is_refused_before_anyone_asks_who_took_part(tmp_path):
    """And the round goes on: no type of anything ends it."""
    with served(tmp_path) as here:
        here.fill_round("known", "u")
        without_a_step = [bad for bad in MALFORMED if not (isinstance(bad, dict) and "client" in bad)]
        for bad in without_a_step:
            assert here.post("/observe", bad)[0] in (400, 422), bad  # also while no round is open
        here.open_round()
        bad = {**ROW, "target": 7}
        known, new = (here.post("/observe", {**bad, "client": name}) for name in ("known", "new"))
        assert known == new
        assert known[0] == 422
        assert here.daemon.learner.clients_wanted == 1  # the new one has taken its place
        assert here.post("/observe", {**ROW, "client": "v"}) == (200, {"answer": "taken"})


SPOILED = [
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"1" * 5000,
    b"-" + b"7" * 200_000,
    b'"\xff\xfe"',
    b'"' + "\u00e9".encode("latin-1") + b'"',
    b'"' + b"x" * 100_000 + b'"',
    b'"\\ud800"',
    b"[[[[1]]]]",
    b"{}",
]
"""Values that strict JSON, UTF-8 or a short request would not allow, in the place of a feature."""


@pytest.mark.parametrize("value", SPOILED, ids=lambda value: ascii(value[:12]))
def test_a_value_that_json_cannot_have_spoils_its_own_record_alone(value, tmp_path):
    """Each is refused with its place in the step, by itself and in a list, where the others are taken."""
    spoiled = b'{"client": "%s", "target": 1, "features": [' + value + b", 1, 1, 1, 1, 1]}"
    good = json.dumps({**ROW, "client": "good"}).encode()
    with served(tmp_path) as here:
        here.open_round()
        status, answer = here.post("/observe", spoiled.replace(b"%s", b"a"))
        assert (status, answer["answer"]) == (422, "refused")
        assert here.daemon.learner.clients_wanted == 1
        status, answer = here.post("/observe", b"[" + spoiled.replace(b"%s", b"b") + b"]")
        assert (status, answer["answers"]) == (422, ["refused"])
        wait_for(lambda: here.daemon.learner.round == 1)
        here.open_round()
        status, answer = here.post("/observe", b"[" + spoiled.replace(b"%s", b"c") + b", " + good + b"]")
        assert (status, answer["answers"]) == (200, ["refused", "taken"])
        wait_for(lambda: here.daemon.learner.round == 2)


NO_NAMES = [b'"a\xff"', b'"\\ud800"', b"NaN", b"1" * 5000, b"5.5", b"null", b'" "', b'["t"]', b'""']


def test_a_record_whose_name_cannot_be_read_is_a_client_of_its_own_and_one_without_a_name_none(tmp_path):
    """As an empty cell of a file: whether a name can be read must not decide how many steps the server sees."""
    with served(tmp_path) as here:
        for first in range(0, len(NO_NAMES) - 1, 2):
            here.open_round()
            for left, name in zip((1, 2), NO_NAMES[first : first + 2], strict=True):
                body = b'{"client": ' + name + b', "target": 1, "features": [1, 1, 1, 1, 1, 1]}'
                status, answer = here.post("/observe", body)
                assert (status, answer["why"][:7]) == (422, "client:")
                if left == 1:
                    assert here.daemon.learner.clients_wanted == 1
            wait_for(lambda r=first // 2 + 1: here.daemon.learner.round == r)
        here.open_round()
        status, answer = here.post("/observe", [{"target": 1, "features": [1] * DIM}, {**ROW, "client": None}])
        assert (status, answer["answers"]) == (422, ["refused", "refused"])
        assert here.daemon.learner.clients_wanted == 1  # a program that forgets the field uses up no steps


DEEP = b"[" * 5000 + b"]" * 5000


@pytest.mark.parametrize("record", [b'{"x0": 1, "x0": 2}', b'{"x0": ' + DEEP + b"}", DEEP, b'{"x0": {"a": 1, "a": 2}}'])
def test_a_field_that_is_there_twice_or_nested_deep_spoils_its_own_record_alone(record, tmp_path):
    good = {"client": "good", "record": {"y": "yes"} | {f"x{i}": 0.5 for i in range(DIM)}}
    spoiled = b'{"client": "a", "record": ' + record + b"}"
    with served(tmp_path, plan=table_plan_of(learners=1)) as here:
        here.open_round()
        status, answer = here.post("/observe", b"[" + spoiled + b", " + json.dumps(good).encode() + b"]")
        assert (status, answer["answers"]) == (200, ["refused", "taken"])
        wait_for(lambda: here.daemon.learner.round == 1)
        here.open_round()
        assert here.post("/observe", spoiled.replace(b'"a"', b'"b"', 1))[0] == 422
        assert here.daemon.learner.clients_wanted == 1


def rows(*tags: str) -> list[dict]:
    return [{**ROW, "client": tag} for tag in tags]


def test_a_list_is_answered_by_position_and_says_nothing_of_who_took_part(tmp_path):
    with served(tmp_path) as here:
        here.fill_round("known", "u")
        here.open_round()
        batch = [*rows("known"), {**ROW, "target": 7}, *rows("v"), "text", *rows("v")]
        status, answer = here.post("/observe", batch)
        assert status == 200
        assert answer["answers"] == ["taken", "refused", "taken", "refused", "wait"]
        assert answer["counts"] == {"taken": 2, "refused": 2, "wait": 1}
        assert sum(answer["why"].values()) == 2
        wait_for(lambda: here.daemon.learner.round == 2)  # of "t", whose record is refused, and "v"


def test_a_list_of_which_all_is_refused_is_no_success(tmp_path):
    with served(tmp_path) as here:
        here.open_round()
        status, answer = here.post("/observe", [{**ROW, "target": 7}, {"target": 1}, 3])
        assert status == 422
        assert answer["counts"] == {"refused": 3}
        assert sorted(answer["why"].values()) == [1, 1, 1]
        assert here.post("/observe", [])[0] == 422
        assert here.post("/observe", rows("t") * 1025)[0] == 413
        assert here.daemon.learner.clients_wanted == 1  # "t" has taken its place


def test_records_wait_across_rounds_and_none_is_taken_twice_or_told_so_early(tmp_path):
    """Five people before any round, two a round: the answer comes with the last one's round."""
    with served(tmp_path, taken_within_s=20.0) as here:
        (calling,), told = here.calls(rows("a", "b", "c", "d", "e"))
        calling.start()
        wait_for(lambda: here.source.waiting == 5)
        for r in range(2):
            here.open_round(now=False)
            wait_for(lambda r=r: here.daemon.learner.round == r + 1)
            assert told == []
        here.open_round(now=False)
        calling.join(10)
        assert told[0][1]["answers"] == ["taken"] * 5
        assert here.daemon.learner.ledger.chain.visits.value().count == 5


def test_what_no_round_took_in_time_is_not_used_and_may_come_again(tmp_path):
    with served(tmp_path) as here:
        here.open_round()
        status, answer = here.post("/observe", rows("a", "b", "c"))
        assert (status, answer["answers"]) == (200, ["taken", "taken", "wait"])
        assert here.source.waiting == 0
        here.open_round()
        assert here.post("/observe", {**ROW, "client": "c"}) == (200, {"answer": "taken"})


def test_a_full_queue_is_429_and_nothing_of_the_request_waits(tmp_path):
    with served(tmp_path, capacity=4, taken_within_s=20.0) as here:
        (calling,), _ = here.calls(rows("a", "b", "c"))
        calling.start()
        wait_for(lambda: here.source.waiting == 3)
        body = json.dumps(rows("d", "e")).encode()
        status, headers, _ = here.ask("POST", "/observe", body, KEPT)
        assert (status, headers["Retry-After"]) == (429, "1")
        assert here.source.waiting == 3
        assert here.api.refusals == {"queue full": 1}
        here.source.release()
        calling.join(10)


def test_who_waits_when_the_epoch_ends_is_told_so(tmp_path):
    with served(tmp_path, rounds=1, taken_within_s=20.0) as here:
        calling, told = here.calls(rows("a", "b"), rows("c", "d"))
        for thread in calling:
            thread.start()
        wait_for(lambda: here.source.waiting == 4)
        here.open_round(now=False)
        for thread in calling:
            thread.join(10)
        assert sorted(status for status, _ in told) == [200, 410]


def test_who_waits_while_the_learner_stops_is_told_to_come_again(tmp_path):
    with served(tmp_path, taken_within_s=20.0) as here:
        (calling,), told = here.calls(ROW)
        calling.start()
        wait_for(lambda: here.source.waiting == 1)
        here.api.close()
        calling.join(10)
        assert told == [(503, {"answer": "wait"})]


def test_a_round_is_begun_when_enough_people_wait_and_spends_nothing_before(tmp_path):
    with served(tmp_path, min_clients=2, taken_within_s=20.0) as here:
        here.open_round(now=False)
        calling, told = here.calls(*({**ROW, "client": tag} for tag in ("a", "a", "b")))
        for thread in calling[:2]:  # one person, twice
            thread.start()
        wait_for(lambda: here.source.waiting == 2)
        time.sleep(0.2)
        assert not here.daemon.learner.pinned
        assert told == []
        calling[2].start()
        for thread in calling:
            thread.join(10)
        assert told == [(200, {"answer": "taken"})] * 3
        wait_for(lambda: here.daemon.learner.round == 1)


def test_predictions_are_for_features_of_the_right_shape(tmp_path):
    with served(tmp_path) as here:
        for bad in ([1], None, "x", [[1] * DIM], [1e300] * DIM, [10**400] * DIM):
            assert here.post("/predict", {"features": bad})[0] == 422
        assert here.post("/predict", {"features": [float("nan")] * DIM})[0] == 400  # no JSON


def test_bodies_are_limited(tmp_path):
    """A prediction by the features; records by what a list may have, so that a long text is no refused request."""
    with served(tmp_path) as here:
        here.open_round()
        long = b" " * (20 << 10)
        assert here.post("/predict", json.dumps(FEATURES).encode() + long)[0] == 413
        headers = {**KEPT, "Content-Length": str((8 << 20) + 1)}
        with socket.create_connection(("127.0.0.1", here.port), 10) as raw:
            raw.sendall(here.raw("POST /observe", **headers))
            assert raw.recv(4096).startswith(b"HTTP/1.1 413 ")
        pieces = b"1000\r\n" + b" " * 4096 + b"\r\n"
        with socket.create_connection(("127.0.0.1", here.port), 10) as raw:
            raw.sendall(here.raw("POST /predict", **KEPT, **{"Transfer-Encoding": "chunked"}) + 5 * pieces)
            assert raw.recv(4096).startswith(b"HTTP/1.1 413 ")
        digits = [0.1234567890123456789] * DIM
        assert here.post("/observe", {**ROW, "features": digits, "client": "x" * 1024})[0] == 200
        assert here.api.refusals == {"too large": 3}


def all_of(raw: socket.socket) -> bytes:
    """What is sent until the other side ends it."""
    found = b""
    while piece := raw.recv(4096):
        found += piece
    return found


@pytest.mark.parametrize("part", ["nothing", "head", "body"])
def test_a_request_has_a_deadline_however_its_bytes_trickle(part, tmp_path):
    limits = Limits(request_s=0.5, idle_s=0.5)
    with served(tmp_path, limits=limits) as here:
        start = {
            "nothing": b"",
            "head": b"POST /observe HTTP/1.1\r\n",
            "body": here.raw("POST /observe", **KEPT, **{"Content-Length": 99}),
        }[part]
        with socket.create_connection(("127.0.0.1", here.port), 10) as raw:
            raw.sendall(start)
            ended = threading.Event()

            def trickle() -> None:
                while part != "nothing" and not ended.wait(0.05):
                    try:
                        raw.sendall(b"x")
                    except OSError:
                        return

            thread = threading.Thread(target=trickle)
            thread.start()
            try:
                said = all_of(raw)
            except ConnectionResetError:
                said = b""
            ended.set()
            thread.join()
        if part == "nothing":
            assert said == b""
        else:
            assert said.startswith(b"HTTP/1.1 408 ")
            assert here.api.refusals == {"request too slow": 1}
        assert here.post("/observe", ROW)[0] == 503


@pytest.mark.parametrize("capped", [False, True])
def test_64_slow_callers_do_not_stop_the_others(capped, tmp_path):
    """Some trickle a head, some a body, some read nothing of many answers; 11 requests go by."""
    limits = Limits(connections=24, connections_per_address=16) if capped else None
    with served(tmp_path, limits=limits) as here:
        kinds = [
            b"POST /obs",
            here.raw("POST /observe", **KEPT, **{"Content-Length": 99}) + b"{",
            here.raw("GET /status", **KEPT) * 2000,
            here.raw("POST /observe", **{"Content-Length": 9999999}),
        ]
        slow = []
        try:
            for number in range(64):
                raw = socket.create_connection(("127.0.0.1", here.port), 10)
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
                raw.setblocking(False)
                slow.append(raw)
                try:
                    raw.send(kinds[number % 4])
                except OSError:
                    assert capped  # its place was taken
            if not capped:
                wait_for(lambda: here.api._server.connections >= 48)
            assert [here.post("/observe", ROW)[0] for _ in range(11)] == [503] * 11
            here.open_round()
            assert here.post("/observe", ROW) == (200, {"answer": "taken"})
            if capped:
                assert here.api._server.connections <= 16
                assert here.api.refusals["too many connections"] >= 31
        finally:
            for raw in slow:
                raw.close()


def test_one_who_reads_nothing_is_cut(tmp_path):
    with served(tmp_path, limits=Limits(answer_s=0.3)) as here:
        request = here.raw("GET /status", **KEPT)
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            raw.connect(("127.0.0.1", here.port))
            raw.setblocking(False)
            until = time.monotonic() + 20

            def still_open() -> bool:
                try:
                    while raw.send(request * 64):
                        pass
                except BlockingIOError:
                    return True
                except OSError:
                    return False
                return True

            while still_open():
                assert time.monotonic() < until, "it was not cut"
                time.sleep(0.02)
        assert here.api.refusals == {"answer not read": 1}


def test_after_the_last_round_callers_are_told_that_it_is_over(tmp_path):
    with served(tmp_path, rounds=1) as here:
        here.fill_round("t", "u")
        wait_for(lambda: here.daemon.learner.horizon_reached)
        for tag in ("t", "new"):
            status, answer = here.post("/observe", {**ROW, "client": tag})
            assert status == 410
            assert answer["why"] == "epoch 0 has ended after 1 of 1 rounds"
        assert here.post("/observe", {**ROW, "target": 7})[0] == 410
        assert here.post("/predict", FEATURES)[0] == 200
        status, _, body = here.ask("GET", "/status", headers=KEPT)
        assert (status, json.loads(body)["state"]) == (200, "ended")


def test_refusals_are_counted_and_logged_without_what_was_sent(tmp_path, caplog):
    with served(tmp_path) as here:
        here.post("/observe", {**ROW, "client": "secret-person"}, Authorization=None)
        here.post("/observe", {**ROW, "client": "secret-person", "target": 7})
        here.post("/observe", b"secret-record")
        counted = {"JSON": 1, "record": 1, "token": 1}
        body = json.loads(here.ask("GET", "/status", headers=KEPT)[2])
        assert body["refusals"] == counted
        assert (body["state"], body["round"], body["rounds"]) == ("waiting", 0, 6)
        here.daemon.account = LocalAccount(here.daemon.learner, here.daemon._source)
        local = json.loads(here.ask("GET", "/status", headers=KEPT)[2])["local"]
        assert (local["used"], local["rounds_left"]) == (0, 6)
        with caplog.at_level(logging.DEBUG):
            here.api.log_refusals()
            here.api.log_refusals()  # nothing new
        lines = [r.getMessage() for r in caplog.records if "learner API" in r.getMessage()]
        assert lines == ["learner API: requests refused since the start: JSON 1, record 1, token 1"]
        assert "secret" not in caplog.text


def test_callers_who_are_there_before_the_port_is_known_are_refused_not_failed(tmp_path, monkeypatch):
    """The server answers from the moment that it is made."""
    from veilstream.federation.learner import learner_api

    class Quick(learner_api.AsgiServer):
        def __init__(self, app, *args, **more):
            super().__init__(app, *args, **more)
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
            connection.request("GET", "/status", headers=KEPT)
            statuses.append(connection.getresponse().status)
            connection.close()

    statuses: list[int] = []
    monkeypatch.setattr(learner_api, "AsgiServer", Quick)
    with served(tmp_path):
        assert statuses == [403]


@pytest.mark.parametrize(("deadline_s", "said"), [(5.0, True), (32.0, False)])
def test_a_deadline_before_the_reply_is_said(caplog, tmp_path, deadline_s, said):
    plan = plan_of(rounds=6, learners=1, federation={"deadline_s": deadline_s})
    LearnerService(plan, tmp_path, tmp_path, "live", None)._check_deadline(31.0)
    assert ("federation.deadline_s = 5: the server waits no longer" in caplog.text) is said


def test_it_is_for_this_machine_alone():
    with pytest.raises(InputError, match="loopback"):
        LearnerApi(None, None, ("0.0.0.0", 0), TOKEN)


def test_an_address_that_is_taken_is_named(tmp_path):
    with served(tmp_path) as here, pytest.raises(InputError, match=r"--learner-api.*in use"):
        LearnerApi(here.daemon, here.source, ("127.0.0.1", here.port), TOKEN)


def test_a_token_is_made_once_for_this_account_alone(tmp_path):
    path = token_path(tmp_path / "deep/north.db")
    path.parent.mkdir()
    assert path.name == "north.token"
    before = os.umask(0o777)  # would leave a file that even its owner cannot read
    try:
        token = open_token(path)
    finally:
        os.umask(before)
    assert len(token) >= 43
    assert path.stat().st_mode & 0o777 == 0o600
    assert open_token(path) == token
    path.chmod(0o640)
    with pytest.raises(InputError, match="no other can read"):
        open_token(path)
    path.chmod(0o600)
    path.write_text("short\n")
    with pytest.raises(InputError, match="32 letters"):
        open_token(path)
    path.unlink()
    assert open_token(path) != token


def test_a_token_file_is_no_link(tmp_path):
    there = tmp_path / "there"
    there.write_text(TOKEN)
    there.chmod(0o600)
    (tmp_path / "north.token").symlink_to(there)
    with pytest.raises(InputError, match="plain file"):
        open_token(tmp_path / "north.token")


def test_the_service_logs_where_its_token_is_and_never_the_token(tmp_path, caplog):
    with served(tmp_path) as here, caplog.at_level(logging.INFO):
        service = LearnerService(
            here.world.plan, tmp_path / "keys/learners/a", tmp_path / "a.db", "live", ("127.0.0.1", 1)
        )
        for _ in range(2):
            caplog.clear()
            service._publish(here.daemon, here.source, ("127.0.0.1", 0))
            token = (tmp_path / "a.token").read_text().strip()
            assert token not in caplog.text
            assert str(tmp_path / "a.token") in caplog.text
            here.port = service._api.port
            assert here.ask("GET", "/status")[0] == 401
            assert here.ask("GET", "/status", headers={"Authorization": f"Bearer {token}"})[0] == 200
            service._api.close()
            service._api = None
