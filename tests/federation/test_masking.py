"""The masking room alone: shares, signatures, decisions, and what a server that lies can make of them."""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scipy import stats
from studies.masking_search import CASES, LONG, SABOTAGES, Case, Search

from veilstream.errors import PrivacyError, ProtocolError, VeilstreamError
from veilstream.federation.masking import server_side, shares
from veilstream.federation.masking.learner_side import LearnerState, MaskedMessage, MaskingLearner
from veilstream.federation.masking.masks import add_mask, as_units, as_words
from veilstream.federation.masking.rules import Rules
from veilstream.federation.masking.server_side import CannotUnmask, MaskingServer
from veilstream.federation.masking.statements import (
    Attempt,
    KeyList,
    OpenCertificate,
    Refused,
    SetOfRound,
    Signatures,
    VoidCertificate,
)

RULES = Rules(4, 2, 1)
DIM = 5


class Group:
    """Learners with real keys, and a server, without a network."""

    def __init__(self, rules: Rules = RULES, dim: int = DIM) -> None:
        self.rules, self.dim = rules, dim
        names = [f"l{k:03d}" for k in range(rules.learners)]
        self.signing = {name: Ed25519PrivateKey.from_private_bytes(os.urandom(32)) for name in names}
        self.identities = {name: key.public_key().public_bytes_raw() for name, key in self.signing.items()}
        self.learners = [
            MaskingLearner(MaskingLearner.fresh(name, 0, "run", os.urandom), rules, self.signing[name].sign, os.urandom)
            for name in names
        ]
        self.keys = KeyList("run", tuple(learner.offer() for learner in self.learners))
        for learner in self.learners:
            learner.keep(learner.take_keys(self.keys.pack(), self.identities))
        self.told = tuple(learner.told() for learner in self.learners)
        if any(self.told):
            for learner in self.learners:
                learner.keep(learner.take_draw(self.told))
        else:
            self.told = ()
        self.server = MaskingServer(rules, self.keys, self.identities, dim, self.told)
        rng = np.random.default_rng(5)
        self.steps = rng.integers(-(10**9), 10**9, (64, rules.learners, dim))
        """By round and learner."""
        self.pending = [{0} for _ in names]
        self.sent: list[dict[Attempt, bytes]] = [{} for _ in names]

    def increment(self, k: int) -> np.ndarray:
        return sum(self.steps[r, k] for r in self.pending[k])

    def tell_opened(self, k: int, certificate: OpenCertificate) -> None:
        learner = self.learners[k]
        before = learner.standing.round
        state, mine = learner.take_opened(certificate)
        learner.keep(LearnerState.unpack(state.pack()))
        if mine:
            self.pending[k] = set()
        self.pending[k] |= set(range(before + 1, learner.standing.round + 1))

    def mask(self, k: int, at: Attempt | None = None, proof: VoidCertificate | None = None) -> bytes:
        learner, at = self.learners[k], self.server.at if at is None else at
        proof = self.server.proof if proof is None else proof
        if learner.may_mask(at, proof) == learner.state:
            return self.sent[k][at]
        state, message = learner.mask(at, self.increment(k), proof)
        learner.keep(LearnerState.unpack(state.pack()))
        self.sent[k][at] = message
        return message

    def sign(self, k: int, what: SetOfRound) -> bytes:
        state, answer = self.learners[k].seal(what)
        self.learners[k].keep(state)
        return answer

    def share(self, k: int, asked=None) -> bytes:
        asked = self.server.share_request() if asked is None else asked
        state, answer = self.learners[k].share(asked.what, asked.agreed)
        self.learners[k].keep(state)
        return answer

    def void(self, k: int, at: Attempt | None = None, proof: VoidCertificate | None = None) -> bytes:
        state, answer = self.learners[k].void(self.server.at if at is None else at, proof)
        self.learners[k].keep(state)
        return answer

    def round(self, here=None):
        """A whole round with these learners."""
        here = range(self.rules.learners) if here is None else here
        for k in here:
            for certificate in self.server.certificates.values():
                self.tell_opened(k, certificate)
            self.server.take_masked(k, self.mask(k))
        what = self.server.name()
        expected = sum(self.increment(k) for k in here)
        for k in here:
            self.server.take_signed(k, self.sign(k, what))
        for k in list(here)[: self.rules.threshold]:
            self.server.take_shares(k, self.share(k))
        if self.server.rules.two_steps:
            for k in here:
                self.server.take_shares(k, self.share(k))
        opened = self.server.open()
        assert np.array_equal(opened.total, expected)
        return opened


def test_the_field_is_prime_and_holds_every_secret():
    p = shares.PRIME
    odd, twos = p - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in range(2, 66):  # Miller-Rabin: a composite passes 64 bases with probability below 4^-64
        x = pow(base, odd, p)
        assert x in (1, p - 1) or any((x := x * x % p) == p - 1 for _ in range(twos - 1))
    assert p > 2**256


@given(st.binary(min_size=32, max_size=32), st.integers(1, 6), st.integers(0, 5), st.randoms())
@settings(max_examples=60, deadline=None)
def test_any_threshold_of_shares_gives_the_secret_and_one_fewer_fits_every_secret(secret, threshold, more, chosen):
    holders = threshold + more
    each = shares.split(secret, threshold, range(holders), os.urandom)
    some = chosen.sample(range(holders), threshold)
    assert shares.combine({k: each[k] for k in some}) == secret
    if threshold > 1:
        # With one share replaced by any value the rest fit another secret: they say nothing of which.
        other = dict.fromkeys(some[:-1], b"") | {k: each[k] for k in some[:-1]} | {some[-1]: bytes(32) + b"\x01"}
        assert shares.combine(other) != secret or each[some[-1]] == bytes(32) + b"\x01"


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40), st.binary(min_size=32, max_size=32))
@settings(max_examples=50, deadline=None)
def test_a_mask_that_is_put_on_and_taken_off_changes_nothing(numbers, seed):
    words = as_words(np.array(numbers, np.int64))
    add_mask(words, seed)
    add_mask(words, seed, -1)
    assert np.array_equal(as_units(words), np.array(numbers, np.int64))


@pytest.mark.parametrize(
    ("messages", "dim"),
    [(1, 1 << 18), pytest.param(100, 1_000_000, marks=pytest.mark.slow)],
    ids=["short", "10^8 words"],
)
def test_masked_messages_look_like_uniform_words(messages, dim):
    """Chi-square tests of bytes and of neighbouring bytes, and a count of ones in each bit; false alarm 1e-6 each.

    The increments are as telling as can be: the same numbers in every message, and nearly all of them small. Each
    message is by itself: all but what one learner sent is thrown away.
    """
    group = Group(Rules(3, 2, 0), dim)
    group.steps = np.full((1, 3, dim), 7, np.int64)
    counts, pairs, ones, total = np.zeros(256, np.int64), np.zeros(1 << 16, np.int64), np.zeros(64, np.int64), 0
    for attempt in range(1, messages + 1):
        at = Attempt(group.keys.digest(), 0, attempt)
        state = group.learners[0].state
        state = replace(state, standing=replace(state.standing, masked=0, voided=attempt - 1))
        group.learners[0].keep(state)
        proof = None
        if attempt > 1:
            before = Attempt(at.keys, 0, attempt - 1)
            signed = {k: group.learners[k].void(before)[1] for k in (1, 2)}
            proof = VoidCertificate(before, Signatures(signed))
        _, message = group.learners[0].mask(at, group.increment(0), proof)
        words = MaskedMessage.unpack(message).words
        told = words.view(np.uint8)
        counts += np.bincount(told, minlength=256)
        pairs += np.bincount(told[0::2].astype(np.uint16) << 8 | told[1::2], minlength=1 << 16)
        ones += [int((words >> np.uint64(k) & np.uint64(1)).sum()) for k in range(64)]
        total += len(words)
    assert stats.chisquare(counts).pvalue > 1e-6
    assert stats.chisquare(pairs).pvalue > 1e-6
    assert (np.abs(ones - total / 2) < 5.7 * np.sqrt(total / 4)).all()  # 64 bits: Bonferroni at 1e-6
    assert total == messages * dim


def test_rounds_with_all_some_and_returning_learners_give_the_sums():
    group = Group()
    for here in (range(4), (0, 1, 3), range(4), (0, 1, 2)):
        if set(here) == {0, 1, 2}:
            with pytest.raises(Refused, match="took part in all"):  # 3 left the core with its next absence
                group.round(here)
            return
        group.round(here)


def test_what_a_server_keeps_is_enough_to_go_on():
    group = Group()
    for k in range(4):
        group.server.take_masked(k, group.mask(k))
    group.server.name()
    expected = sum(group.increment(k) for k in range(4))
    group.server = MaskingServer.unpack(group.server.pack(), RULES, group.identities, DIM)
    for k in range(4):
        group.server.take_signed(k, group.sign(k, group.server.named))
    for k in range(4):
        group.server.take_shares(k, group.share(k))
    assert np.array_equal(group.server.open().total, expected)


def test_no_seal_is_needed_again_once_the_server_has_kept_it():
    group = Group()
    for k in range(4):
        group.server.take_masked(k, group.mask(k))
    what = group.server.name()
    for k in range(3):
        group.server.take_signed(k, group.sign(k, what))
    parts = [group.server.pack()]
    group.server.take_signed(3, group.sign(3, what))
    parts.append(group.server.pack())
    expected = sum(group.increment(k) for k in range(4))
    told = [group.share(k) for k in range(3)]
    for kept, whole in zip(parts, (False, True), strict=True):
        server = MaskingServer.unpack(kept, RULES, group.identities, DIM)
        for k in range(3):
            server.take_shares(k, told[k])
        assert server.can_open is whole
    assert np.array_equal(server.open().total, expected)


def test_wrong_shares_are_found_and_left_out():
    group = Group(Rules(5, 2, 0))
    for k in range(5):
        group.server.take_masked(k, group.mask(k))
    what = group.server.name()
    for k in range(5):
        group.server.take_signed(k, group.sign(k, what))
    expected = sum(group.increment(k) for k in range(5))
    for k in (0, 1, 2):
        answer = bytearray(group.share(k))
        if k == 0:
            answer[-1] ^= 1
        group.server.take_shares(k, bytes(answer))
    with pytest.raises(CannotUnmask):
        group.server.open()
    tried: list[object] = []
    with patch.object(server_side, "combine", lambda *asked: tried.append(asked)), pytest.raises(CannotUnmask):
        group.server.open()  # as each poll asks, while nothing new has come
    assert not tried
    group.server.take_shares(3, group.share(3))
    assert np.array_equal(group.server.open().total, expected)


def test_those_who_told_wrong_pads_for_one_learner_are_tried_last_for_the_others():
    group = Group(Rules(20, 6, 0))
    for k in range(20):
        group.server.take_masked(k, group.mask(k))
    what = group.server.name()
    for k in range(20):
        group.server.take_signed(k, group.sign(k, what))
    expected = sum(group.increment(k) for k in range(20))
    for k in range(20):
        answer = group.share(k)
        wrong = k in (0, 4, 9, 13, 17)
        group.server.take_shares(k, answer[:64] + bytes(len(answer) - 64) if wrong else answer)
    tried: list[object] = []
    combine = shares.combine

    def counted(*asked):
        tried.append(asked)
        return combine(*asked)

    with patch.object(server_side, "combine", counted):
        opened = group.server.open()
    assert np.array_equal(opened.total, expected)
    first = next(n for n, asked in enumerate(tried) if not {0, 4, 9, 13, 17} & asked[0].keys()) + 1
    assert first > 1, "of the first learner nobody is known to lie"
    assert len(tried) == first + 9 + 19


def test_one_who_shares_wrongly_does_not_stop_twenty_learners_whatever_its_place():
    group = Group(Rules(20, 10, 1))
    for k in range(20):
        group.server.take_masked(k, group.mask(k))
    what = group.server.name()
    for k in range(20):
        group.server.take_signed(k, group.sign(k, what))
    expected = sum(group.increment(k) for k in range(20))
    for k in range(20):
        answer = group.share(k)
        group.server.take_shares(k, answer[:64] + bytes(len(answer) - 64) if k == 0 else answer)
    assert np.array_equal(group.server.open().total, expected)


# What a server may try, one test each.


def named(group: Group) -> SetOfRound:
    for k in range(4):
        group.server.take_masked(k, group.mask(k))
    return group.server.name()


def test_different_sets_to_different_learners_open_nothing():
    group = Group()
    what = named(group)
    one = SetOfRound(what.at, what.core, frozenset({0, 1, 2}))
    for k in (0, 1):
        group.sign(k, one)
        with pytest.raises(Refused, match="second set"):
            group.sign(k, what)
    answers = {k: group.sign(k, what) for k in (2, 3)}
    with pytest.raises(Refused, match="has not sealed"):
        group.share(0)
    for k in (0, 1):
        answers[k] = bytes(len(answers[3]))  # the server has nothing that was sealed for this set
    for k, answer in answers.items():
        group.server.take_signed(k, answer)
    assert group.server.all_signed
    for k in (2, 3):
        group.server.take_shares(k, group.share(k))
    assert not group.server.can_open


def test_a_set_that_is_too_small_or_lies_about_the_core_is_not_signed():
    group = Group()
    what = named(group)
    for members in ({0, 1}, {0}):
        with pytest.raises(Refused, match="are needed"):
            group.sign(0, SetOfRound(what.at, what.core, frozenset(members)))
    with pytest.raises(Refused, match="which learners took part"):
        group.sign(0, SetOfRound(what.at, frozenset({0, 1, 2}), what.members))


def test_an_old_opening_is_not_given_again():
    group = Group()
    what = named(group)
    for k in range(4):
        group.server.take_signed(k, group.sign(k, what))
    asked = group.server.share_request()
    for k in range(3):
        group.server.take_shares(k, group.share(k))
    certificate = group.server.open().certificate
    group.tell_opened(3, certificate)
    with pytest.raises(Refused, match="is over"):
        group.share(3, asked)


def test_an_attempt_that_is_void_for_one_learner_is_not_opened_by_it_and_the_other_way_round():
    group = Group()
    what = named(group)
    for k in range(4):
        group.server.take_signed(k, group.sign(k, what))
    group.void(0)
    with pytest.raises(Refused, match="void"):
        group.share(0)
    group.share(1)
    with pytest.raises(Refused, match="opened"):
        group.void(1)
    with pytest.raises(Refused, match="proof"):
        group.learners[1].mask(Attempt(what.at.keys, 0, 2), group.increment(1))


def test_a_hidden_message_leaves_its_learner_out_and_the_round_goes_on():
    group = Group()
    group.mask(3)  # the server says that it never came
    for k in range(3):
        group.server.take_masked(k, group.mask(k))
    what = group.server.name()
    expected = sum(group.increment(k) for k in range(3))
    for k in range(3):
        group.server.take_signed(k, group.sign(k, what))
    for k in range(3):
        group.server.take_shares(k, group.share(k))
    opened = group.server.open()
    assert np.array_equal(opened.total, expected)
    group.tell_opened(3, opened.certificate)
    assert group.pending[3] == {0, 1}, "what was hidden is part of the next increment"


def test_keys_that_the_server_puts_in_place_are_refused():
    group = Group()
    stranger = MaskingLearner(
        MaskingLearner.fresh("l001", 0, "run", os.urandom), RULES, Ed25519PrivateKey.generate().sign, os.urandom
    )
    offers = list(group.keys.offers)
    offers[1] = stranger.offer()
    fresh = MaskingLearner(
        MaskingLearner.fresh("l000", 0, "run", os.urandom), RULES, group.signing["l000"].sign, os.urandom
    )
    offers[0] = fresh.offer()
    with pytest.raises(ProtocolError, match="did not sign"):
        fresh.take_keys(KeyList("run", tuple(offers)).pack(), group.identities)
    with pytest.raises(Refused, match="another list"):
        group.learners[0].take_keys(KeyList("run", tuple(offers)).pack(), group.identities)


def test_a_key_of_small_order_is_refused():
    group = Group(Rules(3, 2, 0))
    names = sorted(group.identities)
    fresh = [
        MaskingLearner(MaskingLearner.fresh(n, 0, "run", os.urandom), group.rules, group.signing[n].sign, os.urandom)
        for n in names
    ]
    bad = replace(fresh[1].offer(), key=bytes(32))
    bad = replace(bad, signature=group.signing[names[1]].sign(bad.signed_content("run")))
    keys = KeyList("run", (fresh[0].offer(), bad, fresh[2].offer()))
    with pytest.raises(ProtocolError, match="agrees on nothing secret"):
        fresh[0].take_keys(keys.pack(), group.identities)  # before anything is kept: a list is for the whole run


def test_an_attempt_that_is_replayed_gets_the_same_bytes():
    group = Group()
    first = group.mask(0)
    assert group.mask(0) == first
    with pytest.raises(Refused):
        group.learners[0].mask(group.server.at, group.increment(0))


def test_learners_that_are_dropped_one_by_one_refuse_when_too_few_are_left():
    group = Group(Rules(5, 3, 0))
    group.round()
    group.round((0, 1, 2, 3))
    group.round((0, 1, 2))
    with pytest.raises(Refused, match="are needed"):
        group.round((0, 1))


def test_a_restored_store_is_found_by_the_signature_that_it_does_not_know():
    group = Group()
    old = group.learners[2].state
    what = named(group)
    for k in range(4):
        group.server.take_signed(k, group.sign(k, what))
    group.learners[2].keep(old)
    with pytest.raises(Refused, match="has not sealed"):
        group.share(2)
    for k in (0, 1, 3):
        group.server.take_shares(k, group.share(k))
    with pytest.raises(PrivacyError, match="old copy"):
        group.tell_opened(2, group.server.open().certificate)


def test_certificates_with_too_few_or_wrong_signatures_prove_nothing():
    group = Group()
    what = named(group)
    for k in range(4):
        group.server.take_signed(k, group.sign(k, what))
    for k in range(3):
        group.server.take_shares(k, group.share(k))
    good = group.server.open().certificate
    few = OpenCertificate(good.opened, Signatures(dict(itertools.islice(good.signatures.by.items(), 2))))
    moved = OpenCertificate(good.opened, Signatures({3 - k: s for k, s in good.signatures.by.items()}))
    other = OpenCertificate(SetOfRound(good.opened.at, good.opened.core, frozenset({0, 1, 2})), good.signatures)
    for certificate in (few, moved, other):
        with pytest.raises(Refused):
            group.tell_opened(3, certificate)


def test_malformed_messages_are_refused_and_change_nothing():
    group = Group()
    message = bytearray(group.mask(0))
    rng = random.Random(3)
    for _ in range(300):
        cut = bytes(message[: rng.randrange(len(message))])
        with pytest.raises(ProtocolError):
            group.server.take_masked(0, cut)
        for kind in (SetOfRound, OpenCertificate, VoidCertificate, KeyList, Signatures):
            junk = rng.randbytes(rng.randrange(80))
            try:
                kind.unpack(junk)
            except ProtocolError:
                continue
            assert (
                kind is Signatures or kind is KeyList
            )  # an empty set, or a list of nobody: refused when it is checked
    assert group.server.masked == frozenset()


# Every state of small cases, and everything at random in larger ones.


@pytest.mark.parametrize("name", list(SABOTAGES))
def test_the_search_finds_what_is_broken_on_purpose(name):
    found = Search(SABOTAGES[name]).run(most=200_000)
    assert found.wrong is not None


@pytest.mark.parametrize(
    "case",
    [
        Case(Rules(3, 2, 0), 0, 1, 1),
        Case(Rules(3, 2, 1), 1, 2, 2, eager=True),
        Case(Rules(3, 2, 0), 0, 1, 1, two_steps=True),
        Case(Rules(3, 2, 1), 1, 2, 2, eager=True, two_steps=True),
    ],
    ids=["all honest", "one colludes", "all honest, two steps", "one colludes, two steps"],
)
def test_no_state_that_can_be_reached_shows_more_than_one_sum_a_round(case):
    found = Search(case).run()
    assert found.wrong is None
    assert found.complete
    assert found.opened > 0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "colluding" in name else pytest.mark.all) for name in CASES]
)
def test_no_state_of_two_rounds_with_two_attempts_shows_more_than_one_sum_a_round(name):
    found = Search(CASES[name]).run()
    assert (found.wrong, found.complete) == (None, True)
    assert found.done > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", list(LONG))
def test_no_state_of_the_long_cases_shows_more_than_one_sum_a_round(name):
    found = Search(LONG[name]).run()
    assert (found.wrong, found.complete) == (None, True)


def outcomes(search: Search) -> tuple[set[object], int]:
    """All that a server can come to know, up to names; and from how many states."""
    known, waiting = {search.as_one(search.start())}, [search.start()]
    found: set[object] = set()
    while waiting:
        for state in search.after(waiting.pop()):
            if (form := search.as_one(state)) in known:
                continue
            known.add(form)
            waiting.append(state)
            sums = [search.known_sums(seen) for seen in state.seen]
            found.add(
                min(
                    tuple(
                        tuple(sorted(tuple(sorted((order[k], *sorted(held)) for k, held in e.items())) for e in each))
                        for each in sums
                    )
                    for order in itertools.permutations(range(search.case.loyal))
                )
            )
    return found, len(known)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(Rules(3, 1, 0), 0, 2, 1, eager=True), marks=pytest.mark.all, id="two rounds"),
        pytest.param(Case(Rules(3, 2, 1), 1, 2, 2, eager=True), id="one colludes"),
        pytest.param(Case(Rules(3, 2, 1), 1, 1, 2, eager=True, two_steps=True), id="in two steps"),
    ],
)
def test_a_reduced_search_finds_all_that_a_whole_one_finds(case):
    few, states = outcomes(Search(case, reduced=True))
    every, all_states = outcomes(Search(case, reduced=False))
    assert few == every
    assert len(few) > 1
    assert states < all_states


class LyingServer(RuleBasedStateMachine):
    """Real masks and signatures; messages are lost, late, doubled and out of order, and the server lies."""

    @initialize(colluding=st.integers(0, 1))
    def begin(self, colluding):
        self.group = Group(Rules(4, 2, colluding), 2)
        self.loyal = range(4 - colluding)
        self.answers: dict[tuple, bytes] = {}
        self.signed: dict[tuple, dict[int, bytes]] = {}
        self.shared: dict[tuple, dict[int, bytes]] = {}
        self.voids: dict[Attempt, dict[int, bytes]] = {}
        self.opened: dict[int, set] = {}
        self.old: list = []

    def _at(self, r: int, a: int) -> Attempt:
        return Attempt(self.group.keys.digest(), r, a)

    def _proof(self, r: int) -> VoidCertificate | None:
        found = [at for at, by in self.voids.items() if at.round == r and len(by) >= self.group.rules.voids]
        return max(
            (VoidCertificate(at, Signatures(self.voids[at])) for at in found), key=lambda p: p.at.attempt, default=None
        )

    def _collude(self, content: bytes, wanted) -> dict[int, bytes]:
        return {k: self.group.learners[k]._sign(content) for k in wanted if k not in self.loyal}

    @rule(k=st.integers(0, 3), r=st.integers(0, 2), a=st.integers(1, 3))
    def mask(self, k, r, a):
        at = self._at(r, a)
        try:
            self.group.mask(k, at, self._proof(r))
        except (VeilstreamError, KeyError):
            return

    @rule(k=st.integers(0, 3), r=st.integers(0, 2), a=st.integers(1, 3), members=st.frozensets(st.integers(0, 3)))
    def sign(self, k, r, a, members):
        what = SetOfRound(self._at(r, a), self.group.learners[k].standing.core, members)
        try:
            signature = self.group.sign(k, what)[:64]
        except VeilstreamError:
            return
        self.signed.setdefault((what.at, what.core, members), {})[k] = signature

    @precondition(lambda self: self.signed)
    @rule(k=st.integers(0, 3), data=st.data())
    def share(self, k, data):
        at, core, members = data.draw(st.sampled_from(sorted(self.signed, key=repr)))
        what = SetOfRound(at, core, members)
        try:
            state, answer = self.group.learners[k].share(what)
        except VeilstreamError:
            return
        self.group.learners[k].keep(state)
        self.shared.setdefault((at, core, members), {})[k] = answer[:64]
        if k in self.loyal:
            helpers = set(self.shared[at, core, members]) | (set(range(4)) - set(self.loyal))
            if len(helpers) >= self.group.rules.threshold:
                self.opened.setdefault(at.round, set()).add((at.attempt, members))

    @rule(k=st.integers(0, 3), r=st.integers(0, 2), a=st.integers(1, 3))
    def void(self, k, r, a):
        at = self._at(r, a)
        try:
            self.voids.setdefault(at, {})[k] = self.group.void(k, at, self._proof(r))
        except VeilstreamError:
            return

    @precondition(lambda self: self.shared)
    @rule(k=st.integers(0, 3), data=st.data())
    def move_on(self, k, data):
        at, core, members = data.draw(st.sampled_from(sorted(self.shared, key=repr)))
        what = SetOfRound(at, core, members)
        signatures = self.shared[at, core, members] | self._collude(what.open_content(), range(4))
        try:
            self.group.tell_opened(k, OpenCertificate(what, Signatures(signatures)))
        except VeilstreamError:
            return

    @rule(k=st.integers(0, 3))
    def crash(self, k):
        learner = self.group.learners[k]
        learner.keep(LearnerState.unpack(learner.state.pack()))

    @rule(r=st.integers(0, 1), here=st.frozensets(st.integers(0, 3), min_size=3), share_with=st.integers(2, 4))
    def whole_round(self, r, here, share_with):
        """So that random walks come far: all that a round takes, in order."""
        for k in here:
            self.mask(k, r, 1)
        for k in here:
            self.sign(k, r, 1, here)
        core = self.group.learners[min(here)].standing.core
        if (self._at(r, 1), core, here) not in self.signed:
            return
        what = SetOfRound(self._at(r, 1), core, here)
        for k in list(range(4))[:share_with]:
            chosen = type("Drawn", (), {"draw": lambda _, __: (what.at, what.core, what.members)})()
            self.share(k, chosen)

    @invariant()
    def one_set_a_round(self):
        assert all(len(sets) <= 1 for sets in getattr(self, "opened", {}).values())


TestLyingServer = LyingServer.TestCase
TestLyingServer.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
