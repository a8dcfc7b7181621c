"""The bits behind a draw, read from the cipher by hand, and what they mean in arbitrary precision.

Written without `exact_normals` and `fine_normals`, so that both can be held to it. A row is three
streams; block j of stream k of step s is the AES-256 block (k·2^56 + s, j).

* stream 0, for each tile of up to 32,768 draws: a 32-bit word a pair for the radius, one a pair for
  the angle, 32 words of reserve, a byte a pair;
* stream 1, for each tile: 32 further bits of each radius, then of each angle;
* stream 2: from block 256·(first draw of the tile + place of the pair) on, 64 more bits of the
  radius and 64 of the angle in every block.
"""

from __future__ import annotations

from collections.abc import Callable

import mpmath
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

TILE = 32768
WORDS = 6
Read = Callable[[int, int, int], bytes]  # Bytes of a stream: which one, from where, how many


def cipher(secret: bytes, step: int) -> Read:
    """Of a row, by encrypting single blocks."""
    encrypt = Cipher(algorithms.AES256(secret), modes.ECB()).encryptor().update

    def read(stream: int, start: int, count: int) -> bytes:
        high = (stream * 2**56 + step).to_bytes(8, "big")
        blocks = range(start // 16, (start + count - 1) // 16 + 1)
        content = encrypt(b"".join(high + block.to_bytes(8, "big") for block in blocks))
        return content[start % 16 :][:count]

    return read


def words(read: Read, dim: int, coordinate: int) -> tuple[int, int, bool]:
    """384 bits of u, 384 of the angle, and whether the draw is the pair's sine."""
    tile, place = divmod(coordinate, TILE)
    pairs = (min(TILE, dim - tile * TILE) + 1) // 2
    sine = place >= pairs
    place -= pairs * sine
    coarse = tile * (4 * (TILE + 32) + TILE // 2)
    fine = tile * 4 * TILE
    both = []
    for which in (0, 1):  # radius, angle
        at = 4 * (which * pairs + place)
        low, high = read(1, fine + at, 4), read(0, coarse + at, 4)
        both.append(int.from_bytes(low + high, "little"))
    u, t = both
    further = read(2, 16 * 256 * (tile * TILE + place), 16 * (WORDS - 1))
    for at in range(0, len(further), 16):
        u = u * 2**64 + int.from_bytes(further[at : at + 8], "little")
        t = t * 2**64 + int.from_bytes(further[at + 8 : at + 16], "little")
    return u, t, sine


def ideal(u: int, t: int, sine: bool) -> mpmath.mpf:
    """The normal that 384 bits of each stand for, to within 2^-370 of what more would say."""
    with mpmath.workdps(140):
        unit = mpmath.mpf(2) ** (-64 * WORDS)
        angle = 2 * mpmath.pi * (t + mpmath.mpf(0.5)) * unit
        circle = mpmath.sin(angle) if sine else mpmath.cos(angle)
        return mpmath.sqrt(-2 * mpmath.log((u + mpmath.mpf(0.5)) * unit)) * circle


def draw(read: Read, dim: int, coordinate: int) -> mpmath.mpf:
    """The ideal draw of a coordinate."""
    return ideal(*words(read, dim, coordinate))
