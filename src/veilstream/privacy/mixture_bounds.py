"""Upper bounds on how well N(0, s²·I) and the mean of N(c_j, s²·I) over j can be told apart, by sampling.

With a_j = ⟨c_j, x⟩/s², n_j = ‖c_j‖²/2s² and u_j = exp(a_j - n_j), the density of P = mean_j N(c_j, s²·I) over that
of Q = N(0, s²·I) is A = mean_j u_j, and

    δ_ε(P, Q) = E_Q[(A - e^ε)_+]        δ_ε(Q, P) = E_Q[(1 - e^ε·A)_+].

Both are means of numbers between 0 and a known bound, so that concentration inequalities for bounded independent
numbers give an upper bound that fails with at most a stated probability. Nothing is assumed of a variance.

*Upwards.* x comes from mean_j N((1+θ)·c_j, s²·I), whose density over Q is B = mean_j u_j^(1+θ)·e^(-θ(1+θ)·n_j). By the
power mean inequality B >= e^(-θ(1+θ)·max n)·A^(1+θ), so the summand (A - e^ε)_+ / B is at most

    e^(θ(1+θ)·max n - θ·ε) · θ^θ / (1+θ)^(1+θ).

*Downwards.* x comes from N(-θ·m, s²·I) with m = mean_j c_j, and counts e^(θ⟨m,x⟩/s² + θ²‖m‖²/2s²). By Jensen's
inequality ⟨m,x⟩/s² - mean n <= ln A, so the summand is at most (1 - e^ε·A)_+·A^θ·e^(θ·mean n + θ²‖m‖²/2s²). That is
largest at A = e^-ε·θ/(1+θ), where it is

    e^(θ·(mean n - ε) + θ²‖m‖²/2s²) · θ^θ / (1+θ)^(1+θ).

Without the last factor it is a bound as well, which A < e^-ε alone gives (``plain``).

Each mean is bounded by the smaller of two bounds, which share the probability of failure: Hoeffding's (1963,
Theorem 1, in its form with relative entropy) and the empirical Bernstein bound (Maurer and Pontil 2009, Theorem 4).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from veilstream.mechanisms.columns import Columns

Floats = NDArray[np.float64]
Chosen = NDArray[np.int64]

_AT_ONCE = 500_000  # numbers of a piece, which has a generator of its own
_IN_CACHE = 65_536  # numbers that are worked on together,
_LEAST_ROWS = 64  # and as many draws at least


@dataclass(frozen=True)
class Bound:
    """An upper bound on a mean of numbers from 0 to ``most``."""

    value: float
    mean: float
    most: float


@dataclass(frozen=True)
class Draws:
    """ln A of draws, and ln of what each counts beside it."""

    log_ratio: Floats
    log_weight: Floats

    def upwards(self, epsilon: float) -> Floats:
        """(A - e^ε)_+ / B."""
        return _parts_of(np.minimum(epsilon - self.log_ratio, 0.0), self.log_ratio + self.log_weight)

    def downwards(self, epsilon: float) -> Floats:
        """(1 - e^ε·A)_+, weighed."""
        return _parts_of(np.minimum(epsilon + self.log_ratio, 0.0), self.log_weight.copy())


def draws_upwards(
    columns: Columns, s: float, tilt: float, count: int, seed: Sequence[int], tick: Callable[[int], None]
) -> Draws:
    """From mean_j N((1+θ)·c_j, s²·I)."""
    T, n = columns.count, columns.norms_squared / (2.0 * s * s)

    def choose(size: int, rng: np.random.Generator) -> Chosen:
        return rng.integers(T, size=size)

    def some(x: Floats, chosen: Chosen) -> tuple[Floats, Floats]:
        columns.add(x, chosen, 1.0 + tilt)
        a = columns.products(x)
        a /= s * s
        ratio = log_mean_exp(a - n)
        if tilt == 0.0:
            return ratio, -ratio
        a *= 1.0 + tilt
        a -= (1.0 + tilt) ** 2 * n
        return ratio, -log_mean_exp(a)

    return in_pieces(choose, some, s, T, count, seed, tick)


def draws_downwards(
    columns: Columns, s: float, tilt: float, count: int, seed: Sequence[int], tick: Callable[[int], None]
) -> Draws:
    """From N(-θ·m, s²·I)."""
    T, n, m = columns.count, columns.norms_squared / (2.0 * s * s), columns.mean
    energy = float(m @ m) / (2.0 * s * s)

    def choose(size: int, _: np.random.Generator) -> Chosen:
        return np.zeros(size, dtype=np.int64)

    def some(x: Floats, _: Chosen) -> tuple[Floats, Floats]:
        x -= tilt * m
        weight = tilt * (x @ m) / (s * s) + tilt**2 * energy
        a = columns.products(x)
        a /= s * s
        a -= n
        return log_mean_exp(a), weight

    return in_pieces(choose, some, s, T, count, seed, tick)


def in_pieces(
    choose: Callable[[int, np.random.Generator], Chosen],
    some: Callable[[Floats, Chosen], tuple[Floats, Floats]],
    s: float,
    width: int,
    count: int,
    seed: Sequence[int],
    tick: Callable[[int], None],
) -> Draws:
    """In pieces, each with a generator of its own, on all cores: the same numbers on any number of them."""
    size = max(1, min(count, _AT_ONCE // width))
    sizes = [min(size, count - first) for first in range(0, count, size)]
    ratios, weights = np.empty(count), np.empty(count)

    def piece(number: int) -> int:
        rng = np.random.default_rng([*seed, number])
        chosen = choose(sizes[number], rng)
        rows = max(_LEAST_ROWS, _IN_CACHE // width)
        for first in range(0, len(chosen), rows):
            own = chosen[first : first + rows]
            x = rng.standard_normal((len(own), width))
            x *= s
            at = number * size + first
            ratios[at : at + len(own)], weights[at : at + len(own)] = some(x, own)
        return len(chosen)

    with ThreadPoolExecutor(min(len(sizes), os.cpu_count() or 1)) as pool:
        for done in pool.map(piece, range(len(sizes))):
            tick(done)
    return Draws(ratios, weights)


def most_upwards(columns: Columns, s: float, tilt: float, epsilon: float) -> float:
    """The largest that `Draws.upwards` can be."""
    n = float(columns.norms_squared.max()) / (2.0 * s * s)
    return _exp(tilt * (1.0 + tilt) * n - tilt * epsilon + _at_most(tilt))


def most_downwards(columns: Columns, s: float, tilt: float, epsilon: float, *, plain: bool = False) -> float:
    """The largest that `Draws.downwards` can be; ``plain`` is a larger number that it cannot exceed either."""
    m, n = columns.mean, float(columns.norms_squared.mean()) / (2.0 * s * s)
    own = 0.0 if plain else _at_most(tilt)
    return _exp(tilt * (n - epsilon) + tilt**2 * float(m @ m) / (2.0 * s * s) + own)


def _at_most(tilt: float) -> float:
    """Ln of θ^θ / (1+θ)^(1+θ), the largest of (1 - r)·r^θ."""
    return (tilt * math.log(tilt) if tilt > 0.0 else 0.0) - (1.0 + tilt) * math.log1p(tilt)


def tightest_tilt_upwards(columns: Columns, s: float, epsilon: float) -> float:
    """The tilt with the least `most_upwards`."""
    n = float(columns.norms_squared.max()) / (2.0 * s * s)
    low, high = 0.0, 1e4
    for _ in range(60):  # of a derivative that grows with the tilt
        middle = 0.5 * (low + high)
        slope = (1.0 + 2.0 * middle) * n - epsilon + math.log(middle / (1.0 + middle))
        low, high = (low, middle) if slope > 0.0 else (middle, high)
    return low


def tightest_tilt_downwards(columns: Columns, s: float, epsilon: float) -> float:
    """The tilt with the least `most_downwards`."""
    m = columns.mean
    return max(0.0, (epsilon * s * s - 0.5 * float(columns.norms_squared.mean())) / float(m @ m))


def bounded_mean(values: Floats, most: float, failure: float, count: int | None = None) -> Bound:
    """Upper bound on the mean of independent numbers in [0, most] that fails with at most this probability.

    ``count`` says how the bound would be with so many numbers like these.
    """
    N = len(values) if count is None else count
    mean = float(values.mean())
    often = math.log(4.0 / failure)
    bernstein = mean + math.sqrt(2.0 * float(values.var(ddof=1)) * often / N) + 7.0 * most * often / (3.0 * (N - 1))
    hoeffding = most * _entropy_bound(min(mean / most, 1.0) if most > 0.0 else 0.0, math.log(2.0 / failure) / N)
    return Bound(min(bernstein, hoeffding, most), mean, most)


def _entropy_bound(p: float, room: float) -> float:
    """The largest q with p·ln(p/q) + (1-p)·ln((1-p)/(1-q)) <= room, rounded up."""

    def apart(q: float) -> float:
        left = p * math.log(p / q) if p > 0.0 else 0.0
        return left + ((1.0 - p) * math.log((1.0 - p) / (1.0 - q)) if p < 1.0 else 0.0)

    low, high = p, 1.0
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        if middle < 1.0 and (middle <= 0.0 or apart(middle) <= room):
            low = middle
        else:
            high = middle
    return high


def _parts_of(short: Floats, log_whole: Floats) -> Floats:
    """(1 - e^short)·e^log_whole, in the memory of both."""
    values: Floats = np.exp(log_whole, out=log_whole)
    values *= np.negative(np.expm1(short, out=short), out=short)
    return values


def log_mean_exp(a: Floats) -> Floats:
    """Of each row."""
    top = a.max(axis=1)
    found: Floats = top + np.log(np.exp(a - top[:, None]).mean(axis=1))
    return found


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))
