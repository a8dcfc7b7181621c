"""Keystream and normals: published vectors, then the distribution.

All draws are seeded; the false-alarm rate stated with each test is over the choice of seed.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from veilstream.errors import InputError
from veilstream.mechanisms import normals
from veilstream.mechanisms.keystream import DRAWS, FINE, FURTHER, NoiseKey, Row, fresh_secret, open_row
from veilstream.mechanisms.normals import TILE, NormalTiles, fill_normals

SAMPLES = 4_000_000


@pytest.fixture(scope="module")
def sample() -> np.ndarray:
    z = np.empty(SAMPLES, np.float32)
    fill_normals(open_row(NoiseKey.from_seed(2024), 5), z)
    return z.astype(np.float64)


class _Scripted:
    """A cipher context that returns chosen words."""

    def __init__(self, words: np.ndarray, fine: np.ndarray | None = None) -> None:
        pairs = (len(words) - 32) // 2
        self._bytes = words.astype(np.uint32).tobytes()
        self._bytes += bytes(pairs) if fine is None else fine.tobytes()

    def update_into(self, data, out) -> int:
        assert len(data) == len(self._bytes)
        out[:] = self._bytes
        return len(data)


@pytest.mark.parametrize(
    ("step", "block"),
    [
        (0, "dc95c078a2408989ad48a21492842087"),  # plaintext of zeros
        (1 << 63, "ddc6bf790c15760d8d9aeb6f9a75fd4e"),  # VarTxt256, first bit set
    ],
)
def test_rows_start_with_the_published_vectors_of_the_cipher(step, block):
    """NIST's known answers for AES-256 under the zero key: our counter block is the plaintext."""
    row = open_row(NoiseKey(bytes(32)), step)
    assert row.update(bytes(16)).hex() == block


def test_rows_count_cipher_blocks_as_nist_counters_do():
    """Block j of a row is the cipher of (step, j): counter mode of SP 800-38A, by ECB."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    secret, step = bytes(range(32)), 0x0011223344556677
    row = open_row(NoiseKey(secret), step).update(bytes(16 * 300))
    counters = b"".join(step.to_bytes(8, "big") + j.to_bytes(8, "big") for j in range(300))
    assert row == Cipher(algorithms.AES256(secret), modes.ECB()).encryptor().update(counters)


def test_rows_are_disjoint_and_continue_across_reads():
    key = NoiseKey.from_seed(0)
    whole = open_row(key, 3).update(bytes(96))
    row = open_row(key, 3)
    assert row.update(bytes(40)) + row.update(bytes(56)) == whole
    assert open_row(key, 4).update(bytes(96)) != whole


def test_the_streams_of_a_row_and_its_blocks_are_counters_that_never_meet():
    """The stream number stands above the step: block j of stream k is the cipher of both."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    secret, step = bytes(range(32)), 0x0022334455667788
    cipher = Cipher(algorithms.AES256(secret), modes.ECB()).encryptor()
    for stream, block in itertools.product((DRAWS, FINE, FURTHER), (0, 7, 2**40)):
        high = (stream << 56) + step
        counters = [high.to_bytes(8, "big") + (block + j).to_bytes(8, "big") for j in range(3)]
        read = Row(secret, step).open(stream, block).update(bytes(48))
        assert read == cipher.update(b"".join(counters))


@pytest.mark.parametrize("secret", [b"", bytes(16), bytes(33), "0" * 32, bytearray(32), None])
def test_a_row_takes_32_bytes_and_shows_none_of_them(secret):
    with pytest.raises(InputError, match="key = '<not shown>': expected 32 bytes"):
        Row(secret, 0)
    with pytest.raises(InputError, match="key = '<not shown>': expected 32 bytes"):
        NoiseKey(secret)


def test_the_operating_system_never_repeats_a_secret_and_a_seed_does():
    secrets = {fresh_secret() for _ in range(100)}
    assert len(secrets) == 100
    assert {len(secret) for secret in secrets} == {32}
    assert NoiseKey.from_operating_system() != NoiseKey.from_operating_system()
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


def test_words_near_both_ends_are_refined_by_the_reserve_in_order():
    """Word w and reserve word e give ln u with u, or 1-u, = (distance + (e + ½)·2^-32)·2^-32."""
    words = np.zeros(2 * 6 + 32)
    words[:6] = [5, 1 << 31, (1 << 16) - 1, 1 << 16, 2**32 - 1, 2**32 - 7]
    words[12:16] = [1 << 31, 12345, 3 << 30, 77]
    out = np.empty(12, np.float32)
    NormalTiles().fill(_Scripted(words), out)
    unit = 2.0**-32
    expected = [
        math.log((5 + (2**31 + 0.5) * unit) * unit),
        math.log(0.5),
        math.log((2**16 - 1 + 12345.5 * unit) * unit),
        math.log(2**16 * unit),
        math.log1p(-(0 + (3 * 2**30 + 0.5) * unit) * unit),
        math.log1p(-(6 + 77.5 * unit) * unit),
    ]
    np.testing.assert_allclose(out[:6], np.sqrt(-2 * np.array(expected)), rtol=1e-6)
    np.testing.assert_array_equal(out[6:], 0)


def test_radius_keeps_the_resolution_of_its_word_everywhere():
    """Words at all distances from both ends: r agrees with float64 to float32 accuracy."""
    distance = np.unique(np.geomspace(2**16 + 1, 2**31 - 1, 700).astype(np.int64))
    words = np.concatenate([distance, 2**32 - distance])
    pairs = len(words)
    rng = np.random.default_rng(0)
    fine = rng.integers(-128, 128, pairs).astype(np.int8)
    out = np.empty(2 * pairs, np.float32)
    NormalTiles().fill(_Scripted(np.concatenate([words, np.zeros(pairs + 32)]), fine), out)
    effective = np.float32(words).astype(np.float64) + fine
    exact = np.where(effective < 2**31, np.log(effective / 2**32), np.log1p(-((2**32 - effective) / 2**32)))
    # First order in byte/word, which is at most 2^-9.
    np.testing.assert_allclose(out[:pairs], np.sqrt(-2 * exact), rtol=1.5e-6)
    near_one = words > 2**31
    np.testing.assert_allclose(out[:pairs][near_one], np.sqrt(-2 * exact[near_one]), rtol=4e-7)


def test_small_radii_lie_on_no_rings(sample):
    """Were u a float32 near one, (1-u)·2^24 would be whole for every small radius.

    Pairs with r < 0.02: the fraction of 1-u in units of 2^-24 is uniform; false alarm 1e-4.
    """
    tiles = sample[: len(sample) // TILE * TILE].reshape(-1, 2, TILE // 2)
    square = (tiles[:, 0] ** 2 + tiles[:, 1] ** 2).ravel()
    v = -np.expm1(-square[square < 4e-4] / 2)
    assert len(v) > 200
    assert stats.kstest((v * 2**24) % 1, "uniform").pvalue > 1e-4


def test_smallest_radius_is_tiny_and_not_zero():
    words = np.concatenate([np.full(32, 2**32 - 1), np.zeros(32 + 32)])
    out = np.empty(64, np.float32)
    NormalTiles().fill(_Scripted(words), out)
    assert 0 < out[:32].min() < 4e-10


def test_reserve_is_ample():
    """The stated chance that a tile needs more refinements than the reserve holds."""
    pairs, p = TILE // 2, float(2 * normals._NEAR_END) / 2**32
    assert stats.binom.sf(normals._RESERVE_WORDS, pairs, p) < 1e-45
