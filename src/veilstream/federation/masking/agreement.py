"""What two learners share: a secret of X25519, and from it keys that each serve one purpose of one attempt.

    s_ij  = HKDF(X25519(i, j); run's list of keys, both names)
    k_ij  = HKDF-Expand(s_ij; "mask", round, attempt)          the same on both sides
    p_i→j = HKDF-Expand(s_ij; "share", i, j, round, attempt, set)   hides i's share for j

A key of one attempt says nothing of s_ij nor of another attempt, so k_ij can be given away for a learner that
has vanished. A pad is for one share alone: to open it, its holder j tells the pad, which needs no message of i.
"""

from __future__ import annotations

import hashlib
import struct

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from veilstream.errors import ProtocolError
from veilstream.federation.masking.shares import SHARE_BYTES
from veilstream.federation.masking.statements import Attempt, KeyList, SetOfRound, pack_parts

_USE = struct.Struct("<II")


def public_key(private: bytes) -> bytes:
    """Of an X25519 private key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


class PairKeys:
    """One learner's keys with those whom it shares masks with, for one run. Secret."""

    def __init__(self, private: bytes, me: int, keys: KeyList) -> None:
        self._own, self._me, self._keys, self._listed = private, me, keys, keys.digest()
        self._secrets: dict[int, bytes] = {}

    def mask_seed(self, other: int, at: Attempt) -> bytes:
        """k_ij."""
        return self._expand(other, b"mask" + at.pack(), 32)

    def pad(self, sender: int, to: int, what: SetOfRound) -> bytes:
        """P of these two, one of them this learner, for the sender's share in this set."""
        other = to if sender == self._me else sender
        about = hashlib.sha256(what.set_content()).digest()
        return self._expand(other, b"share" + _USE.pack(sender, to) + about, SHARE_BYTES)

    def _expand(self, other: int, use: bytes, length: int) -> bytes:
        if other not in self._secrets:
            self._secrets[other] = self._agreed(other)
        return HKDFExpand(SHA256(), length, info=use).derive(self._secrets[other])

    def _agreed(self, other: int) -> bytes:
        names, offer = self._keys.names, self._keys.offers[other]
        own = X25519PrivateKey.from_private_bytes(self._own)
        try:
            agreed = own.exchange(X25519PublicKey.from_public_bytes(offer.key))
        except ValueError:  # a point of small order: everybody would know what is agreed
            raise ProtocolError(f"a key of learner {offer.name!r} that agrees on nothing secret", "") from None
        pair = pack_parts([name.encode() for name in sorted((names[self._me], names[other]))])
        return HKDF(SHA256(), 32, salt=self._listed, info=b"veilstream pair" + pair).derive(agreed)


def masked_with(secret: bytes, pad: bytes) -> bytes:
    """Each byte xor the pad's; the same again takes it off."""
    return (int.from_bytes(secret) ^ int.from_bytes(pad)).to_bytes(len(pad))
