"""A reply leaves at a time that does not depend on clients: by default wherever people call."""

from __future__ import annotations

import dataclasses
import threading
import time

import numpy as np
import pytest

from tests.support.federation import DIM, Plain, World, plan_of, wait_for
from veilstream.deployment.learner import Learner
from veilstream.errors import InputError
from veilstream.federation.keys.identity import ServerKeys
from veilstream.federation.learner.daemon import Daemon
from veilstream.federation.learner.reply_times import SEAL_S, SLOT_S, ReplyTimes, reply_times
from veilstream.federation.protocol.messages import Reply, Request
from veilstream.learning.tasks import Sample
from veilstream.records.admission import Answer
from veilstream.streams.intake import AlwaysReady
from veilstream.streams.waiting_source import LiveSource

WINDOW_S = 30.0


class Clock:
    """Time that passes only when something says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Callers(AlwaysReady):
    """People who come by this clock; whoever does not come is waited for until the window's end."""

    def __init__(self, clock: Clock, at_s: tuple[float, ...]) -> None:
        self._clock, self._at_s = clock, at_s

    def serve(self, round_, observe, wanted):
        began = self._clock.now
        for i, at in enumerate(self._at_s):
            self._clock.now = began + at
            observe([(f"{round_}/{i}", Sample(np.full(DIM, 0.1), 1.0))])
        if wanted():
            self._clock.now = began + WINDOW_S


class Waiting(threading.Event):
    """Waits by the clock it is given."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def wait(self, timeout=None):
        assert timeout >= 0
        self._clock.now += timeout
        return False


class Held(Daemon):
    """A daemon whose replies wait by the clock of its schedule."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self._closing = Waiting(self._replies.clock)


def replied_after(tmp_path, at_s, *, replies=None) -> list[float]:
    """Seconds from request to reply, of two rounds and of one that is asked for again."""
    clock = Clock()
    times = ReplyTimes(WINDOW_S + SEAL_S, clock) if replies is None else replies(clock)
    world = World(tmp_path, plan_of(learners=1), names=("a",))
    server = ServerKeys.load(tmp_path / "keys/server")
    learner = Learner(world.plan, tmp_path / "a.db", Plain(), create=True)
    daemon = Held(learner, world.keys_of("a"), Callers(clock, at_s), replies=times)
    took = []
    try:
        for r in (0, 1, 1):
            began = clock.now
            x = np.zeros(DIM, "<f4").tobytes()
            request = Request("round", "run", "a", "n", r, None, body=x).sign(server.identity)
            reply = Reply.read(daemon.handle(request), world.keys_of("a").identity.public)
            assert reply.kind == "release"
            took.append(clock.now - began)
    finally:
        daemon.close()
    return took


@pytest.mark.parametrize("at_s", [(), (0.0,), (0.0, 0.0), (29.9, 29.99), (0.0, 30.0)])
def test_a_reply_leaves_at_the_same_time_whoever_came(tmp_path, at_s):
    assert replied_after(tmp_path, at_s) == [WINDOW_S + SEAL_S, WINDOW_S + SEAL_S, 0.0]


def test_work_that_takes_longer_leaves_at_a_whole_slot_and_is_logged(tmp_path, caplog):
    times = replied_after(tmp_path, (0.0, 32.25), replies=lambda clock: ReplyTimes(31.0, clock))
    assert times[:2] == [33.0, 33.0]
    first = caplog.records[0]
    assert first.levelname == "WARNING"
    assert first.getMessage().startswith("round 0 is answered 2 s late")
    assert "--reply-after to more than 33 seconds" in first.getMessage()


@pytest.mark.parametrize(("done", "due"), [(0.0, 31.0), (31.0, 31.0), (31.001, 32.0), (32.0, 32.0), (40.5, 41.0)])
def test_due_times_are_the_schedule_or_whole_slots_later(done, due):
    assert ReplyTimes(31.0).due(100.0, 100.0 + done) == pytest.approx(100.0 + due)


def test_where_people_call_the_default_is_the_safe_one():
    assert reply_times(30.0, None) == ReplyTimes(30.0 + SEAL_S)
    assert reply_times(30.0, 45.0) == ReplyTimes(45.0)
    assert reply_times(None, None) == ReplyTimes(SLOT_S, late_slot_s=SLOT_S)  # a file
    assert reply_times(None, 5.0) == ReplyTimes(5.0)


@pytest.mark.parametrize(
    ("window_s", "after_s"), [(30.0, 29.0), (None, -1.0), (None, float("nan")), (None, float("inf"))]
)
def test_a_reply_never_leaves_before_the_windows_end(window_s, after_s):
    with pytest.raises(InputError, match=rf"--reply-after = {after_s}: expected >= {window_s or 0:g} seconds"):
        reply_times(window_s, after_s)


@pytest.mark.parametrize("callers", [0, 2])
def test_a_live_learner_answers_at_the_end_of_its_window_full_or_empty(tmp_path, callers):
    """With real clocks: no sooner than the window's end, also when the round is full at once."""
    source = LiveSource(patience_s=0.3)
    with World(tmp_path, plan_of(learners=1), names=("a",)) as world:
        daemon = world.start("a", source=source, min_clients=0)
        keys = ServerKeys.load(tmp_path / "keys/server")
        x = np.zeros(DIM, "<f4").tobytes()
        request = Request("round", "run", "a", "n", 0, None, body=x).sign(keys.identity)
        left: list[float] = []

        def ask():
            daemon.handle(request)
            left.append(time.monotonic())

        # The second asks while the first is held back: it must not be told sooner.
        asking = [threading.Thread(target=ask) for _ in range(2)]
        began = time.monotonic()
        asking[0].start()
        wait_for(lambda: source.is_open)
        for i in range(callers):
            assert source.offer(f"{i}", Sample(np.full(DIM, 0.1), 1.0)) is Answer.TAKEN
        asking[1].start()
        for thread in asking:
            thread.join(10)
        assert len(left) == 2
        assert min(left) - began >= 0.3 + SEAL_S


def test_a_reply_that_is_held_back_is_not_sent_early_when_the_learner_stops(tmp_path):
    with World(tmp_path, plan_of(learners=1), names=("a",)) as world:
        source = LiveSource(patience_s=0.05)
        daemon = world.start("a", source=source, replies=ReplyTimes(60.0), min_clients=0)
        keys = ServerKeys.load(tmp_path / "keys/server")
        x = np.zeros(DIM, "<f4").tobytes()
        request = Request("round", "run", "a", "n", 0, None, body=x).sign(keys.identity)
        found: list[object] = []

        asking = threading.Thread(target=lambda: found.append(daemon.handle(request)))
        asking.start()
        wait_for(lambda: daemon.learner.round == 1)
        world.stop("a")
        asking.join(10)
        assert found == [b""]


class GrowingFile:
    """A file to which one row is appended at each of these times; `ready` is where a daemon looks."""

    def __init__(self, clock: Clock, rows_at: list[float]) -> None:
        self._clock, self._rows_at, self._read = clock, rows_at, 0
        self.looks: list[float] = []

    def ready(self, minimum, most, may_take):
        self.looks.append(self._clock.now)
        return self._rows_at[self._read : self._read + 1] <= [self._clock.now] != []

    def serve(self, round_, observe, wanted):
        observe([(f"row {self._read}", Sample(np.full(DIM, 0.1), 1.0))])
        self._read += 1


ROWS_AT = [1000.0 + at for at in (0.31, 1.27, 2.713, 3.001, 4.4449, 5.9, 7.1234, 8.2)]
REQUEST_S = 0.00145  # 6,214 requests in 9 s


@pytest.mark.parametrize("slots", [True, False])
def test_a_server_that_polls_dates_rows_of_a_growing_file_no_finer_than_a_slot(tmp_path, slots):
    """The bracket of a row: from the last "absent" before its release to that release."""
    clock = Clock()
    file = GrowingFile(clock, ROWS_AT)
    world = World(tmp_path, plan_of(learners=1, rounds=8), names=("a",))
    server, public = ServerKeys.load(tmp_path / "keys/server"), world.keys_of("a").identity.public
    learner = Learner(world.plan, tmp_path / "a.db", Plain(), create=True)
    replies = reply_times(None, None) if slots else ReplyTimes(0.0, late_slot_s=1e-6)
    daemon = Held(learner, world.keys_of("a"), file, replies=dataclasses.replace(replies, clock=clock))
    if not slots:  # as it was: looked at when asked
        daemon._slot_starts = clock
    x, r, brackets, replied = np.zeros(DIM, "<f4").tobytes(), 0, [], [clock.now]
    try:
        while r < len(ROWS_AT):
            clock.now += REQUEST_S
            request = Request("round", "run", "a", "n", r, None, body=x).sign(server.identity)
            looks = len(file.looks)
            reply = Reply.read(daemon.handle(request), public)
            assert len(file.looks) == looks + 1
            replied.append(clock.now)
            if reply.kind == "release":
                brackets.append(file.looks[-1] - file.looks[-2])
                assert ROWS_AT[r] <= file.looks[-1]
                r += 1
    finally:
        daemon.close()
    looked = np.diff(file.looks)
    if not slots:  # the same server, where nothing holds it: the attack that the slots are for
        assert max(brackets) < 0.017
        return
    assert min(brackets) >= SLOT_S - 1e-9
    assert looked.min() >= SLOT_S - 1e-9
    phases = np.array([*file.looks, *replied[1:]]) / SLOT_S
    assert np.abs(phases - phases.round()).max() < 1e-6  # the server chooses no time of its own
    assert looked.max() <= 2 * SLOT_S + 1e-9  # and a federation that is well stays fast
