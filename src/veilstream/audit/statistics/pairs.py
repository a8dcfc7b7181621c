"""Do two coordinates share noise? All pairs where they are few, likely pairs where they are many.

The whitened residuals of two coordinates are independent Gaussian vectors, so the square of their
correlation over n rounds has a Beta law: p-values are exact, with Bonferroni's factor for how many
pairs were looked at.

* `all_pairs`: every pair of a run with few coordinates; n counts rounds of several learners, so
  correlations of a third are seen.
* `lags`: in a run with many, coordinates at a distance where a program's blocks, tiles and pairs of
  normals lie; summed over all places, so 10⁻³ is seen, and place by place.
* `duplicates`: any two columns of such a run that are equal, or each other's negative, up to the
  slack of rounding; found by sorting, so no distance has to be guessed.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from veilstream.audit.statistics.check import Check
from veilstream.audit.statistics.coordinates import correlation_p, slack_units
from veilstream.audit.statistics.law import Law

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_SHARED = "two coordinates share their noise"
_BLOCKS = tuple(1 << k for k in range(9, 21))
_ENOUGH = 10_000  # products behind a sum that is taken for normal
_ENOUGH_ROUNDS = 4
_MOST_SHIFTS = 500


def all_pairs(white: Floats) -> Check:
    """Judge (n, d) whitened residuals: n rounds, of one learner or of several, d coordinates."""
    n, d = white.shape
    lengths = np.sqrt((white**2).sum(axis=0))
    gram = (white.T @ white) / np.outer(lengths, lengths).clip(min=1e-150)
    np.fill_diagonal(gram, 0.0)
    worst = np.unravel_index(int(np.argmax(np.abs(gram))), gram.shape)
    pairs = d * (d - 1) // 2
    p = min(1.0, pairs * float(correlation_p(gram[worst], n)))
    return Check(
        "all pairs of coordinates",
        p,
        f"{pairs:,} pairs over {n} rounds: coordinates {worst[0]} and {worst[1]} have correlation {gram[worst]:+.2f}",
        _SHARED,
    )


def telling_lags(d: int) -> tuple[int, ...]:
    """Distances of neighbours, of powers of two, and of the ends of blocks of any such size."""
    lags = {*range(1, 33), d // 2, (d + 1) // 2, d - 1}
    lags |= {1 << k for k in range(d.bit_length())}
    for block in _BLOCKS:  # a last, shorter block, and the two halves of pairs in it
        rest = d % block
        lags |= {rest, (rest + 1) // 2, rest // 2, 3 * block}
    return tuple(sorted(lag for lag in lags if 0 < lag < d))


def lags(white: Floats) -> Check:
    """Judge the (R, d) whitened residuals of one run at every telling distance."""
    rounds, d = white.shape
    lengths = np.sqrt((white**2).sum(axis=0)).clip(min=1e-150)
    found: list[tuple[float, str]] = []
    tests = 0
    for lag in telling_lags(d):
        places = d - lag
        products = np.einsum("ri,ri->i", white[:, :places], white[:, lag:])
        if rounds * places >= _ENOUGH:
            z = float(products.sum()) / math.sqrt(rounds * places)
            found.append((2.0 * float(ndtr(-abs(z))), f"at distance {lag}, z = {z:+.2f}"))
            tests += 1
        if rounds >= _ENOUGH_ROUNDS:
            each = products / (lengths[:places] * lengths[lag:])
            at = int(np.argmax(np.abs(each)))
            p = min(1.0, places * float(correlation_p(each[at], rounds)))
            found.append((p, f"coordinates {at} and {at + lag} have correlation {each[at]:+.2f}"))
            tests += 1
    if not found:
        return Check("coordinates at telling distances", 1.0, "too few rounds to tell", _SHARED)
    worst, words = min(found)
    p = min(1.0, tests * worst)
    return Check("coordinates at telling distances", p, f"{tests} tests: {words}", _SHARED)


def duplicates(units: Integers, law: Law, *, grid: float, steps: int) -> Check:
    """Find columns of (R, d) residuals, in units of the grid, that are equal or opposite.

    Two independent columns agree to within t units in every message with probability at most
    Π_r (2·t + 1)/(√(4π)·L_rr): the difference in message r, given those before, is Gaussian with
    variance 2·L_rr². Over all pairs and both signs that is the p-value of any pair found.
    """
    rounds, d = units.shape
    within = int(2 * slack_units(steps))
    assert law.root is not None
    widths = np.diag(law.root) / grid
    logs = np.log((2 * within + 1) / (math.sqrt(4.0 * math.pi) * widths)).clip(max=0.0)
    chance = math.exp(min(0.0, math.log(float(d) * max(d - 1, 1)) + float(logs.sum())))
    pairs = _agreeing(units, within)
    if pairs is None:
        figure, p = f"{d:,} coordinates crowd together: too few rounds to tell", 1.0
    elif len(pairs):
        one, other = pairs[0]
        figure = f"{len(pairs)} agree in all {rounds} messages, first {one} and {other}"
        p = chance
    else:
        figure, p = f"none of {d * (d - 1) // 2:,} pairs agree in {rounds} messages", 1.0
    return Check("equal or opposite coordinates", p, figure, _SHARED)


def _agreeing(units: Integers, within: int) -> Integers | None:
    """Pairs (i, j) whose columns agree, or whose sum vanishes; None if there are too many to try.

    Sorted by the last message, partners are near each other; the rest of the column decides.
    """
    d = units.shape[1]
    key = np.concatenate([units[-1], -units[-1]])
    order = np.argsort(key, kind="stable")
    key = key[order]
    owner, negative = order % d, order >= d
    found: list[tuple[int, int]] = []
    for shift in range(1, 2 * d):
        near = np.flatnonzero(key[shift:] - key[:-shift] <= within)
        if not len(near):
            return np.array(sorted(set(found)), np.int64).reshape(-1, 2)
        if shift > _MOST_SHIFTS:
            return None
        first, second = owner[near], owner[near + shift]
        sign = np.where(negative[near] == negative[near + shift], 1, -1)
        for row in units:
            kept = (np.abs(row[first] - sign * row[second]) <= within) & (first != second)
            first, second, sign = first[kept], second[kept], sign[kept]
            if not len(first):
                break
        found += [(int(min(pair)), int(max(pair))) for pair in zip(first, second, strict=True)]
    return np.array(sorted(set(found)), np.int64).reshape(-1, 2)
