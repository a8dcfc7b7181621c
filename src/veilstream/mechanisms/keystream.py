"""Where random bits come from: AES-256 in counter mode, addressed by (key, step).

A row of noise, one step's d normals, is read from its own part of the counter space: the high
half of the 128-bit counter block is the step, the low half counts cipher blocks. Rows can be read
in any order and in any blocking and always give the same bits.

One function serves simulation (the key comes from a seed) and deployment (the key comes from the
operating system). They differ in nothing but the key, and a `NoiseKey` remembers which it is.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING

from veilstream.errors import InputError, MissingExtra

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import CipherContext

__all__ = ["NoiseKey", "RowOpener", "open_row", "row_opener"]

RowOpener = Callable[[int], "CipherContext"]

KEY_BYTES = 32
_SEED_DOMAIN = b"veilstream/simulation-seed/v1\0"


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """A 256-bit key and whether it may protect anyone.

    Guarantees: only `from_operating_system` yields ``private=True``. A key made from a seed, or
    from given bytes, is known to whoever chose it, hence for simulation only. The key has no
    useful repr.
    """

    secret: bytes = field(repr=False)
    private: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if not isinstance(self.secret, bytes) or len(self.secret) != KEY_BYTES:
            raise InputError("key", "<not shown>", "32 bytes", "use NoiseKey's makers")

    @classmethod
    def from_operating_system(cls) -> NoiseKey:
        """Fresh key from the operating system's generator: the only kind that protects people."""
        key = cls(secrets.token_bytes(KEY_BYTES))
        object.__setattr__(key, "private", True)
        return key

    @classmethod
    def from_seed(cls, seed: int) -> NoiseKey:
        """Key of a reproducible simulation. **Not private**: the seed gives the noise away."""
        if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= seed < 2**128:
            raise InputError("seed", seed, "an integer in [0, 2^128)", "try 0")
        digest = hashlib.sha256(_SEED_DOMAIN + int(seed).to_bytes(16, "big")).digest()
        return cls(digest)


def row_opener(key: NoiseKey) -> RowOpener:
    """`open_row` of this key. Fails here, before any noise is drawn, where there is no AES."""
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError as error:
        raise MissingExtra("cryptography", None, "drawing noise from a keystream") from error

    def open_row(step: int) -> CipherContext:
        counter = step.to_bytes(8, "big") + bytes(8)
        return Cipher(algorithms.AES256(key.secret), modes.CTR(counter)).encryptor()

    return open_row


def open_row(key: NoiseKey, step: int) -> CipherContext:
    """Keystream of one step; successive reads continue where the last one ended.

    Encrypting zeros yields the stream. A row may be 2^68 bytes long before it would reach the
    next step's counters.
    """
    return row_opener(key)(step)
