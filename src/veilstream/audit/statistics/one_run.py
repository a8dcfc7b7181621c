"""One run with many coordinates: an exact confidence interval on every client's d'.

The d columns of the residual messages Y are iid N(0, Σ), so S = Y·Yᵀ is Wishart(d, Σ), and for any
fixed a (Muirhead 1982, Theorem 3.2.12)

    (aᵀΣ⁻¹a) / (aᵀS⁻¹a)  ~  χ² with d - R + 1 degrees of freedom,

whatever Σ is. So the interval on d' = reach·√(aᵀΣ⁻¹a) is exact and presumes nothing about the
mechanism; it presumes Gaussian columns, which is tested too. Intervals hold for all clients at
once (Bonferroni). Half of the level goes to the client that theory names as the worst before
anything is measured: the bound on μ is then hardly wider than for one client alone.

Where Σ is claimed, three more things are tested: every interval holds the d' that follows from Σ;
S is Wishart with that Σ (likelihood ratio, with the first two moments exact); columns whitened by
it are standard normal (Kolmogorov and Smirnov, row by row).

A message without noise of its own makes S singular: then d' is infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from scipy.special import polygamma, psi
from scipy.stats import chi2, gamma, kstwobign, norm

from veilstream.audit.statistics.check import CONFIDENCE, FALSE_ALARMS
from veilstream.audit.statistics.law import Law
from veilstream.errors import InputError

Floats = NDArray[np.float64]

_NOTHING = 1e-9  # share of the expected variance below which a direction carries no noise
_TESTS = 3  # intervals, covariance, normality: each has its share of the false alarms


@dataclass(frozen=True, eq=False)
class OneRun:
    """What the coordinates of one run tell."""

    coordinates: int
    claim: float
    measured: Floats
    lower: Floats
    upper: Floats
    """Bounds on them, together at the stated confidence."""
    expected: Floats | None
    mu_lower: float
    """μ is at least this, at the stated confidence."""
    mu_surely: float
    """μ is at least this, at the level of an alarm."""
    outside: int
    """Clients whose interval, at the level of an alarm, does not hold the expected d'."""
    covariance_p: float | None
    normality_p: float | None
    """For all rows together."""
    confidence: float
    false_alarms: float

    @property
    def violation(self) -> bool:
        """More is told than was promised."""
        return self.mu_surely > self.claim

    @property
    def stranger(self) -> bool:
        """Not the noise that was claimed, be it more private or less."""
        level = self.false_alarms / _TESTS
        tests = [p for p in (self.covariance_p, self.normality_p) if p is not None]
        return self.outside > 0 or any(p < level for p in tests)

    @property
    def alarm(self) -> bool:
        """Either."""
        return self.violation or self.stranger


def one_run(
    residuals: Floats, law: Law, *, confidence: float = CONFIDENCE, false_alarms: float = FALSE_ALARMS
) -> OneRun:
    """Judge (R, d) messages from which all known gradients have been subtracted.

    Guarantees: if columns are iid Gaussian with mean zero, ``mu_lower`` exceeds the largest d' with
    probability at most 1 - ``confidence``; if they also have the law's covariance, `alarm` is
    raised with probability at most ``false_alarms``.
    """
    rounds, d = residuals.shape
    if rounds != law.rounds:
        raise InputError("residuals", rounds, f"{law.rounds} messages", "one a round")
    if d <= rounds + 1:
        raise InputError("dim", d, f"more than the {rounds} rounds", "an audit needs many coordinates")
    white, shifts = _comparable(residuals, law)
    scatter = white @ white.T / d
    inverse = _inverse_forms(scatter, shifts) / d
    freedom = d - rounds + 1
    lower, upper = _intervals(inverse, law, freedom, 1.0 - confidence)
    one_sided, _ = _intervals(inverse, law, freedom, 2.0 * (1.0 - confidence))
    sure_low, sure_high = _intervals(inverse, law, freedom, false_alarms / _TESTS)
    expected = law.expected
    outside = 0
    if expected is not None:
        outside = int(((expected < sure_low) | (expected > sure_high)).sum())
    known = law.root is not None
    return OneRun(
        coordinates=d,
        claim=law.claim,
        measured=law.reach * np.sqrt(inverse * freedom),
        lower=lower,
        upper=upper,
        expected=expected,
        mu_lower=float(one_sided.max()),
        mu_surely=float(sure_low.max()),
        outside=outside,
        covariance_p=_covariance_p(scatter, d) if known else None,
        normality_p=_normality_p(white) if known else None,
        confidence=confidence,
        false_alarms=false_alarms,
    )


def _comparable(residuals: Floats, law: Law) -> tuple[Floats, Floats]:
    """Messages and shifts, whitened by the claimed law; or else as steps of one size.

    Any invertible map of the rows leaves aᵀS⁻¹a as it is; this one keeps the arithmetic stable.
    """
    if law.root is not None:
        return (solve_triangular(law.root, residuals, lower=True), solve_triangular(law.root, law.shifts, lower=True))
    steps = np.diff(residuals, axis=0, prepend=0.0)
    size = np.sqrt((steps**2).mean(axis=1, keepdims=True))
    size[size == 0.0] = max(float(size.max()), 1e-300)
    return steps / size, np.diff(law.shifts, axis=0, prepend=0.0) / size


def _inverse_forms(scatter: Floats, shifts: Floats) -> Floats:
    """aᵀ·M⁻¹·a for every column a; infinite where M has no noise in its direction."""
    sizes, axes = np.linalg.eigh(scatter)
    nothing = sizes < _NOTHING
    along = axes.T @ shifts
    forms: Floats = (along[~nothing] ** 2 / sizes[~nothing, None]).sum(axis=0)
    bare = (along[nothing] ** 2).sum(axis=0) > _NOTHING * (shifts**2).sum(axis=0)
    forms[bare] = np.inf
    return forms


def _intervals(inverse: Floats, law: Law, freedom: int, level: float) -> tuple[Floats, Floats]:
    """Two-sided, together at this level."""
    m = len(inverse)
    share = np.full(m, 0.5 * level / max(m - 1, 1))
    share[law.worst] = level if m == 1 else 0.5 * level
    low = chi2.ppf(0.5 * share, freedom)
    high = chi2.isf(0.5 * share, freedom)
    return law.reach * np.sqrt(inverse * low), law.reach * np.sqrt(inverse * high)


def _covariance_p(scatter: Floats, d: int) -> float:
    """Of the hypothesis that d·M is Wishart(d, I): ℓ = tr W - d·ln det(W/d) - d·R.

    ln det W is a sum of logarithms of independent χ², and tr W goes with them, so mean and variance
    of ℓ are known exactly; a gamma law with both stands in for the rest. (It is χ² in the limit.)
    """
    rounds = len(scatter)
    sign, log_det = np.linalg.slogdet(scatter)
    if sign <= 0 or not math.isfinite(log_det):
        return 0.0
    statistic = d * (float(np.trace(scatter)) - float(log_det) - rounds)
    halves = 0.5 * (d - np.arange(rounds))
    mean = -d * float((psi(halves) + math.log(2.0) - math.log(d)).sum())
    variance = d * d * float(polygamma(1, halves).sum()) - 2.0 * d * rounds
    return float(gamma.sf(statistic, mean**2 / variance, scale=variance / mean))


def _normality_p(white: Floats) -> float:
    """Of the hypothesis that every row is standard normal, with Bonferroni's factor."""
    d = white.shape[1]
    uniform = norm.cdf(np.sort(white, axis=1))
    above = (np.arange(1, d + 1) / d - uniform).max()
    below = (uniform - np.arange(d) / d).max()
    worst = float(kstwobign.sf(max(above, below) * math.sqrt(d)))
    return min(1.0, worst * len(white))
