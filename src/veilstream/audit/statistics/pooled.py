"""Runs of one law, pooled: has every part of them its noise, whichever part that is.

Nothing here knows a fault. K runs have residuals Y of one law; W = L⁻¹·Y is standard normal, so
every block of rounds by coordinates has a sum of squares that is χ² and a sum that is normal.

* `every_part`: blocks of all dyadic sizes, counted from the first and from the last coordinate and
  back from the last round. A single number that is off in all runs is a block; so is a whole round,
  or the last ten coordinates of the last eight rounds.
* `far_values`: how many of W lie beyond 3 to 5 standard deviations: noise that was cut, or has
  heavy tails.
* `still_numbers`: message less the one before. Given the past it is Gaussian with standard deviation
  L_rr, so |moved| <= x has probability at most 2x/(√(2π)·L_rr), whatever the past. Numbers that
  hardly move, in all runs or in rounds on end, are found even where the whitened residual hides them
  (a step without noise leaves what earlier steps predict of it).
* `low_bits`: remainders modulo powers of two are uniform, of messages and of what moved between
  them, in every round and in every coordinate.
* `shifted_rows`: noise of one round that is another's, moved along; and coordinates that share noise
  at any distance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr
from scipy.stats import binom, chi2

from veilstream.audit.statistics.cells import scale_of
from veilstream.audit.statistics.check import Check
from veilstream.audit.statistics.coordinates import correlation_p, slack_units
from veilstream.audit.statistics.differencing import ROUNDING
from veilstream.audit.statistics.law import Law

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_FAR = (3.0, 3.5, 4.0, 4.5, 5.0)
_DENSITY = 2.0 / math.sqrt(2.0 * math.pi)
_MODULI = (2, 4, 16, 256)
_ENOUGH = 200  # expected in each remainder
_ENOUGH_PRODUCTS = 10_000
_MOST_SHIFTED = 48  # rounds


class _Worst:
    """The smallest p-value of several tests, with Bonferroni's factor."""

    def __init__(self) -> None:
        self.tests, self.p, self.words = 0, 1.0, "nothing to look at"

    def add(self, p: float, words: str) -> None:
        self.tests += 1
        if p < self.p or self.tests == 1:
            self.p, self.words = p, words

    def check(self, name: str, means: str) -> Check:
        return Check(name, min(1.0, self.p * max(1, self.tests)), f"{self.tests} tests: {self.words}", means)


def every_part(whites: Sequence[Floats], law: Law, *, grid: float, steps: int) -> Check:
    """Judge the (R, d) whitened residuals of runs with the same d, block by block."""
    runs, (rounds, d) = len(whites), whites[0].shape
    squares, sums = np.zeros((rounds, d)), np.zeros((rounds, d))
    for white in whites:
        squares += white**2
        sums += white
    assert law.root is not None
    reach = float(np.linalg.norm(np.linalg.inv(law.root), 2))
    slack = reach * math.sqrt(rounds) * slack_units(steps) * grid
    worst = _Worst()
    for ends in ("first", "last"):
        along = slice(None, None, -1 if ends == "last" else 1)
        for (height, width, q), (_, _, s) in zip(
            _blocks(squares[::-1, along]), _blocks(sums[::-1, along]), strict=True
        ):
            n, off = height * width * runs, slack * math.sqrt(width * runs)
            where = f"{height} rounds by {width} coordinates counted from the {ends}"
            low, high = float(q.min()), float(q.max())
            few = q.size * float(chi2.cdf((math.sqrt(low) + off) ** 2, n))
            much = q.size * float(chi2.sf(max(0.0, math.sqrt(high) - off) ** 2, n))
            worst.add(few, f"{where} have {low / n:.3g} of their variance, at {_place(q, q.argmin(), height, width)}")
            worst.add(much, f"{where} have {high / n:.3g} of their variance, at {_place(q, q.argmax(), height, width)}")
            z = float(np.abs(s).max()) / math.sqrt(n)
            worst.add(2.0 * s.size * float(ndtr(-max(0.0, z - off))), f"{where} have mean {z:.2f} standard errors off")
    return worst.check("noise of every part", "a part of what is sent has too little noise, too much, or a bias")


def variance(parts: Sequence[Floats], law: Law, *, grid: float, steps: int) -> Check:
    """Judge whitened residuals of each epoch, over all learners: one sum of squares each."""
    assert law.root is not None
    reach = float(np.linalg.norm(np.linalg.inv(law.root), 2))
    worst = _Worst()
    for k, part in enumerate(parts):
        q, off = float((part**2).sum()), reach * slack_units(steps) * grid * math.sqrt(part.size)
        few, much = chi2.cdf((math.sqrt(q) + off) ** 2, part.size), chi2.sf((math.sqrt(q) - off) ** 2, part.size)
        worst.add(2.0 * float(min(few, much)), f"epoch {k} has {q / part.size:.4f} of its variance")
    return worst.check("noise of each epoch", "an epoch has too little noise, or too much")


def _blocks(values: Floats) -> Iterator[tuple[int, int, Floats]]:
    """Sums over blocks of every dyadic height and width, from the upper left corner."""
    height = 1
    while True:
        width, row = 1, values
        while True:
            yield height, width, row
            if row.shape[1] < 2:
                break
            half = row.shape[1] // 2
            row, width = row[:, : 2 * half].reshape(len(row), half, 2).sum(axis=2), 2 * width
        if len(values) < 2:
            return
        half = len(values) // 2
        values, height = values[: 2 * half].reshape(half, 2, -1).sum(axis=1), 2 * height


def _place(blocks: Floats, at: np.intp, height: int, width: int) -> str:
    down, along = np.unravel_index(int(at), blocks.shape)
    return f"{int(down) * height} rounds before the end and {int(along) * width} coordinates in"


def far_values(whites: Sequence[Floats], law: Law, *, grid: float, steps: int) -> Check:
    """Count whitened residuals beyond some distances, on either side."""
    assert law.root is not None
    reach = float(np.linalg.norm(np.linalg.inv(law.root), 2))
    slack = reach * math.sqrt(law.rounds) * slack_units(steps) * grid
    n = sum(white.size for white in whites)
    worst = _Worst()
    for far in _FAR:
        for sign in (1.0, -1.0):
            seen = sum(int((sign * white > far).sum()) for white in whites)
            few = float(binom.cdf(seen, n, float(ndtr(-far - slack))))
            many = float(binom.sf(seen - 1, n, float(ndtr(-far + slack))))
            expected = n * float(ndtr(-far))
            worst.add(2.0 * min(few, many), f"{seen:,} beyond {sign * far:+g}, {expected:,.1f} expected")
    return worst.check("far values", "large values of the noise are cut off, or too common")


def still_numbers(moved: Sequence[Integers], law: Law, *, grid: float, clients_per_round: int) -> Check:
    """Judge what each message adds to the one before, in units, less what clients should add."""
    runs, (rounds, d) = len(moved), moved[0].shape
    assert law.root is not None
    widths = np.diag(law.root) / grid
    slack = 1.0 + ROUNDING * clients_per_round
    chance = np.minimum(1.0, _DENSITY * slack / widths)
    worst = _Worst()
    still = np.zeros((rounds, d), np.int64)
    largest = np.zeros((rounds, d))
    for units in moved:
        size = np.abs(units)
        still += size <= slack - 1.0
        np.maximum(largest, (size + slack) / widths[:, None], out=largest)
    for name, counts, n in (("coordinate", still.sum(axis=0), rounds * runs), ("round", still.sum(axis=1), d * runs)):
        at = int(np.argmax(counts))
        p = len(counts) * float(binom.sf(int(counts[at]) - 1, n, float(chance.max())))
        worst.add(p, f"{name} {at} does not move in {counts[at]} of {n} numbers")
    length = 1
    while True:
        least = float(largest.min())
        at_round, column = np.unravel_index(int(np.argmin(largest)), largest.shape)
        p = largest.size * min(1.0, _DENSITY * least) ** (length * runs)
        worst.add(
            p,
            f"coordinate {column} moves by {least:.2g} standard deviations or less in {length} rounds from round "
            f"{at_round}, in all of {runs} runs",
        )
        if 2 * length > rounds:
            break
        largest = np.maximum(largest[:-length], largest[length:])
        length *= 2
    return worst.check("numbers that do not move", "steps send bare gradients: some coordinate has no noise there")


def low_bits(units: Sequence[Integers], moved: Sequence[Integers], law: Law, *, grid: float) -> Check:
    """Judge remainders of messages and of what moved between them, by round and by coordinate."""
    assert law.root is not None
    widths = np.diag(law.root) / grid
    worst = _Worst()
    for name, tables in (("messages", units), ("moves", moved)):
        rounds, d = tables[0].shape
        n = rounds * len(tables)
        for modulus in _MODULI:
            usable = widths > 4.0 * modulus
            if not usable.all():
                continue
            counts = np.zeros((rounds, modulus), np.int64)
            for table in tables:
                rest = np.bitwise_and(table, modulus - 1)
                for r in range(rounds):
                    counts[r] += np.bincount(rest[r], minlength=modulus)
            each = d * len(tables)
            if each >= _ENOUGH * modulus:
                for r in range(rounds):
                    worst.add(_uniform(counts[r]), f"{name} of round {r} modulo {modulus}")
            if each * rounds >= _ENOUGH * modulus:
                worst.add(_uniform(counts.sum(axis=0)), f"all {name} modulo {modulus}")
        if (widths > 8.0).all():
            odd = sum((np.bitwise_and(table, 1).sum(axis=0) for table in tables), np.zeros(d, np.int64))
            for at, tail in (
                (int(np.argmin(odd)), float(binom.cdf(odd.min(), n, 0.5))),
                (int(np.argmax(odd)), float(binom.sf(odd.max() - 1, n, 0.5))),
            ):
                worst.add(d * tail, f"{odd[at]} of {n} {name} of coordinate {at} are odd")
    return worst.check("low bits", "some values are never sent, or too rarely: cells are not a rounded Gaussian's")


def _uniform(counts: Integers) -> float:
    scale = scale_of("remainders", np.full(len(counts), 1.0 / len(counts)), counts, int(counts.sum()))
    return 1.0 if scale is None else scale.p


def shifted_rows(white: Floats) -> Check:
    """Judge (n, d) whitened residuals in their order: rows moved along each other, and each along itself."""
    rows = white[-_MOST_SHIFTED:]
    n, d = rows.shape
    unit = rows / np.sqrt((rows**2).sum(axis=1, keepdims=True)).clip(min=1e-300)
    waves = np.fft.rfft(unit, axis=1)
    worst = _Worst()
    for apart in (1, 2):
        for r in range(n - apart):
            meets = np.fft.irfft(waves[r].conj() * waves[r + apart], d)
            at = int(np.argmax(np.abs(meets)))
            p = d * float(correlation_p(float(meets[at]), d))
            worst.add(p, f"rounds {r} and {r + apart} moved by {at} have correlation {meets[at]:+.3f}")
    own = np.fft.irfft((np.abs(waves) ** 2).sum(axis=0), d)[1:] * math.sqrt(d / n)
    if d % 2 == 0:
        own[d // 2 - 1] /= math.sqrt(2.0)  # half-way round, every product comes twice
    if len(own) and rows.size >= _ENOUGH_PRODUCTS:
        at = int(np.argmax(np.abs(own)))
        p = d * 2.0 * float(ndtr(-abs(float(own[at]))))
        worst.add(p, f"coordinates at distance {at + 1} have z = {own[at]:+.2f}")
    return worst.check("noise moved along", "rounds or coordinates share noise at some distance")
