"""Rounds in which learners share masks with neighbours in a graph alone: what a lying server can make of them."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.federation.test_masking import Group
from veilstream import mask_graph as graphs
from veilstream.errors import ProtocolError, VeilstreamError
from veilstream.federation.masking import decisions, learner_side, server_side
from veilstream.federation.masking.learner_side import LearnerState, MaskingLearner
from veilstream.federation.masking.links import Links
from veilstream.federation.masking.rules import Rules
from veilstream.federation.masking.server_side import MaskingServer
from veilstream.federation.masking.statements import (
    Attempt,
    KeyList,
    OpenCertificate,
    Refused,
    SetOfRound,
    Signatures,
    VoidCertificate,
)
from veilstream.mask_graph import LISTS, MaskGraph

MANY = 13
OFFSETS = (1, 3, 4)
"""Paley's graph: as even as a graph of 13 can be."""


def small(learners: int, colluding: int) -> MaskGraph | None:
    """A graph where there would be none, for as small a case as its claim allows."""
    if learners != MANY:
        return None
    waves = np.arange(1, 7)
    value = float(np.abs(sum(2 * np.cos(2 * math.pi * waves * o / MANY) for o in OFFSETS)).max()) + 1e-9
    least = colluding + 1 + math.floor(graphs._most_inside(MANY, 11 - colluding, 6, value))
    return MaskGraph(MANY, OFFSETS, value, colluding, 11, least, 0.0)


@pytest.fixture(autouse=True)
def thirteen(monkeypatch):
    monkeypatch.setattr(learner_side, "mask_graph", small)
    monkeypatch.setattr(server_side, "mask_graph", small)


RULES = Rules(MANY, 6, 2)


def named(group: Group, here=range(MANY)) -> SetOfRound:
    for k in here:
        group.server.take_masked(k, group.mask(k))
    return group.server.name()


def test_rounds_with_all_and_with_some_give_the_sums():
    group = Group(RULES)
    assert group.server.rules.two_steps
    assert [len(group.server.links.near(k)) for k in range(MANY)] == [6] * MANY
    for here in (range(MANY), range(11), range(1, MANY)):
        group.round(here)


def test_a_whole_round_of_a_hundred_learners_with_the_graph_that_is_deployed(monkeypatch):
    for module in (learner_side, server_side):
        monkeypatch.setattr(module, "mask_graph", graphs.mask_graph)
    group = Group(Rules(100, 40, 5))
    assert group.server.links.graph.degree == 22
    group.round(range(92))
    group.round([k for k in range(100) if k % 12])


def test_a_set_that_takes_a_learners_neighbours_away_is_agreed_on_by_nobody():
    group = Group(RULES)
    near = sorted(group.server.links.near(0))
    graph = replace(group.server.links.graph, least_set=8, least_neighbours=5)
    for each in (*group.learners, group.server):
        each.rules.links.graph = graph
    here = [k for k in range(MANY) if k not in near[:3]]
    what = SetOfRound(group.server.at, group.server.core, frozenset(here))
    for k in here:
        group.mask(k)
    for k in here:
        with pytest.raises(Refused, match="too few neighbours"):
            group.sign(k, what)
    with pytest.raises(Refused, match="too few neighbours"):
        group.share(near[0], type("Asked", (), {"what": what, "agreed": None}))
    assert not group.server.enough(frozenset(here))


def test_no_pad_is_told_before_enough_agree_whatever_the_server_shows():
    group = Group(RULES)
    what = named(group)
    for k in range(MANY):
        group.server.take_signed(k, group.sign(k, what))
    agreed = {k: group.share(k) for k in range(group.rules.threshold - 1)}
    assert {len(answer) for answer in agreed.values()} == {64}
    learner = group.learners[MANY - 1]
    for some in (agreed, {}):
        with pytest.raises(Refused, match="where it takes"):
            learner.share(what, Signatures(some))
    forged = Signatures(agreed | {9: os.urandom(64)})
    with pytest.raises(Refused, match="not made by"):
        learner.share(what, forged)
    other = SetOfRound(what.at, what.core, what.members - {12})
    with pytest.raises(Refused, match="not made by"):
        learner.share(other, Signatures(agreed))


def test_one_that_voided_helps_when_enough_have_agreed():
    group = Group(RULES)
    what = named(group)
    for k in range(MANY):
        group.server.take_signed(k, group.sign(k, what))
    late = range(group.rules.threshold, MANY)
    for k in late:
        group.void(k)
        with pytest.raises(Refused, match="void"):
            group.share(k)
    for k in range(group.rules.threshold):
        group.server.take_shares(k, group.share(k))
    for k in range(MANY):
        group.server.take_shares(k, group.share(k))
    expected = sum(group.increment(k) for k in range(MANY))
    assert np.array_equal(group.server.open().total, expected)


def test_a_restarted_server_gets_the_same_answers():
    group = Group(RULES)
    what = named(group, range(12))
    first = {k: group.sign(k, what) for k in range(12)}
    expected = sum(group.increment(k) for k in range(12))
    group.server = MaskingServer.unpack(group.server.pack(), RULES, group.identities, group.dim, group.told)
    for k in range(12):
        group.learners[k].keep(LearnerState.unpack(group.learners[k].state.pack()))
        again = group.sign(k, group.server.named)
        assert again == first[k]
        group.server.take_signed(k, again)
    for _ in range(2):
        for k in range(12):
            group.server.take_shares(k, group.share(k))
    assert np.array_equal(group.server.open().total, expected)


# The draw.


def unlisted() -> tuple[dict, list[MaskingLearner]]:
    """Learners that have given keys, and nothing else."""
    group = Group(RULES)
    fresh = [
        MaskingLearner(MaskingLearner.fresh(name, 0, "run", os.urandom), RULES, key.sign, os.urandom)
        for name, key in group.signing.items()
    ]
    return group.identities, fresh


def test_no_round_begins_before_the_graph_is_drawn():
    identities, group = unlisted()
    keys = KeyList("run", tuple(each.offer() for each in group))
    for each in group:
        each.keep(each.take_keys(keys.pack(), identities))
    with pytest.raises(Refused, match="before the run's graph"):
        group[0].mask(Attempt(keys.digest(), 0, 1), np.zeros(3, np.int64))
    told = [each.told() for each in group]
    for wrong in (told[:-1], [*told[:-1], told[0]], [*told[:-1], bytes(32)]):
        with pytest.raises(ProtocolError):
            group[0].take_draw(wrong)


def test_a_server_that_names_different_lists_gets_no_two_graphs_that_can_be_used():
    """Learners of one list number have one list each; with parts of both lists neither graph can be drawn by all."""
    identities, group = unlisted()
    offers = tuple(each.offer() for each in group)
    one, other = KeyList("run", offers), KeyList("run", offers[:-1])
    for each in group[:7]:
        each.keep(each.take_keys(one.pack(), identities))
        with pytest.raises(Refused, match="another list"):
            each.take_keys(other.pack(), identities)
    told = [each.told() for each in group[:7]]
    second = KeyList("run", offers, 2)
    for each in group[7:]:
        each.keep(each.take_keys(second.pack(), identities))
    told += [each.told() for each in group[7:]]
    for each in group:
        with pytest.raises(ProtocolError, match="did not commit"):
            each.take_draw(told)


def test_another_list_is_taken_only_before_anything_was_done_and_seldom():
    identities, group = unlisted()
    offers = tuple(each.offer() for each in group)
    seeds = set()
    for number in (1, 2, LISTS):
        keys = KeyList("run", offers, number)
        for each in group:
            each.keep(each.take_keys(keys.pack(), identities))
        told = [each.told() for each in group]
        for each in group:
            each.keep(LearnerState.unpack(each.take_draw(told).pack()))
        seeds |= {each.state.seed for each in group}
    assert len(seeds) == 3, "each list has one draw, the same for everybody"
    with pytest.raises(ProtocolError):
        group[0].take_keys(KeyList("run", offers, LISTS + 1).pack(), identities)
    with pytest.raises(Refused, match="another list"):
        group[0].take_keys(KeyList("run", offers, 3).pack(), identities)


def test_after_a_masked_message_no_other_list_is_taken():
    group = Group(RULES)
    group.mask(0)
    group.void(1)
    for k in (0, 1):
        with pytest.raises(Refused, match="another list"):
            group.learners[k].take_keys(KeyList("run", group.keys.offers, 2).pack(), group.identities)
    assert group.learners[2].take_keys(KeyList("run", group.keys.offers, 2).pack(), group.identities).seed == b""


class LyingServer(RuleBasedStateMachine):
    """Real masks, a graph and colluding learners; messages are lost, late, doubled and out of order.

    Learners crash, are forked, and come back. What the server knows is worked out from what it has, by the graph.
    """

    @initialize(colluding=st.integers(0, 2), forked=st.booleans())
    def begin(self, colluding, forked):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(learner_side, "mask_graph", small)
        self.patch.setattr(server_side, "mask_graph", small)
        self.group = Group(RULES, 2)
        self.links = self.group.server.links
        # A forked learner counts as colluding: it may say two things.
        self.forked = MANY - 1 - colluding if forked and colluding < 2 else None
        self.loyal = [k for k in range(MANY - colluding) if k != self.forked]
        self.copy = None
        self.sealed: dict[SetOfRound, set[int]] = {}
        self.agreed: dict[SetOfRound, dict[int, bytes]] = {}
        self.told: dict[SetOfRound, set[int]] = {}
        self.voids: dict[Attempt, dict[int, bytes]] = {}
        self.came: dict[Attempt, dict[int, frozenset]] = {}

    def teardown(self):
        if hasattr(self, "patch"):
            self.patch.undo()

    def _at(self, r: int, a: int) -> Attempt:
        return Attempt(self.group.keys.digest(), r, a)

    def _proof(self, r: int) -> VoidCertificate | None:
        found = [
            VoidCertificate(at, Signatures(by | self._collude(at.void_content())))
            for at, by in self.voids.items()
            if at.round == r
        ]
        enough = [proof for proof in found if len(proof.signatures.by) >= RULES.voids]
        return max(enough, key=lambda proof: proof.at.attempt, default=None)

    def _collude(self, content: bytes) -> dict[int, bytes]:
        return {k: self.group.learners[k]._sign(content) for k in range(MANY) if k not in self.loyal}

    def _set(self, k: int, r: int, a: int, out: frozenset) -> SetOfRound:
        return SetOfRound(self._at(r, a), self.group.learners[k].standing.core, frozenset(range(MANY)) - out)

    def _mask(self, k, r, a):
        pending = frozenset(self.group.pending[k])
        try:
            self.group.mask(k, self._at(r, a), self._proof(r))
        except (VeilstreamError, KeyError):
            return
        self.came.setdefault(self._at(r, a), {}).setdefault(k, pending)

    def _seal(self, k, what):
        try:
            self.group.sign(k, what)
        except VeilstreamError:
            return
        self.sealed.setdefault(what, set()).add(k)

    def _agree(self, k, what):
        try:
            state, answer = self.group.learners[k].share(what)
        except VeilstreamError:
            return
        self.group.learners[k].keep(state)
        assert len(answer) == 64
        self.agreed.setdefault(what, {})[k] = answer

    def _tell(self, k, what):
        signed = Signatures(self.agreed.get(what, {}) | self._collude(what.open_content()))
        try:
            state, answer = self.group.learners[k].share(what, signed)
        except VeilstreamError:
            return
        self.group.learners[k].keep(state)
        assert len(answer) > 64
        self.told.setdefault(what, set()).add(k)

    who = st.frozensets(st.integers(0, MANY - 1), min_size=1, max_size=6)
    outs = st.frozensets(st.integers(0, MANY - 1), max_size=3)

    @rule(some=who, r=st.integers(0, 2), a=st.integers(1, 3))
    def mask(self, some, r, a):
        for k in some:
            self._mask(k, r, a)

    @rule(some=who, r=st.integers(0, 2), a=st.integers(1, 3), out=outs)
    def seal(self, some, r, a, out):
        for k in some:
            self._seal(k, self._set(k, r, a, out))

    @precondition(lambda self: self.sealed)
    @rule(some=who, data=st.data(), two=st.booleans())
    def agree(self, some, data, two):
        what = data.draw(st.sampled_from(sorted(self.sealed, key=repr)))
        for k in some:
            (self._tell if two else self._agree)(k, what)

    @rule(some=who, r=st.integers(0, 2), a=st.integers(1, 3))
    def void(self, some, r, a):
        for k in some:
            try:
                self.voids.setdefault(self._at(r, a), {})[k] = self.group.void(k, self._at(r, a), self._proof(r))
            except VeilstreamError:
                continue

    @precondition(lambda self: self.agreed)
    @rule(some=who, data=st.data())
    def move_on(self, some, data):
        what = data.draw(st.sampled_from(sorted(self.agreed, key=repr)))
        signed = self.agreed[what] | self._collude(what.open_content())
        for k in some:
            try:
                self.group.tell_opened(k, OpenCertificate(what, Signatures(signed)))
            except VeilstreamError:
                continue

    @rule(k=st.integers(0, MANY - 1))
    def crash(self, k):
        learner = self.group.learners[k]
        learner.keep(LearnerState.unpack(learner.state.pack()))

    @precondition(lambda self: self.forked is not None)
    @rule()
    def fork(self):
        """The copy goes on where it stood when it was last taken out."""
        learner, old = self.group.learners[self.forked], self.copy
        self.copy = learner.state
        if old is not None:
            learner.keep(old)

    @rule(r=st.integers(0, 2), a=st.integers(1, 2), out=outs, split=st.integers(0, MANY), some=st.integers(0, MANY))
    def whole_round(self, r, a, out, split, some):
        """So that random walks come far: all that a round takes; two sets are shown, and some agree."""
        here = frozenset(range(MANY)) - out
        for k in here:
            self._mask(k, r, a)
        for k in here:
            self._seal(k, self._set(k, r, a, out if k < split else frozenset()))
        for k in range(MANY):
            if k < some:
                self._agree(k, self._set(k, r, a, out if k < split else frozenset()))
        for k in range(MANY):
            self._tell(k, self._set(k, r, a, out))
            self._tell(k, self._set(k, r, a, frozenset()))

    @rule(r=st.integers(0, 2), out=outs, other=outs, voiding=st.integers(0, MANY), agreeing=st.integers(0, MANY))
    def two_attempts(self, r, out, other, voiding, agreeing):
        """Both are driven as far as learners let them: some void the first, and all are asked to open both."""
        for k in set(range(MANY)) - out:
            self._mask(k, r, 1)
            self._seal(k, self._set(k, r, 1, out))
        for k in range(agreeing):
            self._agree(k, self._set(k, r, 1, out))
        self.void(range(MANY - voiding, MANY), r, 1)
        self.open_all(r, 1, out)
        for k in set(range(MANY)) - other:
            self._mask(k, r, 2)
            self._seal(k, self._set(k, r, 2, other))
        for k in range(MANY):
            self._agree(k, self._set(k, r, 2, other))
        self.open_all(r, 2, other)
        self.open_all(r, 1, out)

    def open_all(self, r, a, out):
        for k in range(MANY):
            self._tell(k, self._set(k, r, a, out))

    @rule(k=st.integers(0, MANY - 1), drop=st.integers(0, 6))
    def isolate(self, k, drop):
        """A set without most of one learner's neighbours, but for colluding ones."""
        self.honest_round(0, 1, frozenset(sorted(self.links.near(k) & set(self.loyal))[:drop]))

    @rule(r=st.integers(0, 2), a=st.integers(1, 2), out=outs)
    def honest_round(self, r, a, out):
        here = frozenset(range(MANY)) - out
        for k in here:
            self._mask(k, r, a)
            self._seal(k, self._set(k, r, a, out))
        for step in (self._agree, self._tell):
            for k in range(MANY):
                step(k, self._set(k, r, a, out))
        what = self._set(0, r, a, out)
        if what in self.agreed:
            signed = Signatures(self.agreed[what] | self._collude(what.open_content()))
            for k in range(MANY):
                try:
                    self.group.tell_opened(k, OpenCertificate(what, signed))
                except VeilstreamError:
                    continue

    def _known(self) -> dict[tuple[Attempt, frozenset], dict[int, frozenset]]:
        """Sums over honest learners that the server can work out."""
        found, needed = {}, self.links.graph.shares_needed
        others = set(range(MANY)) - set(self.loyal)
        for at, came in self.came.items():
            opened = {}
            for what, members in self.sealed.items():
                if what.at != at:
                    continue
                helping = self.told.get(what, set()) | others
                for k in members & set(self.loyal):
                    if len(set(self.links.holders(k)) & helping) >= needed:
                        opened[k] = what.members
            left = set(self.loyal)
            while left:
                part, edge = set(), {left.pop()}
                while edge:
                    one = edge.pop()
                    part.add(one)
                    for other in self.links.near(one) & left:
                        hidden = other in opened.get(one, {other}) and one in opened.get(other, {one})
                        if hidden:
                            edge.add(other)
                    left -= edge
                if all(k in opened and k in came for k in part):
                    found[at, frozenset(part)] = {k: came[k] for k in part}
        return found

    @invariant()
    def one_sum_a_round_with_honest_learners_enough(self):
        if not hasattr(self, "came"):
            return
        known = self._known()
        rounds = [at.round for at, _ in known]
        assert len(rounds) == len(set(rounds))
        assert all(len(part) >= RULES.honest for _, part in known)
        always = set(self.loyal).intersection(*(part for _, part in known))
        assert not known or len(always) >= RULES.honest
        for each in known.values():
            assert len({each[k] for k in always}) <= 1
        self.seen = max(getattr(self, "seen", 0), len(known))


ATTACKS = {
    "tell": lambda server: server.two_attempts(0, frozenset(), frozenset(), MANY, 0),
    "mask": lambda server: server.two_attempts(0, frozenset(), frozenset(), 0, MANY),
    "joined": lambda server: server.isolate(lonely(server), 5),
    "bound": lambda server: server.whole_round(0, 1, frozenset({0, 1}), 7, MANY),
}


def driven() -> LyingServer:
    server = LyingServer()
    server.begin(2, False)
    return server


def lonely(server: LyingServer) -> int:
    """An honest learner with most colluding neighbours."""
    return max(server.loyal, key=lambda k: len(server.links.near(k) - set(server.loyal)))


@pytest.mark.parametrize("broken", ["tell", "mask", "joined"])
def test_the_machine_finds_what_is_broken_on_purpose(monkeypatch, broken):
    """Pads before enough agree; attempts without proof that those before are void; sets that isolate a learner."""
    tell, mask = decisions.tell, decisions.mask
    if broken == "tell":
        monkeypatch.setattr(decisions, "tell", lambda now, rules, *asked: tell(now, rules, *asked[:-1], MANY))
    elif broken == "mask":
        monkeypatch.setattr(decisions, "mask", lambda now, rules, r, a, _: mask(now, rules, r, a, a - 1))
    else:
        monkeypatch.setattr(Links, "lacking", lambda links, members: frozenset())
        monkeypatch.setattr(Links, "least", 0)
    server = driven()
    try:
        ATTACKS[broken](server)
        with pytest.raises(AssertionError):
            server.one_sum_a_round_with_honest_learners_enough()
    finally:
        server.teardown()


def test_none_of_these_attacks_gets_more_than_one_sum():
    for attack in ATTACKS.values():
        server = driven()
        attack(server)
        server.one_sum_a_round_with_honest_learners_enough()
        server.teardown()
    server = driven()
    server.honest_round(0, 1, frozenset())
    server.honest_round(1, 1, frozenset({3}))
    server.one_sum_a_round_with_honest_learners_enough()
    server.teardown()
    assert server.seen == 2, "rounds that nobody attacks are opened"


TestLyingServerWithAGraph = LyingServer.TestCase
TestLyingServerWithAGraph.settings = settings(
    max_examples=20, stateful_step_count=8, deadline=None, suppress_health_check=list(HealthCheck)
)
