"""The server's side: masked messages in, one opened sum a round out.

No clock, file or socket. `MaskingServer.pack` is all that must be durable: before anybody is asked to seal for a set
(`name`), before anybody is asked to agree on it (`all_signed`), and before the next round's messages are asked for.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import ProtocolError
from veilstream.federation.masking.agreement import masked_with
from veilstream.federation.masking.learner_side import MaskedMessage, commitment, outside_pad, own_mask
from veilstream.federation.masking.links import Links, drawn
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
from veilstream.mask_graph import mask_graph

_MOST_TRIES = 2000  # selections of openers, until every own mask agrees with its commitment


def _selections(openers: Sequence[int], many: int, wrong: Mapping[int, int]) -> Iterator[Sequence[int]]:
    """All selections, where they are few; else ones at random, so that a few who share wrongly are soon left out.

    ``wrong``: by holder, for how many learners its share was wrong; the first selection has those with the fewest.
    """
    ordered = sorted(openers, key=lambda holder: (wrong.get(holder, 0), holder))
    if math.comb(len(openers), many) <= _MOST_TRIES:
        yield from itertools.combinations(ordered, many)
    else:
        yield ordered[:many]
        chosen = random.Random(0)  # protects nothing: shares that agree with their commitments are right
        for _ in range(_MOST_TRIES):
            yield chosen.sample(openers, many)


def _off(shares: Mapping[int, bytes], right: Sequence[int], secret: bytes) -> list[int]:
    """Holders whose shares do not give the secret in the place of one that does."""
    rest = right[1:]
    beside = {holder: shares[holder] for holder in rest}
    return [
        holder
        for holder in shares.keys() - set(right)
        if combine(beside | {holder: shares[holder]}, weights((*rest, holder))) != secret
    ]


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
    named: SetOfRound | None = None
    sealed: dict[int, tuple[dict[int, bytes], dict[int, bytes]]] = field(default_factory=dict)
    """By member: shares by holder, under pads; masks with neighbours outside the set, under its own secret."""
    openings: dict[int, bytes] = field(default_factory=dict)
    """Signatures of who agrees on the set."""
    certificate: OpenCertificate | None = None
    pads: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """By member: of its shares, by holder."""
    secrets: dict[int, bytes] = field(default_factory=dict)
    """By member: what shares have given so far, in agreement with its commitment."""
    in_vain: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """By member: the pads that gave nothing; they are tried again when there are others."""
    told: set[int] = field(default_factory=set)
    """Who has told pads."""
    voids: dict[int, bytes] = field(default_factory=dict)


class MaskingServer:
    """One run."""

    def __init__(
        self, rules: Rules, keys: KeyList, identities: Mapping[str, bytes], dim: int, told: Sequence[bytes] = ()
    ) -> None:
        graph = mask_graph(len(keys.offers), rules.colluding)
        self.links = Links(len(keys.offers), graph, drawn(keys, told) if graph else b"")
        self.rules, self.keys, self.dim = replace(rules, links=self.links), keys, dim
        self.places = {name: place for place, name in enumerate(keys.names)}
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
        """Who has sealed for it."""
        return frozenset(self._try.sealed)

    @property
    def all_signed(self) -> bool:
        """Whether openings may be asked for."""
        return self.named is not None and self.signed == self.named.members

    @property
    def openers(self) -> frozenset[int]:
        """Who has done all that is asked to open it."""
        return frozenset(self._try.told if self.agreed else self._try.openings)

    @property
    def agreed(self) -> bool:
        """Whether t have agreed on it, so that pads may be asked for where that comes second."""
        return len(self._try.openings) >= self.rules.threshold

    @property
    def voided(self) -> frozenset[int]:
        """Who has promised not to agree on this attempt."""
        return frozenset(self._try.voids)

    @property
    def can_open(self) -> bool:
        """Whether all have sealed, enough have agreed, and told pads."""
        need, pads = self.rules.shares_needed, self._try.pads
        whole = self.agreed and self.all_signed
        return whole and all(len(pads.get(member, ())) >= need for member in self._named().members)

    def enough(self, members: frozenset[int]) -> bool:
        """Whether honest learners agree on a set of these."""
        core = self.rules.enough_core(len(members & self.core))
        return len(members) >= self.rules.least and core and self.rules.joined(members)

    def take_masked(self, sender: int, content: bytes | memoryview) -> bool:
        """Count a message; False for one that was counted, or comes when the set has been named."""
        message = MaskedMessage.unpack(content)
        if (message.sender, len(message.words)) != (sender, self.dim):
            raise malformed("a masked message")
        if message.at != self.at or self.named is not None or sender in self._try.commitments:
            return False
        np.add(self._try.total, message.words, out=self._try.total)
        self._try.commitments[sender] = message.commitment
        return True

    def name(self) -> SetOfRound:
        """Fix the set: all whose messages have come. The state must be durable before anybody seals for it."""
        if self._try.named is None:
            self._try.named = SetOfRound(self.at, self.core, self.masked)
        return self._try.named

    def take_signed(self, sender: int, content: bytes | memoryview) -> None:
        """Count what a learner sealed for the set."""
        what = self._named()
        if sender not in what.members:
            raise malformed("shares for a set")
        holders, outside = self.links.holders(sender), sorted(self.links.near(sender) - what.members)
        first = SHARE_BYTES * len(holders)
        if len(content) != first + SEED_BYTES * len(outside):
            raise malformed("shares for a set")
        shares, seeds = _pieces(content[:first], SHARE_BYTES), _pieces(content[first:], SEED_BYTES)
        self._try.sealed[sender] = dict(zip(holders, shares, strict=True)), dict(zip(outside, seeds, strict=True))

    def share_request(self, opened: tuple[OpenCertificate, ...] = ()) -> ShareRequest:
        """What learners are asked to agree on; with what t have signed, where they must before it tells pads."""
        pads_now = self.rules.two_steps and self.agreed
        return ShareRequest(opened, self._named(), self._certificate().signatures if pads_now else None)

    def take_shares(self, sender: int, content: bytes | memoryview) -> None:
        """Count who agrees, and its pads."""
        what = self._named()
        signature, pads = bytes(content[:SIGNATURE_BYTES]), content[SIGNATURE_BYTES:]
        held = sorted(what.members & set(self.links.holders(sender)))
        if len(pads) != SHARE_BYTES * len(held) and (len(pads) or not self.rules.two_steps):
            raise malformed("an opening")
        if self._try.openings.get(sender) != signature:
            self._check(sender, signature, what.open_content())
            self._try.openings[sender] = signature
        if pads or not held:
            self._try.told.add(sender)
            for member, pad in zip(held, _pieces(pads, SHARE_BYTES), strict=True):
                self._try.pads.setdefault(member, {})[sender] = pad

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
        what = self._named()
        total, secrets = self._try.total.copy(), self._own_secrets(what)
        for secret in secrets.values():
            add_mask(total, own_mask(secret), -1)
        for member, seeds in self._outside(what, secrets).items():
            for place, seed in seeds.items():
                add_mask(total, seed, -1 if member < place else 1)
        certificate = self._certificate()
        self.moved_on(certificate)
        return Opened(what.members, as_units(total), certificate)

    def outside_seeds(self) -> dict[int, dict[int, bytes]]:
        """By member: of the masks that it shares with learners outside the set, when its own can be taken off."""
        return self._outside(self._named(), self._own_secrets(self._named()))

    def _outside(self, what: SetOfRound, secrets: Mapping[int, bytes]) -> dict[int, dict[int, bytes]]:
        return {
            member: {
                place: masked_with(hidden, outside_pad(secret, place, what))
                for place, hidden in self._try.sealed[member][1].items()
            }
            for member, secret in secrets.items()
        }

    def _certificate(self) -> OpenCertificate:
        """The first t signatures of who agrees: more would prove no more, and learners check the same only once."""
        if self._try.certificate is None:
            some = dict(itertools.islice(self._try.openings.items(), self.rules.threshold))
            self._try.certificate = OpenCertificate(self._named(), Signatures(some))
        return self._try.certificate

    def moved_on(self, certificate: OpenCertificate) -> None:
        """Go on to the next round, where this one's sum has been counted already."""
        what = certificate.opened
        self.certificates[what.at.round] = certificate
        self.round, self.core, self.proof = what.at.round + 1, what.core & what.members, None
        self._begin(1)

    def _own_secrets(self, what: SetOfRound) -> dict[int, bytes]:
        """By member: what its shares give, by the first selection of holders that agrees with its commitment."""
        if not self.can_open:
            raise CannotUnmask(f"shares of {len(self._try.told)} learners, which are too few", "wait for more")
        found, in_vain = self._try.secrets, self._try.in_vain
        factors, off = cache(weights), Counter[int]()
        for member in sorted(what.members - found.keys()):
            pads, sealed = self._try.pads[member], self._try.sealed[member][0]
            if in_vain.get(member) == pads:
                continue
            shares = {holder: masked_with(sealed[holder], pad) for holder, pad in pads.items()}
            for tries, some in enumerate(_selections(sorted(shares), self.rules.shares_needed, off)):
                secret = combine({holder: shares[holder] for holder in some}, factors(tuple(some)))
                if secret is not None and commitment(secret) == self._try.commitments[member]:
                    found[member] = secret
                    if tries:
                        off.update(_off(shares, some, secret))
                    break
            else:
                in_vain[member] = dict(pads)
        wrong = [self.keys.names[place] for place in sorted(what.members - found.keys())]
        if wrong:
            raise CannotUnmask(
                f"shares of the own masks of {', '.join(wrong)} that do not agree with what they committed to",
                "either of these shared wrongly, or those who hold their shares told wrong pads",
            )
        return found

    def _named(self) -> SetOfRound:
        if self._try.named is None:
            raise ProtocolError("an answer about a set that has not been named", "an old message was sent again")
        return self._try.named

    def _check(self, sender: int, signature: bytes, content: bytes) -> None:
        if not verifies(self._identities[sender], signature, content):
            raise ProtocolError(f"a signature that learner {self.keys.names[sender]!r} did not make", "")

    def pack(self) -> bytes:
        """All that a server must not forget."""
        now = self._try
        named = now.named is not None
        about: dict[str, Any] = {
            "round": self.round,
            "core": sorted(self.core),
            "attempt": self.at.attempt,
            "proof": None if self.proof is None else self.proof.pack().hex(),
            "commitments": {str(k): v.hex() for k, v in now.commitments.items()} if named else {},
            "sealed": sorted(now.sealed),
        }
        sealed = [b"".join([*now.sealed[k][0].values(), *now.sealed[k][1].values()]) for k in sorted(now.sealed)]
        last = self.certificates.get(self.round - 1)
        return pack_parts(
            [
                self.keys.pack(),
                json.dumps(about).encode(),
                b"" if last is None else last.pack(),
                now.total.astype("<u8").tobytes() if named else b"",
                pack_parts(sealed),
            ]
        )

    @classmethod
    def unpack(
        cls, content: bytes, rules: Rules, identities: Mapping[str, bytes], dim: int, told: Sequence[bytes] = ()
    ) -> MaskingServer:
        """As it was packed; agreement and pads are asked for again, and what was not sealed by then."""
        keys, about, last, total, sealed = unpack_parts(content, 5)
        server, stored = cls(rules, KeyList.unpack(keys), identities, dim, told), json.loads(bytes(about))
        server.round, server.core = stored["round"], frozenset(stored["core"])
        server.proof = None if stored["proof"] is None else VoidCertificate.unpack(bytes.fromhex(stored["proof"]))
        if last:
            certificate = OpenCertificate.unpack(last)
            server.certificates[certificate.opened.at.round] = certificate
        server._begin(stored["attempt"])
        commitments = {int(k): bytes.fromhex(v) for k, v in stored["commitments"].items()}
        if commitments:
            now = server._try
            now.total, now.commitments = np.frombuffer(total, "<u8").astype(np.uint64), commitments
            server.name()
            for member, part in zip(stored["sealed"], unpack_parts(sealed, len(stored["sealed"])), strict=True):
                server.take_signed(member, part)
        return server


def _pieces(content: bytes | memoryview, size: int) -> list[bytes]:
    return [bytes(content[at : at + size]) for at in range(0, len(content), size)]
