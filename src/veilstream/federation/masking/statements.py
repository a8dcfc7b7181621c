"""What learners sign for each other: their keys, the sets of a round, openings and voids; with certificates of both.

Everything is bound to one list of keys, and so to one run. A learner is named by its place in that list.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from veilstream.errors import ProtocolError

Sign = Callable[[bytes], bytes]
"""A learner's own signature of these bytes, 64 long."""

HASH_BYTES, SIGNATURE_BYTES, KEY_BYTES = 32, 64, 32
_PLACE = struct.Struct("<32sII")
_LENGTH = struct.Struct("<I")
_CONTEXT = b"veilstream masking 1 "
_ANY_KEY = X25519PrivateKey.from_private_bytes(bytes(KEY_BYTES))
"""Not secret: with a point of small order every key agrees on zero."""


class Refused(ProtocolError):
    """What a learner does not do, since with it more than one sum of a round might be seen."""

    def __init__(self, what: str, way_out: str = "nothing was sent; the server's copy of the run may be old") -> None:
        super().__init__(what, way_out)


def pack_parts(parts: Iterable[bytes | memoryview]) -> bytes:
    """Byte strings one after the other, each behind its length."""
    found = []
    for part in parts:
        found += [_LENGTH.pack(len(part)), part]
    return b"".join(found)


def unpack_all(content: bytes | memoryview) -> list[memoryview]:
    """The parts that were packed."""
    rest, found = memoryview(content), []
    while rest:
        if len(rest) < _LENGTH.size:
            raise malformed("a message")
        end = _LENGTH.size + _LENGTH.unpack_from(rest)[0]
        if end > len(rest):
            raise malformed("a message")
        found.append(rest[_LENGTH.size : end])
        rest = rest[end:]
    return found


def unpack_parts(content: bytes | memoryview, count: int) -> list[memoryview]:
    """As many parts as were packed, and no more."""
    found = unpack_all(content)
    if len(found) != count:
        raise malformed("a message")
    return found


def malformed(what: str) -> ProtocolError:
    """The error for bytes that are not what they should be."""
    return ProtocolError(f"{what} of unknown form", "check the sender's version")


def verifies(identity: bytes, signature: bytes | memoryview, content: bytes) -> bool:
    """Whether the holder of this Ed25519 key signed it."""
    try:
        Ed25519PublicKey.from_public_bytes(identity).verify(bytes(signature), content)
    except (InvalidSignature, ValueError):
        return False
    return True


@dataclass(frozen=True)
class KeyOffer:
    """A learner's key of one run: what pairwise masks are agreed with."""

    name: str
    epoch: int
    """The learner's own: it counts its mechanisms."""
    key: bytes
    """X25519, public."""
    anchor: bytes = bytes(HASH_BYTES)
    """Commits it to its part of every draw of the graph (`links.hashed`)."""
    signature: bytes = b""

    def signed_content(self, run: str) -> bytes:
        """What its signature is of."""
        about = [run.encode(), self.name.encode(), _LENGTH.pack(self.epoch), self.key, self.anchor]
        return _CONTEXT + b"key " + pack_parts(about)

    def pack(self) -> bytes:
        """As it is sent."""
        return pack_parts([self.name.encode(), _LENGTH.pack(self.epoch), self.key, self.anchor, self.signature])

    @classmethod
    def unpack(cls, content: bytes | memoryview) -> KeyOffer:
        """As it was packed; its signature is checked by `KeyList.check`."""
        name, epoch, key, anchor, signature = unpack_parts(content, 5)
        sizes = tuple(map(len, (epoch, key, anchor, signature)))
        if sizes != (_LENGTH.size, KEY_BYTES, HASH_BYTES, SIGNATURE_BYTES):
            raise malformed("a key")
        return cls(_text(name), _LENGTH.unpack(epoch)[0], bytes(key), bytes(anchor), bytes(signature))


@dataclass(frozen=True)
class KeyList:
    """The keys of a run, by name in order; everybody must see the same, since its hash is in all that is signed."""

    run: str
    offers: tuple[KeyOffer, ...]
    number: int = 1
    """Which list of the run it is: another one is made where somebody vanishes before the graph is drawn."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Learners by place."""
        return tuple(offer.name for offer in self.offers)

    def pack(self) -> bytes:
        """As it is sent and hashed."""
        return pack_parts([self.run.encode(), _LENGTH.pack(self.number), *(offer.pack() for offer in self.offers)])

    def digest(self) -> bytes:
        """Stands for the list in all that is signed and derived."""
        return hashlib.sha256(self.pack()).digest()

    @classmethod
    def unpack(cls, content: bytes | memoryview) -> KeyList:
        """As it was packed."""
        parts = unpack_all(content)
        if len(parts) < 2 or len(parts[1]) != _LENGTH.size:
            raise malformed("a list of keys")
        return cls(_text(parts[0]), tuple(KeyOffer.unpack(part) for part in parts[2:]), _LENGTH.unpack(parts[1])[0])

    def check(self, identities: Mapping[str, bytes], most: int) -> None:
        """Refuse a list that is not by name in order, too long, or has a key that its learner did not sign.

        And a key that agrees on nothing secret, before the list is kept: a list is for the whole run.

        ``identities`` are Ed25519 keys that the caller trusts, whoever sent the list.
        """
        names = self.names
        if list(names) != sorted(set(names)) or len(names) > most or len({o.key for o in self.offers}) < len(names):
            raise ProtocolError(
                f"a list of {len(names)} keys for a run of {most} learners, or one that names a learner twice",
                "the server made it wrongly",
            )
        for offer in self.offers:
            known = identities.get(offer.name)
            if known is None or not verifies(known, offer.signature, offer.signed_content(self.run)):
                raise ProtocolError(
                    f"a list with a key that learner {offer.name!r} did not sign",
                    "the server, or somebody on the way, may have put a key of its own in place; or its plan is "
                    "another, and learners count on each other's noise",
                )
            try:
                _ANY_KEY.exchange(X25519PublicKey.from_public_bytes(offer.key))
            except ValueError:
                raise ProtocolError(
                    f"a key of learner {offer.name!r} that agrees on nothing secret", "leave it out (--void)"
                ) from None


@dataclass(frozen=True)
class Attempt:
    """One try to open the sum of a round."""

    keys: bytes
    """Hash of the list of keys."""
    round: int
    attempt: int
    """From 1."""

    def pack(self) -> bytes:
        """As it is signed."""
        return _PLACE.pack(self.keys, self.round, self.attempt)

    @classmethod
    def unpack(cls, content: bytes | memoryview) -> Attempt:
        """As it was packed."""
        if len(content) != _PLACE.size:
            raise malformed("an attempt")
        return cls(*_PLACE.unpack(content))

    def void_content(self) -> bytes:
        """What is signed by who never opens this attempt, nor one of its round before it."""
        return _CONTEXT + b"void" + self.pack()


@dataclass(frozen=True)
class SetOfRound:
    """Whose increments a sum is of, and what is opened."""

    at: Attempt
    core: frozenset[int]
    """Learners of every sum that was opened before."""
    members: frozenset[int]

    def pack(self) -> bytes:
        """As it is signed."""
        return self._packed

    @cached_property
    def _packed(self) -> bytes:
        return self.at.pack() + pack_parts([_bitmap(self.core), _bitmap(self.members)])

    @classmethod
    def unpack(cls, content: bytes | memoryview) -> SetOfRound:
        """As it was packed."""
        core, members = unpack_parts(content[_PLACE.size :], 2)
        return cls(Attempt.unpack(content[: _PLACE.size]), _places(core), _places(members))

    def set_content(self) -> bytes:
        """Stands for it in what its learners seal for it."""
        return _CONTEXT + b"set " + self.pack()

    def open_content(self) -> bytes:
        """What is signed by who agrees that it is opened, and no other set of its round."""
        return _CONTEXT + b"open" + self.pack()


@dataclass(frozen=True)
class Signatures:
    """Several learners' signatures of the same content."""

    by: Mapping[int, bytes]

    def pack(self) -> bytes:
        """As they are sent."""
        places = sorted(self.by)
        return pack_parts([_bitmap(places), b"".join(self.by[place] for place in places)])

    @classmethod
    def unpack(cls, content: bytes | memoryview) -> Signatures:
        """As they were packed; not checked."""
        who, signatures = unpack_parts(content, 2)
        places = sorted(_places(who))
        if len(signatures) != SIGNATURE_BYTES * len(places):
            raise malformed("a certificate")
        each = [bytes(signatures[at : at + SIGNATURE_BYTES]) for at in range(0, len(signatures), SIGNATURE_BYTES)]
        return cls(dict(zip(places, each, strict=True)))

    def check(self, content: bytes, identities: Sequence[bytes]) -> frozenset[int]:
        """Who signed it; refused if any of the signatures is not what it says."""
        for place, signature in self.by.items():
            if place >= len(identities) or not verifies(identities[place], signature, content):
                raise Refused("signatures that were not made by those whom they name")
        return frozenset(self.by)


@dataclass(frozen=True)
class OpenCertificate:
    """Proof that a set may be opened, and no other of its round: t learners agree."""

    opened: SetOfRound
    signatures: Signatures

    def pack(self) -> bytes:
        """As it is sent."""
        return pack_parts([self.opened.pack(), self.signatures.pack()])

    @classmethod
    def unpack(cls, content: bytes | memoryview) -> OpenCertificate:
        """As it was packed; not checked."""
        opened, signatures = unpack_parts(content, 2)
        return cls(SetOfRound.unpack(opened), Signatures.unpack(signatures))


@dataclass(frozen=True)
class VoidCertificate:
    """Proof that an attempt, and those of its round before it, can never be opened: the signatures of q learners."""

    at: Attempt
    signatures: Signatures

    def pack(self) -> bytes:
        """As it is sent."""
        return pack_parts([self.at.pack(), self.signatures.pack()])

    @classmethod
    def unpack(cls, content: bytes | memoryview) -> VoidCertificate:
        """As it was packed; not checked."""
        at, signatures = unpack_parts(content, 2)
        return cls(Attempt.unpack(at), Signatures.unpack(signatures))


def _text(content: memoryview) -> str:
    try:
        return str(content, "utf-8")
    except UnicodeDecodeError:
        raise malformed("a name") from None


def _bitmap(places: Iterable[int]) -> bytes:
    number = sum(1 << place for place in places)
    return number.to_bytes((number.bit_length() + 7) // 8, "little")


def _places(bitmap: memoryview) -> frozenset[int]:
    if len(bitmap) > 1 << 13 or (len(bitmap) and not bitmap[-1]):  # one form only: it is signed
        raise malformed("a set of learners")
    number = int.from_bytes(bitmap, "little")
    return frozenset(place for place in range(number.bit_length()) if number >> place & 1)
