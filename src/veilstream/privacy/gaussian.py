"""Exact privacy of the Gaussian mechanism.

After Balle and Wang 2018, "Improving the Gaussian Mechanism for Differential Privacy".

A release whose mean moves by Δ under noise of standard deviation σ has, with μ = Δ/σ,

    δ(ε) = Q(a) - e^ε·Q(b),   a = ε/μ - μ/2,  b = ε/μ + μ/2,

and no smaller δ. Written like this it cancels to nothing for small μ. Since e^ε·φ(b) = φ(a),

    δ(ε) = φ(a)·(R(a) - R(b)) = φ(a)·∫_a^b (1 - x·R(x)) dx

with the Mills ratio R = Q/φ, and every factor is computed to full relative precision:
1e-8 <= ε <= 100 and 1e-15 <= δ < 1 are safe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import overload

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.mechanisms.checks import positive_number

Floats = NDArray[np.float64]

_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)
_RTOL = 4.0 * float(np.finfo(np.float64).eps)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(24)


def _mills(x: float) -> float:
    from scipy.special import erfcx

    return math.sqrt(math.pi / 2.0) * float(erfcx(x / math.sqrt(2.0)))


def _mills_slope(x: Floats) -> Floats:
    """1 - x·R(x) = -R'(x)."""
    from scipy.special import erfcx

    near = np.minimum(x, 30.0)
    direct = 1.0 - near * math.sqrt(math.pi / 2.0) * erfcx(near / math.sqrt(2.0))
    s = 1.0 / np.maximum(x, 30.0) ** 2
    series = s * (1.0 - s * (3.0 - s * (15.0 - s * (105.0 - s * (945.0 - s * 10395.0)))))
    return np.where(x > 30.0, series, direct)


def _mills_drop(a: float, width: float) -> float:
    """R(a) - R(a + width) without cancellation."""
    if width >= 0.5 and a <= 30.0:
        return _mills(a) - _mills(a + width)
    total, offset = 0.0, 0.0
    while offset < width:
        # Panels that are short beside their distance from zero keep 24 nodes exact.
        panel = min(width - offset, max(0.5, 0.25 * (a + offset)))
        nodes = a + offset + 0.5 * panel * (1.0 + _NODES)
        total += 0.5 * panel * float(_WEIGHTS @ _mills_slope(nodes))
        offset += panel
    return total


def _log_delta(epsilon: float, mu: float) -> float:
    from scipy.special import log_ndtr

    a, b = epsilon / mu - 0.5 * mu, epsilon / mu + 0.5 * mu
    if a <= 0.0 and mu >= 0.5:
        complement = math.exp(float(log_ndtr(a))) + math.exp(-0.5 * a * a - _LOG_SQRT_2PI) * _mills(b)
        return math.log1p(-complement)
    drop = _mills_drop(a, mu)
    return -0.5 * a * a - _LOG_SQRT_2PI + math.log(drop) if drop > 0.0 else -math.inf


def _log_complement(epsilon: float, mu: float) -> float:
    """ln(1 - δ), for δ near one (then a < 0)."""
    from scipy.special import log_ndtr

    a, b = epsilon / mu - 0.5 * mu, epsilon / mu + 0.5 * mu
    left = float(log_ndtr(a))
    right = -0.5 * a * a - _LOG_SQRT_2PI + math.log(_mills(b))
    return float(np.logaddexp(left, right))


@dataclass(frozen=True, slots=True)
class GaussianCurve:
    """The whole privacy curve of a Gaussian release: μ-Gaussian differential privacy.

    Guarantees: exact for one Gaussian release; under adaptive continual release too (Denisov et
    al. 2022, Theorem 2.1). Every (ε, δ(ε)) holds at once.
    """

    mu: float

    def __post_init__(self) -> None:
        positive_number("mu", self.mu, "sensitivity / noise std")

    def delta(self, epsilon: float) -> float:
        """Smallest δ at this ε >= 0."""
        if not (isinstance(epsilon, Real) and 0.0 <= epsilon < math.inf):
            raise InputError("privacy.epsilon", epsilon, "a finite number >= 0", "try 1")
        return math.exp(_log_delta(epsilon, self.mu))

    def epsilon(self, delta: float) -> float:
        """Smallest ε >= 0 at this δ."""
        from scipy.optimize import brentq

        if not (isinstance(delta, Real) and 0.0 < delta < 1.0):
            raise InputError("privacy.delta", delta, "in (0, 1)", "try 1e-6")
        target = math.log(delta)
        if _log_delta(0.0, self.mu) <= target:
            return 0.0

        def excess(epsilon: float) -> float:
            return max(_log_delta(epsilon, self.mu), -1e6) - target

        high = 0.5 * self.mu**2 + self.mu * math.sqrt(2.0 * math.log(1.0 / delta)) + 1e-12
        while excess(high) > 0.0:
            high *= 2.0
        return float(brentq(excess, 0.0, high, xtol=1e-300, rtol=_RTOL, maxiter=500))

    @overload
    def trade_off(self, alpha: float) -> float: ...
    @overload
    def trade_off(self, alpha: Floats) -> Floats: ...
    def trade_off(self, alpha: float | Floats) -> float | Floats:
        """Least miss rate of any test that tells neighbours apart with false-alarm rate α."""
        from scipy.special import ndtr, ndtri

        beta = ndtr(-ndtri(np.asarray(alpha, dtype=np.float64)) - self.mu)
        return float(beta) if np.ndim(alpha) == 0 else np.asarray(beta, dtype=np.float64)


def mu_for(epsilon: float, delta: float) -> float:
    """Largest μ whose curve passes (ε, δ): the least noise is Δ/μ."""
    from scipy.optimize import brentq

    near_one = delta > 0.5
    target = math.log1p(-delta) if near_one else math.log(delta)

    def excess(log_mu: float) -> float:
        mu = math.exp(log_mu)
        if near_one:
            return target - _log_complement(epsilon, mu)
        return max(_log_delta(epsilon, mu), -1e6) - target

    # μ >= δ always, since δ(ε) <= δ(0) <= μ/√(2π).
    low, high = math.log(delta), math.log(math.sqrt(2.0 * epsilon) + 20.0)
    while excess(high) < 0.0:
        high += 1.0
    mu = math.exp(float(brentq(excess, low, high, xtol=1e-12, rtol=_RTOL, maxiter=500)))
    for _ in range(3):  # Newton to the last bit: dδ/dμ = φ(a)
        a = epsilon / mu - 0.5 * mu
        slope = mu * math.exp(-0.5 * a * a - _LOG_SQRT_2PI - target)
        mu -= mu * excess(math.log(mu)) / slope
    return mu
