"""Mechanisms side by side at one budget: the numbers behind `veilstream plan`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.mechanisms import MECHANISMS, ONCE, Factorization, Participation, build
from veilstream.mechanisms.checks import positive_integer
from veilstream.mechanisms.normals import TILE
from veilstream.privacy import Accounting, Budget, Guarantee, Neighbours, calibrate

__all__ = ["LONG_HORIZON", "Comparison", "Row", "Setting", "compare"]

LONG_HORIZON = 20_000
"""Above this, mechanisms that solve for every step are left out unless asked for by name."""
_SOLVED = ("optimal", "tree_full")
_CLOSE = 1.02
"""Errors this close count as equal; the cheaper mechanism is then recommended."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is planned: one run of Algorithm 1."""

    budget: Budget
    rounds: int
    local_steps: int
    clip_norm: float
    learners: int = 1
    dim: int = 1
    neighbours: Neighbours = Neighbours.REPLACE_ONE
    participation: Participation = ONCE
    accounting: Accounting = Accounting.EXACT

    def __post_init__(self) -> None:
        positive_integer("rounds", self.rounds, "R, try 1000")
        positive_integer("local_steps", self.local_steps, "τ, try 4")
        positive_integer("learners", self.learners, "n, try 20")
        positive_integer("dim", self.dim, "d, the number of model parameters")

    @property
    def horizon(self) -> int:
        """T = R·τ."""
        return self.rounds * self.local_steps


@dataclass(frozen=True, kw_only=True)
class Row:
    """One mechanism in a setting.

    Errors are standard deviations per coordinate of the noise in the learners' averaged prefix
    sums, in units of the gradients.
    """

    mechanism: str
    guarantee: Guarantee
    sensitivity: float
    noise_std: float
    error_max: float
    error_mean: float
    error_round_ends: float
    relative_to_independent: float
    """error_round_ends over that of independent noise at the same promise."""
    state_vectors: int
    state_bytes: int
    seconds_per_step: float
    error_over_time: NDArray[np.float64]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; without the curve over time."""
        names = (
            "mechanism", "sensitivity", "noise_std", "error_max", "error_mean", "error_round_ends",
            "relative_to_independent", "state_vectors", "state_bytes", "seconds_per_step",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names} | {
            "guarantee": self.guarantee.as_dict()
        }


@dataclass(frozen=True)
class Comparison:
    """All rows, the recommended one first."""

    setting: Setting
    rows: tuple[Row, ...]
    reason: str
    left_out: tuple[str, ...]

    @property
    def recommended(self) -> Row:
        """The mechanism to use."""
        return self.rows[0]


def compare(
    setting: Setting,
    names: Sequence[str] | None = None,
    *,
    options: dict[str, Any] | None = None,
    tick: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Build and calibrate mechanisms; ``tick`` is called with each name before its turn."""
    left_out: tuple[str, ...] = ()
    if names is None:
        names = tuple(MECHANISMS)
        if setting.horizon > LONG_HORIZON:
            left_out = _SOLVED
            names = tuple(name for name in names if name not in left_out)
    if not names:
        raise InputError("mechanism", names, "at least one name", "try optimal")
    baseline = _measure(build("independent", setting.horizon), setting, None)
    rows = []
    for name in names:
        tick(name)
        factorization = build(name, setting.horizon, **(options or {}))
        rows.append(_measure(factorization, setting, baseline))
    best = min(row.error_round_ends for row in rows)
    # Every mechanism makes its increments from one fresh draw a step; the state sets the rest.
    good = [row for row in rows if row.error_round_ends <= _CLOSE * best]
    chosen = min(good, key=lambda row: (row.state_vectors, row.error_round_ends))
    others = sorted((r for r in rows if r is not chosen), key=lambda r: r.error_round_ends)
    return Comparison(setting, (chosen, *others), _reason(chosen, best, rows), left_out)


def _reason(chosen: Row, best: float, rows: Sequence[Row]) -> str:
    if len(rows) == 1:
        return "the only one asked for"
    gain = chosen.relative_to_independent
    against = (
        "independent noise does as well here"
        if gain >= 0.999
        else f"{1 / gain:.1f}x less noise in the released model than independent noise"
    )
    if chosen.error_round_ends <= best * (1 + 1e-9):
        return f"least error at round ends: {against}"
    excess = 100 * (chosen.error_round_ends / best - 1)
    return (
        f"within {excess:.1f}% of the least error at round ends with the smallest state "
        f"({chosen.state_vectors} vectors): {against}"
    )


def _seconds_per_step(factorization: Factorization, dim: int) -> float:
    """A few blocks, timed on this machine: good for comparing, not for benchmarking."""
    timed = min(dim, 2 * TILE)
    stream = factorization.noise(dim=timed, seed=0)
    best = math.inf
    for _ in range(min(3, factorization.program.blocks)):
        began = time.perf_counter()
        steps = len(stream.next_block())
        best = min(best, (time.perf_counter() - began) / steps)
    return best * dim / timed


def _measure(factorization: Factorization, setting: Setting, baseline: Row | None) -> Row:
    std, guarantee = calibrate(
        setting.budget,
        factorization,
        setting.clip_norm,
        neighbours=setting.neighbours,
        participation=setting.participation,
        accounting=setting.accounting,
    )
    variance = factorization.row_norms_squared() * (std**2 / setting.learners)
    at_round_ends = math.sqrt(
        float(variance[setting.local_steps - 1 :: setting.local_steps].mean())
    )
    program = factorization.program
    return Row(
        mechanism=factorization.name,
        guarantee=guarantee,
        sensitivity=guarantee.sensitivity / (setting.neighbours.reach * setting.clip_norm),
        noise_std=std,
        error_max=math.sqrt(float(variance.max())),
        error_mean=math.sqrt(float(variance.mean())),
        error_round_ends=at_round_ends,
        relative_to_independent=at_round_ends
        / (baseline.error_round_ends if baseline else at_round_ends),
        state_vectors=program.state_size,
        state_bytes=4 * program.state_size * setting.dim,
        seconds_per_step=_seconds_per_step(factorization, setting.dim),
        error_over_time=np.sqrt(variance),
    )
