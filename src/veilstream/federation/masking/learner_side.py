"""A learner's side: increments and requests in, messages out.

`MaskingLearner` has no clock, file, socket or randomness of its own. What it must never forget is `LearnerState`, a
value: each method returns the next one beside what is to be sent, and changes nothing until `keep` is called with it.
So the caller writes it down in between, and a call that was interrupted has not happened.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from numpy.typing import NDArray

from veilstream.errors import ProtocolError
from veilstream.federation.masking import decisions
from veilstream.federation.masking.agreement import SEALED_BYTES, PairKeys, public_key
from veilstream.federation.masking.decisions import Standing
from veilstream.federation.masking.masks import SEED_BYTES, add_mask, as_words
from veilstream.federation.masking.rules import Rules
from veilstream.federation.masking.shares import SHARE_BYTES, Random, split
from veilstream.federation.masking.statements import (
    HASH_BYTES,
    KEY_BYTES,
    Attempt,
    KeyList,
    KeyOffer,
    OpenCertificate,
    Refused,
    SetOfRound,
    Sign,
    Signatures,
    VoidCertificate,
)

_MASKED = struct.Struct("<8sI32s32sIII")
_MAGIC = b"VEILMSK1"
MASKED_HEADER_BYTES = _MASKED.size


def commitment(seed: bytes) -> bytes:
    """By which the server sees that shares gave the right seed; a seed of 32 random bytes stays hidden."""
    return hashlib.sha256(b"veilstream own mask" + seed).digest()


def masked_bytes(dim: int, learners: int) -> int:
    """Size of a masked message."""
    return _MASKED.size + 8 * dim + SEALED_BYTES * learners


@dataclass(frozen=True)
class MaskedMessage:
    """What a learner sends in an attempt, as the server reads it."""

    sender: int
    at: Attempt
    commitment: bytes
    words: NDArray[np.uint64]
    sealed: tuple[bytes, ...]
    """A share of its own mask for each learner, by place."""

    @classmethod
    def unpack(cls, content: bytes | memoryview, learners: int) -> MaskedMessage:
        """As `MaskingLearner.mask` made it."""
        if len(content) < _MASKED.size:
            raise ProtocolError("a masked message that is cut short", "check the sender's version")
        magic, sender, keys, committed, round_, attempt, dim = _MASKED.unpack_from(content)
        if magic != _MAGIC or len(content) != masked_bytes(dim, learners):
            raise ProtocolError("a masked message of unknown form", "check the sender's version")
        words = np.frombuffer(content, "<u8", count=dim, offset=_MASKED.size)
        first = _MASKED.size + 8 * dim
        sealed = tuple(bytes(content[at : at + SEALED_BYTES]) for at in range(first, len(content), SEALED_BYTES))
        return cls(sender, Attempt(keys, round_, attempt), committed, words, sealed)


@dataclass(frozen=True)
class LearnerState:
    """What a learner must not forget of a run, and must not tell: it holds a private key."""

    name: str
    epoch: int
    run: str
    private: bytes
    """X25519."""
    keys: bytes = b""
    """The list of keys that it took, as packed; empty before."""
    identities: tuple[bytes, ...] = ()
    """Ed25519 keys of the learners of that list, by place."""
    standing: Standing | None = None

    def pack(self) -> bytes:
        """As it is kept."""
        stored: dict[str, Any] = {
            "name": self.name,
            "epoch": self.epoch,
            "run": self.run,
            "private": self.private.hex(),
            "keys": self.keys.hex(),
            "identities": [key.hex() for key in self.identities],
            "standing": None if self.standing is None else asdict(self.standing),
        }
        return json.dumps(stored, default=sorted).encode()

    @classmethod
    def unpack(cls, content: bytes) -> LearnerState:
        """As it was kept."""
        stored = json.loads(content)
        standing = stored["standing"]
        if standing is not None:
            signed, opened = standing["signed"], standing["opened"]
            standing["core"] = frozenset(standing["core"])
            standing["signed"] = None if signed is None else frozenset(signed)
            standing["opened"] = None if opened is None else (opened[0], frozenset(opened[1]))
        return cls(
            stored["name"],
            stored["epoch"],
            stored["run"],
            bytes.fromhex(stored["private"]),
            bytes.fromhex(stored["keys"]),
            tuple(bytes.fromhex(key) for key in stored["identities"]),
            None if standing is None else Standing(**standing),
        )


class MaskingLearner:
    """One learner in one run. Its state counts once it was given to `keep`."""

    def __init__(self, state: LearnerState, rules: Rules, sign: Sign, random: Random) -> None:
        self.state, self.rules, self._sign, self._random = state, rules, sign, random
        self._pairs: PairKeys | None = None
        self._list: KeyList | None = None
        self.keep(state)

    @classmethod
    def fresh(cls, name: str, epoch: int, run: str, random: Random) -> LearnerState:
        """A state with a new key, for a run that begins."""
        return LearnerState(name, epoch, run, random(KEY_BYTES))

    def keep(self, state: LearnerState) -> None:
        """This state is durable now."""
        if (state.keys and state.keys != self.state.keys) or (self._list is None and state.keys):
            self._list = KeyList.unpack(state.keys)
            assert state.standing is not None
            self._pairs = PairKeys(state.private, state.standing.me, self._list)
        self.state = state

    @property
    def standing(self) -> Standing:
        """Where it stands; refused before it has the run's keys."""
        if self.state.standing is None:
            raise Refused("a round before the run's list of keys", "the server sends it first")
        return self.state.standing

    @property
    def has_keys(self) -> bool:
        """Whether it knows the run's list of keys."""
        return self.state.standing is not None

    def offer(self) -> KeyOffer:
        """Its key, signed; the same whenever it is asked."""
        state = self.state
        unsigned = KeyOffer(state.name, state.epoch, public_key(state.private))
        return replace(unsigned, signature=self._sign(unsigned.signed_content(state.run)))

    def take_keys(self, content: bytes, identities: Mapping[str, bytes]) -> LearnerState:
        """Take the run's list of keys, once; ``identities`` are trusted, whoever sent the list."""
        state = self.state
        if state.keys:
            if state.keys != content:
                raise Refused("another list of keys for the same run", "the server shows learners different lists")
            return state
        keys = KeyList.unpack(content)
        keys.check(identities, self.rules.learners)
        if keys.run != state.run or self.offer() not in keys.offers or keys.pack() != content:
            raise ProtocolError("a list of keys without this learner's own", "the server took another epoch's key")
        if len(keys.offers) < self.rules.least:
            raise Refused(f"a list of {len(keys.offers)} keys, where {self.rules.least} are needed")
        me = keys.names.index(state.name)
        return replace(
            state,
            keys=bytes(content),
            identities=tuple(identities[name] for name in keys.names),
            standing=Standing(me, frozenset(range(len(keys.offers)))),
        )

    def take_opened(self, certificate: OpenCertificate) -> tuple[LearnerState, bool]:
        """After proof that a round's sum was opened; and whether this learner's increment was part of it."""
        now, what = self.standing, certificate.opened
        self._check_keys(what.at)
        if what.at.round < now.round:
            return self.state, False
        signers = certificate.signatures.check(what.open_content(), self.state.identities)
        if len(signers) < self.rules.threshold:
            raise Refused(f"proof that a sum was opened by {len(signers)} learners, where it takes more")
        after, mine = decisions.moved_on(now, self.rules, what.at.round, what.at.attempt, what.core, what.members)
        return replace(self.state, standing=after), mine

    def mask(
        self, at: Attempt, increment: NDArray[np.int64], proof: VoidCertificate | None = None
    ) -> tuple[LearnerState, bytes]:
        """The message of an attempt; its bytes must be kept with the state, and sent again rather than made again."""
        assert self._pairs is not None
        assert self._list is not None
        after = self.may_mask(at, proof)
        if after == self.state:
            raise Refused("a second message of one attempt", "the first is sent again")
        me, many = self.standing.me, len(self._list.offers)
        words = as_words(increment)
        for other in range(many):
            if other != me:
                add_mask(words, self._pairs.mask_seed(other, at), 1 if me < other else -1)
        own = self._random(SEED_BYTES)
        add_mask(words, own)
        shares = split(own, self.rules.threshold, many, self._random)
        sealed = [self._pairs.seal(share, holder, at, self._random) for holder, share in enumerate(shares)]
        head = _MASKED.pack(_MAGIC, me, at.keys, commitment(own), at.round, at.attempt, len(words))
        return after, b"".join([head, words.astype("<u8").tobytes(), *sealed])

    def may_mask(self, at: Attempt, proof: VoidCertificate | None = None) -> LearnerState:
        """The state after a message of this attempt; the present one if it was made before."""
        self._check_keys(at)
        proved = 0 if proof is None else self._proved_void(proof, at.round)
        after = decisions.mask(self.standing, self.rules, at.round, at.attempt, proved)
        return replace(self.state, standing=after)

    def sign_set(self, what: SetOfRound) -> tuple[LearnerState, bytes]:
        """The signature of a set, and what takes this learner's pairwise masks with all others off."""
        assert self._pairs is not None
        assert self._list is not None
        self._check_keys(what.at)
        after = decisions.sign(self.standing, self.rules, what.at.round, what.at.attempt, what.core, what.members)
        outside = [place for place in range(len(self._list.offers)) if place not in what.members]
        seeds = [self._pairs.mask_seed(place, what.at) for place in outside]
        return replace(self.state, standing=after), b"".join([self._sign(what.set_content()), *seeds])

    def share(
        self, what: SetOfRound, signatures: Signatures, sealed: Mapping[int, bytes]
    ) -> tuple[LearnerState, bytes]:
        """Its shares of the own masks of a set that all of it have signed, behind a signature that says so.

        ``sealed``: what each of the set sealed for this learner. A share that cannot be read is sent as zeros.
        """
        assert self._pairs is not None
        self._check_keys(what.at)
        signers = signatures.check(what.set_content(), self.state.identities)
        after = decisions.share(
            self.standing, self.rules, what.at.round, what.at.attempt, what.core, what.members, signers
        )
        shares = []
        for place in sorted(what.members):
            try:
                shares.append(self._pairs.unseal(sealed.get(place, b""), place, what.at))
            except (InvalidTag, ValueError):
                shares.append(bytes(SHARE_BYTES))
        return replace(self.state, standing=after), b"".join([self._sign(what.open_content()), *shares])

    def has_opened(self, at: Attempt, proof: VoidCertificate | None = None) -> bool:
        """Whether it has shared for an attempt up to this one that may still be opened."""
        opened, proved = self.standing.opened, 0 if proof is None else self._proved_void(proof, at.round)
        return at.round == self.standing.round and opened is not None and proved < opened[0] <= at.attempt

    def void(self, at: Attempt, proof: VoidCertificate | None = None) -> tuple[LearnerState, bytes]:
        """The promise never to share for this attempt, nor for one of its round before it."""
        self._check_keys(at)
        proved = 0 if proof is None else self._proved_void(proof, at.round)
        after = decisions.void(self.standing, at.round, at.attempt, proved)
        return replace(self.state, standing=after), self._sign(at.void_content())

    def _proved_void(self, proof: VoidCertificate, round_: int) -> int:
        self._check_keys(proof.at)
        if proof.at.round != round_:
            raise Refused(f"proof that an attempt of round {proof.at.round} is void, for one of round {round_}")
        signers = proof.signatures.check(proof.at.void_content(), self.state.identities)
        if len(signers) < self.rules.voids:
            raise Refused(
                f"proof by {len(signers)} learners that an attempt is void, where it takes {self.rules.voids}"
            )
        return proof.at.attempt

    def _check_keys(self, at: Attempt) -> None:
        assert len(at.keys) == HASH_BYTES
        _ = self.standing
        assert self._list is not None
        if at.keys != self._digest():
            raise Refused("a round under another list of keys", "the server shows learners different lists")

    def _digest(self) -> bytes:
        return hashlib.sha256(self.state.keys).digest()
