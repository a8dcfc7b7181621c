"""Cells, coordinates, pairs, repeats, seeds: levels on ideal noise, power against planted faults.

Seeds are fixed, so a test that passes always passes; each says how often it would fail if seeds
were drawn and the code correct.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random

import numpy as np
import pytest
from scipy.stats import binom, kstest

from tests.support.catalogue import VARIANTS
from veilstream.audit.statistics import FALSE_ALARMS, Law, law_of
from veilstream.audit.statistics.cells import CellCounts, CellLaw, cell_fit, power
from veilstream.audit.statistics.check import Check, alarming
from veilstream.audit.statistics.coordinates import every_coordinate, whitened
from veilstream.audit.statistics.lattice import float32_pattern, lattice_fit
from veilstream.audit.statistics.pairs import all_pairs, duplicates, lags, telling_lags
from veilstream.audit.statistics.repeats import epoch_against_epoch, repeated_rows
from veilstream.errors import InputError, PrivacyError
from veilstream.privacy.seeds import check_generator, checked_seed

STD = 20_000.0  # units: narrow cells, small tables
GRID = 2.0**-16
T = 16


def law(horizon: int = T) -> Law:
    noising = VARIANTS["buffered"](horizon).noising_matrix()
    return law_of(noising, std=STD * GRID, reach=2.0, claim=1.0)


def residuals(rng: np.random.Generator, d: int, of: Law) -> np.ndarray:
    """Ideal noise, rounded to the grid, in its units."""
    exact = of.root @ rng.standard_normal((of.rounds, d)) / GRID
    return np.floor(exact + 0.5).astype(np.int64)


def rounded(rng: np.random.Generator, count: int, std: float = STD) -> np.ndarray:
    return np.floor(std * rng.standard_normal(count) + 0.5).astype(np.int64)


def counted(cells: np.ndarray, std: float = STD) -> CellCounts:
    counts = CellCounts(std)
    for part in np.array_split(cells, 3):
        counts.add(part)
    return counts


@pytest.mark.parametrize("std", [1.0, 3.7, 999.0, 1001.0, 200_000.3])
def test_cell_probabilities_are_those_of_fifty_digits(std):
    mpmath = pytest.importorskip("mpmath")
    of = CellLaw(std)
    with mpmath.workdps(50):
        for cell in {0, 1, 2, int(std), int(3 * std), of.half}:
            edges = [(mpmath.mpf(cell) + side) / mpmath.mpf(std) for side in (-0.5, 0.5)]
            exact = mpmath.ncdf(-edges[0]) - mpmath.ncdf(-edges[1])
            for signed in (cell, -cell):
                found = of.probabilities[of.half + 1 + signed]
                assert abs(found / exact - 1) < 1e-9
    assert of.probabilities.sum() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("draws", [30_000, 400_000])
def test_eta_squared_is_unbiased_and_has_its_standard_error(draws):
    """200 audits of ideal cells. Fails by chance in 4e-6 of seeds."""
    rng = np.random.default_rng(draws)
    fits = [cell_fit(counted(rounded(rng, draws, 2000.0), 2000.0)) for _ in range(200)]
    z = np.array([fit.eta_squared / fit.standard_error for fit in fits])
    assert abs(z.mean()) < 4.9 / math.sqrt(200)
    assert kstest([fit.scales[0].p for fit in fits], "uniform").pvalue > 1e-6
    for k in range(1, len(fits[0].scales)):
        assert kstest([fit.scales[k].p for fit in fits], "uniform").pvalue > 1e-7
    assert min(fit.p for fit in fits) > 1e-6 / 4


def test_a_known_error_of_the_cells_is_measured():
    """Every other cell 10% more probable: η² = 0.01. Fails by chance in 1e-6 of seeds."""
    rng = np.random.default_rng(1)
    cells = rounded(rng, 4_000_000)
    odd = (cells % 2 == 1) & (rng.random(len(cells)) < 0.1)
    fit = cell_fit(counted(np.where(odd, cells - 1, cells)))
    assert abs(fit.eta_squared - 0.01) < 4.9 * (fit.standard_error + 2 * 0.1 / 2000)
    assert fit.p < 1e-20
    assert {scale.name for scale in fit.scales if scale.p < 1e-9} >= {"single cells", "remainders of 256"}


def test_power_is_what_is_stated():
    """Cells in pairs, moved by 4%: found as often as `power` says. Fails in 1e-6 of seeds."""
    rng, draws, std, level, found = np.random.default_rng(2), 200_000, 500.0, 1e-3, 0
    eta = 0.04
    for _ in range(100):
        cells = rounded(rng, draws, std)
        odd = (cells % 2 == 1) & (rng.random(draws) < eta)
        fit = cell_fit(counted(np.where(odd, cells - 1, cells), std))
        found += fit.scales[0].p < level
    stated = power(draws, eta**2, std=std, level=level)
    assert 0.2 < stated < 0.999
    assert binom.ppf(5e-7, 100, stated) <= found <= binom.isf(5e-7, 100, stated)


def test_a_wider_or_narrower_gaussian_is_seen_in_pooled_cells():
    rng = np.random.default_rng(3)
    fit = cell_fit(counted(rounded(rng, 1_000_000, 1.01 * STD)))
    assert fit.p < 1e-9
    assert min(fit.scales, key=lambda scale: scale.p).name == "cells by 4096"


def test_float32_products_follow_their_pattern_and_the_gaussian_does_not():
    """z is near √(N·η²). Fails by chance in 1e-6 of seeds."""
    rng, std, factor = np.random.default_rng(4), 250_000.0, np.float32(1.5455883)
    draws = 1_000_000
    coarse = (std / float(factor) * rng.standard_normal(draws)).astype(np.float32) * factor
    planted = counted(np.floor(coarse.astype(np.float64) + 0.5).astype(np.int64), std)
    found = lattice_fit(planted, float(factor))
    assert abs(found.share - 1.0) < 4.9 * found.share_error
    assert found.p < 1e-12
    ideal = lattice_fit(counted(rounded(rng, draws, std), std), float(factor))
    assert abs(ideal.z) < 4.9
    assert ideal.pattern_eta_squared == pytest.approx(found.pattern_eta_squared)


def test_the_pattern_counts_every_float32():
    """Against a list of all float32 numbers that reach some cells."""
    of, factor = CellLaw(250_000.0), np.float32(1.3)
    pattern = float32_pattern(of, float(factor))
    for cell in (-100_001, 40_000, 700_123):
        near = np.float32((abs(cell) - 2.0) / 1.3), np.float32((abs(cell) + 2.0) / 1.3)
        first, last = (int(np.float32(edge).view(np.int32)) for edge in near)
        y = np.arange(first, last, dtype=np.int32).view(np.float32)
        image = np.sign(cell) * (factor * y).astype(np.float64)
        inside = np.floor(image + 0.5) == cell
        mass = float(factor) * np.spacing(y[inside]).astype(np.float64).sum()
        assert pattern[of.half + cell] == pytest.approx(mass - 1.0, abs=1e-12)


def test_too_few_counts_and_too_wide_a_law_are_refused():
    with pytest.raises(InputError, match="at least 1000"):
        cell_fit(CellCounts(100.0))
    with pytest.raises(InputError, match="earlier message"):
        CellLaw(1e9)


def test_each_check_has_its_level_on_ideal_noise():
    """p-values of 80 runs lie above the uniform law's. Fails by chance in 1e-5 of seeds."""
    rng, of = np.random.default_rng(5), law()
    found: dict[str, list[float]] = {}
    for _ in range(80):
        units = residuals(rng, 700, of)
        other = residuals(rng, 700, of)
        white, second = (whitened(u * GRID, of) for u in (units, other))
        for check in (
            every_coordinate(units * GRID, of, grid=GRID, steps=T),
            lags(white),
            all_pairs(white[:, :40]),
            duplicates(units, of, grid=GRID, steps=T),
            epoch_against_epoch([white, second]),
            repeated_rows(np.concatenate([white, second])),
        ):
            found.setdefault(check.name, []).append(check.p)
    for name, ps in found.items():
        for level in (0.01, 0.1, 0.5):
            assert np.sum(np.array(ps) < level) <= binom.isf(5e-7, 80, level), name


@pytest.mark.parametrize("share", [0.0, 0.1, 6.0])
def test_one_coordinate_among_many_with_another_variance_is_found(share):
    rng, of = np.random.default_rng(6), law(64)
    units = residuals(rng, 20_000, of)
    assert every_coordinate(units * GRID, of, grid=GRID, steps=64).p > FALSE_ALARMS
    units[:, 4321] = (math.sqrt(share) * units[:, 4321]).astype(np.int64)
    found = every_coordinate(units * GRID, of, grid=GRID, steps=64)
    assert found.p < FALSE_ALARMS / 30
    assert "number 4321 " in found.figure


def test_one_round_of_a_coordinate_without_noise_proves_nothing():
    """A residual of zero happens by rounding alone."""
    of = law(1)
    units = residuals(np.random.default_rng(7), 5000, of)
    units[0, 17] = 0
    assert every_coordinate(units * GRID, of, grid=GRID, steps=1).p > 0.01


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("pair", [(3, 4), (100, 19_000)])
def test_two_coordinates_that_share_noise_are_found_wherever_they_are(pair, sign):
    rng, of = np.random.default_rng(8), law()
    units = residuals(rng, 20_000, of)
    units[:, pair[1]] = sign * units[:, pair[0]] + rng.integers(-2, 3, T)
    found = duplicates(units, of, grid=GRID, steps=T)
    assert found.p < 1e-12
    assert f"{pair[0]} and {pair[1]}" in found.figure
    if pair == (3, 4):
        assert lags(whitened(units * GRID, of)).p < FALSE_ALARMS / 30


def test_equal_columns_of_one_round_prove_nothing():
    of = law(1)
    units = residuals(np.random.default_rng(9), 5000, of)
    assert duplicates(units, of, grid=GRID, steps=1).p == 1.0


def test_a_weak_correlation_at_a_block_boundary_is_found():
    """Three thousandths of the variance are shared at the distance of half a last tile."""
    rng, d = np.random.default_rng(10), 40_000
    lag = (d % 32_768 + 1) // 2
    assert lag in telling_lags(d)
    white = rng.standard_normal((64, d))
    assert lags(white).p > FALSE_ALARMS
    white[:, lag:] = math.sqrt(1 - 0.01**2) * white[:, lag:] + 0.01 * white[:, :-lag]
    assert lags(white).p < FALSE_ALARMS / 30


def test_part_of_the_noise_shared_by_two_of_few_coordinates_is_found():
    rng = np.random.default_rng(11)
    white = rng.standard_normal((512, 64))
    white[:, 50] = math.sqrt(0.75) * white[:, 50] + 0.5 * white[:, 7]
    found = all_pairs(white)
    assert found.p < FALSE_ALARMS / 30
    assert "7 and 50" in found.figure or "50 and 7" in found.figure


def test_an_epoch_that_repeats_noise_is_found_in_whole_or_in_part():
    rng = np.random.default_rng(12)
    first, second = rng.standard_normal((2, 16, 128))
    assert epoch_against_epoch([first, second]).p > FALSE_ALARMS
    for again in (first, -first, np.roll(first, 3, axis=0), 0.3 * first + 0.95 * second):
        assert epoch_against_epoch([first, again]).p < FALSE_ALARMS / 30
    assert repeated_rows(np.concatenate([first, second])).p > FALSE_ALARMS
    assert repeated_rows(np.concatenate([first, second, first[4:5]])).p < FALSE_ALARMS / 30
    with pytest.raises(InputError, match="two"):
        epoch_against_epoch([first])


def test_weak_seeds_are_refused_and_good_ones_are_not():
    good = random.Random(13)
    check_generator(lambda: good.randbytes(32))
    clock = itertools.count(1_700_000_000)
    weak = {
        "came twice": lambda: hashlib.sha256(good.randbytes(2)).digest(),
        "different bytes": lambda: good.randbytes(2) + bytes(30),
        "not uniform": lambda: next(clock).to_bytes(8, "big") + good.randbytes(24),
        "not 32 bytes": lambda: good.randbytes(16),
    }
    for said, draw in weak.items():
        with pytest.raises(PrivacyError, match=said):
            check_generator(draw)
    with pytest.raises(PrivacyError, match="different bytes"):
        checked_seed(b"operator" * 4)


def test_the_level_of_an_alarm_is_shared():
    checks = [Check("a", 2e-7, "", ""), Check("b", 0.5, "", ""), Check("c", 4e-7, "", "")]
    assert [check.name for check in alarming(checks)] == ["a"]
    assert not alarming([Check("a", 1e-6, "", "")])
