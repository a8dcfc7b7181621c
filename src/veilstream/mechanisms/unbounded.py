"""Noise for streams without an end.

**With forgetting** (`stationary`). The server keeps x <- ρ·x - step, so what is published is
Σ_j ρ^j g_{t-j}: W has the generating function 1/(1 - ρx). Take C with 1/(1 - ρx)^½, coefficients
h(j)·ρ^j: C and W·C⁻¹ are the same Toeplitz matrix. Its columns, over a time without end, and the
limit of its rows both have the squared norm

    Σ_j h(j)²·ρ^(2j) = (2/π)·K(ρ²)          (K: complete elliptic integral, parameter ρ²),

so sensitivity and error stay what they are, for ever: the variance of what is published, at
sensitivity one, rises to ((2/π)·K(ρ²))² and no further. No stationary mechanism does better: one
whose X = CᵀC has the spectrum S has sensitivity² ∫S and error ∫|W|²/S over frequencies, and by
Cauchy-Schwarz their product is at least (∫|W|)², which S = |W| attains: this C.

Privacy for ever: what T steps send is a function of the first T rows of C·G + ξ. C is lower
triangular, so the norm of a column over those rows is at most the norm over all of them, which is
what `sensitivity` states. It holds for every T at once, hence also where the time to stop is
chosen after looking.

**Without** (`doubling`). Epochs of doubling length, each with fresh noise of its own: C is block
diagonal, and the model goes on from epoch to epoch with all that was learned. A client is in one
epoch, so the sensitivity is the largest of the epochs', one. The noise that an epoch leaves in the
model stays there; after t steps log2(t) epochs have done so, which costs more than a horizon that
is a thousand times too long (docs/workloads.md). It is the choice where no bound on T can be named.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.mechanisms.analysis import inverse_block
from veilstream.mechanisms.buffered import buffered
from veilstream.mechanisms.checks import checked_horizon, positive_integer
from veilstream.mechanisms.factorization import Factorization
from veilstream.mechanisms.participation import Participation
from veilstream.mechanisms.program import ENDLESS, NoiseProgram, compile_program
from veilstream.mechanisms.steps import ConstantSteps, EpochSteps
from veilstream.mechanisms.toeplitz import exponential_sum, relaxation

Floats = NDArray[np.float64]

_EXACT = 1e-9
_LONGEST = 10_000_000  # Steps of C that are looked at for people who return; beyond, a bound is taken


def stationary(forgetting: float) -> StationaryFactorization:
    """Noise that never ends, for a server that forgets; the best that does not change with time.

    Args:
        forgetting: ρ of a *step*, in (0, 1). Of a round of τ steps it is ρ_round^(1/τ).

    Returns:
        A factorization of horizon `ENDLESS`. Sensitivity and error are computed from the float32
        block that runs, over a time without end.

    Raises:
        InputError: for a ρ outside (0, 1): without forgetting, noise must know its end.

    """
    forgetting = _checked_rate(forgetting, "in (0, 1): without forgetting, noise without an end grows")
    memory = max(2, int(np.ceil(40.0 / -np.log(forgetting))))  # ρ^memory < 1e-17
    decays, weights = relaxation(memory, _EXACT)
    steps = exponential_sum(forgetting * decays, forgetting * weights)
    return StationaryFactorization(steps, forgetting)


def _checked_rate(forgetting: object, rule: str) -> float:
    """ρ of a step as a float in (0, 1)."""
    rate = math.nan
    if isinstance(forgetting, numbers.Real) and not isinstance(forgetting, bool):
        rate = float(forgetting)
    if not 0.0 < rate < 1.0:
        raise InputError("forgetting", forgetting, rule, "try 0.999; or `doubling`, or a horizon that is too long")
    return rate


@dataclass(frozen=True, eq=False)
class EndlessProgram(NoiseProgram):
    """One block, for ever; memory does not depend on time."""

    @property
    def blocks(self) -> int:
        """As many as the horizon has; the last one may be short."""
        return -(-self.horizon // self.block_length)

    def matrix(self, block: int) -> NDArray[np.float32]:
        """The one there is; of a last one that is short, its first steps, and no state after."""
        whole, k = self.matrices[0], self.state_size
        _, length = self.span(block)
        if length == self.block_length:
            return whole
        short: NDArray[np.float32] = np.zeros((length + k, k + length), np.float32)
        short[:length] = whole[:length, : k + length]
        return short

    @property
    def endless(self) -> bool:
        """True."""
        return True


class StationaryFactorization(Factorization):
    """See `stationary`: one step, repeated without end."""

    steps: ConstantSteps

    def __init__(self, steps: ConstantSteps, forgetting: float, horizon: int = ENDLESS) -> None:
        super().__init__("stationary", horizon, steps)
        self.forgetting = forgetting

    def __repr__(self) -> str:
        return "<stationary factorization without an end>"

    @cached_property
    def program(self) -> NoiseProgram:
        """One float32 block that repeats."""
        length = 16 if self._block_length is None else self._block_length
        one = compile_program(self.steps, length, length)
        return EndlessProgram(self.horizon, length, one.state_size, one.matrices, one.matrix_of_block)

    def limited(self, horizon: int) -> StationaryFactorization:
        """The same noise at the same memory and sensitivity, refused after so many steps."""
        other = StationaryFactorization(self.steps, self.forgetting, checked_horizon(horizon))
        other._block_length = self._block_length
        return other

    def prefix_variance(self, steps: int) -> float:
        """Variance of the noise in a sum of so many steps, at noise one; O(k²) at any time.

        With weights w and decays λ of N, the sum's kernel is 1 - Σ w·(1 - λ^j)/(1 - λ).
        """
        if steps != 0:
            positive_integer("steps", steps, "of the sum, try 1000; of none it is 0")
        rate = -np.log(self.steps.transition.diagonal())
        reach = -self.steps.output * self.steps.entry / -np.expm1(-rate)
        terms, rates = np.append(reach, 1.0 - reach.sum()), np.append(rate, 0.0)
        pair = rates[:, None] + rates
        safe = np.where(pair == 0.0, 1.0, pair)
        total = np.where(pair == 0.0, float(steps), np.expm1(-steps * safe) / np.expm1(-safe))
        return float(terms @ total @ terms)

    def until(self, horizon: int) -> Factorization:
        """The same noise with an end; its sensitivity, over so many steps, is at most the endless one."""
        length = min(self.program.block_length, checked_horizon(horizon))
        return Factorization("stationary", horizon, self.steps).with_block_length(length)

    @property
    def _inverse_block(self) -> tuple[Floats, Floats, Floats, Floats]:
        return inverse_block(self.program.matrices[0].astype(np.float64), self.program.state_size)

    @cached_property
    def _column_norms_squared(self) -> Floats:
        """Of a column at each place in a block, over all later time."""
        from scipy.linalg import solve_discrete_lyapunov

        H, E, G, F = self._inverse_block
        if not np.abs(np.linalg.eigvals(F)).max(initial=0.0) < 1.0:
            raise InputError(
                "forgetting",
                self.forgetting,
                "columns of C that die out in float32, which a ρ this near to 1 does not give",
                "try 0.99999, or a horizon",
            )
        later = solve_discrete_lyapunov(F.T, E.T @ E)
        norms: Floats = (H**2).sum(axis=0) + np.einsum("kj,kj->j", G, later @ G)
        norms.setflags(write=False)
        return norms

    def _shifted_sensitivity(self, part: Participation) -> float | None:
        """Of C without an end: columns die out, so a long stretch of it has all but 1e-17."""
        _, _, _, F = self._inverse_block
        slowest = float(np.abs(np.linalg.eigvals(F)).max(initial=1e-9))
        # After e^-40, what is left is far below the rounding that is added anyway.
        dying = int(np.ceil(40.0 * self.program.block_length / -np.log(slowest)))
        span = (part.times - 1) * part.min_separation + dying
        if span > _LONGEST:
            return None
        return self.until(span)._shifted_sensitivity(part)

    def row_norms_squared(self) -> Floats:
        """Refused: sums of noise without an end have no bound; see `published_error`."""
        raise InputError(
            "mechanism",
            self.name,
            "a mechanism with an end, for errors of prefix sums",
            "published_error(rho), prefix_variance(steps), or until(horizon)",
        )

    def published_error(self, forgetting: float) -> float:
        """Limit, never exceeded, of the published variance at sensitivity one, of a server that forgets ρ a step."""
        forgetting = _checked_rate(forgetting, "in (0, 1): what forgets nothing has no limit")
        from scipy.linalg import solve_discrete_lyapunov

        M = self.program.matrices[0].astype(np.float64)
        k, length = self.program.state_size, self.program.block_length
        # [S; x] from block to block, and x after each step of one.
        x = np.zeros((length + 1, k + 1 + length))
        x[0, k] = 1.0
        for t in range(length):
            x[t + 1] = forgetting * x[t]
            x[t + 1, :k] += M[t, :k]
            x[t + 1, k + 1 :] += M[t, k:]
        move = np.zeros((k + 1, k + 1))
        move[:k, :k] = M[length:, :k]
        move[k] = x[-1, : k + 1]
        entry = np.vstack([M[length:, k:], x[-1, k + 1 :]])
        covariance = solve_discrete_lyapunov(move, entry @ entry.T)
        rows = x[1:]
        held = np.einsum("tk,tk->t", rows[:, : k + 1] @ covariance, rows[:, : k + 1])
        worst = float((held + (rows[:, k + 1 :] ** 2).sum(axis=1)).max())
        return worst * self.sensitivity() ** 2


def doubling(horizon: int, *, first: int = 64, growth: int = 2, buffers: int = 5) -> Factorization:
    """Epochs of ``first``, 2·``first``, 4·``first``, ... steps, each with fresh buffered noise.

    What the first t steps do does not depend on the horizon: it may be extended at any time.

    Args:
        horizon: number of steps T.
        first: steps of the first epoch.
        growth: how many times longer the next one is; a larger one leaves less noise behind, and
            makes more of it early in an epoch.
        buffers: k of every epoch's `buffered`.

    Returns:
        The factorization, with its noise program.

    Raises:
        InputError: for a number that is not a whole number from 1.

    """
    T = checked_horizon(horizon)
    length = positive_integer("first", first, "steps of the first epoch, try 64")
    factor = positive_integer("growth", growth, "2 doubles; try 16")
    starts, epochs = [], []
    at = 0
    while at < T:
        starts.append(at)
        epochs.append(buffered(length, buffers))
        at, length = at + length, factor * length
    width = max(len(_constant(e).entry) for e in epochs)
    steps = EpochSteps(tuple(starts), tuple(_widened(_constant(e), width) for e in epochs))
    scale = np.concatenate([_scale(e) for e in epochs])[:T]
    return Factorization("doubling", T, steps, row_scale=scale)


def without_end(forgetting: float, horizon: int) -> Factorization:
    """The noise of a plan with unbounded rounds: `stationary` where the server forgets, else `doubling`."""
    return stationary(forgetting) if forgetting < 1.0 else doubling(horizon)


def _constant(epoch: Factorization) -> ConstantSteps:
    assert isinstance(epoch.steps, ConstantSteps)
    return epoch.steps


def _scale(epoch: Factorization) -> NDArray[np.float32]:
    scale = epoch.program.row_scale
    assert scale is not None
    return scale


def _widened(steps: ConstantSteps, k: int) -> ConstantSteps:
    more = k - len(steps.entry)
    return ConstantSteps(
        np.pad(steps.transition, (0, more)), np.pad(steps.entry, (0, more)), np.pad(steps.output, (0, more)), steps.feed
    )
