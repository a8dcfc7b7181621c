"""Cell by cell: are the numbers that leave a learner distributed as the rounded Gaussian is.

One coordinate of message s is round(x), x ~ N(0, σ²), σ = V·‖b_s‖ in units of the grid. So cell c
has the probability p_c = Φ((c + ½)/σ) - Φ((c - ½)/σ). Let q_c be what the code really gives it. An
adversary who knows q (it is public: the code is) gains from

    η² = Σ_c p_c·(q_c/p_c - 1)²,

about 2·d·η² of μ² over d coordinates, however smooth q looks from afar. From N draws with counts
n_c, its unbiased estimate is a U-statistic with kernel [X = Y]/p_X - 1:

    U = Σ_c n_c·(n_c - 1) / (N·(N - 1)·p_c) - 1.

For q = p it has mean 0 and variance exactly 2·(K - 1)/(N·(N - 1)) over K cells, and the third
cumulant of N·U is Σ_c (8 + 4/(N·p_c)) to first order (Charlier polynomials); a gamma law with these
three moments gives p-values. (Pearson's statistic would add the noise of Σ n_c/p_c, which for
narrow cells is larger than all the rest.) No fault has to be guessed: every cell has its own term.

Cells are looked at one by one, for lattices and other fine structure; c and -c together, since what
is the same on both sides shows twice as well in half as many cells; pooled by 16, 256 and 4096, for
smooth deviations; and by their remainder modulo 256, for patterns in the low bits. Beyond three
standard deviations (four for pooled cells), and where fewer than `_RARE` draws are expected in a
cell, cells are pooled: the far tail is not tested here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammainc, gammaincc, ndtr, ndtri

from veilstream.audit.statistics.check import FALSE_ALARMS, Check
from veilstream.errors import InputError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_WIDE = 4.0  # standard deviations on either side
_FINE = 3.0  # the same for cells one by one: fewer of them make a sharper test
_RARE = 0.01  # expected draws below which a cell is pooled: keeps the statistic's tail light
_NARROW = 1e-3  # cells this narrow (in standard deviations) are worked out from the density
_POOLED = (16, 256, 4096)
_REMAINDERS = 256
_MOST_CELLS = 1 << 25


@dataclass(frozen=True)
class CellLaw:
    """round(N(0, std²)) on whole numbers from -half to half, and two tails."""

    std: float
    """In units of the grid."""

    def __post_init__(self) -> None:
        if not self.covers(self.std):
            raise InputError(
                "std", self.std, f"1 to {_MOST_CELLS / (2.0 * _WIDE):g} units of the grid", "look at an earlier message"
            )

    @staticmethod
    def covers(std: float) -> bool:
        """Whether cells of this law can be looked at: not too few, and not too many to count."""
        return 1.0 <= std <= _MOST_CELLS / (2.0 * _WIDE)

    @property
    def half(self) -> int:
        """The last cell that is looked at by itself."""
        return math.ceil(_WIDE * self.std)

    @cached_property
    def probabilities(self) -> Floats:
        """Lower tail, the cells from -half to half, upper tail. Relative error below 1e-12."""
        right = _cells(np.arange(self.half + 1, dtype=np.float64), self.std)
        tail = ndtr(-(self.half + 0.5) / self.std)
        whole: Floats = np.concatenate([[tail], right[:0:-1], right, [tail]])
        return whole


def _cells(cells: Floats, std: float) -> Floats:
    """P(round(x) = c) for c >= 0, without the cancellation that differences of Φ would have."""
    width = 1.0 / std
    x = cells * width
    if width < _NARROW:
        # ∫ over a cell of width h: φ(x)·h·(1 + He₂(x)·h²/24 + He₄(x)·h⁴/1920 + ...)
        square = x * x
        series = 1.0 + width**2 / 24.0 * (square - 1.0)
        series += width**4 / 1920.0 * (square * square - 6.0 * square + 3.0)
        narrow: Floats = np.exp(-0.5 * square) * (width / math.sqrt(2.0 * math.pi)) * series
        return narrow
    upper = ndtr(-(x - 0.5 * width)) - ndtr(-(x + 0.5 * width))  # both in the same tail
    wide: Floats = np.where(cells == 0.0, 1.0 - 2.0 * ndtr(-0.5 * width), upper)
    return wide


class CellCounts:
    """How often each cell was seen; draws come in chunks of any size."""

    def __init__(self, std: float) -> None:
        self.law = CellLaw(std)
        self.counts: Integers = np.zeros(2 * self.law.half + 3, np.int64)

    @property
    def draws(self) -> int:
        """N."""
        return int(self.counts.sum())

    def add(self, cells: Integers) -> None:
        """Count whole numbers, in units of the grid."""
        half = self.law.half
        index = np.clip(cells, -half - 1, half + 1)
        index += half + 1
        self.counts += np.bincount(index, minlength=len(self.counts))


@dataclass(frozen=True)
class Scale:
    """η² as seen through cells of one width."""

    name: str
    cells: int
    eta_squared: float
    """Unbiased; may be negative."""
    standard_error: float
    """If the law is the claimed one: exact."""
    p: float
    """Two-sided: too uneven, or too even to be independent draws."""


@dataclass(frozen=True)
class CellFit:
    """What the counts say."""

    draws: int
    std: float
    scales: tuple[Scale, ...]

    @property
    def eta_squared(self) -> float:
        """Of single cells."""
        return self.scales[0].eta_squared

    @property
    def standard_error(self) -> float:
        """Of single cells, if the law is the claimed one."""
        return self.scales[0].standard_error

    @property
    def p(self) -> float:
        """Of all scales together (Bonferroni)."""
        return min(1.0, len(self.scales) * min(scale.p for scale in self.scales))

    def check(self, message: int) -> Check:
        """For the report; messages count from 1."""
        worst = min(self.scales, key=lambda scale: scale.p)
        return Check(
            f"cells of message {message}",
            self.p,
            f"{self.draws:.3g} draws: eta^2 = {self.eta_squared:.2e} +- {self.standard_error:.1e}"
            + (f"; {worst.name}: {worst.eta_squared:.2e}" if worst is not self.scales[0] else ""),
            "the numbers that are sent do not have the probabilities of a rounded Gaussian",
        )


def cell_fit(seen: CellCounts) -> CellFit:
    """Judge the counts.

    Guarantees: if the draws are independent and have the law, p-values are uniform up to the
    gamma law's error, which matters less than a factor of two down to 1e-9.
    """
    draws = seen.draws
    if draws < 1000:
        raise InputError("draws", draws, "at least 1000", "fewer say nothing about cells")
    inner, counts = seen.law.probabilities[1:-1], seen.counts[1:-1]
    scales = []
    out = seen.law.half - math.ceil(_FINE * seen.law.std)
    fine, fine_counts = inner[out : len(inner) - out], counts[out : len(inner) - out]
    scales = [
        scale_of("single cells", fine, fine_counts, draws),
        scale_of("cells of either sign", _folded(fine), _folded(fine_counts), draws),
    ]
    for pool in _POOLED:
        if len(inner) // pool < 8:
            break
        starts = np.arange(0, len(inner), pool)
        p, n = np.add.reduceat(inner, starts), np.add.reduceat(counts, starts)
        scales.append(scale_of(f"cells by {pool}", p, n, draws))
    if len(inner) >= 4 * _REMAINDERS:
        rest = np.arange(len(inner)) % _REMAINDERS
        p = np.bincount(rest, weights=inner)
        n = np.bincount(rest, weights=counts).astype(np.int64)
        inside = int(n.sum())
        scales.append(scale_of(f"remainders of {_REMAINDERS}", p / p.sum(), n, inside))
    usable = tuple(scale for scale in scales if scale is not None)
    if not usable:
        raise InputError("draws", draws, f"more, for std = {seen.law.std:g} units", "draw more")
    return CellFit(draws, seen.law.std, usable)


def _folded(values: Any) -> Any:
    """Those of c and -c together."""
    half = len(values) // 2
    whole = values[half:].copy()
    whole[1:] += values[:half][::-1]
    return whole


def scale_of(name: str, p: Floats, n: Integers, draws: int) -> Scale | None:
    """U, its standard error and p-value; rare cells and whatever is outside are pooled."""
    common = draws * p >= _RARE
    if common.sum() < 2:
        return None
    rest, left = 1.0 - float(p[common].sum()), draws - int(n[common].sum())
    p, n = p[common], n[common].astype(np.float64)
    if rest * draws >= _RARE:
        p, n = np.append(p, rest), np.append(n, float(left))
    elif left:  # seen where next to nothing is expected
        return Scale(name, len(p), math.inf, 0.0, min(1.0, rest * draws))
    total = float((n * (n - 1.0) / p).sum()) / (draws * (draws - 1.0))
    error = math.sqrt(2.0 * (len(p) - 1)) / math.sqrt(draws * (draws - 1.0))
    third = 8.0 * len(p) + 4.0 * float((1.0 / p).sum()) / draws
    skewness = third / (2.0 * len(p)) ** 1.5
    return Scale(name, len(p), total - 1.0, error, _two_sided((total - 1.0) / error, skewness))


def _two_sided(z: float, skewness: float) -> float:
    """p-value of a standardised gamma variable with this skewness."""
    shape = 4.0 / skewness**2
    at = shape + math.sqrt(shape) * z
    if at <= 0.0:
        return 0.0
    return min(1.0, 2.0 * float(min(gammaincc(shape, at), gammainc(shape, at))))


def power(draws: float, eta_squared: float, *, std: float, level: float = FALSE_ALARMS / 100) -> float:
    """Probability that single cells with this η² raise an alarm.

    U has mean η² and variance 2·K/N² + about 4·η²/N, with K = 6·σ cells. ``level`` is the alarm's:
    an audit has up to twenty checks, and this one looks in six ways.
    """
    error = math.sqrt(4.0 * _FINE * std) / draws
    spread = math.sqrt(error**2 + 4.0 * eta_squared / draws)
    needed = -float(ndtri(0.5 * level)) * error
    return float(ndtr((eta_squared - needed) / spread))
