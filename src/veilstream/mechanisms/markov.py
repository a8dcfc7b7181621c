"""From a Gram matrix X = CᵀC to causal noise, in O(T) steps and without forming X.

X is given as the covariance of y_t = weights · x_t, where x is a vector of Markov chains that run
**backwards** in time:

    x_{T-1} ~ N(0, diag(start)),   x_{t-1} = decay_t ∘ x_t + N(0, diag(fresh_t)).

Any square root of X gives the same noise law (PAPER: B = A·C⁺); the one wanted is lower
triangular, X = CᵀC with C and N = C⁻¹ causal. Along reversed time that is the innovations form of
y, which the Kalman filter with exact observations yields; transposing its whitening recurrence
turns time round again and gives the steps of N.

State directions that the increments cannot see are dropped on the way: N has Hankel blocks of low
numerical rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from veilstream.mechanisms.steps import VaryingSteps

__all__ = ["BackwardChains", "causal_noise"]

Floats = NDArray[np.float64]
Tick = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class BackwardChains:
    """m independent chains whose weighted sum has covariance X."""

    weights: Floats  # (m,)
    start: Floats  # (m,) variances at t = T-1
    decay: Floats  # (T, m); row t leads from t to t-1, row 0 is not used
    fresh: Floats  # (T, m); likewise


@dataclass(frozen=True, eq=False)
class _Whitener:
    """Steps of N before reduction: transition_t = diag(decay_t) - weights·gain_tᵀ."""

    decay: Floats
    weights: Floats
    gain: Floats  # (T, m)
    feed: Floats  # (T,)


def _innovations(chains: BackwardChains) -> _Whitener:
    T, m = chains.decay.shape
    h = chains.weights
    gain = np.zeros((T, m))
    feed = np.empty(T)
    covariance = np.diag(chains.start)
    for t in range(T - 1, -1, -1):
        seen = covariance @ h
        variance = float(h @ seen)
        feed[t] = variance**-0.5
        if t:
            decay = chains.decay[t]
            gain[t] = decay * seen / variance
            covariance -= np.outer(seen, seen) / variance
            covariance *= decay[:, None]
            covariance *= decay
            covariance.flat[:: m + 1] += chains.fresh[t]
    return _Whitener(chains.decay, h, gain, feed)


def causal_noise(
    chains: BackwardChains, tolerance: float = 3e-8, tick: Tick = lambda _: None
) -> VaryingSteps:
    """Steps of N = C⁻¹ with CᵀC = X, of the least order that loses at most ``tolerance``.

    The states of the result are uncorrelated with variance one. ``tolerance`` bounds, relative to
    an increment's own fresh part, the standard deviation of what a dropped direction would have
    added to all later increments together. ``tick`` is called with each finished step.
    """
    full = _innovations(chains)
    T, m = full.gain.shape
    h = full.weights

    def move(t: int, columns: Floats) -> Floats:
        moved: Floats = full.decay[t][:, None] * columns - np.outer(h, full.gain[t] @ columns)
        return moved

    # Backwards: R_t with R_tᵀR_t the Gramian of what states at t do to increments t..T-1.
    watched: list[Floats] = [np.zeros((0, m))] * (T + 1)
    for t in range(T - 1, 0, -1):
        later = watched[t + 1]
        # transition_tᵀ applied to the rows of R_{t+1}
        moved = later * full.decay[t] - np.outer(later @ h, full.gain[t])
        R = np.linalg.qr(np.vstack([moved, full.gain[t]]), mode="r")
        keep = np.abs(R).max(axis=1) > 1e-17 * max(np.abs(R).max(), 1e-300)
        watched[t] = R[keep]
        tick(1)

    # Forwards: keep, at each step, the directions of [S; z] that will still be seen.
    basis = np.zeros((m, 0))
    outputs: list[Floats] = []
    moves: list[Floats] = []
    for t in range(T):
        outputs.append(-(full.gain[t] @ basis))
        candidates = np.hstack([move(t, basis), (h * full.feed[t])[:, None]])
        _, size, V = np.linalg.svd(watched[t + 1] @ candidates, full_matrices=False)
        moves.append(V[size > tolerance * full.feed[t]])
        basis = candidates @ moves[-1].T
        tick(1)
    return VaryingSteps.from_ragged(outputs, moves, full.feed)
