"""The paper's accounting: zero-concentrated differential privacy (lem-priv-analy).

Valid and loose: at (2, 1e-3) its noise really gives ε = 1.365. For comparison and reproduction.
"""

from __future__ import annotations

import math

__all__ = ["mu_for"]


def mu_for(epsilon: float, delta: float) -> float:
    """Μ = Δ/V of the paper's V² = Δ²/(2ρ), with the exact ρ of lem-priv-analy."""
    tail = math.log(1.0 / delta)
    # √(ε + ln 1/δ) - √(ln 1/δ), without cancellation
    root_rho = epsilon / (math.sqrt(epsilon + tail) + math.sqrt(tail))
    return math.sqrt(2.0) * root_rho
