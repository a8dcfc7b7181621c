"""`vs.Server` and `vs.Site`: all that messages may do, with nothing between them but bytes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import veilstream as vs
from tests.support.federation import DIM, Plain, plan_of, seeds_by_name
from tests.support.secret_order import D, people
from tests.support.secret_order import plan_of as secret_plan_of
from veilstream.errors import InputError, ProtocolError, UnknownName
from veilstream.federation.addresses import free_port
from veilstream.federation.keys.identity import LearnerKeys, ServerKeys
from veilstream.federation.protocol.bounds import OutOfBounds
from veilstream.federation.protocol.messages import Reply
from veilstream.federation.server.coordinator import Coordinator

ROOT = Path(__file__).parents[2]
NAMES = ("a", "b", "c")


class Carried:
    """A server and its sites; messages are carried by hand."""

    def __init__(self, root: Path, plan: vs.Plan | None = None, *, signed: bool = True) -> None:
        self.root, self.plan, self.signed = root, plan or plan_of(), signed
        if signed:
            vs.make_keys(root / "keys", ["localhost"], list(NAMES))
        self.server = vs.Server(self.plan, self.server_keys, learners=None if signed else NAMES, task=Plain())
        self.sites = {name: self.open(name) for name in NAMES}

    @property
    def server_keys(self) -> Path | None:
        return self.root / "keys/server" if self.signed else None

    def open(self, name: str, plan: vs.Plan | None = None, store: str = "store.db") -> vs.Site:
        who = {"keys": self.root / "keys/learners" / name} if self.signed else {"name": name}
        place = NAMES.index(name)
        return vs.Site.open(
            plan or self.plan, self.root / name / store, f"plan:{place}", create=True, task=Plain(), **who
        )

    def carry(self, name: str, request: bytes):
        return self.server.accept(self.sites[name].answer(request), None if self.signed else name)

    def enrol(self) -> None:
        for name in NAMES:
            assert self.carry(name, self.server.request(name)).kind == "enrolled"

    def run(self, rounds: int | None = None) -> None:
        last = self.server.rounds if rounds is None else rounds
        while self.server.round < last:
            for name, request in self.server.requests().items():
                self.carry(name, request)
            if self.server.complete:
                self.server.close_round()

    def end(self) -> None:
        for name, request in self.server.requests().items():
            assert self.carry(name, request).kind == "ended"

    def close(self) -> None:
        for site in self.sites.values():
            site.close()


@pytest.fixture
def carried(tmp_path):
    made = Carried(tmp_path)
    yield made
    made.close()


@pytest.fixture
def unsigned(tmp_path):
    made = Carried(tmp_path, signed=False)
    yield made
    made.close()


def x_by_ledgers(here: Carried) -> np.ndarray:
    """The last model from what the ledgers hold: the sums of all increments, and nothing of the server's."""
    total, method = np.zeros(DIM), here.plan.methods[0]
    for site in here.sites.values():
        message = vs.decode(site.learner.sealed_release().payload)
        total += message.prefix * message.grid
    return -method.step_size * method.server_step_size * total / here.plan.learning.learners


@pytest.mark.parametrize("signed", [True, False])
def test_a_run_by_hand_ends_with_the_model_that_the_ledgers_hold(tmp_path, signed):
    here = Carried(tmp_path, signed=signed)
    here.run()
    np.testing.assert_allclose(here.server.model, x_by_ledgers(here), atol=1e-6)
    assert np.abs(here.server.model).max() > 1e-3
    assert all(site.learner.horizon_reached for site in here.sites.values())
    here.end()
    assert here.server.requests() == {}
    assert all(site.dismissed for site in here.sites.values())
    loaded = here.server.released
    loaded.save(tmp_path / "model.npz")
    assert vs.load(tmp_path / "model.npz").round == here.server.rounds
    here.close()


def test_the_coordinator_drives_these_objects_to_the_same_model_to_the_bit(tmp_path, monkeypatch):
    from tests.support.federation import World

    seeds_by_name(monkeypatch)
    with World(tmp_path / "world", plan_of()).start_all() as world:
        coordinator = world.coordinator()
        coordinator.go(world.transport())
        assert isinstance(coordinator, Coordinator)
        expected = coordinator.models.read(world.plan.learning.rounds)
    here = Carried(tmp_path / "carried", world.plan)
    here.run()
    np.testing.assert_array_equal(here.server.model, expected)
    here.close()


@pytest.mark.parametrize("signed", [True, False])
def test_a_server_that_is_kept_as_bytes_after_every_message_ends_with_the_same_model(tmp_path, monkeypatch, signed):
    seeds_by_name(monkeypatch)
    straight = Carried(tmp_path / "straight", signed=signed)
    straight.run()
    here = Carried(tmp_path / "kept", signed=signed)

    def reopened() -> vs.Server:
        return vs.Server.from_bytes(here.plan, here.server.to_bytes(), here.server_keys, task=Plain())

    while not here.server.finished:
        due = here.server.requests()
        here.server = reopened()  # the requests are out: their replies are still taken
        for name, request in due.items():
            here.carry(name, request)
            here.server = reopened()
        if here.server.complete:
            here.server.close_round()
            here.server = reopened()
    np.testing.assert_array_equal(here.server.model, straight.server.model)
    here.end()
    assert reopened().ended == set(NAMES)
    straight.close()
    here.close()


def test_a_reply_counts_once_and_an_old_one_not_at_all(carried):
    carried.enrol()
    request = carried.server.request("a")
    assert carried.server.request("a") == request, "the same until something has changed"
    reply = carried.sites["a"].answer(request)
    assert carried.sites["a"].answer(request) == reply, "the same release, however often it is asked for"
    assert carried.server.accept(reply).kind == "release"
    with pytest.raises(ProtocolError, match="to nothing that was asked"):
        carried.server.accept(reply)
    assert carried.server.request("a") is None
    assert carried.server.answered == ("a",)


def test_a_lost_reply_is_made_good_by_the_next(carried):
    carried.enrol()
    carried.sites["a"].answer(carried.server.request("a"))  # lost
    for name in ("b", "c"):
        carried.carry(name, carried.server.request(name))
    assert not carried.server.complete
    carried.carry("a", carried.server.request("a"))
    assert carried.server.complete
    carried.server.close_round()
    carried.run()
    np.testing.assert_allclose(carried.server.model, x_by_ledgers(carried), atol=1e-6)


def test_where_too_few_answered_a_round_does_not_close(carried):
    carried.enrol()
    carried.carry("a", carried.server.request("a"))
    with pytest.raises(InputError, match=r"learners = 'a': expected at least 3 that have answered in round 0"):
        carried.server.close_round()
    assert carried.server.waiting == ("b", "c")
    assert not carried.server.enough


def test_past_the_horizon_nothing_is_asked_and_nothing_is_closed(carried):
    carried.run()
    with pytest.raises(InputError, match="round = 6: expected a run with rounds left"):
        carried.server.close_round()
    assert not carried.server.complete
    for site in carried.sites.values():
        with pytest.raises(vs.errors.PrivacyError):
            site.learner.begin_round(6, np.zeros(DIM, np.float32))


def test_a_site_of_another_plan_refuses_and_the_run_that_cannot_begin_says_why(carried, tmp_path):
    other = plan_of(privacy={"epsilon": 1.0})
    carried.sites["a"].close()
    carried.sites["a"] = carried.open("a", other, "other.db")
    told = carried.carry("a", carried.server.request("a"))
    assert told.kind == "refusal"
    assert "different plans (privacy.epsilon: server 4.0, learner 1.0" in told.why
    with pytest.raises(ProtocolError, match=r"1 of 3 learners cannot take part \(a: .*privacy.epsilon"):
        carried.server.requests()


def test_a_message_of_another_run_is_refused_by_both_sides(carried, tmp_path):
    carried.enrol()
    other = vs.Server(carried.plan, carried.server_keys, task=Plain())
    told = other.accept(carried.sites["a"].answer(other.request("a")))
    assert told.kind == "refusal"
    assert "which this learner's epoch 0 is for" in told.why
    reply = carried.sites["a"].answer(carried.server.request("a"))
    with pytest.raises(ProtocolError, match="to nothing that was asked"):
        other.accept(reply)


def test_a_store_of_another_model_is_refused_when_it_is_opened(carried):
    carried.sites["a"].close()
    with pytest.raises(InputError, match="what this store was begun with"):
        carried.open("a", plan_of(learning={"local_steps": 3}))


def test_an_unknown_learner_is_refused_by_name(carried, tmp_path):
    with pytest.raises(UnknownName, match="nobody"):
        carried.server.request("nobody")
    vs.make_keys(tmp_path / "strangers", ["localhost"], ["eve"])
    eve = LearnerKeys.load(tmp_path / "strangers/learners/eve")
    with pytest.raises(ProtocolError, match="a reply from 'eve', who is not enrolled"):
        carried.server.accept(Reply("absent", "eve", "0" * 64).sign(eve.identity))


def test_only_signed_messages_go_between_sides_with_keys(carried, tmp_path):
    anyone = vs.Server(carried.plan, learners=NAMES, task=Plain())
    reply = carried.sites["a"].answer(anyone.request("a"))
    with pytest.raises(ProtocolError, match="not signed by learner"):
        anyone.accept(reply, "a")  # a refusal, which the site has signed
    nobody = LearnerKeys.unsigned("a").identity
    request = carried.server.request("a")
    from veilstream.federation.protocol.messages import digest

    with pytest.raises(ProtocolError, match="not signed by learner 'a'"):
        carried.server.accept(Reply("absent", "a", digest(request)).sign(nobody))
    assert ServerKeys.load(tmp_path / "keys/server").signed


def test_without_keys_a_name_belongs_to_its_first_sender(unsigned):
    server = unsigned.server
    with pytest.raises(InputError, match="sender = None"):
        server.accept(unsigned.sites["a"].answer(server.request("a")))
    reply = unsigned.sites["a"].answer(server.enrol("node 7"))
    with pytest.raises(ProtocolError, match="to nothing that was asked"):
        server.accept(reply, "node 8")
    assert server.accept(reply, "node 7").learner == "a"
    release = unsigned.sites["a"].answer(server.request("a"))
    with pytest.raises(ProtocolError, match="another sender than its first"):
        server.accept(release, "node 8")
    assert server.accept(release, "node 7").kind == "release"
    later = vs.Server(unsigned.plan, learners=NAMES, task=Plain())
    reply = unsigned.sites["b"].answer(later.enrol("b"))
    with pytest.raises(ProtocolError, match="learner 'b' answers what learner 'a' was asked"):
        later.accept(reply, "a")


def test_what_one_place_answers_leaves_what_another_was_asked(carried):
    """Else a second process with a learner's keys would be taken for an old message."""
    first, second = carried.server.enrol("another place"), carried.server.enrol("a")
    site = carried.sites["a"]
    assert carried.server.accept(site.answer(first), "another place").kind == "enrolled"
    assert carried.server.accept(site.answer(second), "a").kind == "enrolled"


def test_a_release_out_of_bounds_holds_its_seat(unsigned):
    from veilstream.deployment.release import encode
    from veilstream.federation.protocol.messages import digest
    from veilstream.privacy.gradient_types import Noised

    unsigned.enrol()
    server, terms = unsigned.server, unsigned.server.terms
    body = encode(0, 0, terms.local_steps, terms.grid.step, Noised(np.full(DIM, 2**60)))
    forged = Reply("release", "a", digest(server.request("a")), {}, body).sign(LearnerKeys.unsigned("a").identity)
    with pytest.raises(OutOfBounds):
        server.accept(forged, "a")
    assert server.request("a") is None
    assert "a" not in server.waiting
    server.reset("a")
    assert unsigned.carry("a", server.request("a")).kind == "enrolled"


def test_too_large_a_message_is_not_read(carried):
    with pytest.raises(ProtocolError, match="at most 65584 are read"):
        carried.server.accept(bytes(carried.server.largest_reply + 1))
    assert Reply.claimed_learner(carried.sites["a"].answer(bytes(1 << 20))) == "a"  # a refusal


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state[:-1], "cut, changed"),
        (lambda state: b"", "cut, changed"),
        (lambda state: state[:50] + b"X" + state[51:], "cut, changed"),
    ],
)
def test_a_damaged_state_is_refused(carried, change, said):
    with pytest.raises(InputError, match=said):
        vs.Server.from_bytes(carried.plan, change(carried.server.to_bytes()), carried.server_keys, task=Plain())


def test_a_state_of_another_plan_or_without_its_keys_is_refused(carried):
    state = carried.server.to_bytes()
    with pytest.raises(InputError, match="that of this plan"):
        vs.Server.from_bytes(plan_of(rounds=7), state, carried.server_keys, task=Plain())
    with pytest.raises(InputError, match="as the run was begun: with the server's keys"):
        vs.Server.from_bytes(carried.plan, state, task=Plain())


def test_what_is_left_out_or_given_twice_is_named(carried, tmp_path):
    with pytest.raises(InputError, match="or the names of learners"):
        vs.Server(carried.plan, task=Plain())
    with pytest.raises(InputError, match="a different name for each"):
        vs.Server(carried.plan, learners=["a", "a", "b"], task=Plain())
    with pytest.raises(InputError, match=r"as many as are named \(2\)"):
        vs.Server(carried.plan, learners=["a", "b"], task=Plain())
    with pytest.raises(InputError, match="the learner's keys, or its name"):
        vs.Site.open(carried.plan, tmp_path / "x.db", "plan:0", create=True, task=Plain())
    with pytest.raises(InputError, match="people call `veilstream learner`"):
        vs.Site.open(carried.plan, tmp_path / "x.db", "live", name="a", create=True, task=Plain())


def test_a_file_of_records_is_read_on_by_a_site_that_is_opened_for_every_message(tmp_path):
    from tests.support.federation import csv_of, rows_of, table_plan_of

    plan = table_plan_of(rounds=3, learners=1, federation={"min_clients": 2})
    (tmp_path / "a.csv").write_text(csv_of(rows_of([f"p{i}" for i in range(5)])))
    server = vs.Server(plan, learners=["a"])

    def ask():
        with vs.Site.open(plan, tmp_path / "a.db", str(tmp_path / "a.csv"), name="a", create=True) as site:
            told = server.accept(site.answer(server.request("a")), "a")
            clients = site.learner.ledger.chain.standing.steps
        return told.kind, clients

    assert ask() == ("enrolled", 0)
    for r in (1, 2):
        assert ask() == ("release", 2 * r)
        server.close_round()
    assert ask() == ("absent", 4), "one record is left, and a round of a file takes two"
    assert server.absent == {"a"}
    with (tmp_path / "a.csv").open("a") as file:
        file.write(csv_of(rows_of(["q"])).splitlines()[1] + "\n")
    assert ask() == ("release", 6)


def test_the_example_over_plain_http_survives_a_killed_server(tmp_path):
    plan = plan_of(rounds=12)
    plan_file = tmp_path / "plan.toml"
    plan_file.write_text(plan.to_toml())
    vs.make_keys(tmp_path / "keys", ["localhost"], list(NAMES))
    port = free_port()

    def start(script: str, *words: object) -> subprocess.Popen:
        command = [sys.executable, str(ROOT / "examples/http" / script), *map(str, words)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    server = start("server.py", plan_file, tmp_path / "keys/server", tmp_path / "out", port)
    sites = [
        start(
            "site.py",
            plan_file,
            tmp_path / "keys/learners" / n,
            f"plan:{i}",
            tmp_path / f"{n}.db",
            f"http://127.0.0.1:{port}",
        )
        for i, n in enumerate(NAMES)
    ]
    model = tmp_path / "out/model.npz"
    try:
        until = time.monotonic() + 120.0
        while not (model.exists() and vs.load(model).round >= 3):
            assert time.monotonic() < until
            time.sleep(0.1)
        server.send_signal(signal.SIGKILL)
        server.wait(10)
        server = start("server.py", plan_file, tmp_path / "keys/server", tmp_path / "out", port)
        for process in (*sites, server):
            assert process.wait(120) == 0
    finally:
        for process in (*sites, server):
            process.kill()
            process.wait()
    total = np.zeros(DIM)
    for name in NAMES:
        with vs.Learner(plan, tmp_path / f"{name}.db", vs.tasks.Logistic(dim=DIM)) as learner:
            assert learner.horizon_reached
            message = vs.decode(learner.sealed_release().payload)
            total += message.prefix * message.grid
    method = plan.methods[0]
    expected = -method.step_size * method.server_step_size * total / 3
    assert vs.load(model).round == 12
    np.testing.assert_allclose(vs.load(model).parameters, expected, atol=1e-6)


def test_a_plan_may_be_named_by_its_file(tmp_path):
    """As for `vs.run`; once it ended in an AttributeError."""
    path = tmp_path / "plan.toml"
    path.write_text(plan_of().to_toml())
    server = vs.Server(path, learners=NAMES, task=Plain())
    with vs.Site.open(str(path), tmp_path / "a.db", "plan:0", create=True, task=Plain(), name="a") as site:
        assert server.accept(site.answer(server.request("a")), "a").kind == "enrolled"


@pytest.mark.parametrize("window", [4, None])
def test_a_site_around_an_own_learner_refuses_a_secret_order_before_anything_happens(window, tmp_path):
    """It replies when it is done, and the promise names a fixed time; `Site.open` refuses for the same reason."""
    plan = secret_plan_of(6, 2, 3, window=window)
    with pytest.raises(InputError, match=r"privacy\.order = 'secret'.*`veilstream learner` replies at fixed times"):
        vs.Site.open(plan, tmp_path / "opened.db", "plan:0", name="a", create=True)
    assert not (tmp_path / "opened.db").exists()
    server = vs.Server(plan, learners=["a"])
    with vs.Learner(plan, tmp_path / "a.db", vs.tasks.Logistic(D), create=True) as learner:
        site, before = vs.Site(learner, name="a"), learner.ledger.chain.length
        with pytest.raises(InputError, match=r"privacy\.order = 'secret'.*`veilstream learner` replies at fixed times"):
            site.answer(server.request("a"), people(0, 6))
        assert learner.ledger.chain.length == before
        assert learner.run is None
