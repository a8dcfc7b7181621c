"""The server's side: masked messages in, one opened sum a round out.

No clock, file or socket. `MaskingServer.pack` is all that must be durable: before a set's signatures are asked for
(`name`), and before the next round's messages are (`opened`).
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import ProtocolError
from veilstream.federation.masking.agreement import SEALED_BYTES
from veilstream.federation.masking.learner_side import MaskedMessage, commitment
from veilstream.federation.masking.masks import SEED_BYTES, Words, add_mask, as_units
from veilstream.federation.masking.requests import ShareRequest
from veilstream.federation.masking.rules import Rules
from veilstream.federation.masking.shares import SHARE_BYTES, combine, weights
from veilstream.federation.masking.statements import (
    SIGNATURE_BYTES,
    Attempt,
    KeyList,
    OpenCertificate,
    SetOfRound,
    Signatures,
    VoidCertificate,
    malformed,
    pack_parts,
    unpack_parts,
    verifies,
)

_MOST_TRIES = 2000  # selections of openers, until every own mask agrees with its commitment


def _selections(openers: Sequence[int], many: int) -> Iterator[Sequence[int]]:
    """All selections, where they are few; else ones at random, so that a few who share wrongly are soon left out."""
    if math.comb(len(openers), many) <= _MOST_TRIES:
        yield from itertools.combinations(openers, many)
    else:
        chosen = random.Random(0)  # protects nothing: shares that agree with their commitments are right
        for _ in range(_MOST_TRIES):
            yield chosen.sample(openers, many)


class CannotUnmask(ProtocolError):
    """The shares that came give some learner's own mask wrongly."""


@dataclass(frozen=True)
class Opened:
    """A sum, with the proof that it is the only one of its round."""

    members: frozenset[int]
    total: NDArray[np.int64]
    certificate: OpenCertificate


@dataclass
class _Try:
    """One attempt."""

    at: Attempt
    total: Words
    commitments: dict[int, bytes] = field(default_factory=dict)
    sealed: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    named: SetOfRound | None = None
    signatures: dict[int, bytes] = field(default_factory=dict)
    seeds: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """By signer: the pairwise masks with each learner outside the set."""
    openings: dict[int, bytes] = field(default_factory=dict)
    shares: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """By opener: a share of each member's own mask."""
    voids: dict[int, bytes] = field(default_factory=dict)


class MaskingServer:
    """One run."""

    def __init__(self, rules: Rules, keys: KeyList, identities: Mapping[str, bytes], dim: int) -> None:
        self.rules, self.keys, self.dim = rules, keys, dim
        self._identities = [identities[name] for name in keys.names]
        self._digest = keys.digest()
        self.round = 0
        self.core = frozenset(range(len(keys.names)))
        self.certificates: dict[int, OpenCertificate] = {}
        """By round, of every sum that was opened."""
        self.proof: VoidCertificate | None = None
        """That the attempt before the present one is void."""
        self._begin(1)

    def _begin(self, attempt: int) -> None:
        self._try = _Try(Attempt(self._digest, self.round, attempt), np.zeros(self.dim, np.uint64))

    @property
    def at(self) -> Attempt:
        """The attempt that is under way."""
        return self._try.at

    @property
    def masked(self) -> frozenset[int]:
        """Whose message of this attempt has come."""
        return frozenset(self._try.commitments)

    @property
    def named(self) -> SetOfRound | None:
        """The set whose signatures are asked for."""
        return self._try.named

    @property
    def signed(self) -> frozenset[int]:
        """Who has signed it."""
        return frozenset(self._try.signatures)

    @property
    def all_signed(self) -> bool:
        """Whether openings may be asked for."""
        return self.named is not None and self.signed == self.named.members

    @property
    def openers(self) -> frozenset[int]:
        """Who has shared."""
        return frozenset(self._try.openings)

    @property
    def voided(self) -> frozenset[int]:
        """Who has promised not to share for this attempt."""
        return frozenset(self._try.voids)

    @property
    def can_open(self) -> bool:
        """Whether enough have shared."""
        return len(self._try.openings) >= self.rules.threshold

    def enough(self, members: frozenset[int]) -> bool:
        """Whether honest learners sign a set of these."""
        return len(members) >= self.rules.least and self.rules.enough_core(len(members & self.core))

    def take_masked(self, sender: int, content: bytes | memoryview) -> bool:
        """Count a message; False for one that was counted, or comes when the set has been named."""
        message = MaskedMessage.unpack(content, len(self.keys.names))
        if (message.sender, len(message.words)) != (sender, self.dim):
            raise malformed("a masked message")
        if message.at != self.at or self.named is not None or sender in self._try.commitments:
            return False
        np.add(self._try.total, message.words, out=self._try.total)
        self._try.commitments[sender], self._try.sealed[sender] = message.commitment, message.sealed
        return True

    def name(self) -> SetOfRound:
        """Fix the set: all whose messages have come. The state must be durable before anybody is asked to sign it."""
        if self._try.named is None:
            self._try.named = SetOfRound(self.at, self.core, self.masked)
        return self._try.named

    def take_signed(self, sender: int, content: bytes | memoryview) -> None:
        """Count a signature of the set."""
        what = self._named()
        outside = [place for place in range(len(self.keys.names)) if place not in what.members]
        signature, seeds = bytes(content[:SIGNATURE_BYTES]), content[SIGNATURE_BYTES:]
        if sender not in what.members or len(seeds) != SEED_BYTES * len(outside):
            raise malformed("a signature of a set")
        self._check(sender, signature, what.set_content())
        self._try.signatures[sender] = signature
        each = [bytes(seeds[at : at + SEED_BYTES]) for at in range(0, len(seeds), SEED_BYTES)]
        self._try.seeds[sender] = dict(zip(outside, each, strict=True))

    def share_request(self, holder: int, opened: tuple[OpenCertificate, ...] = ()) -> ShareRequest:
        """What a learner needs to share: the set, its signatures, and what was sealed for it."""
        what = self._named()
        sealed = {place: self._try.sealed[place][holder] for place in what.members}
        return ShareRequest(opened, what, Signatures(dict(self._try.signatures)), sealed)

    def take_shares(self, sender: int, content: bytes | memoryview) -> None:
        """Count an opening."""
        what = self._named()
        members = sorted(what.members)
        signature, shares = bytes(content[:SIGNATURE_BYTES]), content[SIGNATURE_BYTES:]
        if len(shares) != SHARE_BYTES * len(members):
            raise malformed("an opening")
        self._check(sender, signature, what.open_content())
        each = [bytes(shares[at : at + SHARE_BYTES]) for at in range(0, len(shares), SHARE_BYTES)]
        self._try.openings[sender] = signature
        self._try.shares[sender] = dict(zip(members, each, strict=True))

    def take_void(self, sender: int, signature: bytes) -> None:
        """Count a void of the attempt under way."""
        self._check(sender, signature, self.at.void_content())
        self._try.voids[sender] = signature

    def next_attempt(self) -> bool:
        """Begin another attempt, if enough have signed the void of this one."""
        if len(self._try.voids) < self.rules.voids:
            return False
        self.proof = VoidCertificate(self.at, Signatures(dict(self._try.voids)))
        self._begin(self.at.attempt + 1)
        return True

    def open(self) -> Opened:
        """Take the masks off, and go on to the next round; the state must be durable before that is asked for.

        Raises:
            CannotUnmask: too many of the shares are wrong; more of them may help.

        """
        what, now = self._named(), self._try
        total = now.total.copy()
        for seed in self._own_seeds(what):
            add_mask(total, seed, -1)
        for signer, seeds in now.seeds.items():
            for place, seed in seeds.items():
                add_mask(total, seed, -1 if signer < place else 1)
        certificate = OpenCertificate(what, Signatures(dict(now.openings)))
        self.moved_on(certificate)
        return Opened(what.members, as_units(total), certificate)

    def moved_on(self, certificate: OpenCertificate) -> None:
        """Go on to the next round, where this one's sum has been counted already."""
        what = certificate.opened
        self.certificates[what.at.round] = certificate
        self.round, self.core, self.proof = what.at.round + 1, what.core & what.members, None
        self._begin(1)

    def _own_seeds(self, what: SetOfRound) -> list[bytes]:
        """Every member's own mask, by the first selection of openers whose shares agree with all commitments."""
        openers, members = sorted(self._try.openings), sorted(what.members)
        if not self.can_open:
            raise CannotUnmask(f"shares of {len(openers)} learners, where {self.rules.threshold} are needed", "wait")
        left = dict.fromkeys(members, b"")
        for some in _selections(openers, self.rules.threshold):
            factors = weights(some)
            for member in [place for place, seed in left.items() if not seed]:
                seed = combine({k: self._try.shares[k][member] for k in some}, factors)
                if seed is not None and commitment(seed) == self._try.commitments[member]:
                    left[member] = seed
            if all(left.values()):
                return list(left.values())
        wrong = [self.keys.names[place] for place, seed in left.items() if not seed]
        raise CannotUnmask(
            f"shares of the own masks of {', '.join(wrong)} that do not agree with what they committed to",
            "either of these shared wrongly, or those who sent shares changed them",
        )

    def _named(self) -> SetOfRound:
        if self._try.named is None:
            raise ProtocolError("an answer about a set that has not been named", "an old message was sent again")
        return self._try.named

    def _check(self, sender: int, signature: bytes, content: bytes) -> None:
        if not verifies(self._identities[sender], signature, content):
            raise ProtocolError(f"a signature that learner {self.keys.names[sender]!r} did not make", "")

    def pack(self) -> bytes:
        """All that a server must not forget; secret shares stay sealed in it."""
        now = self._try
        named = now.named is not None
        about: dict[str, Any] = {
            "round": self.round,
            "core": sorted(self.core),
            "attempt": self.at.attempt,
            "proof": None if self.proof is None else self.proof.pack().hex(),
            "commitments": {str(k): v.hex() for k, v in now.commitments.items()} if named else {},
        }
        last = self.certificates.get(self.round - 1)
        return pack_parts(
            [
                self.keys.pack(),
                json.dumps(about).encode(),
                b"" if last is None else last.pack(),
                now.total.astype("<u8").tobytes() if named else b"",
                b"".join(b"".join(now.sealed[k]) for k in sorted(now.sealed)) if named else b"",
            ]
        )

    @classmethod
    def unpack(cls, content: bytes, rules: Rules, identities: Mapping[str, bytes], dim: int) -> MaskingServer:
        """As it was packed; signatures and shares are asked for again."""
        keys, about, last, total, sealed = unpack_parts(content, 5)
        server, told = cls(rules, KeyList.unpack(keys), identities, dim), json.loads(bytes(about))
        server.round, server.core = told["round"], frozenset(told["core"])
        server.proof = None if told["proof"] is None else VoidCertificate.unpack(bytes.fromhex(told["proof"]))
        if last:
            certificate = OpenCertificate.unpack(last)
            server.certificates[certificate.opened.at.round] = certificate
        server._begin(told["attempt"])
        commitments = {int(k): bytes.fromhex(v) for k, v in told["commitments"].items()}
        if commitments:
            now, row = server._try, SEALED_BYTES * len(server.keys.names)
            now.total, now.commitments = np.frombuffer(total, "<u8").astype(np.uint64), commitments
            for at, place in enumerate(sorted(commitments)):
                mine = bytes(sealed[at * row : (at + 1) * row])
                now.sealed[place] = tuple(mine[k : k + SEALED_BYTES] for k in range(0, row, SEALED_BYTES))
            server.name()
        return server
