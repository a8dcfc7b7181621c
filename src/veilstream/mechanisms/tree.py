"""Binary trees over the steps: MF (i) as the paper has it, and two better decoders.

Nodes are dyadic intervals. Prefix sum m (1-based) adds the nodes of m's binary digits, so the
only nodes that a prefix ever uses are (m - lowbit(m), m]: one per step. C is square, 0/1 and
lower triangular; column 1 lies in the nodes 1, 2, 4, ...: ‖c‖² = floor(log2 T) + 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from veilstream.mechanisms.analysis import check_dense
from veilstream.mechanisms.checks import checked_horizon
from veilstream.mechanisms.factorization import Factorization
from veilstream.mechanisms.markov import BackwardChains, causal_noise
from veilstream.mechanisms.steps import TreeSteps

Floats = NDArray[np.float64]


def tree(horizon: int) -> Factorization:
    """The paper's tree (eq-bc) without the nodes that no prefix sum uses.

    Args:
        horizon: number of steps T = R·τ.

    Returns:
        The factorization, with its noise program.

    Raises:
        InputError: for a horizon that is not a whole number from 1.

    """
    T = checked_horizon(horizon)
    levels = T.bit_length()
    return Factorization("tree", T, TreeSteps(np.ones(levels), np.zeros((levels, levels))))


def tree_online(horizon: int) -> Factorization:
    """The tree with Honaker's online estimator: each closed node is averaged with its subtree.

    A closed node of level v is estimated by a_v times its own noisy sum plus (1 - a_v) times the
    estimates of its two halves. The weight a_v = 2^v / (2^(v+1) - 1) minimises the variance, which
    is then a_v too. All complete nodes carry noise, so the published sensitivity is that
    of the plain tree, floor(log2 T) + 1, and it is what `sensitivity` reports. The right halves
    are never seen alone: one fresh draw a step has the law of them all, and the sensitivity of
    that law, `released_sensitivity`, is smaller.

    Args:
        horizon: number of steps T = R·τ.

    Returns:
        The factorization, with its noise program.

    Raises:
        InputError: for a horizon that is not a whole number from 1.

    """
    T = checked_horizon(horizon)
    levels = T.bit_length()
    own = _own_weights(levels)
    gain = np.zeros(levels)
    carry = np.zeros((levels, levels))
    for v in range(levels):
        # Weight of the level-i node on the right edge of a level-v node.
        passed = np.array([np.prod(1.0 - own[i + 1 : v + 1]) for i in range(v + 1)])
        gain[v] = np.sqrt(np.sum((passed * own[: v + 1]) ** 2))
        carry[v, :v] = passed[:v]
    return _OnlineTree("tree_online", T, TreeSteps(gain, carry))


def _own_weights(levels: int) -> Floats:
    """Weight a_v of a node's own noisy sum: V_v of inverse-variance weighting."""
    variance = np.empty(levels)
    variance[0] = 1.0
    for v in range(1, levels):
        variance[v] = 1.0 / (1.0 + 1.0 / (2.0 * variance[v - 1]))
    return variance


class _OnlineTree(Factorization):
    """`tree_online` as published: C has a row for every complete node."""

    def column_norms_squared(self) -> Floats:
        steps = np.arange(self.horizon)
        count = np.zeros(self.horizon)
        for level in range(self.horizon.bit_length()):
            count += ((steps >> level) + 1) << level <= self.horizon
        return count

    def released_sensitivity(self) -> float:
        """Sensitivity of the noise law that is really sent, without the unseen right halves."""
        return float(np.sqrt(Factorization.column_norms_squared(self).max()))

    def _nodes(self) -> list[tuple[int, int]]:
        """(level, end) of every complete node, in the order in which they close."""
        return [(level, m) for m in range(1, self.horizon + 1) for level in range((m & -m).bit_length())]

    def strategy_matrix(self) -> Floats:
        check_dense(self.horizon)
        nodes = self._nodes()
        C = np.zeros((len(nodes), self.horizon))
        for row, (level, end) in enumerate(nodes):
            C[row, end - (1 << level) : end] = 1.0
        return C

    def decoder_matrix(self) -> Floats:
        check_dense(self.horizon)
        nodes = self._nodes()
        row_of = {node: row for row, node in enumerate(nodes)}
        own = _own_weights(self.horizon.bit_length())
        estimate = np.zeros((len(nodes), len(nodes)))
        for row, (level, end) in enumerate(nodes):
            estimate[row, row] = own[level]
            if level:
                halves = row_of[level - 1, end - (1 << (level - 1))], row_of[level - 1, end]
                estimate[row] += (1.0 - own[level]) * estimate[list(halves)].sum(axis=0)
        B = np.zeros((self.horizon, len(nodes)))
        for m in range(1, self.horizon + 1):
            lowbit = m & -m
            if m > lowbit:
                B[m - 1] = B[m - lowbit - 1]
            B[m - 1] += estimate[row_of[lowbit.bit_length() - 1, m]]
        return B


def tree_full(horizon: int) -> Factorization:
    """All nodes of the padded tree with the optimal decoder B = A·C⁺, made causal.

    Nodes that reach past the horizon hold partial sums. X = CᵀC counts the nodes that two steps
    share: the covariance of a sum of chains, one a level, each redrawn where its node ends.

    Args:
        horizon: number of steps T = R·τ.

    Returns:
        The factorization, with its noise program.

    Raises:
        InputError: for a horizon that is not a whole number from 1.

    """
    T = checked_horizon(horizon)
    levels = (T - 1).bit_length() + 1
    decay = np.ones((T, levels))
    for level in range(levels):
        decay[:: 1 << level, level] = 0.0  # going down from t, level's node ends at its first step
    chains = BackwardChains(np.ones(levels), np.ones(levels), decay, 1.0 - decay)
    return Factorization("tree_full", T, causal_noise(chains))
