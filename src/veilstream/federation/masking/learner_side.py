"""A learner's side: increments and requests in, messages out.

`MaskingLearner` has no clock, file, socket or randomness of its own. What it must never forget is `LearnerState`, a
value: each method returns the next one beside what is to be sent, and changes nothing until `keep` is called with it.
So the caller writes it down in between, and a call that was interrupted has not happened.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from numpy.typing import NDArray

from veilstream.errors import ProtocolError
from veilstream.federation.masking import decisions
from veilstream.federation.masking.agreement import PairKeys, masked_with, public_key
from veilstream.federation.masking.decisions import Standing
from veilstream.federation.masking.links import Links, drawn, hashed, told_root
from veilstream.federation.masking.masks import SEED_BYTES, add_mask, as_words
from veilstream.federation.masking.rules import Rules
from veilstream.federation.masking.shares import SECRET_BYTES, Random, split
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
from veilstream.mask_graph import LISTS, mask_graph

_MASKED = struct.Struct("<8sI32s32sIII")
_MAGIC = b"VEILMSK2"
MASKED_HEADER_BYTES = _MASKED.size


def commitment(secret: bytes) -> bytes:
    """By which the server sees that shares gave the right secret; one of 32 random bytes stays hidden."""
    return hashlib.sha256(b"veilstream own mask" + secret).digest()


def own_mask(secret: bytes) -> bytes:
    """The seed of a learner's own mask."""
    return HKDFExpand(SHA256(), SEED_BYTES, info=b"veilstream own mask").derive(secret)


def outside_pad(secret: bytes, place: int, what: SetOfRound) -> bytes:
    """Hides the mask that it shares with a learner outside a set, until its own is opened for that set."""
    about = hashlib.sha256(what.set_content()).digest() + place.to_bytes(4)
    return HKDFExpand(SHA256(), SEED_BYTES, info=b"veilstream outside" + about).derive(secret)


def masked_bytes(dim: int) -> int:
    """Size of a masked message."""
    return _MASKED.size + 8 * dim


@dataclass(frozen=True)
class MaskedMessage:
    """What a learner sends in an attempt, as the server reads it."""

    sender: int
    at: Attempt
    commitment: bytes
    words: NDArray[np.uint64]

    @classmethod
    def unpack(cls, content: bytes | memoryview) -> MaskedMessage:
        """As `MaskingLearner.mask` made it."""
        if len(content) < _MASKED.size:
            raise ProtocolError("a masked message that is cut short", "check the sender's version")
        magic, sender, keys, committed, round_, attempt, dim = _MASKED.unpack_from(content)
        if magic != _MAGIC or len(content) != masked_bytes(dim):
            raise ProtocolError("a masked message of unknown form", "check the sender's version")
        words = np.frombuffer(content, "<u8", count=dim, offset=_MASKED.size)
        return cls(sender, Attempt(keys, round_, attempt), committed, words)


def _draws_of(seed: bytes) -> Random:
    """The bytes that this seed stands for, one after the other."""
    count = itertools.count()

    def more(length: int) -> bytes:
        return hashlib.shake_256(seed + next(count).to_bytes(4)).digest(length)

    return more


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
    seed: bytes = b""
    """Of the graph that the list has drawn; empty before, and where all pairs share masks."""
    own: bytes = b""
    """Of the attempt that it masked: the secret of its own mask, and what its shares follow from."""

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
            "seed": self.seed.hex(),
            "own": self.own.hex(),
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
            bytes.fromhex(stored["seed"]),
            bytes.fromhex(stored["own"]),
        )


class MaskingLearner:
    """One learner in one run. Its state counts once it was given to `keep`."""

    def __init__(self, state: LearnerState, rules: Rules, sign: Sign, random: Random) -> None:
        self.state, self.rules, self._sign, self._random = state, rules, sign, random
        self._pairs: PairKeys | None = None
        self._list: KeyList | None = None
        self._checked: tuple[tuple[bytes, ...], SetOfRound, Mapping[int, bytes]] | None = None
        self.keep(state)

    @classmethod
    def fresh(cls, name: str, epoch: int, run: str, random: Random) -> LearnerState:
        """A state with a new key, for a run that begins."""
        return LearnerState(name, epoch, run, random(KEY_BYTES))

    def keep(self, state: LearnerState) -> None:
        """This state is durable now."""
        known, self.state = self.state, state
        if not state.keys or (self._list is not None and (known.keys, known.seed) == (state.keys, state.seed)):
            return
        assert state.standing is not None
        self._list = KeyList.unpack(state.keys)
        self._pairs = PairKeys(state.private, state.standing.me, self._list)
        many = len(self._list.offers)
        graph = mask_graph(many, self.rules.colluding)
        ready = graph is None or state.seed
        self.rules = replace(self.rules, links=Links(many, graph, state.seed) if ready else None)

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

    @property
    def _links(self) -> Links:
        """Whom it shares masks with; refused before that is settled."""
        _ = self.standing
        if self.rules.links is None:
            raise Refused("a round before the run's graph is drawn", "the server sends every learner's part first")
        return self.rules.links

    def offer(self) -> KeyOffer:
        """Its key, signed; the same whenever it is asked."""
        state = self.state
        unsigned = KeyOffer(state.name, state.epoch, public_key(state.private), hashed(told_root(state.private), LISTS))
        return replace(unsigned, signature=self._sign(unsigned.signed_content(state.run)))

    def take_keys(self, content: bytes, identities: Mapping[str, bytes]) -> LearnerState:
        """Take the run's list of keys; ``identities`` are trusted, whoever sent the list.

        Another list is taken only after one whose graph is drawn, before anything was masked or voided under it,
        and `LISTS` times at most.
        """
        state = self.state
        keys = KeyList.unpack(content)
        if state.keys:
            if state.keys == content:
                return state
            assert self._list is not None
            begun = state.standing != Standing(self.standing.me, frozenset(range(len(self._list.offers))))
            drawn_before = mask_graph(len(self._list.offers), self.rules.colluding) is not None
            if begun or not drawn_before or not self._list.number < keys.number:
                raise Refused("another list of keys for the same run", "the server shows learners different lists")
        keys.check(identities, self.rules.learners)
        if keys.run != state.run or self.offer() not in keys.offers or keys.pack() != content:
            raise ProtocolError("a list of keys without this learner's own", "the server took another epoch's key")
        if not 1 <= keys.number <= LISTS:
            raise Refused(f"list {keys.number} of a run that has {LISTS} at most", "begin another run")
        least = replace(self.rules, links=None).least
        if len(keys.offers) < least:
            raise Refused(f"a list of {len(keys.offers)} keys, where {least} are needed")
        me = keys.names.index(state.name)
        return replace(
            state,
            keys=bytes(content),
            identities=tuple(identities[name] for name in keys.names),
            standing=Standing(me, frozenset(range(len(keys.offers)))),
            seed=b"",
        )

    def told(self) -> bytes:
        """Its part of the draw of this list's graph; empty where all pairs share masks."""
        assert self._list is not None
        if mask_graph(len(self._list.offers), self.rules.colluding) is None:
            return b""
        return hashed(told_root(self.state.private), LISTS - self._list.number)

    def take_draw(self, told: Sequence[bytes]) -> LearnerState:
        """Draw the list's graph from what all its learners told, by place."""
        assert self._list is not None
        if mask_graph(len(self._list.offers), self.rules.colluding) is None:
            raise Refused("a graph where all pairs share masks", "the server counts on another plan")
        return replace(self.state, seed=drawn(self._list, told))

    def take_opened(self, certificate: OpenCertificate) -> tuple[LearnerState, bool]:
        """After proof that a round's sum was opened; and whether this learner's increment was part of it."""
        now, what = self.standing, certificate.opened
        self._check_keys(what.at)
        if what.at.round < now.round:
            return self.state, False
        signers = self._agreed(what, certificate.signatures)
        if len(signers) < self.rules.threshold:
            raise Refused(f"proof that a sum was opened by {len(signers)} learners, where it takes more")
        after, mine = decisions.moved_on(now, self.rules, what.at.round, what.at.attempt, what.core, what.members)
        return replace(self.state, standing=after), mine

    def mask(
        self, at: Attempt, increment: NDArray[np.int64], proof: VoidCertificate | None = None
    ) -> tuple[LearnerState, bytes]:
        """The message of an attempt; its bytes must be kept with the state, and sent again rather than made again."""
        after = self.may_mask(at, proof)
        assert self._pairs is not None
        if after == self.state:
            raise Refused("a second message of one attempt", "the first is sent again")
        me, words = self.standing.me, as_words(increment)
        for other in sorted(self._links.near(me)):
            add_mask(words, self._pairs.mask_seed(other, at), 1 if me < other else -1)
        own = self._random(SECRET_BYTES + SEED_BYTES)
        secret = own[:SECRET_BYTES]
        add_mask(words, own_mask(secret))
        head = _MASKED.pack(_MAGIC, me, at.keys, commitment(secret), at.round, at.attempt, len(words))
        return replace(after, own=own), b"".join([head, words.astype("<u8").tobytes()])

    def may_mask(self, at: Attempt, proof: VoidCertificate | None = None) -> LearnerState:
        """The state after a message of this attempt; the present one if it was made before."""
        _ = self._links
        self._check_keys(at)
        proved = 0 if proof is None else self._proved_void(proof, at.round)
        after = decisions.mask(self.standing, self.rules, at.round, at.attempt, proved)
        return replace(self.state, standing=after)

    def seal(self, what: SetOfRound) -> tuple[LearnerState, bytes]:
        """Shares of its own mask for its neighbours and itself, and the masks that it shares with others outside a set.

        All of it is of use for this set alone, and the same whenever it is asked.
        """
        links = self._links
        assert self._pairs is not None
        self._check_keys(what.at)
        after = decisions.sign(self.standing, self.rules, what.at.round, what.at.attempt, what.core, what.members)
        me, secret = self.standing.me, self.state.own[:SECRET_BYTES]
        holders = links.holders(me)
        about = self.state.own[SECRET_BYTES:] + hashlib.sha256(what.set_content()).digest()
        shares = split(secret, self.rules.shares_needed, holders, _draws_of(about))
        sealed = [masked_with(s, self._pairs.pad(me, k, what)) for k, s in zip(holders, shares, strict=True)]
        sealed += [
            masked_with(self._pairs.mask_seed(place, what.at), outside_pad(secret, place, what))
            for place in sorted(links.near(me) - what.members)
        ]
        return replace(self.state, standing=after), b"".join(sealed)

    def share(self, what: SetOfRound, agreed: Signatures | None = None) -> tuple[LearnerState, bytes]:
        """Its signature that it agrees on a set; and the pads of the set's shares that it holds, when they may be told.

        ``agreed``: who else does, where as many as t must before pads are told.
        """
        links = self._links
        assert self._pairs is not None
        self._check_keys(what.at)
        asked = (self.standing, self.rules, what.at.round, what.at.attempt, what.core, what.members)
        if agreed is None:
            after = decisions.share(*asked)
        else:
            after = decisions.tell(*asked, len(self._agreed(what, agreed)))
        pads = []
        if agreed is not None or not self.rules.two_steps:
            me = self.standing.me
            held = sorted(what.members & (links.near(me) | {me}))
            pads = [self._pairs.pad(place, me, what) for place in held]
        return replace(self.state, standing=after), b"".join([self._sign(what.open_content()), *pads])

    def has_opened(self, at: Attempt, proof: VoidCertificate | None = None) -> bool:
        """Whether it has agreed on an attempt up to this one that may still be opened."""
        opened, proved = self.standing.opened, 0 if proof is None else self._proved_void(proof, at.round)
        return at.round == self.standing.round and opened is not None and proved < opened[0] <= at.attempt

    def void(self, at: Attempt, proof: VoidCertificate | None = None) -> tuple[LearnerState, bytes]:
        """The promise never to agree on this attempt, nor for one of its round before it."""
        self._check_keys(at)
        proved = 0 if proof is None else self._proved_void(proof, at.round)
        after = decisions.void(self.standing, at.round, at.attempt, proved)
        return replace(self.state, standing=after), self._sign(at.void_content())

    def _agreed(self, what: SetOfRound, signatures: Signatures) -> frozenset[int]:
        """Who has signed that it agrees; signatures that were checked just before are right."""
        same = self.state.identities, what, signatures.by
        if self._checked != same:
            signatures.check(what.open_content(), self.state.identities)
            self._checked = same
        return frozenset(signatures.by)

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
