"""What theory says about a transcript: its covariance, and how far one client moves it.

The messages of a run are prefixes at round ends, Y = A_R·G + B_R·ξ, with A_R and B_R the rows of A
and B = A·N at the last step of each round. Coordinates are iid, so with all gradients known the
columns of Y - A_R·G are iid N(0, Σ), Σ = V²·B_R·B_Rᵀ. A client at step j whose gradient moves by
Δg along one direction moves that direction's column by a_j·Δg, a_j = A_R·e_j. The best test between
the two has the separation d'_j = |Δg|·√(a_jᵀ·Σ⁻¹·a_j): this is the μ of that client.

With one step a round, B is square and A = B·C, so a_jᵀΣ⁻¹a_j = ‖c_j‖²/V²: the promise itself. With
more, steps inside a round are not sent, and the transcript tells less than the promise allows for.
N is read from the program that runs, so a mechanism with more rows in its published C than are
drawn (`tree_online`) is taken for what it sends.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cholesky, solve_triangular

from veilstream.errors import InputError
from veilstream.mechanisms.participation import ONCE, Participation

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Law:
    """Of R messages and the clients behind them."""

    shifts: Floats
    """(R, m): what client k moves the messages by, when its gradients move by one."""
    reach: float
    """How far a gradient can move between neighbours: 2·B_g, or B_g."""
    claim: float
    covariance: Floats | None = None
    """Σ of a column; None where nothing is known but the promise."""

    @property
    def rounds(self) -> int:
        """R."""
        return len(self.shifts)

    @cached_property
    def root(self) -> Floats | None:
        """Lower-triangular L with L·Lᵀ = Σ."""
        if self.covariance is None:
            return None
        root: Floats = cholesky(self.covariance, lower=True)
        return root

    @cached_property
    def expected(self) -> Floats | None:
        """d'_k of every client, in what is sent."""
        if self.root is None:
            return None
        white = solve_triangular(self.root, self.shifts, lower=True)
        separations: Floats = self.reach * np.sqrt((white**2).sum(axis=0))
        return separations

    @cached_property
    def worst(self) -> int:
        """The client that is told apart most easily; known before anything is measured."""
        if self.expected is None:
            return int(np.argmax((self.shifts**2).sum(axis=0)))
        return int(np.argmax(self.expected))

    def likelihood_ratio(self, client: int) -> Floats:
        """Weights of the best linear statistic, Σ⁻¹·a, scaled to unit variance."""
        if self.root is None:
            raise InputError("law", None, "a covariance", "without one, learn the weights")
        white = solve_triangular(self.root, self.shifts[:, client], lower=True)
        weights: Floats = solve_triangular(self.root, white, lower=True, trans="T")
        return weights / np.linalg.norm(white)


def patterns(horizon: int, participation: Participation = ONCE) -> list[tuple[int, ...]]:
    """Steps at which one client comes: as often as allowed, as close together as allowed.

    For one visit these are all there are. For more they are some of them, so what is found is a
    lower bound.
    """
    k, apart = participation.times, participation.min_separation
    return [tuple(range(first, min(first + k * apart, horizon), apart)) for first in range(horizon)]


def law_of(
    noising_matrix: Floats,
    *,
    std: float,
    reach: float,
    claim: float,
    local_steps: int = 1,
    participation: Participation = ONCE,
) -> Law:
    """Of a mechanism with increments V·N·ξ that sends every ``local_steps``-th prefix."""
    T = len(noising_matrix)
    ends = np.arange(local_steps - 1, T, local_steps)
    decoder = np.cumsum(noising_matrix, axis=0)[ends] * std
    sums = (np.arange(T)[None, :] <= ends[:, None]).astype(np.float64)
    shifts = np.stack([sums[:, list(steps)].sum(axis=1) for steps in patterns(T, participation)], axis=1)
    return Law(shifts, reach, claim, decoder @ decoder.T)
