"""Shamir's sharing of a secret of 32 bytes: any ``threshold`` shares give it, fewer say nothing.

Over the field of 2^256 + 297 elements, the smallest prime above 2^256: every secret is an element, and any
number of holders has a place. Holder k, from 0, has the polynomial's value at k + 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33
Random = Callable[[int], bytes]
"""So many fresh bytes."""


def split(secret: bytes, threshold: int, holders: Sequence[int], random: Random) -> list[bytes]:
    """A share for each of these holders."""
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= len(holders):
        raise ValueError("a secret of 32 bytes, and a threshold of at most all holders")
    # 64 bytes mod the prime are within 2^-255 of uniform.
    polynomial = [int.from_bytes(random(64)) % PRIME for _ in range(threshold - 1)]
    shares = []
    for holder in holders:
        value = 0
        for coefficient in polynomial:
            value = (value + coefficient) * (holder + 1) % PRIME
        shares.append(((value + int.from_bytes(secret)) % PRIME).to_bytes(SHARE_BYTES))
    return shares


def weights(holders: Sequence[int]) -> list[int]:
    """What each of these holders' shares counts in the secret (Lagrange's coefficients at zero)."""
    whole = math.prod(k + 1 for k in holders)
    below = [(k + 1) * math.prod(other - k for other in holders if other != k) for k in holders]
    # All inverses from one: that of the product, times what comes before and after each.
    before = list(itertools.accumulate(below, lambda x, y: x * y % PRIME, initial=1))
    after = pow(before[-1], -1, PRIME)
    found = [0] * len(below)
    for at in range(len(below) - 1, -1, -1):
        found[at] = whole * before[at] * after % PRIME
        after = after * below[at] % PRIME
    return found


def combine(shares: Mapping[int, bytes], known_weights: Sequence[int] | None = None) -> bytes | None:
    """The secret that these holders' shares give; None where that is no secret of 32 bytes.

    With shares that are wrong it is another secret: whoever combines them compares it with a commitment.
    """
    factors = weights(list(shares)) if known_weights is None else known_weights
    total = sum(w * int.from_bytes(share) for w, share in zip(factors, shares.values(), strict=True)) % PRIME
    return total.to_bytes(SECRET_BYTES) if total < 1 << 256 else None
