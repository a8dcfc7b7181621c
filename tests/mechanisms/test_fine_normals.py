"""Float64 normals against arbitrary precision, from bits that are read by hand.

The statistical tests are seeded; the false-alarm rate stated with each is over the choice of seed.
"""

from __future__ import annotations

import hashlib
import itertools
import math

import mpmath
import numpy as np
import pytest
from scipy import stats

from tests.mechanisms import row_words
from veilstream.errors import PrivacyError
from veilstream.mechanisms import fine_normals, independent
from veilstream.mechanisms.exact_normals import WORDS, enclosures, nearest_float
from veilstream.mechanisms.fine_normals import FineNormals, circle_error, fine_row
from veilstream.mechanisms.keystream import NoiseKey, Row, open_row
from veilstream.mechanisms.normals import TILE, fill_normals
from veilstream.mechanisms.program import DRAW_ERROR
from veilstream.privacy.grid import grid_for
from veilstream.privacy.grid_noise import GridNoise

SECRET = NoiseKey.from_seed(31).secret
SAMPLES = 2_000_000


def errors(row, read, dim: int, coordinates, draws: np.ndarray) -> list[float]:
    """Of float64 draws, exactly."""
    with mpmath.workdps(60):
        return [float(abs(mpmath.mpf(float(draws[i])) - row_words.draw(read, dim, i))) for i in coordinates]


def test_5000_draws_are_within_a_quarter_of_the_stated_error():
    dim = 5000
    draws = fine_row(Row(SECRET, 3), dim)
    found = errors(Row(SECRET, 3), row_words.cipher(SECRET, 3), dim, range(dim), draws)
    assert max(found) < DRAW_ERROR / 4
    assert max(found) > 1e-17  # float64 cannot be exact: there was something to measure


@pytest.mark.parametrize("dim", [1, 2, 3, TILE - 1, TILE, TILE + 1, TILE + 2, 2 * TILE + 7])
def test_tiles_and_odd_lengths_read_the_bits_that_are_theirs(dim):
    """First and last of both halves of every tile."""
    row, read = Row(SECRET, 9), row_words.cipher(SECRET, 9)
    draws = fine_row(row, dim)
    places = set()
    for first in range(0, dim, TILE):
        size = min(TILE, dim - first)
        places |= {first, first + (size + 1) // 2 - 1, first + size - 1}
        places |= {first + (size + 1) // 2} if size > 1 else set()
    assert max(errors(row, read, dim, sorted(places), draws)) < DRAW_ERROR / 4


def test_std_scales_a_draw_and_its_error():
    dim, std = 501, 2.0**18 * 1.37
    out = np.empty(dim)
    slices = list(FineNormals(dim).tiles(Row(SECRET, 3), out, std))
    assert slices == [slice(0, dim)]
    read = row_words.cipher(SECRET, 3)
    with mpmath.workdps(60):
        found = [float(abs(float(z) - std * row_words.draw(read, dim, i))) for i, z in enumerate(out)]
    assert max(found) < std * DRAW_ERROR / 4


class Scripted:
    """A row whose words the test chooses: pairs of a single tile."""

    def __init__(self, radius: list[int], angle: list[int], further: dict[int, bytes]) -> None:
        high = [word >> 32 for word in radius + angle]
        low = [word % 2**32 for word in radius + angle]
        pairs = len(radius)
        self._streams = [np.array(high, "<u4").tobytes() + bytes(4 * 32 + pairs), np.array(low, "<u4").tobytes()]
        self._further = further

    def read(self, stream: int, start: int, count: int) -> bytes:
        if stream < 2:
            return self._streams[stream][start : start + count].ljust(count, b"\0")
        pair, at = divmod(start, 16 * 256)
        known = self._further.get(pair)
        if known is None:
            known = hashlib.shake_256(b"%d" % pair).digest(16 * 5)
        return known[at : at + count].ljust(count, b"\0")

    def open(self, stream: int = 0, block: int = 0) -> Scripted._Context:
        return self._Context(self, stream, 16 * block)

    class _Context:
        def __init__(self, row: Scripted, stream: int, at: int) -> None:
            self._row, self._stream, self._at = row, stream, at

        def update(self, zeros: bytes) -> bytes:
            self._at += len(zeros)
            return self._row.read(self._stream, self._at - len(zeros), len(zeros))

        def update_into(self, zeros, out) -> int:
            out[:] = self.update(bytes(zeros))
            return len(zeros)


def near_ends() -> list[int]:
    """64-bit words of u: at both ends, and on both sides of every switch on the way there."""
    switches = [2**50, 2**32, 2**33, 2**40, 2**56, 1 << 12]
    near = {0, 1, 2, 3, 2**63, 2**62}
    for switch in switches:
        near |= {switch - 1, switch, switch + 1}
    return sorted(near | {2**64 - 1 - word for word in near})


def near_points() -> list[int]:
    """64-bit words of the angle: on the table's points, half-way between, and just beside."""
    point = 2**54
    near = {0, point // 2, 3 * point + point // 2, 2**61, 2**62, 2**63, 2**63 + point // 2}
    beside = {(word + delta) % 2**64 for word in near for delta in (-1, 0, 1)}
    return sorted(beside | {2**64 - point // 2 - 1, 0x123456789ABCDEF0})


def test_words_near_every_switch_are_within_the_stated_error():
    both = list(itertools.product(near_ends(), near_points()))
    row = Scripted([u for u, _ in both], [t for _, t in both], {})
    dim = 2 * len(both)
    draws = fine_row(row, dim)
    assert max(errors(row, row.read, dim, range(dim), draws)) < DRAW_ERROR / 4


@pytest.mark.parametrize("zeros", range(8, 47, 4))
@pytest.mark.parametrize("end", [0x00, 0xFF])
def test_the_deepest_tails_and_the_smallest_radii_are_exact_too(zeros, end):
    """So many bytes of u are all 0 or all 255, of at most 48: |z| up to 23, or r down to 1e-57."""
    rest = hashlib.shake_256(b"%d" % zeros).digest(48 - zeros)
    bits = int.from_bytes(bytes([end]) * zeros + rest, "big")
    words = [bits >> (64 * (5 - k)) & (2**64 - 1) for k in range(6)]
    further = b"".join(
        word.to_bytes(8, "little") + hashlib.sha256(b"%d" % k).digest()[:8] for k, word in enumerate(words[1:])
    )
    row = Scripted([words[0]], [0x2345_6789_ABCD_EF01], {0: further})
    draws = fine_row(row, 2)
    assert max(errors(row, row.read, 2, range(2), draws)) < DRAW_ERROR / 4
    with mpmath.workdps(60):
        for i in range(2):
            exact = row_words.draw(row.read, 2, i)
            assert abs(float(draws[i]) - exact) < 2.0**-49 * abs(exact)


def test_a_draw_without_any_bits_is_refused_where_it_would_be_used():
    """384 zeros: nothing says where beyond 23 such a draw lies. It happens once in 2^384."""
    row = Scripted([0], [0], {0: bytes(80)})
    assert list(enclosures(row, 2, 0)) == []
    assert math.isnan(nearest_float(row, 2, 0))
    noise = GridNoise(independent(2).with_block_length(1).program, std=1.0, grid=grid_for(1.0, 1.0), dim=2)
    with pytest.raises(PrivacyError, match="range"):
        noise.step(row)


def test_enclosures_hold_the_draw_and_narrow_down():
    dim = TILE + 11
    row, read = Row(SECRET, 5), row_words.cipher(SECRET, 5)
    for coordinate in (0, 1, 7, TILE // 2 - 1, TILE // 2, TILE - 1, TILE, TILE + 6, TILE + 10):
        found = list(enclosures(row, dim, coordinate))
        assert len(found) == WORDS - 2
        with mpmath.workdps(140):
            exact = row_words.draw(read, dim, coordinate)
            widths = []
            for low, high in found:
                assert mpmath.mpf(str(low)) < exact < mpmath.mpf(str(high))
                widths.append(float(high - low))
        for words, width in enumerate(widths, start=3):
            assert 0 < width < 2.0 ** (8 - 64 * words) + 1e-115
        assert nearest_float(row, dim, coordinate) == float(exact)


def test_enclosures_hold_draws_at_every_switch():
    both = list(itertools.product(near_ends()[::3], near_points()[::4]))
    row = Scripted([u for u, _ in both], [t for _, t in both], {})
    dim = 2 * len(both)
    for coordinate in range(dim):
        with mpmath.workdps(140):
            exact = row_words.draw(row.read, dim, coordinate)
            for low, high in enclosures(row, dim, coordinate):
                assert mpmath.mpf(str(low)) < exact < mpmath.mpf(str(high))


def test_the_table_of_the_circle_is_right_to_its_last_place():
    cosine, sine = fine_normals._circle()
    assert cosine.shape == sine.shape == (1024,)
    with mpmath.workdps(60):
        for j in range(1024):
            angle = 2 * mpmath.pi * j / 1024
            assert abs(float(cosine[j]) - mpmath.cos(angle)) <= 2.0**-53
            assert abs(float(sine[j]) - mpmath.sin(angle)) <= 2.0**-53


def test_the_bound_of_the_circles_error_holds_and_is_what_the_text_says():
    """Radius one, as nearly as float64 has it: then a draw is its cosine or sine."""
    assert 2.0**-53 < circle_error() < 1.1 * 2.0**-52
    rng = np.random.default_rng(4)
    angles = [int(t) for t in rng.integers(0, 2**64, 1500, np.uint64)] + near_points()
    u = int(mpmath.floor(mpmath.exp(mpmath.mpf(-0.5)) * 2**64))
    row = Scripted([u] * len(angles), angles, {})
    draws = fine_row(row, 2 * len(angles))
    found = errors(row, row.read, len(draws), range(len(draws)), draws)
    # Besides the circle: logarithm of a number near -1/2, root and product.
    assert max(found) < circle_error() + 3.0 * 2.0**-53


def test_the_parts_of_the_error_add_up_to_less_than_is_stated():
    """The table of the module's text, at the largest radius that floats are used for."""
    r = math.sqrt(2.0 * 76 * math.log(2.0))  # beyond 64 + 12 zeros, exact bits are used
    assert 2.0**-49.4 + r * (2.0**-52 + 2.0**-52 + circle_error() + 2.0**-53) < DRAW_ERROR


@pytest.fixture(scope="module")
def sample() -> np.ndarray:
    return fine_row(Row(NoiseKey.from_seed(2025).secret, 5), SAMPLES)


def test_draws_follow_the_normal_distribution(sample):
    """Kolmogorov-Smirnov; false alarm 1e-4."""
    assert stats.kstest(sample, "norm").pvalue > 1e-4


def test_moments(sample):
    """First four moments at 4.5 standard errors; false alarm 3e-5."""
    n = len(sample)
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((sample**power).mean() - expected) < 4.5 * math.sqrt(variance / n)


@pytest.mark.parametrize("bound", [0.001, 0.1, 2.0, 3.0, 4.0, 4.5])
def test_tail_and_centre_counts(sample, bound):
    """Exact binomial test of P(|z| > bound); false alarm 6e-5 over the six."""
    seen = int((np.abs(sample) > bound).sum())
    assert stats.binomtest(seen, len(sample), 2 * stats.norm.sf(bound)).pvalue > 1e-5


def test_halves_neighbours_and_tiles_are_not_correlated(sample):
    """Draws and their squares, at 4.5 standard errors; false alarm 4e-5."""
    for lag in (1, TILE // 2, TILE):
        x, y = sample[:-lag], sample[lag:]
        assert abs((x * y).mean()) < 4.5 / math.sqrt(len(x))
        assert abs(((x**2 - 1) * (y**2 - 1)).mean()) < 4.5 * 2 / math.sqrt(len(x))


def test_bits_far_below_float32_are_uniform_and_float32_has_none(sample):
    """z in units of 2^-36 modulo one: Kolmogorov-Smirnov; false alarm 1e-4."""
    few = sample[:200_000]
    few = few[np.abs(few) > 2.0**-6]
    assert stats.kstest((few * 2.0**36) % 1.0, "uniform").pvalue > 1e-4
    coarse = np.empty(200_000, np.float32)
    fill_normals(open_row(NoiseKey.from_seed(2025), 5), coarse)
    coarse = coarse[np.abs(coarse) > 2.0**-6].astype(np.float64)
    assert stats.kstest((coarse * 2.0**36) % 1.0, "uniform").pvalue < 1e-100


@pytest.mark.parametrize("dim", [1, 2, 3, 100, 101, 4096, 8191])
def test_rows_drawn_together_are_those_drawn_one_by_one(dim):
    """Enough of them that some words lie near the ends, where more bits are read."""
    rows = [Row(hashlib.sha256(b"%d" % i).digest(), i) for i in range(max(20, 60000 // dim))]
    together = FineNormals(dim).rows(rows, 1.5)
    one_by_one = np.empty_like(together)
    for row, out in zip(rows, one_by_one, strict=True):
        for _ in FineNormals(dim).tiles(row, out, 1.5):
            pass
    np.testing.assert_array_equal(together, one_by_one)
