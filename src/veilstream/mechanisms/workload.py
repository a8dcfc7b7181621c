"""Workloads: the linear map from gradients to what is published.

A server that sums steps publishes prefix sums, W = A. One that averages, forgets, has momentum or
a falling step size publishes another linear map of the same gradients, and its noise is W·C⁻¹·ξ:
the rows of W·C⁻¹ decide the error, not those of A·C⁻¹. A mechanism may be made for W
(`optimal(T, workload=...)`); its sensitivity is that of its C, whatever W is.

With the round's factor s_r = (1 + r)^-step_decay, a round of τ steps does, of the noise alone,

    m <- momentum·m + Σ_j g_j          server momentum
    x <- forgetting·x - s_r·m          x is the model's distance from x⁰
    a <- (1 - β_r)·a + β_r·x           what is published, where models are averaged

The step size itself, η·η_g, is left out: all errors are in units of it, as variances.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.mechanisms import analysis
from veilstream.mechanisms.checks import checked_horizon, positive_integer
from veilstream.mechanisms.factorization import Factorization
from veilstream.mechanisms.linear_system import LinearSystem, OutputRow
from veilstream.mechanisms.participation import Participation

Floats = NDArray[np.float64]


def published_blend(power: float | None, newest: float | None, round_: Any) -> Any:
    """β_r, the weight of the newest model in the average that is published; 1 is no average.

    ``power`` p lets model r weigh about r^p (0 is the plain mean); ``newest`` is the least weight
    of the newest model, so that the average forgets like (1 - newest)^age once it is that old.
    """
    if newest is not None:
        return np.maximum(newest, 1.0 / (1.0 + round_))
    return 1.0 if power is None else (power + 1.0) / (power + round_ + 1.0)


@dataclass(frozen=True, eq=False)
class PublishedError:
    """Noise in models, per coordinate: variances, but for `std`, at sensitivity one and step size one."""

    variance: Floats  # Of every published model, in order: one a round
    unpublished: Floats  # Of the models that gradients are taken at, one a step: x as if the round ended there
    interior_weight: float

    @property
    def mean(self) -> float:
        """Mean variance over what is published."""
        return float(self.variance.mean())

    @property
    def max(self) -> float:
        """Largest variance of a published model."""
        return float(self.variance.max())

    @property
    def std(self) -> Floats:
        """Standard deviation of the noise in every published model."""
        return np.sqrt(self.variance)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a method publishes, as a linear map of its gradients.

    Args:
        horizon: number of steps T = R·τ.
        local_steps: τ; a model is published at the end of every round.
        step_decay: step sizes fall like (1 + round)^-step_decay.
        step_sizes: a schedule of its own instead: one factor a round.
        averaging: publish an average in which model r weighs about r^averaging; 0 is the mean.
        newest_weight: publish an exponential average in which the newest model has this weight.
        momentum: of the server, in [0, 1).
        forgetting: ρ in (0, 1]: every round first draws the model to x⁰, x⁰ + ρ·(x - x⁰).
        interior_weight: in (0, 1]; what noise in models that are not published (inside a round,
            and before averaging) counts when a mechanism is made for this workload. At 0 the noise
            that gradients are taken under would grow without bound.

    Raises:
        InputError: for a value that the rules exclude, or a τ that does not divide the horizon.

    """

    horizon: int
    local_steps: int = 1
    step_decay: float = 0.0
    step_sizes: tuple[float, ...] | None = None
    averaging: float | None = None
    newest_weight: float | None = None
    momentum: float = 0.0
    forgetting: float = 1.0
    interior_weight: float = 0.1

    def __post_init__(self) -> None:
        T = checked_horizon(self.horizon)
        tau = positive_integer("local_steps", self.local_steps, "τ, try 4")
        if T % tau:
            raise InputError("local_steps", tau, f"a divisor of the horizon {T}", "T is R·τ")
        # Plain numbers, whatever kind was given: NumPy's have no JSON, which caches are named by.
        plain: dict[str, object] = {"horizon": T, "local_steps": tau}
        plain["step_decay"] = _within("step_decay", self.step_decay, "a finite number >= 0", "0 for none", low=0.0)
        if self.averaging is not None:
            plain["averaging"] = _within(
                "averaging", self.averaging, "a number from 0 to 1e6", "None for none; try 3", low=0.0, high=1e6
            )
        if self.newest_weight is not None:
            plain["newest_weight"] = _within("newest_weight", self.newest_weight, "in (0, 1]", "try 0.01", high=1.0)
            if self.averaging is not None:
                raise InputError(
                    "newest_weight", self.newest_weight, "one kind of averaging", "remove averaging, or this"
                )
        plain["momentum"] = _within(
            "momentum", self.momentum, "in [0, 1)", "0 for none; try 0.9", low=0.0, high=math.nextafter(1.0, 0.0)
        )
        plain["forgetting"] = _within(
            "forgetting", self.forgetting, "in (0, 1]", "1 forgets nothing; try 0.999", high=1.0
        )
        plain["interior_weight"] = _within("interior_weight", self.interior_weight, "in (0, 1]", "try 0.1", high=1.0)
        for field, number in plain.items():
            object.__setattr__(self, field, number)
        if self.step_sizes is not None:
            object.__setattr__(self, "step_sizes", self._checked_schedule(self.step_sizes))
        elif self.step_decay * math.log(self.rounds) > -math.log(_SMALLEST_FACTOR):
            most = -math.log(_SMALLEST_FACTOR) / math.log(self.rounds)
            raise InputError(
                "step_decay",
                self.step_decay,
                f"<= {most:.4g}: the last of {self.rounds} rounds would step less than "
                f"{_SMALLEST_FACTOR:g} of the first",
                "0.5 for 1/sqrt(round), 0 for none",
            )

    def _checked_schedule(self, given: Any) -> tuple[float, ...]:
        sizes = real_array("step_sizes", given)
        rule = f"{self.rounds} numbers from 1e-15 to 1e15, one a round"
        if sizes.shape != (self.rounds,):
            raise InputError("step_sizes", f"array of shape {sizes.shape}", rule, "R is T / τ")
        outside = np.flatnonzero(~((sizes >= 1e-15) & (sizes <= 1e15)))
        if outside.size:
            at = int(outside[0])
            raise InputError("step_sizes", f"step_sizes[{at}] = {sizes[at]:g}", rule, "a step of size 0 learns nothing")
        if self.step_decay:
            raise InputError("step_decay", self.step_decay, "0 beside step_sizes", "put it into step_sizes")
        return tuple(float(size) for size in sizes)

    @classmethod
    def prefix(cls, horizon: int) -> Workload:
        """Every prefix sum, published as it is: what all mechanisms are made for by default."""
        return cls(horizon=horizon)

    @property
    def rounds(self) -> int:
        """R."""
        return self.horizon // self.local_steps

    @property
    def averages(self) -> bool:
        """Whether an average is published rather than the latest model."""
        return self.averaging is not None or self.newest_weight is not None

    @property
    def forgetting_per_step(self) -> float:
        """ρ spread over a round's steps."""
        return float(self.forgetting ** (1.0 / self.local_steps))

    @property
    def plain(self) -> bool:
        """Whether it is prefix sums at round ends and nothing else."""
        constant = not self.step_decay and self.step_sizes is None
        return constant and not self.averages and not self.momentum and self.forgetting == 1.0

    def at_rounds(self, rounds: int) -> Workload:
        """The same kind of workload for another number of rounds."""
        sizes = self.step_sizes
        if sizes is not None:
            here, there = np.linspace(0, 1, rounds), np.linspace(0, 1, len(sizes))
            sizes = tuple(np.interp(here, there, sizes).tolist())
        return replace(self, horizon=rounds * self.local_steps, step_sizes=sizes)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and digests."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def round_factors(self) -> Floats:
        """s_r of every round."""
        if self.step_sizes is not None:
            return np.array(self.step_sizes)
        factors: Floats = (1.0 + np.arange(self.rounds, dtype=np.float64)) ** -self.step_decay
        return factors

    def system(self) -> LinearSystem:
        """The map as a recurrence; the state is x, then m and a where there are any."""
        T, tau = self.horizon, self.local_steps
        size = np.repeat(self.round_factors(), tau)
        first = np.arange(T) % tau == 0
        last = np.arange(T) % tau == tau - 1
        n = 1 + (self.momentum > 0.0) + self.averages
        F, b = np.zeros((T, n, n)), np.zeros((T, n))
        F[:, 0, 0] = np.where(first, self.forgetting, 1.0)
        b[:, 0] = size
        if self.momentum > 0.0:
            F[:, 0, 1] = np.where(first, self.momentum * size, 0.0)
            F[:, 1, 1] = np.where(first, self.momentum, 1.0)
            b[:, 1] = 1.0
        rows = [OutputRow(0, np.where(last, 1.0, self.interior_weight))]
        if self.averages:
            rounds = np.arange(T) // tau
            newest = published_blend(self.averaging, self.newest_weight, rounds)
            beta = np.where(last, newest, 0.0)
            F[:, -1] = beta[:, None] * F[:, 0]
            F[:, -1, -1] += 1.0 - beta
            b[:, -1] = beta * b[:, 0]
            rows = [OutputRow(n - 1, last.astype(np.float64)), OutputRow(0, np.full(T, self.interior_weight))]
        return LinearSystem(F, b, tuple(rows))

    def matrix(self) -> Floats:
        """W, dense, (R, T): what is published at the end of every round; for T up to 8192."""
        analysis.check_dense(self.horizon)
        system = self.system()
        published: Floats = system.matrix(system.rows[0].coordinate)[self.local_steps - 1 :: self.local_steps]
        return published

    def error(
        self, mechanism: Factorization, participation: Participation | tuple[int, int] | None = None
    ) -> PublishedError:
        """Noise in what is published, exactly: from the program that runs, at sensitivity one.

        Args:
            mechanism: of the same horizon; made for this workload or for another.
            participation: how often one client may take part, and how far apart; None for once.

        Raises:
            InputError: for another horizon.

        """
        _same_horizon(self.horizon, mechanism)
        system = self.system()
        variance = analysis.system_variances(mechanism.program, system)
        variance *= mechanism.sensitivity(participation) ** 2
        ends = slice(self.local_steps - 1, None, self.local_steps)
        published = variance[ends, system.rows[0].coordinate].copy()
        return PublishedError(published, variance[:, 0].copy(), self.interior_weight)

    def weighted_error(self, mechanism: Factorization) -> float:
        """What `optimal` minimises: the mean over published models and, at less, the others."""
        system = self.system()
        variance = analysis.system_variances(mechanism.program, system)
        total = sum(float(row.weights @ variance[:, row.coordinate]) for row in system.rows)
        return total / system.total_weight * mechanism.sensitivity() ** 2


_SMALLEST_FACTOR = 1e-30  # Of a step beside the first: below, squares of what is published are lost in rounding


def real_array(field: str, given: Any) -> Floats:
    """A copy of real numbers as float64; texts, complex numbers and ragged rows are refused."""
    try:
        array = np.array(given)
    except ValueError as error:
        raise InputError(field, type(given).__name__, "numbers in rows of one length", "check the rows") from error
    if array.size and array.dtype.kind not in "biuf":
        raise InputError(field, f"array of {array.dtype}", "real numbers", "no text and no complex ones")
    return array.astype(np.float64)


def check_workload(workload: object, horizon: int) -> None:
    """Refuse what is not a workload, or one of another horizon."""
    if not isinstance(workload, Workload):
        raise InputError("workload", type(workload).__name__, "a Workload", "vs.Workload(horizon=1000)")
    if workload.horizon != horizon:
        raise InputError(
            "workload",
            f"horizon {workload.horizon}",
            f"the mechanism's horizon {horizon}",
            f"Workload(horizon={horizon}, ...)",
        )


def _same_horizon(horizon: int, mechanism: Factorization) -> None:
    if not isinstance(mechanism, Factorization):
        raise InputError("mechanism", mechanism, "a Factorization", "mechanisms.optimal(1000)")
    if mechanism.horizon != horizon:
        raise InputError(
            "mechanism",
            f"horizon {mechanism.horizon}",
            f"the workload's horizon {horizon}",
            f"build it for {horizon} steps",
        )


def _within(
    field: str, value: object, rule: str, way_out: str, *, low: float | None = None, high: float | None = None
) -> float:
    """A finite number from ``low`` (above 0 where there is none) to ``high``, as a plain float."""
    number = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_):
        number = float(value)
    fits = math.isfinite(number) and (number > 0.0 if low is None else number >= low)
    if not fits or (high is not None and number > high):
        raise InputError(field, value, rule, way_out)
    return number
