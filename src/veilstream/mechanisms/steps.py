"""Noise as a recurrence: linear state-space models of the noising matrix N = C⁻¹.

At step s, with k state vectors S (k×d) and one fresh standard normal vector z (1×d):

    w  = output_s · S + feed_s · z          the increment (b_s - b_{s-1})·ξ of eq-comp-alg
    S' = transition_s · S + entry_s · z

`Steps` objects are exact (float64). `veilstream.mechanisms.program` multiplies L of them together
and rounds the product to the float32 block that really runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Steps(Protocol):
    """What a mechanism supplies: its recurrence, as blocks of any length."""

    def surviving(self, length: int) -> slice:
        """Which state vectors can be nonzero at the boundaries of blocks of this length."""

    def kind(self, start: int, length: int) -> Hashable:
        """Blocks of one kind have one matrix; it is built once."""

    def block(self, start: int, length: int) -> Floats:
        """Matrix M of shape (length + k, k + length) with [W; S'] = M · [S; Z], all k states."""


def _compose(transition: Floats, entry: Floats, output: Floats, feed: Floats, length: int) -> Floats:
    """Multiply ``length`` steps (each array has the step as its first axis) into one block."""
    k = transition.shape[-1]
    block = np.zeros((length + k, k + length))
    state = np.zeros((k, k + length))
    state[:, :k] = np.eye(k)
    for t in range(length):
        block[t] = output[t] @ state
        block[t, k + t] += feed[t]
        state = transition[t] @ state
        state[:, k + t] += entry[t]
    block[length:] = state
    return block


@dataclass(frozen=True, eq=False)
class ConstantSteps:
    """The same step for ever: Toeplitz noise."""

    transition: Floats  # (k, k)
    entry: Floats  # (k,)
    output: Floats  # (k,)
    feed: float

    def surviving(self, length: int) -> slice:  # noqa: D102
        return slice(0, len(self.entry))

    def kind(self, start: int, length: int) -> Hashable:  # noqa: D102
        return length

    def block(self, start: int, length: int) -> Floats:  # noqa: D102
        def same(a: Floats) -> Floats:
            return np.broadcast_to(a, (length, *a.shape))

        feed = np.full(length, self.feed)
        return _compose(same(self.transition), same(self.entry), same(self.output), feed, length)


@dataclass(frozen=True, eq=False)
class EpochSteps:
    """One constant step after the other, each from its start on and from a state of zero."""

    starts: tuple[int, ...]  # First step of each epoch; the first is 0
    epochs: tuple[ConstantSteps, ...]  # All with as many state vectors

    def surviving(self, length: int) -> slice:  # noqa: D102
        return slice(0, len(self.epochs[0].entry))

    def _epochs_of(self, start: int, length: int) -> tuple[tuple[int, bool], ...]:
        """Of each step: which epoch it is in, and whether it is the first one."""
        steps = range(start, start + length)
        within = [bisect_right(self.starts, step) - 1 for step in steps]
        return tuple((e, self.starts[e] == step) for e, step in zip(within, steps, strict=True))

    def kind(self, start: int, length: int) -> Hashable:  # noqa: D102
        return self._epochs_of(start, length)

    def block(self, start: int, length: int) -> Floats:  # noqa: D102
        each = [(self.epochs[e], 0.0 if new else 1.0) for e, new in self._epochs_of(start, length)]
        return _compose(
            np.array([kept * steps.transition for steps, kept in each]),
            np.array([steps.entry for steps, _ in each]),
            np.array([kept * steps.output for steps, kept in each]),
            np.array([steps.feed for steps, _ in each]),
            length,
        )


@dataclass(frozen=True, eq=False)
class VaryingSteps:
    """A step of its own at every time: dense optima."""

    transition: Floats  # (T, k, k)
    entry: Floats  # (T, k)
    output: Floats  # (T, k)
    feed: Floats  # (T,)

    @classmethod
    def from_ragged(cls, outputs: list[Floats], moves: list[Floats], feed: Floats) -> VaryingSteps:
        """Steps whose state size changes: ``moves[t]`` maps [S; z] at t to S at t+1."""
        T, k = len(moves), max(len(move) for move in moves)
        steps = cls(np.zeros((T, k, k)), np.zeros((T, k)), np.zeros((T, k)), feed)
        for t, (output, move) in enumerate(zip(outputs, moves, strict=True)):
            before, after = len(output), len(move)
            steps.output[t, :before] = output
            steps.transition[t, :after, :before] = move[:, :before]
            steps.entry[t, :after] = move[:, before]
        return steps

    def surviving(self, length: int) -> slice:  # noqa: D102
        return slice(0, self.entry.shape[1])

    def kind(self, start: int, length: int) -> Hashable:  # noqa: D102
        return start, length

    def block(self, start: int, length: int) -> Floats:  # noqa: D102
        s = slice(start, start + length)
        return _compose(self.transition[s], self.entry[s], self.output[s], self.feed[s], length)


@dataclass(frozen=True, eq=False)
class TreeSteps:
    """Binary tree over prefix sums; state vector i is the live node of level i.

    Step m (1-based) closes a node of level v = number of trailing zeros of m. Its estimate is
    ``gain[v]·z + Σ_{i<v} carry[v, i]·S_i``; it replaces the live nodes below it. The plain tree
    has gain 1 and carry 0: the node's own noise. The node of the top level is never replaced, so
    it needs no state.
    """

    gain: Floats  # (levels,)
    carry: Floats  # (levels, levels), strictly lower triangular

    def surviving(self, length: int) -> slice:  # noqa: D102
        levels = len(self.gain) - 1
        # At multiples of 2^p no node below level p is live.
        lowest = length.bit_length() - 1 if length & (length - 1) == 0 else 0
        return slice(min(lowest, levels), levels)

    def kind(self, start: int, length: int) -> Hashable:  # noqa: D102
        return tuple(_trailing_zeros(m) for m in range(start + 1, start + length + 1))

    def block(self, start: int, length: int) -> Floats:  # noqa: D102
        k = len(self.gain) - 1
        nodes = np.eye(k + 1, k + length)
        nodes[k] = 0.0
        rows = np.zeros((length, k + length))
        for t in range(length):
            v = _trailing_zeros(start + t + 1)
            closed = self.carry[v, :v] @ nodes[:v]
            closed[k + t] += self.gain[v]
            rows[t] = closed - nodes[:v].sum(axis=0)
            nodes[:v] = 0.0
            nodes[v] = closed
        return np.vstack([rows, nodes[:k]])


def _trailing_zeros(m: int) -> int:
    return (m & -m).bit_length() - 1
