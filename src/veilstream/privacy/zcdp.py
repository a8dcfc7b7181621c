"""The paper's accounting: zero-concentrated differential privacy (lem-priv-analy).

Valid and loose: at (2, 1e-3) its noise really gives ε = 1.365. For comparison and reproduction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

from veilstream.errors import InputError
from veilstream.mechanisms.checks import positive_number


@dataclass(frozen=True, slots=True)
class ZcdpCurve:
    """What the paper's formula says of noise with μ = sensitivity / std: an upper bound on ε.

    ρ = μ²/2, and ε = ρ + 2·√(ρ·ln 1/δ), the inverse of `mu_for`.
    """

    mu: float

    def __post_init__(self) -> None:
        positive_number("mu", self.mu, "sensitivity / noise std")

    @property
    def rho(self) -> float:
        """Zero-concentrated differential privacy with this ρ."""
        return 0.5 * self.mu**2

    def epsilon(self, delta: float) -> float:
        """The formula's ε at this δ."""
        if not (isinstance(delta, Real) and 0.0 < delta < 1.0):
            raise InputError("privacy.delta", delta, "in (0, 1)", "try 1e-6")
        return self.rho + 2.0 * math.sqrt(self.rho * math.log(1.0 / delta))

    def delta(self, epsilon: float) -> float:
        """The formula's δ at this ε; 1, which promises nothing, where ε <= ρ."""
        if not (isinstance(epsilon, Real) and 0.0 <= epsilon < math.inf):
            raise InputError("privacy.epsilon", epsilon, "a finite number >= 0", "try 1")
        beyond = max(0.0, epsilon - self.rho)
        return math.exp(-(beyond**2) / (4.0 * self.rho))


def mu_for(epsilon: float, delta: float) -> float:
    """Μ = Δ/V of the paper's V² = Δ²/(2ρ), with the exact ρ of lem-priv-analy."""
    tail = math.log(1.0 / delta)
    # √(ε + ln 1/δ) - √(ln 1/δ), without cancellation
    root_rho = epsilon / (math.sqrt(epsilon + tail) + math.sqrt(tail))
    return math.sqrt(2.0) * root_rho
