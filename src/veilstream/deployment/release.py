"""A learner's messages: one a round, of one size, whatever the data.

    8 bytes  VEIL0001
    4        epoch                      8   grid (float64): what one unit stands for
    4        round                      8·d prefix: int64, units of the grid
    8        steps so far
    4        d                          all little-endian

The prefix is the sum of all noisy steps of the epoch, so a lost message is made good by the next.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from typing import NewType

import numpy as np

from veilstream.errors import InputError
from veilstream.privacy.gradient_types import Noised

Payload = NewType("Payload", bytes)
"""Bytes that may be sent; `encode` makes them from noised numbers."""

_MAGIC = b"VEIL0001"
_HEADER = struct.Struct("<8sIIQId")
HEADER_BYTES = _HEADER.size


@dataclass(frozen=True)
class Release:
    """A round's message, and its hash, which the server acknowledges."""

    epoch: int
    round: int
    payload: Payload
    hash: str

    def __repr__(self) -> str:
        return f"Release(epoch={self.epoch}, round={self.round}, {len(self.payload)} bytes)"


@dataclass(frozen=True)
class Message:
    """A payload that has been read."""

    epoch: int
    round: int
    steps: int
    grid: float
    prefix: Noised
    hash: str


def encode(epoch: int, round_: int, steps: int, grid: float, prefix: Noised) -> Payload:
    """The bytes of a round's message."""
    header = _HEADER.pack(_MAGIC, epoch, round_, steps, len(prefix), grid)
    return Payload(header + prefix.astype("<i8").tobytes())


def decode(payload: bytes | memoryview, known_hash: str | None = None) -> Message:
    """Read a message; anything that is not one is refused.

    Args:
        payload: the bytes of a `Release`, or of `PrivateSum.add`.
        known_hash: their SHA-256, where it has been computed.

    Returns:
        ``epoch``, ``round``, ``steps`` so far, ``grid`` (what one unit stands for), ``prefix`` (the
        noisy sum so far, in units of the grid) and ``hash``.

    Raises:
        InputError: for bytes that are not a message.

    """
    if len(payload) < HEADER_BYTES:
        raise InputError("message", f"{len(payload)} bytes", "a header", "check the sender")
    magic, epoch, round_, steps, dim, grid = _HEADER.unpack_from(payload)
    if magic != _MAGIC:
        raise InputError("message", repr(magic), f"to begin with {_MAGIC!r}", "check the sender")
    if len(payload) != HEADER_BYTES + 8 * dim:
        raise InputError(
            "message", f"{len(payload)} bytes", f"{HEADER_BYTES + 8 * dim} bytes for d = {dim}", "check the sender"
        )
    if not (math.isfinite(grid) and grid > 0 and math.frexp(grid)[0] == 0.5):
        raise InputError("message", f"grid {grid}", "a power of two", "check the sender")
    prefix = np.frombuffer(payload, "<i8", offset=HEADER_BYTES).astype(np.int64)
    hashed = known_hash or hashlib.sha256(payload).hexdigest()
    return Message(epoch, round_, steps, grid, Noised(prefix), hashed)
