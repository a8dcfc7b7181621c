"""What peers may try, one test an attack: the server goes on, the seat is kept, the log is clean.

Learners here are puppets: they hold their real keys and say whatever a test wants. TLS and
connections are attacked in `tests/engine/test_direct.py`.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import random
import struct
import time

import numpy as np
import pytest
from scipy import stats

from tests.support.federation import DIM, Lines, Plain, World, plan_of
from veilstream.deployment.learner import Learner
from veilstream.deployment.release import encode
from veilstream.deployment.terms import Terms, both_sides, differences
from veilstream.errors import InputError, ProtocolError
from veilstream.federation.keys.identity import LearnerKeys, PrivateKey, ServerKeys
from veilstream.federation.keys.new_keys import make_keys
from veilstream.federation.learner.daemon import Daemon
from veilstream.federation.protocol.bounds import FALSE_ALARM, OutOfBounds, ReleaseBounds
from veilstream.federation.protocol.fold import ServerFold
from veilstream.federation.protocol.messages import Reply, Request, digest
from veilstream.federation.protocol.transport import Inbox
from veilstream.federation.server.coordinator import Coordinator
from veilstream.plans.data_source import PlanSource
from veilstream.privacy.gradient_types import Noised
from veilstream.wording import shown

NAMES = ("a", "b", "c")
LOSSY = {"quorum": 0.6, "deadline_s": 0.1, "patience_s": 0.1}
ACTS = "\x1b[2J\r\nERROR all is well\u202e\u2066\x00\ud800\x9b31m"


class Puppet:
    """A learner with real keys whose words a test chooses; by itself it is honest and lazy."""

    def __init__(self, name: str, identity: PrivateKey, terms: Terms) -> None:
        self.name, self.identity, self.terms = name, identity, terms
        self.epoch = self.round = 0
        self.prefix = np.zeros(DIM, np.int64)
        self.step = 1000
        """Units that a round adds to every coordinate."""
        self.heard: list[bytes] = []

    def facts(self) -> dict:
        return {
            "epoch": self.epoch,
            "round": self.round,
            "daemon": self.name,
            "settings": self.terms.settings,
            "time": int(time.time()),
        }

    def enrol(self, raw: bytes) -> bytes:
        return Reply("enrolled", self.name, digest(raw), self.facts()).sign(self.identity)

    def release(self, raw: bytes, request: Request) -> bytes:
        if request.round == self.round:
            self.prefix = self.prefix + self.step
            self.round += 1
        return self.say_release(raw, self.epoch, request.round, self.prefix)

    def say_release(self, raw: bytes, epoch: int, round_: int, prefix) -> bytes:
        steps = self.terms.local_steps * (round_ + 1)
        body = encode(epoch, round_, steps, self.terms.grid.step, Noised(prefix))
        return Reply("release", self.name, digest(raw), {}, body).sign(self.identity)

    def handle(self, raw: bytes, request: Request) -> bytes:
        self.heard.append(raw)
        return self.enrol(raw) if request.kind == "enrol" else self.release(raw, request)


class Stage:
    """A server and its puppets; a transport between them."""

    def __init__(self, root, plan) -> None:
        self.root, self.plan = root, plan
        make_keys(root / "keys", ["127.0.0.1"], list(NAMES))
        self.keys = ServerKeys.load(root / "keys/server")
        self.terms = Terms.of(plan, DIM)
        self.puppets = {n: Puppet(n, LearnerKeys.load(root / "keys/learners" / n).identity, self.terms) for n in NAMES}
        self.inbox = Inbox()
        self.notes = Lines("veilstream.federation.server.coordinator")

    def coordinator(self) -> Coordinator:
        return Coordinator(self.plan, np.zeros(DIM, np.float32), self.keys, self.root / "run")

    def nodes(self) -> set[str]:
        return set(self.puppets)

    def send(self, node: str, head: bytes, body: bytes = b"") -> None:
        raw = head + body
        reply = self.puppets[node].handle(raw, Request.read(raw, self.keys.identity.public))
        self.inbox.put(node, reply)

    def receive(self, timeout_s: float):
        return self.inbox.receive(min(timeout_s, 0.02))

    def close(self) -> None:
        self.notes.end()

    def went_on(self, coordinator: Coordinator | None = None) -> Coordinator:
        coordinator = coordinator or self.coordinator()
        coordinator.go(self, look=until(20.0))
        assert coordinator.finished
        return coordinator


def until(seconds: float):
    end = time.monotonic() + seconds

    def look() -> None:
        if time.monotonic() > end:
            raise TimeoutError

    return look


@pytest.fixture
def stage(tmp_path):
    made = Stage(tmp_path, plan_of(rounds=3, federation=LOSSY))
    yield made
    made.close()


def signed(identity: PrivateKey, text: str, body: bytes = b"") -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    start = struct.pack("<4sI", b"VSM2", len(data)) + data
    return start + identity.sign(hashlib.sha256(start).digest()) + body


@pytest.mark.parametrize("field", ["epoch", "round"])
@pytest.mark.parametrize("said", ["Infinity", "NaN", "1e400", "4294967296", "-1", "true", '"3"', "9" * 5000])
def test_an_enrolment_with_a_number_that_cannot_be_is_refused_counted_and_named(stage, field, said):
    evil = stage.puppets["a"]

    def enrol(raw: bytes) -> bytes:
        head = {
            "kind": "enrolled",
            "learner": "a",
            "answers": digest(raw),
            "facts": evil.facts() | {field: "HERE"},
            "body": hashlib.sha256(b"").hexdigest(),
        }
        return signed(evil.identity, json.dumps(head).replace('"HERE"', said))

    evil.enrol = enrol
    server = stage.went_on()
    assert server.messages_refused["ProtocolError"] >= 1
    assert any("node a" in note and "unknown form" in note for note in stage.notes)
    assert server.fold.seats["a"].round == 0


def test_two_thousand_damaged_and_signed_messages_do_not_end_the_server(stage):
    """Bits of honest replies, and heads that a holder of a key makes up and signs."""
    rng = random.Random(13)
    evil = stage.puppets["a"]
    values = [None, True, -1, 0, 3, 2**31, 2**32 - 1, 2**32, 2**80, 1.5, 1e308, "", "a", "x" * 3000, ACTS]
    values += [[], [[]], {}, {"a": {"b": [1]}}, ["a", 1]]
    sent = 0

    def damage(honest: bytes) -> bytes:
        kind = rng.randrange(4)
        if kind == 0:
            changed = bytearray(honest)
            for _ in range(rng.randrange(1, 4)):
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            return bytes(changed)
        if kind == 1:
            return honest[: rng.randrange(len(honest))] + rng.randbytes(rng.randrange(40))
        length = struct.unpack_from("<4sI", honest)[1]
        head = json.loads(honest[8 : 8 + length])
        inside = head["facts"] if kind == 3 and head["facts"] else head
        name = rng.choice([*inside, "more"])
        if rng.random() < 0.2:
            inside.pop(name, None)
        else:
            inside[name] = rng.choice(values)
        body = honest[8 + length + 64 :]
        if rng.random() < 0.5:
            body = rng.randbytes(rng.randrange(120))
            head["body"] = hashlib.sha256(body).hexdigest()
        return signed(evil.identity, json.dumps(head), body)

    honest_handle = evil.handle

    def handle(raw: bytes, request: Request) -> bytes:
        nonlocal sent
        for _ in range(500):
            sent += 1
            stage.inbox.put("a", damage(honest_handle(raw, request)))
        return signed(evil.identity, "{}")

    evil.handle = handle
    server = stage.coordinator()
    while sent < 2000:
        server._again_at.clear()
        server._places.pop("a", None)
        server.enrol(stage)
    stage.went_on(server)
    assert sum(server.messages_refused.values()) > 1000
    known = {"ProtocolError", "InputError", "OtherEpoch", "OutOfBounds"}
    assert set(server.messages_refused) <= known, "a defect was caught by the last net"
    assert all(note.isprintable() for note in stage.notes)


def test_an_error_that_nobody_thought_of_costs_one_message(stage, monkeypatch):
    server = stage.coordinator()
    accept, failed = server.fold.accept, []

    def fails(name: str, *message) -> bool:
        if not failed:
            failed.append(name)
            raise ZeroDivisionError(ACTS)
        return accept(name, *message)

    monkeypatch.setattr(server.fold, "accept", fails)
    stage.went_on(server)
    assert server.messages_refused["ZeroDivisionError"] == 1
    assert any("ZeroDivisionError while reading a reply" in note for note in stage.notes)


def test_a_learner_that_refuses_for_ever_does_not_end_a_server_that_has_begun(tmp_path):
    stage = Stage(tmp_path, plan_of(rounds=3, federation=LOSSY | {"quorum": 1.0}))
    server = stage.coordinator()
    server.go(stage, until=1, look=until(10.0))
    evil = stage.puppets["a"]
    evil.handle = lambda raw, _: Reply("refusal", "a", digest(raw), {"why": ACTS}).sign(evil.identity)
    with pytest.raises(TimeoutError):
        server.go(stage, look=until(1.0))
    assert sum("waiting: 1 of 3 learners cannot take part" in note for note in stage.notes) == 1
    assert stage.coordinator().round == 1
    stage.close()


@pytest.mark.parametrize("units", [10**14, -(10**14), 2**63 - 1, -(2**63)])
def test_a_prefix_that_noise_cannot_make_is_refused_with_the_bound_and_the_run_goes_on(stage, units):
    evil = stage.puppets["a"]

    def release(raw: bytes, request: Request) -> bytes:
        prefix = np.zeros(DIM, np.int64)
        prefix[2] = units
        return evil.say_release(raw, 0, request.round, prefix)

    evil.release = release
    server = stage.went_on()
    bound = ReleaseBounds.of(stage.terms).coordinate(1)
    assert any(f"{abs(units)} units, over {bound:.0f}" in note for note in stage.notes)
    assert np.isfinite(server.fold.x).all()
    seat = stage.coordinator().fold.seats["a"]  # written down
    assert (seat.state, seat.round) == ("held", 0)
    assert "which clipping and noise allow" in seat.why


def test_an_increment_that_noise_cannot_make_is_refused_though_each_prefix_could_be():
    terms = Terms.of(plan_of(rounds=40, learning={"local_steps": 50}), DIM)
    fold, bounds = ServerFold(terms, np.zeros(DIM, np.float32), NAMES), ReleaseBounds.of(terms)
    far = np.zeros(DIM, np.int64)
    for r in range(30):
        far[0] += int(50 * bounds.clip)
        body = encode(0, r, 50 * (r + 1), terms.grid.step, Noised(far.copy()))
        assert fold.accept("a", body)
        fold.close_round()
    assert abs(far).max() < bounds.coordinate(31)
    with pytest.raises(OutOfBounds, match="that adds"):
        fold.accept("a", encode(0, 30, 50 * 31, terms.grid.step, Noised(-far)))


def test_the_bounds_are_those_of_gaussian_noise_and_clipped_gradients():
    """The quantile by SciPy; the deviations by the dense matrix; the norm by its chi law."""
    terms = Terms.of(plan_of(rounds=8), DIM)
    bounds = ReleaseBounds.of(terms)
    rows = terms.mechanism.decoder_matrix()[1::2]
    deviations = terms.noise_std / terms.grid.step * np.linalg.norm(rows, axis=1)
    np.testing.assert_allclose(bounds.deviations[1:], deviations, rtol=1e-5)
    clip = terms.grid.clip_norm / terms.grid.step
    for rounds in range(1, 9):
        noise = bounds.coordinate(rounds) - rounds * 2 * clip
        alarms = 3 * 8 * DIM * 2 * stats.norm.sf(noise / deviations[rounds - 1])
        assert alarms < FALSE_ALARM
        assert noise < 12 * deviations[rounds - 1]  # and still says something
        for before in range(rounds):
            spread = np.linalg.norm(rows[rounds - 1] - (rows[before - 1] if before else 0.0))
            noise = bounds.increment(before, rounds) - (rounds - before) * 2 * clip
            law = stats.chi(DIM, scale=spread * terms.noise_std / terms.grid.step)
            assert 3 * 8 * 8 * law.sf(noise) < FALSE_ALARM


def test_sums_that_might_leave_64_bits_are_refused_with_the_plan():
    terms = Terms.of(plan_of(), DIM)
    with pytest.raises(InputError, match=r"learning\.learners = .*fit into 64 bits"):
        ReleaseBounds.of(dataclasses.replace(terms, learners=2**50))


def test_a_round_that_would_lead_x_out_is_closed_without_those_that_led_it(tmp_path):
    plan = plan_of(rounds=4, federation=LOSSY, learning={"model_norm_cap": 0.1})
    stage = Stage(tmp_path, plan)
    stage.puppets["a"].step = int(2.0 / stage.terms.grid.step / DIM**0.5)  # within the bounds
    server = stage.went_on()
    dropped = [note for note in stage.notes if "learner a was left out of round 0" in note]
    assert len(dropped) == 1
    assert "model_norm_cap = 0.1" in dropped[0]
    assert "--reset a or --void a" in dropped[0]
    assert server.fold.seats["a"].state == "held"
    assert server.fold.seats["a"].round == 1  # spent, and acknowledged
    for r in range(5):
        assert np.linalg.norm(server.models.read(r)) <= 0.1
    # By hand: b and c alone, weights 1/3.
    step = 0.1 * 2.0 * stage.terms.grid.step / 3
    np.testing.assert_allclose(server.fold.x, -step * 2 * 4 * 1000, rtol=1e-9)
    stage.close()


def operations(stage: Stage) -> list[list[str]]:
    with (stage.root / "run/operations.csv").open() as file:
        return [row[1:4] for row in csv.reader(file)][1:]


def test_a_server_rolls_back_to_a_model_and_learners_rounds_stay_spent(stage):
    server = stage.coordinator()
    server.go(stage, until=2, look=until(10.0))
    first = server.models.read(1).copy()
    before = {s.name: (s.epoch, s.round, s.accepted) for s in server.fold.seats.values()}
    server.roll_back(1)
    server = stage.coordinator()  # it is written down
    assert server.round == 2
    assert {s.name: (s.epoch, s.round, s.accepted) for s in server.fold.seats.values()} == before
    np.testing.assert_array_equal(server.fold.x, first)
    np.testing.assert_array_equal(server.models.read(2), first)
    step = 0.1 * 2.0 * stage.terms.grid.step * 1000
    np.testing.assert_allclose(stage.went_on(server).fold.x, first - step, rtol=1e-6)
    assert operations(stage) == [["2", "roll back", "1"]]
    for bad in (-1, 3, 99):
        with pytest.raises(InputError, match="--roll-back"):
            server.roll_back(bad)


def test_a_void_seat_is_never_asked_again_and_its_weight_stays(stage):
    stage.plan = plan_of(rounds=3, federation=LOSSY | {"quorum": 1.0})
    server = stage.coordinator()
    server.go(stage, until=1, look=until(10.0))
    server.void("a", "it lies")
    with pytest.raises(InputError, match="--void"):
        server.void("nobody")
    server = stage.coordinator()
    stage.went_on(server)
    assert server.fold.seats["a"].round == 1
    step = 0.1 * 2.0 * stage.terms.grid.step * 1000
    np.testing.assert_allclose(server.fold.x, -step * (1 + 2 / 3 + 2 / 3), rtol=1e-9)
    assert any("whose seat is void (it lies)" in note for note in stage.notes)
    assert operations(stage) == [["1", "void", "a"]]


def test_a_stolen_key_cannot_put_a_seat_out_of_reach_and_a_reset_gives_it_back(tmp_path):
    stage = Stage(tmp_path, plan_of(rounds=6, federation=LOSSY))
    server = stage.coordinator()
    server.go(stage, until=2, look=until(10.0))
    owner = stage.puppets["a"]
    thief = stage.puppets["a"] = Puppet("a", owner.identity, stage.terms)
    for epoch in (2**32 - 1, 2):
        thief.epoch = epoch
        server = stage.coordinator()
        server.go(stage, until=server.round + 1, look=until(10.0))
        assert (server.fold.seats["a"].epoch, server.fold.seats["a"].round) == (0, 2)
        assert any(f"is at epoch {epoch}, and had come to epoch 0" in n for n in stage.notes)
    thief.epoch = 1  # the next one: nobody can tell it from the learner
    server = stage.coordinator()
    server.go(stage, until=5, look=until(10.0))
    assert (server.fold.seats["a"].epoch, server.fold.seats["a"].round) == (1, 1)
    stage.puppets["a"] = owner
    server = stage.coordinator()
    server.enrol(stage)
    assert any("its store is an old copy" in note for note in stage.notes)
    server.reset("a")
    x = server.fold.x.copy()
    owner.prefix = owner.prefix + 5  # what it added meanwhile is not for this run
    stage.went_on(server)
    seat = server.fold.seats["a"]
    assert (seat.epoch, seat.round, seat.state) == (0, 3, "open")
    step = 0.1 * 2.0 * stage.terms.grid.step / 3
    moved = (x - server.fold.x) / step
    assert set(np.round(moved)) == {2000}, "a's first release after a reset must add nothing"
    stage.close()


def test_after_a_reset_the_second_release_counts_in_full(stage):
    fold = ServerFold(stage.terms, np.zeros(DIM, np.float32), NAMES)
    fold.reset("a")
    fold.enrol("a", 7, 1)
    say = stage.puppets["a"]

    def message(round_: int, units: int) -> bytes:
        prefix = Noised(np.full(DIM, units, np.int64))
        return encode(7, round_, 2 * (round_ + 1), say.terms.grid.step, prefix)

    assert fold.accept("a", message(1, 4000))
    fold.close_round()
    np.testing.assert_array_equal(fold.x, 0.0)
    assert fold.accept("a", message(2, 4900))
    fold.close_round()
    np.testing.assert_allclose(fold.x, -0.2 * say.terms.grid.step / 3 * 900, rtol=1e-9)


def test_a_new_run_takes_a_learner_at_any_epoch_once(stage):
    fold = ServerFold(stage.terms, np.zeros(DIM, np.float32), NAMES)
    fold.enrol("a", 9, 0)
    assert fold.seats["a"].epoch == 9
    for epoch in (11, 2**32 - 1):
        with pytest.raises(ProtocolError, match="only the next epoch is taken"):
            fold.enrol("a", epoch, 0)
    fold.enrol("a", 10, 0)
    with pytest.raises(ProtocolError, match="old copy"):
        fold.enrol("a", 9, 0)


def test_an_enrolment_that_was_heard_before_enrols_nobody(stage):
    evil = stage.puppets["a"]
    server = stage.coordinator()
    kept: list[bytes] = []
    honest = evil.enrol
    evil.enrol = lambda raw: kept.append(honest(raw)) or kept[0]
    server.enrol(stage)
    assert "a" in server.seated
    server = stage.coordinator()  # asks with another nonce, and gets the old answer
    server.enrol(stage)
    assert server.seated == {"b", "c"}
    assert any("to nothing that was asked" in note for note in stage.notes)


def test_a_learner_is_not_enrolled_by_what_another_one_was_asked(stage):
    stage.puppets["a"].enrol = lambda raw: stage.puppets["b"].enrol(raw)
    server = stage.coordinator()
    server.enrol(stage)
    assert "a" not in server.seated
    assert any("'b' answers what learner 'a' was asked" in note for note in stage.notes)


def test_an_old_request_does_not_bind_a_learner_to_a_run_that_is_over(tmp_path):
    with World(tmp_path, plan_of()) as world:
        keys = ServerKeys.load(world.root / "keys/server")
        learner = Learner(world.plan, world.store("a"), Plain(), create=True)
        daemon = Daemon(learner, world.keys_of("a"), PlanSource(world.plan, 0))
        x, now = np.zeros(DIM, "<f4").tobytes(), int(time.time())

        def why(request: Request) -> str:
            reply = daemon.handle(request.sign(keys.identity))
            return Reply.read(reply, world.keys_of("a").identity.public).facts.get("why", "")

        settings = learner.settings
        old = Request("enrol", "over", "a", "n", settings=settings, time=now - 7200)
        assert "signed 720" in why(old)
        assert "check both clocks" in why(old)
        assert "s ago" in why(Request("round", "over", "a", "n", 0, None, body=x, time=now - 7200))
        assert "s ahead" in why(Request("enrol", "over", "", "n", settings=settings, time=2**32 - 1))
        assert "a request to 'b'" in why(Request("enrol", "new", "b", "n", settings=settings))
        assert learner.run is None
        assert why(Request("enrol", "new", "a", "n", settings=settings)) == ""
        assert learner.run == "new"
        late = Request("round", "new", "a", "n", 0, None, body=x, time=now - 7200)
        assert why(late) == ""  # it has joined: a slow carrier is no reason to refuse
        daemon.close()


def test_what_peers_say_cannot_act_on_a_terminal_and_ends(stage):
    evil = stage.puppets["a"]
    evil.handle = lambda raw, _: Reply("refusal", "a", digest(raw), {"why": ACTS + "x" * 1900}).sign(evil.identity)
    stage.went_on()
    told = [note for note in stage.notes if "learner a refuses" in note]
    assert told
    for note in stage.notes:
        assert note.isprintable()
        assert len(note) < 1200
    assert r"\x1b[2J\r\nERROR" in told[0]


def test_a_servers_words_cannot_act_on_a_learners_terminal(tmp_path):
    with World(tmp_path, plan_of()) as world:
        lines = Lines("veilstream.federation.learner.daemon")
        daemon = world.start("a")
        keys = ServerKeys.load(world.root / "keys/server")
        settings = daemon.learner.settings | {ACTS: ACTS, "task": ACTS * 50, "d": "x" * 9000}
        data = Request("enrol", "run", "a", "n", settings=settings).sign(keys.identity)
        reply = Reply.read(daemon.handle(data), world.keys_of("a").identity.public)
        assert len(reply.facts["why"]) < 1000
        assert lines
        assert all(line.isprintable() for line in lines)
        lines.end()


@pytest.mark.parametrize(
    ("said", "seen"),
    [
        ("north", "north"),
        ("grün ü 漢", "grün ü 漢"),
        ("a\nb", r"a\nb"),
        ("\x1b[0m", r"\x1b[0m"),
        ("\u202eabc", r"\u202eabc"),
        ("\ud800", r"\ud800"),
        ("\u2028", r"\u2028"),
        ("x" * 200, "x" * 200),
        ("x" * 201, "x" * 197 + "..."),
        ("\0" * 300, r"\x00" * 49 + "\\..."),
    ],
)
def test_shown_escapes_and_cuts(said, seen):
    assert shown(said) == seen
    assert len(shown(said)) <= 200


def test_plans_that_differ_are_told_apart_by_their_differing_fields_only():
    ours = Terms.of(plan_of(), DIM).settings
    theirs = Terms.of(plan_of(method={"epsilon": 3.0}), DIM).settings
    told = both_sides(differences(ours, theirs))
    assert told == "methods.epsilon: server None, learner 3.0"
    many = both_sides(differences(ours, ours | {f"k{i}": "y" * 500 for i in range(100)}))
    assert "and 88 more" in many
    assert len(many) < 2000


def test_a_liar_within_bounds_moves_the_mean_by_its_share(stage):
    stage.puppets["a"].step = 2**19
    moved = float(stage.went_on().fold.x[0]) / stage.terms.grid.step / -0.2 / 3
    assert moved == pytest.approx((2**19 + 2000) / 3)


def test_the_study_of_poisoning_in_short():
    """Real noise: one liar of ten within bounds ruins the mean, which is what the page says."""
    from studies.poisoning import plan_of as poisoned
    from studies.poisoning import play

    plan = poisoned(12, 64.0)
    terms = Terms.of(plan, 10)
    honest, lied = (play(plan, terms, 0, liar=liar) for liar in (False, True))
    assert honest.accuracy > 0.7
    assert lied.accuracy < 0.5
    assert lied.loss > honest.loss + 0.05
