"""Masks: a keystream of 64-bit words, added to and taken from numbers mod 2^64."""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

Words = NDArray[np.uint64]

SEED_BYTES = 32
_CHUNK = 1 << 16  # words that are made at a time: they stay in the processor's cache
_ZEROS = bytes(8 * _CHUNK)
_COUNTER = bytes(16)


def add_mask(words: Words, seed: bytes, sign: int = 1) -> None:
    """Add F(seed), AES-256-CTR from counter zero, to these words; ``sign`` -1 takes it off.

    A seed is for one mask only: a second message under it would give away the difference of both.
    """
    stream = Cipher(algorithms.AES256(seed), modes.CTR(_COUNTER)).encryptor()
    for first in range(0, len(words), _CHUNK):
        part = words[first : first + _CHUNK]
        mask = np.frombuffer(stream.update(_ZEROS[: 8 * len(part)]), "<u8")
        if sign > 0:
            np.add(part, mask, out=part)
        else:
            np.subtract(part, mask, out=part)


def as_words(units: NDArray[np.int64]) -> Words:
    """Whole numbers mod 2^64; a copy."""
    return units.astype(np.int64).view(np.uint64).copy()


def as_units(words: Words) -> NDArray[np.int64]:
    """Whole numbers in [-2^63, 2^63) that these words stand for."""
    return words.view(np.int64).copy()
