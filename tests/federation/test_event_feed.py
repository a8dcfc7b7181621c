"""Events: what is kept, what a reader who comes back is told, and who is sent away."""

from __future__ import annotations

import http.client
import json
import socket
import time
from contextlib import contextmanager

import pytest
from starlette.applications import Starlette

from tests.support.federation import wait_for
from veilstream.federation.http.asgi_server import AsgiServer, Limits
from veilstream.federation.http.event_feed import EventFeed
from veilstream.federation.http.live_routes import LiveRoutes, StreamLimits


def numbers(events) -> list[int]:
    return [json.loads(event.data)["n"] for event in events]


def test_a_reader_who_comes_back_is_told_what_it_missed_and_no_more():
    feed = EventFeed()
    before = feed.last_id
    for n in range(5):
        feed.publish({"n": n})
    assert numbers(feed.since(before)) == [0, 1, 2, 3, 4]
    middle = feed.id_of(3)
    assert numbers(feed.since(middle)) == [3, 4]
    assert feed.since(feed.last_id) == []


@pytest.mark.parametrize(
    "name", ["", "x", "x-1", "-1", "{p}-", "{p}--1", "{p}-6", "{p}-1e3", "{p}-²", "{p}-" + "9" * 30, "{p}-٣"]
)
def test_whoever_names_no_event_of_this_process_begins_anew(name):
    feed = EventFeed()
    for n in range(5):
        feed.publish({"n": n})
    process = feed.last_id.partition("-")[0]
    assert feed.since(name.replace("{p}", process)) is None
    other = EventFeed()
    other.publish({})
    assert feed.since(other.last_id) is None  # the server was started again


def test_what_is_kept_is_bounded_in_number_and_in_bytes():
    feed = EventFeed(kept_events=10, kept_bytes=1000)
    for n in range(100):
        feed.publish({"n": n})
    assert numbers(feed.since(feed.id_of(90))) == list(range(90, 100))
    assert feed.since(feed.id_of(89)) is None
    feed.publish({"n": 100, "x": "y" * 5000})
    assert numbers(feed.since(feed.id_of(100))) == [100]  # the newest always is
    assert feed.since(feed.id_of(99)) is None
    feed.publish({"n": 101})
    assert numbers(feed.since(feed.id_of(101))) == [101]


def test_no_number_that_json_lacks_is_published():
    with pytest.raises(ValueError, match="not JSON compliant"):
        EventFeed().publish({"n": float("nan")})


class Shown:
    """A page of one number."""

    def __init__(self) -> None:
        self.feed, self.number, self.made = EventFeed(), 0, 0

    def set(self, number: int, **more: object) -> None:
        with self.feed.changing:
            self.number = number
            self.feed.publish({"n": number, **more})

    def snapshot(self):
        self.made += 1
        with self.feed.changing:
            return self.feed.last_id, json.dumps({"n": self.number}).encode()

    def html(self):
        with self.feed.changing:
            return self.feed.last_id, f"<p>{self.number} {self.feed.last_id}</p>".encode()


LIMITS = StreamLimits(streams=4, streams_per_address=3, heartbeat_s=0.2, stream_s=5.0, slow_s=0.5)


class Serving:
    def __init__(self, limits: StreamLimits, local: bool, answer_s: float) -> None:
        self.page = Shown()
        own = (lambda: self.server.port) if local else None
        self.live = LiveRoutes(self.page, "/live", own_port=own, limits=limits)
        self.server = AsgiServer(
            Starlette(routes=self.live.routes), ("127.0.0.1", 0), option="--test", limits=Limits(answer_s=answer_s)
        )
        self.open: list[http.client.HTTPConnection] = []

    def ask(self, path: str = "/live", **headers: str):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=10)
        self.open.append(connection)
        connection.request("GET", path, headers=headers)
        return connection.getresponse()

    def close(self) -> None:
        for connection in self.open:
            connection.close()
        self.page.feed.stop()
        self.server.close()


@contextmanager
def serving(limits: StreamLimits = LIMITS, *, local: bool = True, answer_s: float = 60.0):
    here = Serving(limits, local, answer_s)
    try:
        yield here
    finally:
        here.close()


def events_of(answer, count: int) -> list[tuple[str, str, dict]]:
    """Kind, id and content of the next events; heartbeats are passed over."""
    found, lines = [], {}
    while len(found) < count:
        raw = answer.readline()
        assert raw, "the stream has ended"
        line = raw.decode().rstrip("\n")
        if line.startswith(":"):
            continue
        if line:
            key, _, value = line.partition(": ")
            lines[key] = value
        elif "event" in lines:
            found.append((lines["event"], lines.get("id", ""), json.loads(lines["data"])))
            lines = {}
        else:
            lines = {}
    return found


def test_a_stream_begins_with_everything_and_goes_on_with_what_changes():
    with serving() as here:
        here.page.set(7)
        answer = here.ask("/live/events")
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        assert answer.headers["Cache-Control"] == "no-store"
        assert events_of(answer, 1) == [("state", here.page.feed.last_id, {"n": 7})]
        here.page.set(8)
        here.page.set(9)
        told = events_of(answer, 2)
        assert [(kind, data["n"]) for kind, _, data in told] == [("patch", 8), ("patch", 9)]
        assert told[1][1] == here.page.feed.last_id


def test_last_event_id_goes_on_where_the_reader_was_and_comes_before_the_address():
    with serving() as here:
        for n in range(3):
            here.page.set(n)
        seen = here.page.feed.id_of(1)
        for path, headers in (
            ("/live/events", {"Last-Event-ID": seen}),
            (f"/live/events?after={seen}", {}),
            ("/live/events?after=other-1", {"Last-Event-ID": seen}),
        ):
            answer = here.ask(path, **headers)
            assert [data["n"] for _, _, data in events_of(answer, 2)] == [1, 2]
            answer.close()
            here.open.pop().close()
            wait_for(lambda: here.live.readers == 0)
        assert here.page.made == 0  # nobody needed everything
        answer = here.ask("/live/events", **{"Last-Event-ID": "0123abcd-7"})
        assert events_of(answer, 1)[0][0] == "state"


def test_the_page_says_which_event_it_was_made_at():
    with serving() as here:
        here.page.set(3)
        answer = here.ask()
        assert answer.read().decode() == f"<p>3 {here.page.feed.last_id}</p>"
        assert answer.headers["X-Frame-Options"] == "DENY"
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]


def test_silence_has_heartbeats_and_a_stream_ends_in_time_as_http_has_it():
    """Without the last chunk a browser would log an error each time."""
    with serving(StreamLimits(heartbeat_s=0.1, stream_s=0.5, retry_s=2.0)) as here:
        began = time.monotonic()
        text = here.ask("/live/events").read().decode()  # IncompleteRead if it were cut
        assert 0.4 < time.monotonic() - began < 5
        assert text.startswith("retry: 2000\n\n")
        assert 3 <= text.count(": still here") <= 5
        wait_for(lambda: here.live.readers == 0)


def test_only_so_many_listen_in_all_and_from_one_address():
    with serving() as here:
        answers = [here.ask("/live/events") for _ in range(3)]
        for answer in answers:
            events_of(answer, 1)
        refused = here.ask("/live/events")
        assert (refused.status, refused.headers["Retry-After"]) == (503, "5")
        assert here.ask().status == 200  # the page itself is there for everyone
        here.open[0].close()
        answers[0].close()
        wait_for(lambda: here.live.readers == 2)  # noticed within a heartbeat
        assert here.ask("/live/events").status == 200
        here.live._readers["192.0.2.1"] = 1
        assert here.live.readers == 4
        assert here.ask("/live/events").status == 503
        del here.live._readers["192.0.2.1"]


def test_a_reader_who_takes_nothing_is_dropped_and_others_are_not_held_up():
    with serving(LIMITS, answer_s=3.0) as here:
        slow = socket.create_connection(("127.0.0.1", here.server.port))
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        request = f"GET /live/events HTTP/1.1\r\nHost: 127.0.0.1:{here.server.port}\r\n\r\n"
        slow.sendall(request.encode())
        wait_for(lambda: here.live.readers == 1)
        quick = here.ask("/live/events")
        events_of(quick, 1)
        for n in range(60):
            here.page.set(n, filling="x" * 200_000)
            assert events_of(quick, 1)[0][2]["n"] == n
        wait_for(lambda: here.live.readers == 1)
        wait_for(lambda: here.server.connections == 1)  # cut, with what it had not read
        slow.close()


def test_the_end_is_told_after_all_that_came_before_it():
    with serving() as here:
        answer = here.ask("/live/events")
        events_of(answer, 1)
        here.page.set(1)
        here.page.feed.end()
        told = events_of(answer, 2)
        assert [kind for kind, _, _ in told] == ["patch", "end"]
        assert answer.read() == b""
        late = here.ask("/live/events")  # who comes later is told all of it
        assert [kind for kind, _, _ in events_of(late, 2)] == ["state", "end"]


def test_a_server_that_stops_lets_its_readers_go_at_once():
    with serving() as here:
        answer = here.ask("/live/events")
        events_of(answer, 1)
        began = time.monotonic()
        here.page.feed.stop()
        here.server.close()
        assert time.monotonic() - began < 2
        assert b"event: end" not in answer.read()


@pytest.mark.parametrize(
    ("headers", "local", "status"),
    [
        ({"Host": "evil.example"}, True, 403),
        ({"Host": "127.0.0.1:1"}, True, 403),
        ({"Host": "fl.example.org"}, False, 200),
        ({"Origin": "https://evil.example"}, True, 403),
        ({"Origin": "null"}, False, 403),
        ({"Host": "fl.example.org", "Origin": "https://fl.example.org"}, False, 200),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}, False, 403),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"}, True, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, True, 200),  # a link
        ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}, True, 200),
    ],
)
def test_pages_of_other_sites_may_not_ask(headers, local, status):
    with serving(local=local) as here:
        for path in ("/live", "/live/events"):
            assert here.ask(path, **headers).status == status
