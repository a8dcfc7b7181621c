"""How often one client may take part, and what that does to the sensitivity.

A client who appears at the steps π moves C·G by Σ_{j∈π} c_j·uⱼ with ‖uⱼ‖ <= 1, whose largest
squared norm is Σ_{i,j∈π} |X_ij| when X = CᵀC has no negative entry on π (all uⱼ alike), and at
most that otherwise. Under "at most k times, at least b steps apart" the sensitivity is the maximum
over all such π. It is

- computed by going through every pattern where there are few enough;
- read off the left-most pattern where C is Toeplitz with positive decreasing coefficients
  (Kalinin and Lampert 2024, "Banded square root matrix factorization", Theorem 2);
- found by a dynamic program at any horizon where C is banded and only neighbouring visits meet,
  bands <= 2b: a pattern's value is then a sum over its steps and over pairs of neighbours;
- otherwise bounded by Σ_{i∈π} max_{π'} Σ_{j∈π'} |X_ij|, two nested dynamic programs. Where columns
  b apart are orthogonal (banded C) the bound is attained.

`Sensitivity.exact` says which it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.mechanisms.checks import positive_integer

Floats = NDArray[np.float64]

GRAM_LIMIT = 4096  # Longest horizon for which X = CᵀC is formed
_PATTERN_WORK = 20_000_000
_NESTED_WORK = 20_000_000_000
_SAME = 1e-6
_FEW_VISITS = 64  # Up to this many columns are added one by one


@dataclass(frozen=True, slots=True)
class Participation:
    """At most ``times`` visits of one client, any two at least ``min_separation`` steps apart."""

    times: int = 1
    min_separation: int = 1

    def __post_init__(self) -> None:
        times = positive_integer("participation.times", self.times, "1 means once")
        apart = positive_integer("participation.min_separation", self.min_separation, "1 means any steps")
        object.__setattr__(self, "times", times)
        object.__setattr__(self, "min_separation", apart)

    def __str__(self) -> str:
        if self.times == 1:
            return "once"
        return f"at most {self.times} times, at least {self.min_separation} steps apart"

    def check_horizon(self, horizon: int) -> None:
        """Refuse what cannot happen within the horizon."""
        needed = (self.times - 1) * self.min_separation + 1
        if max(needed, self.min_separation) > horizon:
            raise InputError(
                "participation",
                (self.times, self.min_separation),
                f"visits and separation that fit in a horizon of {horizon} steps "
                f"(these need {max(needed, self.min_separation)})",
                "fewer visits or a smaller separation",
            )


ONCE = Participation()


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """‖C(G - G')‖ per unit of gradient change, and how it is known."""

    value: float
    exact: bool
    method: str


def as_participation(value: Participation | tuple[int, int] | None) -> Participation:
    """A `Participation` from itself, a pair (k, b), or None for once."""
    if value is None:
        return ONCE
    if isinstance(value, Participation):
        return value
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise InputError("participation", value, "a pair (times, min_separation)", "try (1, 1)")
    return Participation(*value)


def gram_sensitivity(C: Floats, participation: Participation) -> Sensitivity:
    """Sensitivity under repeated participation, from the matrix itself."""
    k, b = participation.times, participation.min_separation
    X = C.T @ C
    size = np.abs(X)
    distance = np.abs(np.subtract.outer(np.arange(len(X)), np.arange(len(X))))
    apart = distance >= b
    # Float32 rounding leaves entries that should vanish at either sign of 1e-8.
    nonnegative = bool((X[apart] >= -1e-7 * X.diagonal().max()).all())
    patterns = _pattern_count(len(X), k - 1, b)
    if patterns * len(X) <= _PATTERN_WORK:
        value = math.sqrt(_over_all_patterns(size, k, b))
        return Sensitivity(value, nonnegative, f"maximum over all patterns of up to {k} steps")
    shifted = _left_most_toeplitz(C, k, b)
    if shifted is not None:
        return Sensitivity(shifted, True, "left-most pattern of a decreasing Toeplitz matrix")
    if k * len(X) ** 2 > _NESTED_WORK:
        largest = k * math.sqrt(float(X.diagonal().max()))
        return Sensitivity(largest, False, "times x largest column norm (too many patterns)")
    # Steps of one pattern are b apart: nothing nearer than that ever meets, but a step itself.
    met = np.where(apart | (distance == 0), size, 0.0)
    per_step = np.concatenate([_best_patterns(met[:, i : i + 2048], k, b) for i in range(0, len(met), 2048)])
    upper, pattern = heaviest_pattern(per_step, k, b)
    attained = float(size[np.ix_(pattern, pattern)].sum())
    if nonnegative and upper <= attained * (1.0 + _SAME):
        return Sensitivity(math.sqrt(upper), True, "bound attained by a pattern")
    return Sensitivity(math.sqrt(upper), False, "upper bound by nested dynamic programs")


def _pattern_count(T: int, k: int, b: int) -> int:
    """How many patterns of at most k steps there are."""
    return sum(math.comb(max(0, T - (i - 1) * (b - 1)), i) for i in range(1, k + 1)) + 1


def _over_all_patterns(X: Floats, k: int, b: int) -> float:
    T = len(X)
    diagonal = X.diagonal()
    best = 0.0

    def extend(value: float, cross: Floats, first: int, left: int) -> None:
        nonlocal best
        if first >= T:
            return
        gains = diagonal[first:] + 2.0 * cross[first:]
        best = max(best, value + float(gains.max()))
        if left > 1:
            for offset, gain in enumerate(gains):
                j = first + offset
                extend(value + float(gain), cross + X[j], j + b, left - 1)

    extend(0.0, np.zeros(T), 0, k)
    return best


def _left_most_toeplitz(C: Floats, k: int, b: int) -> float | None:
    """Exact value if C is a decreasing Toeplitz matrix up to rounding, which is added on top."""
    from scipy.linalg import toeplitz

    if C.shape[0] != C.shape[1]:
        return None
    c = C[:, 0]
    T = len(c)
    ideal = np.minimum.accumulate(np.maximum(c, 0.0))
    rounding = math.sqrt(((C - toeplitz(ideal, np.zeros(T))) ** 2).sum(axis=0).max())
    if rounding > _SAME * np.linalg.norm(c):
        return None
    return _rounded_up(left_most_sum(ideal, Participation(k, b)), k * rounding)


def left_most_sum(c: Floats, part: Participation) -> Floats:
    """Sum of the columns of the left-most pattern, of a Toeplitz matrix whose first one is c."""
    T, b = len(c), part.min_separation
    visits = min(part.times, -(-T // b))
    if visits <= _FEW_VISITS:
        total = np.zeros_like(c)
        for at in range(0, visits * b, b):
            total[at:] += c[: T - at]
        return total
    # Each step has all that came b, 2b, ... before it, less what came before the first visit.
    rows = -(-T // b)
    running = np.zeros((rows, b))
    running.ravel()[:T] = c
    np.cumsum(running, axis=0, out=running)
    running[visits:] -= running[: rows - visits].copy()
    summed: Floats = running.ravel()[:T]
    return summed


def long_toeplitz_sensitivity(c: Floats, rounding: float, part: Participation) -> float | None:
    """The same from a first column alone; ``rounding`` bounds how far any other is from it. None if C does not fall."""
    ideal = np.minimum.accumulate(np.maximum(c, 0.0))
    rounding += float(np.linalg.norm(c - ideal))
    if rounding > _SAME * np.linalg.norm(c):
        return None
    return _rounded_up(left_most_sum(ideal, part), part.times * rounding)


def _rounded_up(total: Floats, rounding: float) -> float:
    """Norm of a sum, with all that rounding may have taken from it added."""
    lost = 4.0 * len(total) * float(np.finfo(np.float64).eps)
    return (float(np.linalg.norm(total)) + rounding) * (1.0 + lost)


def banded_sensitivity(
    norms: Floats, products: dict[int, Floats], beyond: float, width: int, part: Participation
) -> Sensitivity:
    """The maximum over all patterns where columns ``width`` <= 2b or more apart are orthogonal.

    ``norms`` and ``products`` (⟨c_j, c_{j-d}⟩ for d from b up to ``width``) are of columns cut off after
    ``width`` entries; k times ``beyond``, the largest norm of what was cut off, is added.
    """
    k, b = part.times, part.min_separation
    apart = max(width, b)
    best = norms.copy()  # over patterns of at most so many steps that end at j
    for _ in range(k - 1):
        before = np.zeros_like(best)
        before[apart:] = np.maximum.accumulate(best)[:-apart]
        for d, product in products.items():
            np.maximum(before[d:], best[:-d] + 2.0 * np.abs(product[d:]), out=before[d:])
        best = norms + before
    largest = float(np.sqrt(norms.max()))
    # |⟨c_j, c_i⟩| is counted: where a product is negative, by rounding, that is at most 4 too much for a pair.
    negative = -min((float(p.min()) for p in products.values()), default=0.0)
    nonnegative = 2.0 * (k - 1) * negative <= _SAME * float(best.max())
    value = math.sqrt(float(best.max())) + k * beyond
    exact = nonnegative and beyond <= _SAME * largest
    return Sensitivity(value, exact, "maximum over all patterns of a banded matrix")


def _best_patterns(weights: Floats, k: int, b: int) -> Floats:
    """For each column of weights (T, m): the largest total of at most k rows, b apart."""
    T = len(weights)
    fewer = np.zeros((T + b, weights.shape[1]))
    for _ in range(k):
        best = np.zeros_like(fewer)
        for j in range(T - 1, -1, -1):
            np.maximum(best[j + 1], weights[j] + fewer[j + b], out=best[j])
        fewer = best
    totals: Floats = fewer[0]
    return totals


def heaviest_pattern(weights: Floats, k: int, b: int) -> tuple[float, list[int]]:
    """The largest total of at most k weights, b apart, and where it is."""
    T = len(weights)
    layers = [np.zeros(T + b)]
    for _ in range(k):
        best = np.zeros(T + b)
        for j in range(T - 1, -1, -1):
            best[j] = max(best[j + 1], weights[j] + layers[-1][j + b])
        layers.append(best)
    pattern, j = [], 0
    for m in range(k, 0, -1):
        while j < T and layers[m][j] == layers[m][j + 1]:
            j += 1
        if j >= T:
            break
        pattern.append(j)
        j += b
    return float(layers[k][0]), pattern
