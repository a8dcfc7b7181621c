"""Terms that several bounds share (lem-u, eq-18)."""

from __future__ import annotations

from veilstream.research.theory.constants import Constants


def local_spread(c: Constants) -> tuple[float, float]:
    """2L² times eq-18, the bound on E‖z - x^r‖²: the part of B_g and the part of the noise."""
    scale = 2 * (c.smoothness * c.step_size) ** 2
    gradients = scale * 2 * (c.local_steps * c.gradient_bound) ** 2
    return gradients, scale * 8 * c.max_row_norm_squared * c.dim * c.noise_std**2


def released_noise(c: Constants) -> float:
    """What x^r - x_ξ^r costs in lem-u, over η̃²."""
    spread = c.round_row_norms_squared * c.dim * c.noise_variance / c.local_steps**2
    return 24 * c.smoothness * (1 + c.regularity) * spread / (c.alpha**2 * c.rounds)


def environment_term(c: Constants) -> float:
    """(1/θ + μ)·C_R/(αR) at θ = α/(12L)."""
    return (12 * c.smoothness + c.alpha * c.mu) * c.path_variation / (c.alpha**2 * c.rounds)
