"""Sums over learners of rounded noise: why a sum is as private as one Gaussian release, and what that costs.

Learner j adds n_j = round(W_j) to its gradients on the grid, in every coordinate, where W_j is the prefix
noise of all T steps: independent over learners, N(0, Σ) with Σ = V²·B·Bᵀ in units of the grid. The server
sees Σ_j n_j + Σ_j G_j for the h learners whose noise nobody else knows.

**Lemma.** Let D_1 … D_{h-1} be independent and uniform on [-½, ½)^T. For every outcome, the probability of
Σ_j round(W_j) lies within a factor 1 ± η of that of round(Σ_j W_j + Σ_j D_j), with

    η = (Σ_{k∈ℤ} e^{-2π²·λ·k²/h})^{(h-1)·T} - 1,      λ the least eigenvalue of Σ.

*Proof.* Given s = Σ_j W_j, the vectors W_1 … W_{h-1} are Gaussian with covariance Σ ⊗ (I - 11ᵀ/h), whose least
eigenvalue is λ/h. Modulo one, their density is Σ_k φ(2πk)·e^{2πi⟨k, ·⟩} over k ∈ ℤ^{(h-1)T} (Poisson summation),
with |φ(2πk)| <= e^{-2π²·λ·|k|²/h}: within 1 ± η of uniform at every point. With W_j + D_j the nearest whole
numbers to W_j, Σ_j round(W_j) = Σ_{j<h} (W_j + D_j) + round(s - Σ_{j<h} W_j) = round(s + Σ_{j<h} D_j), since whole
numbers pass through rounding. So given s the two laws differ by that factor at most, and hence without it. ∎

Whole numbers G(past) pass through the rounding too, also where they depend on what was released before: each
outcome's probability is compared by itself. So up to (1 ± η) a coordinate, what is seen is a function of the
Gaussian release ΣG + ΣW and of uniform numbers that depend on nothing: the Gaussian mechanism with V·√h.

The h learners are fixed above, while the server chooses each round's set by what it has seen. Given all that is outside
the core, a sequence of outcomes decides every set, and so the core that it ends with; its probability is compared by
itself, as above.

**λ.** Since A = B·C, |Bᵀx| >= |Aᵀx| / ‖C‖ >= |x| / (2·‖C‖), and ‖C‖² <= T·max‖c_j‖². Hence
λ >= V² / (4·T·max‖c_j‖²), in units of the grid. V is at least 2^17 units, so this is large.

**Arithmetic.** Prefixes are linear in their draws up to rounding errors that earlier draws decide
(`privacy.noise_law`). Learner by learner that is an adaptive shift of Gaussian draws, of length at most
`charge.mu / 2`; of all h together √h·charge.mu / 2. From real sums to ideal ones, over to the neighbour and back to
real sums is a chain of Gaussian shifts, whose lengths add up (Dong, Roth and Su 2022, Theorem 2): √h·charge.mu more
in μ.
"""

from __future__ import annotations

import math

from veilstream.errors import InputError
from veilstream.mask_graph import SMALL
from veilstream.privacy.guarantee import Budget, SumTrust

_NEGLIGIBLE = 1e-60  # beside any δ


def log_rounding_ratio(least: float, learners: int, steps: int) -> float:
    """ln(1 + η) of the lemma: λ = ``least`` in grid units, h = ``learners``, T = ``steps``."""
    fall = 2.0 * math.pi**2 * least / learners
    total, k = 0.0, 1
    while (term := 2.0 * math.exp(-fall * k * k)) > 1e-18 * total:
        total, k = total + term, k + 1
    return (learners - 1.0) * steps * math.log1p(total)


def beside_graph(budget: Budget, trust: SumTrust | None) -> Budget:
    """What is left of a budget for noise beside the graph on which learners share masks (`mask_graph`).

    Where the graph fails nothing is claimed, in either world alike: its probability, which data do not change, is taken
    from δ as it is.

    Raises:
        InputError: for a δ that is not far above that.

    """
    failure = 0.0 if trust is None else trust.graph_failure
    if not failure:
        return budget
    if not failure < 0.5 * budget.delta:
        raise InputError(
            "privacy.delta",
            budget.delta,
            f"more than {2.0 * failure:.1g}: with so many learners each masks with some others, and colluding ones may "
            "be all around one of them",
            f"a larger delta, fewer federation.epochs, colluding = 0, or at most {SMALL} learners",
        )
    return Budget(budget.epsilon, budget.delta - failure)


def sum_tail(trust: SumTrust, horizon: int, dim: int, scale: float, column: float) -> float:
    """What the lemma's factor may add to δ, in either world: (1 + η)^dim - 1.

    Args:
        trust: whose noise is summed; every number of them up to all learners is covered.
        horizon: T, steps.
        dim: coordinates of a release.
        scale: V of one learner, in units of the grid.
        column: largest norm of a column of C.

    Raises:
        InputError: where noise is too small beside the grid, or a run too long, for the lemma to be of use.

    """
    least = scale**2 / (4.0 * horizon * column**2)
    ratio = dim * log_rounding_ratio(least, trust.learners, horizon)
    if not ratio < _NEGLIGIBLE:
        raise InputError(
            "learning.rounds",
            horizon,
            f"few enough for sums over {trust.learners} learners to hide how each one was rounded",
            'fewer rounds, or trust = "each"',
        )
    return math.expm1(ratio)
