"""Sums on the way: the same bits as without, and nothing that was not asked for or is lost."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.support.federation import DIM, plan_of
from veilstream.deployment.release import encode
from veilstream.deployment.terms import Terms
from veilstream.errors import InputError, ProtocolError
from veilstream.federation.aggregator import MessageStore, PartialSums
from veilstream.federation.direct.branch import pack, unpack
from veilstream.federation.keys.identity import AggregatorKeys, LearnerKeys, ServerKeys, add_aggregator, make_keys
from veilstream.federation.protocol.bounds import OutOfBounds
from veilstream.federation.protocol.fold import OtherEpoch, ServerFold
from veilstream.federation.protocol.messages import Reply, Request, Sum, digest
from veilstream.federation.server.coordinator import Coordinator
from veilstream.privacy.gradient_types import Noised

NAMES = ["a", "b", "c"]
X0 = np.zeros(DIM, np.float32)


@pytest.fixture
def keys(tmp_path):
    folder = tmp_path / "keys"
    make_keys(folder, ["127.0.0.1"], NAMES)
    add_aggregator(folder, "g", ["127.0.0.1"], NAMES)
    return folder


@pytest.fixture
def terms():
    return Terms.of(plan_of(), DIM)


class Side:
    """A fold behind an aggregator, and learners whose prefixes are a function of their round."""

    def __init__(self, folder, keys, terms) -> None:
        self.folder, self.keys, self.terms = folder, keys, terms
        self.server = ServerKeys.load(keys / "server")
        self.fold = ServerFold(terms, X0, NAMES)
        for name in NAMES:
            self.fold.enrol(name, 0, 0)
        self.restart()

    def restart(self) -> None:
        """As after a kill: what is not on disk is lost."""
        store = MessageStore(self.folder, DIM, NAMES)
        self.sums = PartialSums("g", self.terms, store)

    def payload(self, name: str, round_: int) -> bytes:
        rng = np.random.default_rng([NAMES.index(name), round_])
        steps = self.terms.local_steps * (round_ + 1)
        return encode(0, round_, steps, self.terms.grid.step, Noised(rng.integers(-9, 9, DIM)))

    def ask(self, name: str) -> bytes:
        asked = self.fold.announce(name)
        data = Request("round", "run", name, "1", asked.round, asked.accepted, body=b"x").sign(self.server.identity)
        own = AggregatorKeys.load(self.keys / "aggregators/g")
        self.sums.ask(Request.read(data, own.server), digest(data))
        return data

    def reply(self, name: str, request: bytes, body: bytes | None = None) -> Reply:
        learner = LearnerKeys.load(self.keys / "learners" / name)
        if body is None:
            body = self.payload(name, self.fold.seats[name].round)
        data = Reply("release", name, digest(request), {}, body).sign(learner.identity)
        return Reply.read(data, learner.identity.public)

    def sum(self) -> Sum:
        own = AggregatorKeys.load(self.keys / "aggregators/g")
        data = self.sums.sum().sign(own.identity)
        return Sum.read(data, self.server.aggregators["g"][0])

    def round(self, *names: str) -> Sum:
        for name in names:
            assert self.sums.take(name, self.reply(name, self.ask(name)))
        return self.sum()


@pytest.fixture
def side(tmp_path, keys, terms):
    return Side(tmp_path / "store", keys, terms)


def test_sums_give_the_same_bits_as_messages_whoever_is_away_or_killed(side, terms):
    direct = ServerFold(terms, X0, NAMES)
    for name in NAMES:
        direct.enrol(name, 0, 0)
    for r, present in enumerate(["abc", "ab", "abc", "c", "abc", "abc"]):
        for name in present:
            assert direct.accept(name, side.payload(name, direct.seats[name].round))
        direct.close_round()
        said = side.round(*present)
        if r % 2:  # killed before it was sent: asked again, learners say the same
            side.restart()
            assert side.round(*present) == said
        assert side.fold.accept_sum(said)
        assert not side.fold.accept_sum(said), "the same again adds nothing"
        side.fold.close_round()
        side.restart()
        assert side.fold.x.tobytes() == direct.x.tobytes()
    assert {n: s.accepted for n, s in side.fold.seats.items()} == {n: s.accepted for n, s in direct.seats.items()}


def test_a_server_that_forgot_a_round_gets_the_same_sum_again(side, terms):
    first = side.round(*NAMES)
    assert side.fold.accept_sum(first)
    side.fold.close_round()
    forgetful = ServerFold(terms, X0, NAMES)  # killed before its checkpoint
    for name in NAMES:
        forgetful.enrol(name, 0, 0)
    second = side.round(*NAMES)
    side.fold.accept_sum(second)
    x = side.fold.close_round() and side.fold.x
    side.fold = forgetful
    with pytest.raises(ProtocolError, match="was asked for"):
        side.fold.accept_sum(second)
    side.restart()
    side.fold.accept_sum(side.round(*NAMES))
    side.fold.close_round()
    side.fold.accept_sum(side.round(*NAMES))
    side.fold.close_round()
    np.testing.assert_array_equal(side.fold.x, x)


def test_what_was_not_asked_for_is_not_added(side):
    request = side.ask("a")
    with pytest.raises(ProtocolError, match="nothing that was asked"):
        side.sums.take("b", side.reply("b", request))
    with pytest.raises(ProtocolError, match="round 1"):
        side.sums.take("a", side.reply("a", request, side.payload("a", 1)))
    far = encode(0, 0, side.terms.local_steps, side.terms.grid.step, Noised(np.full(DIM, 10**14)))
    with pytest.raises(OutOfBounds):
        side.sums.take("a", side.reply("a", request, far))
    assert side.sums.parts == []
    assert side.sums.take("a", side.reply("a", request))
    with pytest.raises(ProtocolError, match="nothing that was asked"):
        side.sums.take("a", side.reply("a", request))


def test_a_lost_store_is_named_and_a_seat_that_is_reset_begins_anew(side, tmp_path):
    side.fold.accept_sum(side.round(*NAMES))
    side.fold.close_round()
    side.folder = tmp_path / "another"
    side.restart()
    with pytest.raises(ProtocolError, match="--reset a"):
        side.ask("a")
    x = side.fold.x.copy()
    side.fold.reset("a")
    side.fold.enrol("a", 0, 1)
    side.fold.accept_sum(side.round("a"))
    side.fold.close_round()
    np.testing.assert_array_equal(side.fold.x, x)
    side.fold.accept_sum(side.round("a"))
    side.fold.close_round()
    assert np.any(side.fold.x != x)


@pytest.mark.parametrize(
    ("change", "error"),
    [({"round": 1}, ProtocolError), ({"epoch": 1}, OtherEpoch), ({"base": (0, "0" * 64)}, ProtocolError)],
)
def test_a_sum_of_which_one_part_begins_elsewhere_counts_for_nobody(side, change, error):
    said = side.round(*NAMES)
    wrong = dataclasses.replace(said.parts[1], **change)
    x = side.fold.x.copy()
    with pytest.raises(error):
        side.fold.accept_sum(dataclasses.replace(said, parts=(said.parts[0], wrong, said.parts[2])))
    assert side.fold.answered == ()
    side.fold.close_round()
    np.testing.assert_array_equal(side.fold.x, x)


def test_a_sum_beyond_what_its_learners_could_add_is_refused(side):
    said = side.round(*NAMES)
    far = np.full(DIM, 10**14, "<i8").tobytes()
    with pytest.raises(OutOfBounds, match="'g'"):
        side.fold.accept_sum(dataclasses.replace(said, total=far))
    twice = (*said.parts, said.parts[0])
    with pytest.raises(ProtocolError):
        side.fold.accept_sum(dataclasses.replace(said, parts=twice))
    with pytest.raises(ProtocolError):
        side.fold.accept_sum(dataclasses.replace(said, total=said.total[:-8]))


def test_a_sum_is_signed_by_its_aggregator(side, keys):
    said = side.round("a")
    stranger = LearnerKeys.load(keys / "learners/a").identity
    with pytest.raises(ProtocolError, match="not signed"):
        Sum.read(said.sign(stranger), side.server.aggregators["g"][0])
    own = AggregatorKeys.load(keys / "aggregators/g")
    data = bytearray(said.sign(own.identity))
    data[-1] ^= 1
    with pytest.raises(ProtocolError, match="did not sign"):
        Sum.read(bytes(data), own.identity.public)


def test_sums_and_medians_do_not_go_together(tmp_path, keys):
    plan = plan_of(federation={"combine": "median"})
    with pytest.raises(InputError, match=r"federation\.combine"):
        Coordinator(plan, X0, ServerKeys.load(keys / "server"), tmp_path / "run")


def test_aggregators_stand_for_learners_that_have_keys(keys):
    with pytest.raises(InputError, match="learners that have keys"):
        add_aggregator(keys, "h", ["127.0.0.1"], ["nobody"])
    add_aggregator(keys, "h", ["127.0.0.1"], ["a"])
    known = ServerKeys.load(keys / "server").aggregators
    assert known["h"][1] == {"a"}
    assert known["g"][1] == {"b", "c"}, "a learner stands behind one"


def test_frames_are_read_whole_or_not_at_all():
    pairs = [("a", b"one"), ("b", b"")]
    data = pack(pairs)
    assert [(name, bytes(part)) for name, part in unpack(memoryview(data))] == pairs
    for end in range(1, len(data)):
        if end != len(pack(pairs[:1])):
            with pytest.raises(ValueError, match="cut short"):
                unpack(memoryview(data)[:end])
