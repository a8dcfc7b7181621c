"""What two learners share: a secret of X25519, and from it keys that each serve one purpose of one attempt.

    s_ij  = HKDF(X25519(i, j); run's list of keys, both names)
    k_ij  = HKDF-Expand(s_ij; "mask", round, attempt)          the same on both sides
    e_i→j = HKDF-Expand(s_ij; "share", i, j, round, attempt)   seals i's share for j

A key of one attempt says nothing of s_ij nor of another attempt, so k_ij can be given away for a learner that
has vanished.
"""

from __future__ import annotations

import struct

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from veilstream.errors import ProtocolError
from veilstream.federation.masking.shares import SHARE_BYTES, Random
from veilstream.federation.masking.statements import Attempt, KeyList, pack_parts

_NONCE = 12
SEALED_BYTES = _NONCE + SHARE_BYTES + 16
_USE = struct.Struct("<II")


def public_key(private: bytes) -> bytes:
    """Of an X25519 private key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


class PairKeys:
    """One learner's keys with every other, for one run. Secret."""

    def __init__(self, private: bytes, me: int, keys: KeyList) -> None:
        own, names, listed = X25519PrivateKey.from_private_bytes(private), keys.names, keys.digest()
        self._me = me
        self._secrets = []
        for place, offer in enumerate(keys.offers):
            try:
                agreed = own.exchange(X25519PublicKey.from_public_bytes(offer.key))
            except ValueError:  # a point of small order: everybody would know what is agreed
                raise ProtocolError(f"a key of learner {offer.name!r} that agrees on nothing secret", "") from None
            pair = pack_parts([name.encode() for name in sorted((names[me], names[place]))])
            self._secrets.append(HKDF(SHA256(), 32, salt=listed, info=b"veilstream pair" + pair).derive(agreed))

    def mask_seed(self, other: int, at: Attempt) -> bytes:
        """k_ij."""
        return self._expand(other, b"mask" + at.pack())

    def seal(self, share: bytes, to: int, at: Attempt, random: Random) -> bytes:
        """A share that only its holder can read."""
        nonce = random(_NONCE)
        return nonce + self._box(self._me, to, at).encrypt(nonce, share, None)

    def unseal(self, sealed: bytes, sender: int, at: Attempt) -> bytes:
        """A share that was sealed for this learner; `InvalidTag` if it was not."""
        return self._box(sender, self._me, at).decrypt(sealed[:_NONCE], sealed[_NONCE:], None)

    def _box(self, sender: int, to: int, at: Attempt) -> ChaCha20Poly1305:
        other = to if sender == self._me else sender
        return ChaCha20Poly1305(self._expand(other, b"share" + _USE.pack(sender, to) + at.pack()))

    def _expand(self, other: int, use: bytes) -> bytes:
        return HKDFExpand(SHA256(), 32, info=use).derive(self._secrets[other])
