"""One draw to any precision: the ideal normal that the float64 one stands for.

A pair of draws has an endless string of random bits for its radius and one for its angle,

    u = 0.k₀k₁k₂...,   t = 0.m₀m₁m₂...   (64-bit words; t counts turns, m₀ signed)
    z = √(-2·ln u)·cos 2πt   and   √(-2·ln u)·sin 2πt,

exactly standard normal and independent. `enclosures` reads as many words as a question needs and
encloses z in an interval; it is asked only where float64 cannot tell on which side of a boundary z
lies: less than once in ten million draws.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING

from veilstream.mechanisms.keystream import DRAWS, FINE, FURTHER, Row
from veilstream.mechanisms.normals import TILE, tile_bytes

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import CipherContext

WORDS = 6  # Words that a draw can have: then |z| <= √(2·384·ln 2) = 23, and a draw is cut off with probability 2^-384
FURTHER_BLOCKS = 256  # Blocks of the row's third stream that belong to one pair; each is a word for u and one for t
_DIGITS = 140
_BITS = 460  # fixed point for the angle
_CONTEXT = decimal.Context(prec=_DIGITS, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX)
_SLACK = Decimal(10) ** -120


def further_words(row: Row, pair: int, count: int) -> list[tuple[int, int]]:
    """The pair's words after the first, for radius and angle."""
    stream = row.open(FURTHER, pair * FURTHER_BLOCKS).update(bytes(16 * count))
    words = [int.from_bytes(stream[at : at + 8], "little") for at in range(0, 16 * count, 8)]
    return list(zip(words[::2], words[1::2], strict=True))


def enclosures(row: Row, dim: int, coordinate: int) -> Iterator[tuple[Decimal, Decimal]]:
    """Ever narrower intervals that hold the draw of a coordinate, with `WORDS` words at last."""
    tile = coordinate - coordinate % TILE
    size = min(TILE, dim - tile)
    pairs = (size + 1) // 2
    place = (coordinate - tile) % pairs
    u, t = _first_words(row, tile, pairs, place)
    further = further_words(row, tile + place, WORDS - 1)
    for words, (more_u, more_t) in enumerate(further, start=2):
        u, t = u << 64 | more_u, t << 64 | more_t
        if words >= 3 and u:
            yield _enclosed(u, t, 64 * words, sine=coordinate - tile >= pairs)


def _first_words(row: Row, tile: int, pairs: int, place: int) -> tuple[int, int]:
    """k₀ and m₀: 32 bits that float32 draws have too, and 32 finer ones."""
    before = tile // TILE
    coarse = before * tile_bytes(TILE // 2)
    fine = before * 8 * (TILE // 2)
    high = [_word(row, DRAWS, coarse + 4 * (at + place)) for at in (0, pairs)]
    low = [_word(row, FINE, fine + 4 * (at + place)) for at in (0, pairs)]
    radius, angle = (h << 32 | f for h, f in zip(high, low, strict=True))
    return radius, angle - (angle >> 63 << 64)


def _word(row: Row, stream: int, at: int) -> int:
    context: CipherContext = row.open(stream, at // 16)
    return int.from_bytes(context.update(bytes(16 + at % 16))[at % 16 :][:4], "little")


def _enclosed(u: int, t: int, bits: int, *, sine: bool) -> tuple[Decimal, Decimal]:
    with decimal.localcontext(_CONTEXT):
        longest = _radius(u, bits)
        shortest = _radius(u + 1, bits)
        circle = _circle(t << (_BITS - bits) | 1 << (_BITS - bits - 1), sine=sine)
        middle = (longest + shortest) / 2 * circle
        # The angle is known to 2^-bits of a turn, less than 7·2^-bits in radians.
        reach = (longest - shortest) / 2 + longest * (7 * Decimal(2) ** -bits + _SLACK) + _SLACK
        return middle - reach, middle + reach


def _radius(u: int, bits: int) -> Decimal:
    if u >> bits:  # u = 1
        return Decimal(0)
    return (-2 * (Decimal(u) / (1 << bits)).ln()).sqrt()


def _circle(t: int, *, sine: bool) -> Decimal:
    """Cosine or sine of t·2^-_BITS turns, by Taylor's series in whole numbers."""
    quarter = 1 << (_BITS - 2)
    turns = (t + quarter // 2) // quarter  # nearest quarter turn; what is left is within 1/8
    x = 2 * _pi() * (t - turns * quarter) >> _BITS
    square = x * x >> _BITS
    term, value, n = (x, x, 1) if (turns + sine) % 2 else (1 << _BITS, 1 << _BITS, 0)
    while term:
        term = -(term * square >> _BITS) // ((n + 1) * (n + 2))
        value, n = value + term, n + 2
        if abs(term) <= 1:
            break
    # cos(x + q·90°) and sin(x + q·90°) from sine or cosine of x.
    quadrant = (turns - 1) % 4 if sine else turns % 4
    sign = -1 if quadrant in (1, 2) else 1
    return Decimal(sign * value) / (1 << _BITS)


@cache
def _pi() -> int:
    """π·2^_BITS by Machin's formula."""
    scale = 1 << (_BITS + 32)

    def arctan(inverse: int) -> int:
        power, total, n = scale // inverse, 0, 1
        while power:
            total += power // n if n % 4 == 1 else -(power // n)
            power //= inverse * inverse
            n += 2
        return total

    return 4 * (4 * arctan(5) - arctan(239)) >> 32


def nearest_float(row: Row, dim: int, coordinate: int) -> float:
    """The draw in float64, from its exact bits; for draws whose first words do not tell enough."""
    low, high = math.nan, math.nan
    for a, b in enclosures(row, dim, coordinate):
        low, high = float(a), float(b)
        if low == high:
            break
    return 0.5 * (low + high)
