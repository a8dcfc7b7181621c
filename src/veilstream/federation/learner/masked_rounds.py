"""A learner's rounds where only sums over learners are seen: its ledger and its masks, kept in step.

Every request of the masking protocol ends in one durable write, before its answer leaves: the key, the list of keys,
each masked message, signature, opening and void, and each proof that a round was opened.

A round takes a learner's noise whether or not clients wait, since all share one clock: where too few wait, or the
person beside the data has paused it, its noise alone takes part. So others keep its noise, and whether it takes part
says nothing of clients.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable
from typing import Any

from veilstream.deployment.learner import Learner
from veilstream.errors import InputError, ProtocolError
from veilstream.federation.keys.identity import LearnerKeys
from veilstream.federation.keys.peers import PeerCertificates, own_certificate
from veilstream.federation.masking.learner_side import LearnerState, MaskingLearner
from veilstream.federation.masking.requests import KeysRequest, MaskRequest, ShareRequest, VoidRequest, run_on_terms
from veilstream.federation.masking.rules import Rules
from veilstream.federation.masking.statements import OpenCertificate, Refused, SetOfRound, pack_parts
from veilstream.federation.protocol.messages import Buffer, Request

KINDS = ("key", "keys", "mask", "set", "open", "void")
"""Requests of the masking protocol; each is answered by a reply of its own kind (`ANSWERS`)."""
ANSWERS = dict(zip(KINDS, ("key", "keys", "masked", "signed", "opened", "voided"), strict=True))

Local = Callable[[int, Buffer], None]
"""Does the local part of a round: from the model's bytes to a sealed round."""


class MaskedRounds:
    """One learner's answers; for one thread at a time."""

    def __init__(self, learner: Learner, keys: LearnerKeys) -> None:
        trust = learner.plan.trust
        assert trust is not None
        if keys.path is None:
            raise InputError(
                "privacy.trust",
                "sum",
                "keys: learners sign for each other what they open",
                "`veilstream keys` makes them",
            )
        self._learner, self._keys, self._folder = learner, keys, keys.path
        self._rules = Rules(trust.learners, trust.honest, trust.colluding)
        self._masks: MaskingLearner | None = None

    @property
    def core(self) -> tuple[int, int] | None:
        """Learners that were part of every sum so far, and how many must be; None before the first request."""
        masks, rules = self._masks, self._rules
        if masks is None or not masks.has_keys:
            return None
        return len(masks.standing.core), rules.honest + rules.colluding

    def answer(self, request: Request, local: Local) -> bytes:
        """The body of the reply."""
        if request.kind == "key":
            return self._key()
        if request.kind == "keys":
            return self._take_keys(request.body)
        if request.kind == "mask":
            return self._mask(MaskRequest.unpack(request.body), local)
        if request.kind == "set":
            return self._sign(SetOfRound.unpack(request.body))
        if request.kind == "open":
            return self._share(ShareRequest.unpack(request.body))
        return self._void(VoidRequest.unpack(request.body))

    def _known(self) -> MaskingLearner:
        """The masks of the present epoch, as the ledger has them."""
        learner = self._learner
        kept = learner.epochs.masking
        if kept is None:
            raise Refused("a round of a run to which this learner gave no key", "it takes part from the next run on")
        if self._masks is None or self._masks.state.epoch != learner.epoch:
            state = LearnerState.unpack(kept)
            self._masks = MaskingLearner(state, self._rules, self._keys.identity.sign, secrets.token_bytes)
        return self._masks

    def _keep(self, kind: str, state: LearnerState, masked: bytes | None = None, **facts: Any) -> None:
        masks = self._known()
        if state != masks.state:
            self._learner.epochs.keep_masking(kind, state.pack(), masked, **facts)
            masks.keep(state)

    def _key(self) -> bytes:
        learner = self._learner
        if learner.epochs.masking is None:
            if learner.over or learner.run is None:
                raise Refused("a key for an epoch that is over")
            state = MaskingLearner.fresh(
                self._keys.name, learner.epoch, run_on_terms(learner.run, learner.settings), secrets.token_bytes
            )
            learner.epochs.keep_masking("key", state.pack())
        return pack_parts([self._known().offer().pack(), own_certificate(self._folder)])

    def _take_keys(self, body: Buffer) -> bytes:
        told = KeysRequest.unpack(body)
        masks = self._known()
        known = masks.state.keys == told.keys
        identities = {} if known else PeerCertificates(self._folder).identities(told.certificates)
        listed = hashlib.sha256(told.keys).hexdigest()
        self._keep("keys", masks.take_keys(told.keys, identities), hash=listed)
        if told.told:
            self._keep("keys", masks.take_draw(told.told), hash=listed)
        return masks.told()

    def _mask(self, told: MaskRequest, local: Local) -> bytes:
        masks, learner, at = self._known(), self._learner, told.at
        self._take_opened(told.opened)
        if masks.may_mask(at, told.proof) == masks.state:  # sent before: the same bytes
            return learner.epochs.masked
        if learner.round <= at.round:
            self._refuse_to_carry_clients(at.round)
            local(at.round, told.model)
        state, message = masks.mask(at, learner.increment(at.round), told.proof)
        hashed = hashlib.sha256(message).hexdigest()
        self._keep("mask", state, message, round=at.round, attempt=at.attempt, hash=hashed)
        return message

    def _refuse_to_carry_clients(self, round_: int) -> None:
        """A client counts in the round of its own step or in none, where the promise rests on which step that is.

        A server that leaves a learner out and takes it in later would else gather clients of many steps in one round:
        under a secret order it would know better where each is, and several visits of one person, which are priced as
        apart, would come together. The learner's epoch ends instead.
        """
        learner = self._learner
        same_round = learner.pinned and learner.round == round_
        rests_on_steps = learner.order_is_secret or learner.plan.participation.times > 1
        if rests_on_steps and learner.ledger.chain.standing.unopened and not same_round:
            learner.end_epoch()
            raise Refused(
                "a further round at a learner whose last one is in no sum, where the promise rests on a client's step",
                "it takes part from the next run on",
            )

    def _sign(self, what: SetOfRound) -> bytes:
        state, answer = self._known().seal(what)
        self._keep("sign", state, round=what.at.round, attempt=what.at.attempt, hash=_hash(what))
        return answer

    def _share(self, told: ShareRequest) -> bytes:
        self._take_opened(told.opened)
        state, answer = self._known().share(told.what, told.agreed)
        at = told.what.at
        self._keep("share", state, round=at.round, attempt=at.attempt, hash=_hash(told.what))
        return answer

    def _void(self, told: VoidRequest) -> bytes:
        """The signed void; nothing where it has opened the attempt and so cannot promise not to."""
        masks = self._known()
        self._take_opened(told.opened)
        if masks.has_opened(told.at, told.proof):
            return b""
        state, answer = masks.void(told.at, told.proof)
        self._keep("void", state, round=told.at.round, attempt=told.at.attempt)
        return answer

    def _take_opened(self, certificates: Iterable[OpenCertificate]) -> None:
        masks = self._known()
        for certificate in certificates:
            state, mine = masks.take_opened(certificate)
            at, hashed = certificate.opened.at, _hash(certificate.opened)
            if mine and self._learner.round != at.round + 1:
                raise ProtocolError(f"proof of round {at.round} at a learner of round {self._learner.round}", "")
            self._keep("opened", state, round=at.round, attempt=at.attempt, hash=hashed, counted=mine)


def _hash(what: SetOfRound) -> str:
    return hashlib.sha256(what.pack()).hexdigest()
