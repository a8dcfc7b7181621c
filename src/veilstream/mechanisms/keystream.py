"""Where random bits come from: AES-256 in counter mode, addressed by (key, step).

A row of noise, one step's d normals, is read from its own part of the counter space: the high
half of the 128-bit counter block is the step (with a stream number in its top byte), the low half
counts cipher blocks. Rows can be read in any order and in any blocking and always give the same
bits. A row has three streams: the words of float32 draws, 32 more bits for each of those words,
and further bits for single draws that need them (`veilstream.mechanisms.fine_normals`).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from numbers import Integral
from typing import TYPE_CHECKING, Any

from veilstream.errors import InputError, MissingExtra

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import CipherContext

RowOpener = Callable[[int], "CipherContext"]

KEY_BYTES = 32
DRAWS, FINE, FURTHER = 0, 1, 2
"""The streams of a row: words of float32 draws, 32 more bits for each, and as many as one needs."""
_SEED_DOMAIN = b"veilstream/simulation-seed/v1\0"


def noise_seed(seed: int, mechanism: str) -> int:
    """Seed of one mechanism's draws in one run; simulation only, as all seeds are."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{mechanism}".encode()).digest()[:16], "big")


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """A 256-bit key of a noise stream; its repr shows nothing. Whoever chose the seed or the bytes knows it.

    Nothing that leaves a learner is made with one: a release draws a fresh secret for every step
    (`veilstream.privacy.grid_noise`).
    """

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        _checked_secret(self.secret)

    @classmethod
    def from_operating_system(cls) -> NoiseKey:
        """Fresh key from the operating system's generator."""
        return cls(fresh_secret())

    @classmethod
    def from_seed(cls, seed: int) -> NoiseKey:
        """Key of a reproducible simulation. **Not private**: the seed gives the noise away."""
        if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= seed < 2**128:
            raise InputError("seed", seed, "an integer in [0, 2^128)", "try 0")
        digest = hashlib.sha256(_SEED_DOMAIN + int(seed).to_bytes(16, "big")).digest()
        return cls(digest)


def fresh_secret() -> bytes:
    """32 bytes from the operating system: the only source of noise that protects people."""
    return secrets.token_bytes(KEY_BYTES)


def _checked_secret(secret: bytes) -> bytes:
    if not isinstance(secret, bytes) or len(secret) != KEY_BYTES:
        raise InputError("key", "<not shown>", "32 bytes", "use NoiseKey's makers")
    return secret


class Row:
    """One step's part of a keystream."""

    __slots__ = ("_algorithm", "_cipher", "_ctr", "_step")

    def __init__(self, secret: bytes, step: int) -> None:
        self._cipher, self._ctr, algorithm = _aes()
        self._algorithm = algorithm(_checked_secret(secret))
        self._step = step

    def open(self, stream: int = DRAWS, block: int = 0) -> CipherContext:
        """A stream of the row from a 16-byte block on; successive reads continue.

        Encrypting zeros yields it. A stream may be 2^68 bytes long before it would reach another.
        """
        counter = (stream << 56 | self._step).to_bytes(8, "big") + block.to_bytes(8, "big")
        context: CipherContext = self._cipher(self._algorithm, self._ctr(counter)).encryptor()
        return context


def row_opener(key: NoiseKey) -> RowOpener:
    """Float32 draws of this key, step by step. Fails here, before any is drawn, without AES."""
    _aes()
    return lambda step: Row(key.secret, step).open()


def open_row(key: NoiseKey, step: int) -> CipherContext:
    """Keystream of the float32 draws of one step."""
    return row_opener(key)(step)


@cache
def _aes() -> tuple[Any, Any, Any]:
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError as error:
        raise MissingExtra("cryptography", None, "drawing noise from a keystream") from error
    return Cipher, modes.CTR, algorithms.AES256
