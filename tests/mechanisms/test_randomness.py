"""Keystream and normals: published vectors, then the distribution.

All draws are seeded; the false-alarm rate stated with each test is over the choice of seed.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from veilstream.errors import InputError
from veilstream.mechanisms import normals
from veilstream.mechanisms.keystream import NoiseKey, open_row
from veilstream.mechanisms.normals import TILE, NormalTiles, fill_normals

SAMPLES = 4_000_000


@pytest.fixture(scope="module")
def sample() -> np.ndarray:
    z = np.empty(SAMPLES, np.float32)
    fill_normals(open_row(NoiseKey.from_seed(2024), 5), z)
    return z.astype(np.float64)


class _Scripted:
    """A cipher context that returns chosen words."""

    def __init__(self, words: np.ndarray) -> None:
        self._bytes = words.astype(np.uint32).tobytes()

    def update_into(self, data, out) -> int:
        out[: len(data)] = self._bytes[: len(data)]
        return len(data)


def test_keystream_matches_the_published_vectors_of_the_cipher():
    """NIST SP 800-38A, F.5.5 CTR-AES256.Encrypt; its counter is f0f1...ff, one block a counter."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    secret = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    text = bytes.fromhex(
        "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
        "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
    )
    expected = bytes.fromhex(
        "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"
        "2b0930daa23de94ce87017ba2d84988ddfc9c58db67aada613c2dd08457941a6"
    )
    counter = bytes(range(0xF0, 0x100))
    assert (
        Cipher(algorithms.AES256(secret), modes.CTR(counter)).encryptor().update(text) == expected
    )
    # Our rows start at (step, block 0): the same step as the vector's high half, shifted back.
    step = int.from_bytes(counter[:8], "big")
    blocks = int.from_bytes(counter[8:], "big")
    ours = open_row(NoiseKey(secret, private=False), step)
    reference = Cipher(algorithms.AES256(secret), modes.CTR(counter[:8] + bytes(8))).encryptor()
    assert ours.update(bytes(64)) == reference.update(bytes(64))
    assert blocks > 0


def test_fips_197_vector_through_a_row():
    """FIPS 197 C.3 encrypts 00112233...ff; row 0x0011223344556677 reaches it at block 0x8899..."""
    secret = bytes(range(32))
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    block = bytes.fromhex("00112233445566778899aabbccddeeff")
    expected = bytes.fromhex("8ea2b7ca516745bfeafc49904b496089")
    assert Cipher(algorithms.AES256(secret), modes.ECB()).encryptor().update(block) == expected
    step = bytes.fromhex("0011223344556677")
    first = Cipher(algorithms.AES256(secret), modes.ECB()).encryptor().update(step + bytes(8))
    row = open_row(NoiseKey(secret, private=False), int.from_bytes(step, "big"))
    assert row.update(bytes(16)) == first


def test_rows_are_disjoint_and_continue_across_reads():
    key = NoiseKey.from_seed(0)
    whole = open_row(key, 3).update(bytes(96))
    row = open_row(key, 3)
    assert row.update(bytes(40)) + row.update(bytes(56)) == whole
    assert open_row(key, 4).update(bytes(96)) != whole


def test_only_the_operating_system_makes_private_keys():
    assert NoiseKey.from_operating_system().private
    assert NoiseKey.from_operating_system() != NoiseKey.from_operating_system()
    assert not NoiseKey.from_seed(1).private
    assert NoiseKey.from_seed(1) == NoiseKey.from_seed(1)
    assert NoiseKey.from_seed(1).secret.hex() not in repr(NoiseKey.from_seed(1))


@pytest.mark.parametrize("seed", [-1, 1.0, "7", True, 2**128])
def test_bad_seeds_are_refused(seed):
    with pytest.raises(InputError, match="seed"):
        NoiseKey.from_seed(seed)


def test_normals_follow_the_normal_distribution(sample):
    """Kolmogorov-Smirnov; false alarm 1e-4."""
    assert stats.kstest(sample, "norm").pvalue > 1e-4


def test_moments(sample):
    """First four moments at 4.5 standard errors; false alarm 3e-5."""
    n = len(sample)
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((sample**power).mean() - expected) < 4.5 * math.sqrt(variance / n)


@pytest.mark.parametrize("bound", [2.0, 3.0, 4.0, 4.5])
def test_tail_counts(sample, bound):
    """Exact binomial test of P(|z| > bound); false alarm 4e-5 over the four."""
    seen = int((np.abs(sample) > bound).sum())
    assert stats.binomtest(seen, len(sample), 2 * stats.norm.sf(bound)).pvalue > 1e-5


def test_radius_of_pairs_is_exponential_and_angle_uniform(sample):
    """Within a tile, the two halves are the pairs; false alarm 2e-4."""
    tiles = sample[: len(sample) // TILE * TILE].reshape(-1, 2, TILE // 2)
    cosine, sine = tiles[:, 0].ravel(), tiles[:, 1].ravel()
    assert stats.kstest((cosine**2 + sine**2) / 2, "expon").pvalue > 1e-4
    angle = np.arctan2(sine, cosine) / (2 * np.pi) + 0.5
    assert stats.kstest(angle, "uniform").pvalue > 1e-4


def test_no_correlation_between_neighbours_halves_and_rows(sample):
    """Each at 4.5 standard errors; false alarm 3e-5."""
    other = np.empty(SAMPLES, np.float32)
    fill_normals(open_row(NoiseKey.from_seed(2024), 6), other)
    n = len(sample)
    pairs = [
        (sample[:-1], sample[1:]),
        (sample[: -TILE // 2], sample[TILE // 2 :]),
        (sample[:-TILE], sample[TILE:]),
        (sample, other),
    ]
    for x, y in pairs:
        assert abs((x * y).mean()) < 4.5 / math.sqrt(n)
        assert abs(((x**2 - 1) * (y**2 - 1)).mean()) < 4.5 * 2 / math.sqrt(n)


def test_short_rows_are_whole_and_odd_lengths_work():
    for length in (1, 2, 3, 100, TILE - 1, TILE, TILE + 1, 2 * TILE + 7):
        z = np.full(length, np.nan, np.float32)
        fill_normals(open_row(NoiseKey.from_seed(1), 0), z)
        assert np.isfinite(z).all()
        assert len(np.unique(z)) > 0.99 * length


def test_smallest_words_reach_the_documented_tail():
    """All-zero radius words and reserve: |z| = sqrt(2·65·ln 2), never infinity."""
    out = np.empty(64, np.float32)
    NormalTiles().fill(_Scripted(np.zeros(2 * 32 + 32)), out)
    assert np.abs(out).max() == pytest.approx(math.sqrt(2 * 65 * math.log(2)), rel=1e-6)


def test_small_radius_words_are_refined_by_the_reserve():
    """Radius word w and reserve word e give u = (w + (e + ½)·2^-32)·2^-32, in order."""
    words = np.zeros(2 * 4 + 32)
    words[:4] = [5, 1 << 31, (1 << 16) - 1, 1 << 16]
    words[8:12] = [1 << 31, 12345, 0, 0]
    out = np.empty(8, np.float32)
    NormalTiles().fill(_Scripted(words), out)
    u = np.array([5 + 0.5, 2**31, 2**16 - 1 + 12345.5 / 2**32, 2**16]) / 2**32
    np.testing.assert_allclose(out[:4], np.sqrt(-2 * np.log(u)), rtol=1e-6)
    np.testing.assert_array_equal(out[4:], 0)


def test_largest_words_give_a_finite_small_radius():
    out = np.empty(64, np.float32)
    NormalTiles().fill(_Scripted(np.full(2 * 32 + 32, 2**32 - 1)), out)
    assert np.abs(out).max() < 4e-4


def test_reserve_is_ample():
    """The stated chance that a tile needs more refinements than the reserve holds."""
    pairs, p = TILE // 2, float(normals._SMALL_RADIUS_WORD) / 2**32
    assert stats.binom.sf(normals._RESERVE_WORDS, pairs, p) < 1e-50
