"""Does every single coordinate carry its noise? Both tails, over the rounds of a run.

Residuals Y whitened by the claimed law, W = L⁻¹·Y, are standard normal: the R numbers of each of d
coordinates have a sum of squares that is χ² with R degrees of freedom, independently over
coordinates. The smallest and the largest of d such sums have known laws,

    P(min <= x) = 1 - (1 - F(x))^d,    P(max >= x) = 1 - F(x)^d,

so both p-values are exact. A coordinate without noise has a sum near nothing; averages over all
coordinates would never show it.

What is sent is rounded to the grid, and gradients are known to a unit or two: the smallest sum is
taken as large as `slack` units in each message could make it. With very few rounds a coordinate
without noise then proves nothing, and the p-value says so.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from scipy.special import betainc
from scipy.stats import chi2

from veilstream.audit.statistics.check import Check
from veilstream.audit.statistics.differencing import ROUNDING
from veilstream.audit.statistics.law import Law
from veilstream.errors import InputError

Floats = NDArray[np.float64]


def whitened(residuals: Floats, law: Law) -> Floats:
    """L⁻¹·Y: standard normal and independent, if Y has the law."""
    if law.root is None:
        raise InputError("law", None, "a covariance", "these checks compare with a claimed law")
    if len(residuals) != law.rounds:
        raise InputError("residuals", len(residuals), f"{law.rounds} messages", "one a round")
    white: Floats = solve_triangular(law.root, residuals, lower=True)
    return white


def slack_units(steps: int) -> float:
    """How far a residual may be beside the noise, in units of the grid, after so many steps."""
    return 0.5 + ROUNDING * steps


def every_coordinate(residuals: Floats, law: Law, *, grid: float, steps: int) -> Check:
    """Judge the (R, d) residuals of a run of ``steps`` steps on a grid.

    Guarantees: the p-value is exact for Gaussian columns, and conservative by the slack alone.
    Power: at R = 64 and d = 100,000 a coordinate with less than 0.2 or more than 2.9 times its
    variance is found in at least half of all runs; one without noise is always found.
    """
    white = whitened(residuals, law)
    rounds, d = white.shape
    lengths = np.sqrt((white**2).sum(axis=0))
    assert law.root is not None
    reach = float(np.linalg.norm(np.linalg.inv(law.root), 2))
    slack = reach * math.sqrt(rounds) * slack_units(steps) * grid
    least, most = int(np.argmin(lengths)), int(np.argmax(lengths))
    low = float(chi2.logcdf((lengths[least] + slack) ** 2, rounds))
    high = float(chi2.logsf(max(0.0, lengths[most] - slack) ** 2, rounds))
    smallest, largest = (_some(tail, d) for tail in (low, high))
    p = min(1.0, 2.0 * min(smallest, largest))
    at, share = (least, lengths[least]) if smallest <= largest else (most, lengths[most])
    return Check(
        "noise of every coordinate",
        p,
        f"of {d:,} coordinates, number {at} has {share**2 / rounds:.2g} of its variance",
        "some coordinates have too little noise, or too much",
    )


def correlation_p(correlation: Floats | float, length: int) -> Floats:
    """Two-sided, of two independent vectors of ``length``, one of them Gaussian: r² is Beta."""
    rest = np.clip(1.0 - np.square(np.asarray(correlation, np.float64)), 0.0, 1.0)
    p: Floats = betainc(0.5 * (length - 1), 0.5, rest)
    return p


def _some(log_tail: float, d: int) -> float:
    """That any of d has a tail probability this small: 1 - (1 - p)^d."""
    tail = math.exp(log_tail)
    return 1.0 if tail >= 1.0 else float(-math.expm1(d * math.log1p(-tail)))
