"""Noise on the grid against exact arithmetic: every cell, from bits that are read by hand."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest

from tests.mechanisms import row_words
from tests.support.catalogue import VARIANTS
from veilstream.errors import HorizonExhausted, InputError, PrivacyError
from veilstream.mechanisms.keystream import NoiseKey, Row
from veilstream.mechanisms.normals import TILE
from veilstream.privacy.grid import Grid, grid_for
from veilstream.privacy.grid_noise import GridNoise

SECRET = NoiseKey.from_seed(8).secret
STEPS, DIM, STD = 12, 24, 3.3
ROUNDOFF = Fraction(1, 2**53)


@pytest.fixture(params=sorted(VARIANTS))
def mechanism(request):
    return VARIANTS[request.param](STEPS).with_block_length(1)


def noise_of(mechanism, dim: int = DIM, std: float = STD, grid: Grid | None = None) -> GridNoise:
    return GridNoise(mechanism.program, std=std, grid=grid or grid_for(1.0, std), dim=dim)


def rows(step: int) -> Row:
    return Row(SECRET, step)


def exact_draw(step: int, dim: int, coordinate: int) -> Fraction:
    """As a fraction that is within 1e-110 of the ideal draw."""
    with mpmath.workdps(140):
        z = row_words.draw(row_words.cipher(SECRET, step), dim, coordinate)
        return Fraction(int(mpmath.nint(z * mpmath.mpf(2) ** 400)), 2**400)


def test_every_cell_is_that_of_exact_arithmetic(mechanism):
    """⌊h + c + a·z + ½⌋ of what is held, with the ideal draw; V rounded up, c as float64 has it."""
    noise = noise_of(mechanism)
    scale = Fraction(STD) / Fraction(grid_for(1.0, STD).step)
    assert scale <= Fraction(noise.scale) <= scale * (1 + 2 * ROUNDOFF)
    for step in range(STEPS):
        *output, feed = [Fraction(float(entry)) for entry in mechanism.program.matrix(step)[0]]
        states, fractions = noise.state.copy(), noise.fraction.copy()
        before = noise.cells
        moved = noise.step(rows(step)).copy()
        np.testing.assert_array_equal(noise.cells - before, moved)
        known = noise.known
        for i in range(DIM):
            parts = [o * Fraction(float(s)) for o, s in zip(output, states[:, i], strict=True)]
            slack = (len(parts) + 1) * ROUNDOFF * sum(map(abs, parts))
            assert abs(Fraction(float(known[i])) - sum(parts)) <= slack
            a = feed * Fraction(noise.scale)
            value = Fraction(float(fractions[i])) + Fraction(float(known[i]))
            value += a * exact_draw(step, DIM, i)
            assert moved[i] == math.floor(value + Fraction(1, 2))
            assert abs(Fraction(float(noise.fraction[i])) - (value - int(moved[i]))) < 1e-7


def test_prefixes_are_the_mechanisms_own_of_the_ideal_draws(mechanism):
    """B·z with 50 digits, for the matrices that run; float64 adds less than 1e-9 of a std."""
    noise = noise_of(mechanism)
    decoder = np.cumsum(mechanism.noising_matrix(), axis=0)
    draws = np.array([[float(exact_draw(step, DIM, i)) for i in range(DIM)] for step in range(STEPS)])
    exact = noise.scale * decoder @ draws
    for step in range(STEPS):
        noise.step(rows(step))
        held = noise.cells + noise.fraction
        np.testing.assert_allclose(held, exact[step], atol=1e-9 * noise.scale, rtol=0)
        assert np.abs(noise.fraction).max() <= 0.5 + 1e-7


def test_deciding_every_cell_exactly_changes_none(mechanism, monkeypatch):
    quick = noise_of(mechanism)
    expected = [quick.step(rows(step)).copy() for step in range(STEPS)]
    monkeypatch.setattr(GridNoise, "_uncertainty", lambda self, feed, largest: 0.49)
    asked = []
    decide = GridNoise._decide
    monkeypatch.setattr(GridNoise, "_decide", lambda self, *given: asked.append(given) or decide(self, *given))
    slow = noise_of(mechanism)
    for step in range(STEPS):
        np.testing.assert_array_equal(slow.step(rows(step)), expected[step])
    assert len(asked) > 0.9 * STEPS * DIM


@pytest.mark.parametrize("name", ["independent", "buffered", "optimal"])
def test_cells_that_float64_cannot_tell_are_decided_by_further_bits(name, monkeypatch):
    """What is held is placed so that each number lies within 1e-11 units of a boundary.

    Without exact decisions, a good part of them comes out wrong.
    """
    dim = 60
    mechanism = VARIANTS[name](STEPS).with_block_length(1)
    program = mechanism.program
    feed = Fraction(float(program.matrix(0)[0, -1]))

    def placed() -> tuple[GridNoise, list[int]]:
        noise = noise_of(mechanism, dim)
        expected = []
        for i in range(dim):
            fresh = feed * Fraction(noise.scale) * exact_draw(0, dim, i)
            whole = math.floor(fresh)
            # float64 has spare bits here: fractions near zero are finer than those near a half
            noise._fraction[i] = float(Fraction(1, 2) - (fresh - whole) + Fraction(i - 30, 10**13))
            value = Fraction(float(noise.fraction[i])) + fresh
            expected.append(math.floor(value + Fraction(1, 2)))
        return noise, expected

    noise, expected = placed()
    assert noise.step(rows(0)).tolist() == expected
    with monkeypatch.context() as patch:
        patch.setattr(GridNoise, "_uncertainty", lambda self, feed, largest: -1.0)
        noise, expected = placed()
        assert noise.step(rows(0)).tolist() != expected


def test_the_stated_uncertainty_covers_what_float64_gets_wrong(mechanism):
    """The value before rounding, against exact arithmetic, over all steps."""
    noise = noise_of(mechanism)
    stated = []
    original = GridNoise._uncertainty

    def noted(feed, largest):
        stated.append(original(noise, feed, largest))
        return stated[-1]

    noise._uncertainty = noted
    for step in range(STEPS):
        feed = Fraction(float(mechanism.program.matrix(step)[0, -1]))
        fractions, before = noise.fraction.copy(), noise.cells
        noise.step(rows(step))
        moved, known = noise.cells - before, noise.known
        for i in range(DIM):
            value = feed * Fraction(noise.scale) * exact_draw(step, DIM, i)
            value += Fraction(float(fractions[i])) + Fraction(float(known[i]))
            held = Fraction(float(noise.fraction[i])) + int(moved[i])
            assert abs(value - held) < Fraction(stated[-1]) / 2
    assert max(stated) < 1e-6  # or exact decisions would be frequent


def test_tiles_are_rounded_alike():
    """More coordinates than a tile holds: the first and last of each, to the cell."""
    dim = TILE + 3
    noise = noise_of(VARIANTS["buffered"](2).with_block_length(1), dim)
    feed = Fraction(float(noise._program.matrix(0)[0, -1]))
    moved = noise.step(rows(0))
    for i in (0, TILE // 2 - 1, TILE // 2, TILE - 1, TILE, TILE + 1, TILE + 2):
        value = feed * Fraction(noise.scale) * exact_draw(0, dim, i)
        assert moved[i] == math.floor(value + Fraction(1, 2))


def test_covariance_of_prefixes(mechanism):
    """V²·B·Bᵀ; 78 entries x 14 mechanisms at 6 standard errors: false alarm below 1e-5 in all."""
    dim = 50_000
    noise = noise_of(mechanism, dim)
    sums = np.empty((STEPS, dim))
    for step in range(STEPS):
        noise.step(rows(step))
        sums[step] = noise.cells * grid_for(1.0, STD).step / STD
    B = mechanism.decoder_matrix()
    expected = B @ B.T
    spread = np.sqrt((np.outer(expected.diagonal(), expected.diagonal()) + expected**2) / dim)
    assert (np.abs(sums @ sums.T / dim - expected) / spread).max() < 6.0


def test_a_snapshot_goes_on_to_the_bit(mechanism):
    whole = noise_of(mechanism)
    snapshots = [whole.snapshot()]
    for step in range(STEPS):
        whole.step(rows(step))
        snapshots.append(whole.snapshot())
    for position in range(STEPS + 1):
        late = noise_of(mechanism)
        late.restore(snapshots[position])
        assert late.position == position
        for step in range(position, STEPS):
            late.step(rows(step))
            assert late.snapshot() == snapshots[step + 1]


def test_snapshots_of_something_else_are_refused(mechanism):
    noise = noise_of(mechanism)
    noise.step(rows(0))
    kept = noise.snapshot()
    past = (STEPS + 1).to_bytes(8, "little") + kept[8:]
    for bad in (kept[:-8], kept + bytes(8), past, noise_of(mechanism, DIM + 1).snapshot()):
        with pytest.raises(PrivacyError, match="not of this mechanism: nothing was released"):
            noise_of(mechanism).restore(bad)
    noise.restore(kept)


def test_the_horizon_ends_it(mechanism):
    noise = noise_of(mechanism)
    for step in range(STEPS):
        noise.step(rows(step))
    cells = noise.cells
    for _ in range(2):
        with pytest.raises(HorizonExhausted, match=f"horizon of {STEPS} steps"):
            noise.step(rows(STEPS))
    np.testing.assert_array_equal(noise.cells, cells)


def test_a_step_that_was_interrupted_is_not_gone_on_from(mechanism):
    """At the second tile: the first has moved already."""
    dim = TILE + 2
    noise = noise_of(mechanism, dim)
    noise.step(rows(0))
    kept = noise.snapshot()
    draw = noise._draw

    def interrupted(row, out):
        tiles = draw(row, out)
        yield next(tiles)
        raise KeyboardInterrupt

    noise._draw = interrupted
    with pytest.raises(KeyboardInterrupt):
        noise.step(rows(1))
    noise._draw = draw
    with pytest.raises(PrivacyError, match="half-way: nothing was released"):
        noise.step(rows(1))
    with pytest.raises(PrivacyError, match="between two steps"):
        noise.snapshot()
    noise.restore(kept)
    noise.step(rows(1))
    other = noise_of(mechanism, dim)
    other.step(rows(0))
    other.step(rows(1))
    np.testing.assert_array_equal(noise.cells, other.cells)


def test_cells_are_handed_out_as_copies():
    noise = noise_of(VARIANTS["toeplitz"](STEPS).with_block_length(1))
    noise.step(rows(0))
    noise.cells[:] = 0
    assert noise.cells.any()


def test_blocks_of_several_steps_are_refused():
    mechanism = VARIANTS["toeplitz"](STEPS).with_block_length(4)
    with pytest.raises(InputError, match=r"program = 'blocks of 4 steps'.*with_block_length\(1\)"):
        noise_of(mechanism)


@pytest.mark.parametrize("std", [2.0**31, 1e30, math.inf, math.nan])
def test_noise_that_leaves_the_range_of_64_bits_is_an_error(std):
    mechanism = VARIANTS["independent"](STEPS).with_block_length(1)
    noise = noise_of(mechanism, std=std, grid=Grid(2.0**-31, 1.0))
    with np.errstate(all="ignore"), pytest.raises(PrivacyError, match="range: nothing"):
        noise.step(rows(0))
