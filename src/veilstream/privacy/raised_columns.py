"""Draws in which columns that do not overlap are raised together: for a δ so small that one alone seldom suffices.

Notation as in `privacy.mixture_bounds`: u_j = exp(a_j - n_j), A = mean_j u_j, and δ_ε(P, Q) = E_Q[(A - e^ε)_+].

**Where x comes from.** Columns b, a band, apart do not overlap, so under Q the u_j of a class {r, r + b, r + 2b, …} are
independent, and ln u_j is N(-n_j, 2·n_j). For a step function h and a number λ > 0 let x have the density, over Q,

    B = ½·mean_j u_j^(1+θ)·e^(-θ(1+θ)·n_j)  +  ½·Σ_r p_r·exp(λ·A_r)/M_r,
    A_r = mean of h(u_j) over class r,   M_r = Π_{j in r} E_Q[exp(λ·h(u_j)/c_r)],

with c_r the size of class r and p_r = c_r/T. The first half raises one column; the second gives each u_j of a class its
law weighed by exp(λ·h/c_r): ln u_j is normal within each of finitely many cells, so M_r is a product of finite sums.

**The most that a draw can count.** Let h be such that u <= h(u) + ω·u^(1+θ)·e^(-θ(1+θ)·n) for all u, n the largest n_j.
With H = mean_j h(u_j) = Σ_r p_r·A_r, the power u^(1+θ) in its mean, and B₁, B₂ for the halves of B without their ½,

    (A - e^ε)_+ <= ω·B₁ + (H - e^ε)_+        B₂ >= e^(λ·H) / max_r M_r   (Jensen),

and y·e^(-λy) <= 1/(e·λ), so that the summand (A - e^ε)_+ / B is at most

    2·ω + 2·max_r M_r · e^(-λ·e^ε) / (e·λ).

Nothing is left out: this holds for every x. θ, ω and λ are chosen for the least of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import ndtr, ndtri

from veilstream.mechanisms.columns import Columns
from veilstream.privacy.mixture_bounds import Chosen, Draws, Floats, in_pieces, log_mean_exp

_CELLS = 240  # of ln u, between two that reach to the ends
_WIDEST = 8.0  # standard deviations below the mean, where cells begin
_TILTS = tuple(np.arange(0.5, 16.0, 0.5).tolist())
_CAPS = 12
_RATES = 2.0 ** np.arange(0.0, 10.0, 0.5)  # times e^-ε
_STEEPEST = 300.0  # the most that λ·h/c may be, so that no number leaves the range of floats
_LARGEST = 600.0  # exponent
_NEXT = 2.0**-53  # how far from the edge of a cell a draw stays


@dataclass(frozen=True, eq=False)
class Raised:
    """One way to raise columns together."""

    columns: Columns
    s: float
    tilt: float
    """θ."""
    cap: float
    """Beyond this u, the first half of B is enough."""
    rate: float
    """λ."""

    @classmethod
    def of(cls, columns: Columns, s: float, epsilon: float) -> Raised:
        """Of those that are looked at, the one with about the least `most`."""
        n = float(columns.norms_squared.max()) / (2.0 * s * s)
        size, top = columns.count // columns.reach, math.exp(epsilon)
        found = []
        for tilt in _TILTS:
            for cap in np.geomspace(1.2 * top, 4.0 * columns.count * top, _CAPS).tolist():
                edges, heights, over = _cells(n, tilt, cap)
                rates = _RATES[_RATES * (heights[-1] / top) <= _STEEPEST * size] / top
                if not len(rates):
                    continue
                log_m = size * _log_mean(heights, _law(edges, np.array([n])), rates / size)[0]
                tails = _tail(log_m, rates, epsilon)
                best = int(tails.argmin())
                found.append((over + float(tails[best]), tilt, cap, float(rates[best])))
        _, tilt, cap, rate = min(found)
        return cls(columns, s, tilt, cap, rate)

    def most(self, epsilon: float) -> float:
        """The largest that a draw can count."""
        return 2.0 * (self._over + float(_tail(self._log_m.max(), self.rate, epsilon))) * (1.0 + 1e-9)

    def draws(self, count: int, seed: Sequence[int], tick: Callable[[int], None]) -> Draws:
        """From B."""
        T, b = self.columns.count, self.columns.reach

        def choose(size: int, rng: np.random.Generator) -> Chosen:
            return rng.integers(2 * T, size=size)  # beyond T: the class of column chosen - T

        def some(x: Floats, chosen: Chosen) -> tuple[Floats, Floats]:
            alone = chosen < T
            own = x[alone]
            self.columns.add(own, chosen[alone], 1.0 + self.tilt)
            x[alone] = own
            classes = np.where(alone, -1, (chosen - T) % b)
            for r in np.unique(classes[~alone]).tolist():
                x[classes == r] = self._raise(x[classes == r], r)
            a = self.columns.products(x)
            a /= self.s**2
            return self.looked_at(a - self._n)

        return in_pieces(choose, some, self.s, T, count, seed, tick)

    def looked_at(self, log_u: Floats) -> tuple[Floats, Floats]:
        """What `Draws` holds, ln A and -ln B, of rows of ln u."""
        T, b, n, power = self.columns.count, self.columns.reach, self._n, 1.0 + self.tilt
        sizes = np.array([len(range(r, T, b)) for r in range(b)])
        heights = self._heights[np.searchsorted(self._edges, log_u)]
        of_class = np.stack([heights[:, r::b].mean(axis=1) for r in range(b)], axis=1)
        together = np.logaddexp.reduce(self.rate * of_class + (np.log(sizes / T) - self._log_m), axis=1)
        alone = log_mean_exp(power * log_u - (self.tilt * power) * n)
        return log_mean_exp(log_u), math.log(2.0) - np.logaddexp(alone, together)

    def _raise(self, x: Floats, r: int) -> Floats:
        """Draws of Q as draws of the class's law: each of its ln u moves to the same quantile of its own new law."""
        T, b = self.columns.count, self.columns.reach
        of = np.arange(r, T, b)
        length = np.sqrt(self.columns.norms_squared[of])
        g = self.columns.products(x)[:, of] / (length * self.s)
        moved = np.empty_like(g)
        for i, n in enumerate(self._n[of]):
            at = (self._edges + n) / math.sqrt(2.0 * n)
            moved[:, i] = _moved(g[:, i], at, np.exp(self.rate / len(of) * self._heights))
        where = of[:, None] + np.arange(b)
        inside = where < T
        added = ((moved - g) * (self.s / length))[:, :, None] * self.columns.entries[of, :b]
        found = x.copy()
        found[:, where[inside]] += added[:, inside]
        return found

    @cached_property
    def _n(self) -> Floats:
        return self.columns.norms_squared / (2.0 * self.s**2)

    @cached_property
    def _made(self) -> tuple[Floats, Floats, float]:
        return _cells(float(self._n.max()), self.tilt, self.cap)

    @property
    def _edges(self) -> Floats:
        return self._made[0]

    @property
    def _heights(self) -> Floats:
        return self._made[1]

    @property
    def _over(self) -> float:
        return self._made[2]

    @cached_property
    def _log_m(self) -> Floats:
        """The logarithm of M_r of each class."""
        found = []
        for r in range(self.columns.reach):
            law = _law(self._edges, self._n[r :: self.columns.reach])
            found.append(float(_log_mean(self._heights, law, np.array([self.rate / len(law)])).sum()))
        return np.array(found)


def _cells(n: float, tilt: float, cap: float) -> tuple[Floats, Floats, float]:
    """Edges of cells of ln u, the largest of u - ω·u^(1+θ)·e^(-θ(1+θ)·n) in each, and ω; it grows up to the cap."""
    log_bend = -tilt * (1.0 + tilt) * n
    log_over = -log_bend - math.log1p(tilt) - tilt * math.log(cap)
    edges = np.linspace(-_WIDEST * math.sqrt(2.0 * n) - n, math.log(cap), _CELLS)
    upper = np.append(edges, math.log(cap))
    heights: Floats = np.exp(upper) - np.exp(log_over + log_bend + (1.0 + tilt) * upper)
    return edges, heights, math.exp(min(log_over, _LARGEST))


def _law(edges: Floats, n: Floats) -> Floats:
    """Probability of each cell under Q, for columns with these n."""
    at = (edges + n[:, None]) / np.sqrt(2.0 * n)[:, None]
    ends = np.full((len(n), 1), np.inf)
    return _between(np.hstack([-ends, at]), np.hstack([at, ends]))


def _log_mean(heights: Floats, law: Floats, rates: Floats) -> Floats:
    """The logarithm of the mean of exp(rate·h): a row for each law, a column for each rate."""
    found: Floats = np.log(law @ np.exp(np.outer(heights, rates)))
    return found


def _between(low: Floats, high: Floats) -> Floats:
    """Normal probability, without loss in either tail."""
    found: Floats = np.where(low > 0.0, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low))
    return found


def _tail(log_m: Floats | float, rate: Floats | float, epsilon: float) -> Floats:
    """M·e^(-λ·e^ε) / (e·λ)."""
    found: Floats = np.exp(np.minimum(log_m - rate * math.exp(epsilon) - 1.0 - np.log(rate), _LARGEST))
    return found


def _moved(g: Floats, edges: Floats, weights: Floats) -> Floats:
    """Standard normal draws, moved to the normal law whose cells are weighed so."""
    low, high = np.append(-np.inf, edges), np.append(edges, np.inf)
    old = _between(low, high)
    new = old * weights
    new /= new.sum()
    ends = np.cumsum(new)
    ends[-1] = 1.0
    p = ndtr(g)
    cell = np.minimum(np.searchsorted(ends, p), len(new) - 1)
    inside = np.clip(1.0 - (ends[cell] - p) / new[cell], _NEXT, 1.0 - _NEXT)
    up = low[cell] > 0.0
    part = np.where(up, ndtr(-high[cell]) + (1.0 - inside) * old[cell], ndtr(low[cell]) + inside * old[cell])
    found: Floats = np.clip(np.where(up, -1.0, 1.0) * ndtri(part), low[cell], high[cell])
    return found
