"""From a Gram matrix X = CᵀC to causal noise, in O(T) steps and without forming X.

X is given as the covariance of y_t = weights · x_t, where x is a vector of Markov chains that run
**backwards** in time:

    x_{T-1} ~ N(0, diag(start)),   x_{t-1} = decay_t ∘ x_t + N(0, diag(fresh_t)).

Chains may also be vectors of n numbers (`BlockChains`): decay_t, start and fresh_t are then n×n
matrices of each chain, and the weights depend on the time.

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

Floats = NDArray[np.float64]
Tick = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class BackwardChains:
    """m independent chains whose weighted sum has covariance X."""

    weights: Floats  # (m,)
    start: Floats  # (m,) variances at t = T-1
    decay: Floats  # (T, m); row t leads from t to t-1, row 0 is not used
    fresh: Floats  # (T, m); likewise

    @property
    def shape(self) -> tuple[int, int]:
        """Steps, and numbers of all chains together."""
        return self.decay.shape[0], self.decay.shape[1]

    def seen_by(self, t: int) -> Floats:
        """Weights of all numbers in y_t."""
        return self.weights

    def first_covariance(self) -> Floats:
        """Of x_{T-1}."""
        return np.diag(self.start)

    def carry(self, t: int, columns: Floats) -> Floats:
        """decay_t times columns."""
        carried: Floats = self.decay[t][:, None] * columns
        return carried

    def carry_back(self, t: int, columns: Floats) -> Floats:
        """The transpose of decay_t times columns."""
        return self.carry(t, columns)

    def carry_rows(self, t: int, rows: Floats) -> Floats:
        """Rows times the transpose of decay_t."""
        carried: Floats = rows * self.decay[t]
        return carried

    def move_covariance(self, t: int, covariance: Floats) -> Floats:
        """From t to t-1."""
        decay = self.decay[t]
        covariance *= decay[:, None]
        covariance *= decay
        covariance.flat[:: len(decay) + 1] += self.fresh[t]
        return covariance


@dataclass(frozen=True, eq=False)
class BlockChains:
    """m independent chains of n numbers each; the methods are those of `BackwardChains`."""

    weights: Floats  # (T, m, n)
    start: Floats  # (m, n, n)
    decay: Floats  # (T, m, n, n); row t leads from t to t-1, row 0 is not used
    fresh: Floats  # (T, m, n, n); likewise

    @property
    def shape(self) -> tuple[int, int]:  # noqa: D102
        T, m, n = self.weights.shape
        return T, m * n

    def seen_by(self, t: int) -> Floats:  # noqa: D102
        seen: Floats = self.weights[t].ravel()
        return seen

    def first_covariance(self) -> Floats:  # noqa: D102
        return self._add_blocks(np.zeros((self.shape[1],) * 2), self.start)

    def carry(self, t: int, columns: Floats) -> Floats:  # noqa: D102
        return self._apply(self.decay[t], columns)

    def carry_back(self, t: int, columns: Floats) -> Floats:  # noqa: D102
        return self._apply(self.decay[t].transpose(0, 2, 1), columns)

    def carry_rows(self, t: int, rows: Floats) -> Floats:  # noqa: D102
        return self.carry(t, rows.T).T

    def move_covariance(self, t: int, covariance: Floats) -> Floats:  # noqa: D102
        moved = self.carry(t, self.carry(t, covariance).T)
        return self._add_blocks(0.5 * (moved + moved.T), self.fresh[t])

    @staticmethod
    def _apply(blocks: Floats, columns: Floats) -> Floats:
        m, n, _ = blocks.shape
        applied: Floats = (blocks @ columns.reshape(m, n, -1)).reshape(m * n, -1)
        return applied

    @staticmethod
    def _add_blocks(matrix: Floats, blocks: Floats) -> Floats:
        m, n, _ = blocks.shape
        each = np.arange(m)
        matrix.reshape(m, n, m, n)[each, :, each] += blocks
        return matrix


@dataclass(frozen=True, eq=False)
class _Whitener:
    """Steps of N before reduction: transition_t = decay_tᵀ - seen_t·gain_tᵀ."""

    gain: Floats  # (T, m)
    feed: Floats  # (T,)


def _innovations(chains: BackwardChains | BlockChains) -> _Whitener:
    T, m = chains.shape
    gain = np.zeros((T, m))
    feed = np.empty(T)
    covariance = chains.first_covariance()
    for t in range(T - 1, -1, -1):
        h = chains.seen_by(t)
        seen = covariance @ h
        variance = float(h @ seen)
        if not variance > 0.0:
            raise np.linalg.LinAlgError(f"the Gram matrix is not positive at step {t}")
        feed[t] = variance**-0.5
        if t:
            gain[t] = chains.carry(t, seen[:, None])[:, 0] / variance
            covariance -= np.outer(seen, seen) / variance
            covariance = chains.move_covariance(t, covariance)
    return _Whitener(gain, feed)


def causal_noise(
    chains: BackwardChains | BlockChains, tolerance: float = 3e-8, tick: Tick = lambda _: None
) -> VaryingSteps:
    """Steps of N = C⁻¹ with CᵀC = X, of the least order that loses at most ``tolerance``.

    The states of the result are uncorrelated with variance one. ``tolerance`` bounds, relative to
    an increment's own fresh part, the standard deviation of what a dropped direction would have
    added to all later increments together. ``tick`` is called with each finished step.
    """
    full = _innovations(chains)
    T, m = full.gain.shape

    def move(t: int, columns: Floats) -> Floats:
        seen = np.outer(chains.seen_by(t), full.gain[t] @ columns)
        moved: Floats = chains.carry_back(t, columns) - seen
        return moved

    # Backwards: R_t with R_tᵀR_t the Gramian of what states at t do to increments t..T-1.
    watched: list[Floats] = [np.zeros((0, m))] * (T + 1)
    for t in range(T - 1, 0, -1):
        later = watched[t + 1]
        # transition_tᵀ applied to the rows of R_{t+1}
        moved = chains.carry_rows(t, later) - np.outer(later @ chains.seen_by(t), full.gain[t])
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
        candidates = np.hstack([move(t, basis), (chains.seen_by(t) * full.feed[t])[:, None]])
        _, size, V = np.linalg.svd(watched[t + 1] @ candidates, full_matrices=False)
        moves.append(V[size > tolerance * full.feed[t]])
        basis = candidates @ moves[-1].T
        tick(1)
    return VaryingSteps.from_ragged(outputs, moves, full.feed)
