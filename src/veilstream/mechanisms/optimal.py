"""MF (ii): the best factorization there is (eq-ABC), certified and cached."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError, SolverError, UnknownName
from veilstream.mechanisms import solution_cache
from veilstream.mechanisms.banded import banded
from veilstream.mechanisms.banded_optimum import best_banded
from veilstream.mechanisms.checks import checked_horizon, positive_integer, positive_number
from veilstream.mechanisms.factorization import Factorization, from_strategy_matrix
from veilstream.mechanisms.markov import causal_noise
from veilstream.mechanisms.optimal_solver import Optimum, PrefixProblem, RowWeights, chains_of, solve
from veilstream.mechanisms.participation import Participation, as_participation
from veilstream.mechanisms.steps import VaryingSteps
from veilstream.mechanisms.workload import Workload, check_workload
from veilstream.mechanisms.workload_solver import WorkloadProblem
from veilstream.progress import progress

Floats = NDArray[np.float64]

OBJECTIVES = ("mean", "max", "rounds")
RETURNING_LIMIT = 2048  # Longest horizon of the optimum for people who return: a search among dense matrices


class OptimalFactorization(Factorization):
    """A factorization that knows how far from the best possible one it can be."""

    objective: str
    row_weights: Floats  # u: how much the error of each prefix sum counts
    multipliers: Floats  # v: the certificate. (tr (V^½ AᵀUA V^½)^½)² / (Σu·Σv) is the lower bound, for any v > 0.
    lower_bound: float  # No factorization of this horizon has a smaller (weighted) error

    def objective_value(self) -> float:
        """The error that was minimised, of the program that runs."""
        rows = self.row_norms_squared()
        error = rows.max() if self.objective == "max" else np.average(rows, weights=self.row_weights)
        return float(error) * self.sensitivity() ** 2

    @property
    def duality_gap(self) -> float:
        """(value - lower bound) / lower bound, of the float32 program that really runs."""
        return self.objective_value() / self.lower_bound - 1.0


class ReturningOptimum(OptimalFactorization):
    """`optimal` for people who return: least error among C whose columns of two visits are orthogonal.

    ``lower_bound`` is that of all C with as many bands as there are steps between two visits.
    """

    participation: Participation
    published: Workload | None

    def objective_value(self) -> float:
        """The error that was minimised, at the sensitivity of ``participation``."""
        if self.published is not None:
            error = self.published.weighted_error(self) / self.sensitivity() ** 2
        else:
            error = float(np.average(self.row_norms_squared(), weights=self.row_weights))
        return error * self.sensitivity(self.participation) ** 2


class WorkloadOptimum(OptimalFactorization):
    """`optimal` for a workload: least noise in what is published, which is `workload.error(mechanism)`."""

    workload: Workload

    def objective_value(self) -> float:
        """Weighted mean over published models and, at less weight, the others."""
        return self.workload.weighted_error(self)


def optimal(
    horizon: int,
    objective: str = "mean",
    *,
    local_steps: int = 1,
    interior_weight: float = 0.1,
    workload: Workload | None = None,
    participation: Participation | tuple[int, int] | None = None,
    cache: bool = True,
) -> OptimalFactorization:
    """Least error over all C with unit columns, with a duality certificate.

    Args:
        horizon: number of steps T = R·τ.
        objective: "mean" (‖B‖_F², the paper's), "max" (the worst prefix sum), or "rounds" (prefix
            sums at round ends, which alone reach the released model).
        local_steps: τ, for "rounds".
        interior_weight: for "rounds", what an error inside a round counts beside one at its end.
            At 0 the best C is singular: the error at round ends reaches that of horizon R, while
            the noise inside a round, which the local model feels, grows without bound. 0.1 is a
            middle way; 1 is "mean".
        workload: what is published, if not prefix sums; then without an objective.
            `Workload(horizon=T, local_steps=τ)` is "rounds".
        participation: for people who take part so often, so far apart, and horizons up to 2048: least error over
            all C with as many bands as there are steps between two visits, whose k visits cost √k. Not for "max".
        cache: keep the solution in the user's cache directory.

    Returns:
        The factorization, with ``duality_gap``, how far from the optimum it is at most.

    Raises:
        InputError: for a value that the rules exclude, or a τ that does not divide the horizon.
        SolverError: where the gap stays above its tolerance.

    """
    T = checked_horizon(horizon)
    if objective not in OBJECTIVES:
        raise UnknownName("objective", str(objective), OBJECTIVES)
    returning = as_participation(participation)
    returning.check_horizon(T)
    if workload is not None:
        if objective != "mean" or local_steps != 1:
            raise InputError(
                "objective", objective, "left out beside a workload, as is local_steps", "the workload says what counts"
            )
        check_workload(workload, T)
        if not workload.plain and returning.times == 1:
            return _of_workload(workload, cache)
        objective = "rounds" if workload.local_steps > 1 else "mean"
        local_steps, interior_weight = workload.local_steps, workload.interior_weight
    tau = positive_integer("local_steps", local_steps, "τ, try 4")
    inside = positive_number("interior_weight", interior_weight, "try 0.1")
    if inside > 1:
        raise InputError("interior_weight", interior_weight, "in (0, 1]", "try 0.1")
    if T % tau:
        raise InputError("local_steps", tau, f"a divisor of the horizon {T}", "T is R·τ")
    if objective != "rounds":
        tau, inside = 1, 1.0
    if returning.times > 1:
        averaged = None if workload is None or workload.plain else workload
        return _for_returning(T, objective, tau, inside, averaged, returning, cache)

    recipe: dict[str, object] = {
        "mechanism": "optimal",
        "version": 2,
        "horizon": T,
        "objective": objective,
        "local_steps": tau,
        "interior_weight": inside,
    }

    def solution() -> _Solution:
        with progress(f"optimal({T}): solving", total=None) as tick:
            found = solve(T, lambda t: PrefixProblem(_row_weights(objective, t, tau, inside)), tick=tick)
            return found, causal_noise(chains_of(found.row_weights, found.multipliers), tick=tick)

    def blank(steps: VaryingSteps) -> OptimalFactorization:
        return OptimalFactorization("optimal", T, steps)

    return _solved(blank, objective, recipe, solution, cache)


def _for_returning(
    T: int, objective: str, tau: int, inside: float, published: Workload | None, part: Participation, cache: bool
) -> ReturningOptimum:
    if objective == "max":
        raise InputError("objective", objective, "mean or rounds for people who return", '"mean"')
    if T > RETURNING_LIMIT:
        raise InputError(
            "participation",
            f"{T} steps",
            f"at most {RETURNING_LIMIT} steps for optimal with people who return",
            "`banded` or `buffered`, which are tuned for them at any horizon",
        )
    bands = min(part.min_separation, T)
    recipe: dict[str, object] = {
        "mechanism": "optimal",
        "version": 2,
        "horizon": T,
        "bands": bands,
        "visits": part.times,
    }
    recipe |= (
        {"local_steps": tau, "interior_weight": inside} if published is None else {"workload": published.as_dict()}
    )
    weights = _row_weights(objective, T, tau, inside)(np.ones(T))

    def solution() -> _Solution:
        if published is None:
            A = np.tri(T)
            M = A.T @ (weights[:, None] * A) / weights.sum()
        else:
            system = published.system()
            M = system.gram() / system.total_weight
        with progress(f"optimal({T}) for people who return: solving", total=None) as tick:
            C, bound = best_banded(M, bands, banded(T, bands).strategy_matrix(), tick)
        steps = from_strategy_matrix("optimal", C).steps
        assert isinstance(steps, VaryingSteps)
        return Optimum(1.0 / np.diag(C) ** 2, weights, part.times * bound, 0.0), steps

    def blank(steps: VaryingSteps) -> ReturningOptimum:
        made = ReturningOptimum("optimal", T, steps)
        made.participation, made.published, made.bandwidth = part, published, bands
        return made

    return _solved(blank, objective, recipe, solution, cache)


def _of_workload(workload: Workload, cache: bool) -> WorkloadOptimum:
    T = workload.horizon
    recipe: dict[str, object] = {"mechanism": "optimal", "version": 2, "horizon": T, "workload": workload.as_dict()}

    def solution() -> _Solution:
        with progress(f"optimal({T}) for its workload: solving", total=None) as tick:
            tau = workload.local_steps
            problems = {T: WorkloadProblem(workload.system())}

            def problem(t: int) -> WorkloadProblem:
                return problems.get(t) or WorkloadProblem(workload.at_rounds(t // tau).system())

            found = solve(T, problem, multiple_of=tau, tick=tick)
            return found, causal_noise(problems[T].chains(found.multipliers), tick=tick)

    def blank(steps: VaryingSteps) -> WorkloadOptimum:
        made = WorkloadOptimum("optimal", T, steps)
        made.workload = workload
        return made

    return _solved(blank, "workload", recipe, solution, cache)


_Solution = tuple[Optimum, VaryingSteps]
_STEPS = ("transition", "entry", "output", "feed")
_PROGRAM_GAP = 1e-3  # Largest gap of a program that is handed out; rounding to float32 alone makes 1e-7 to 1e-4
_SHAPES = {"transition": 3, "entry": 2, "output": 2, "feed": 1, "row_weights": 1, "multipliers": 1, "lower_bound": 0}


_Optimal = TypeVar("_Optimal", bound=OptimalFactorization)


def _solved(
    blank: Callable[[VaryingSteps], _Optimal],
    objective: str,
    recipe: dict[str, object],
    solution: Callable[[], _Solution],
    cache: bool,
) -> _Optimal:
    """The factorization of this recipe, from disk or anew; ``blank`` has no certificate yet."""

    def certified(arrays: dict[str, Floats]) -> _Optimal:
        result = blank(VaryingSteps(*(arrays[key] for key in _STEPS)))
        result.objective = objective
        result.row_weights = arrays["row_weights"]
        result.multipliers = arrays["multipliers"]
        result.lower_bound = float(arrays["lower_bound"])
        return result

    def arrays_of() -> dict[str, Floats]:
        named = f"optimal({recipe['horizon']})"
        try:
            found, steps = solution()
            arrays = {
                **{key: getattr(steps, key) for key in _STEPS},
                "row_weights": found.row_weights,
                "multipliers": found.multipliers,
                "lower_bound": np.array(found.lower_bound),
            }
            gap = certified(arrays).duality_gap
        except (np.linalg.LinAlgError, ArithmeticError) as error:
            raise SolverError(
                f"{named}: {error}: numbers beyond what floats resolve (weights, steps or "
                "entries of the workload that are closer in size; or `buffered`)"
            ) from error
        if not gap <= _PROGRAM_GAP:
            raise SolverError(
                f"{named}: the float32 program is {gap:.2g} above the bound, wanted <= "
                f"{_PROGRAM_GAP:g} (a larger interior_weight, or steps that are closer in size)"
            )
        return arrays

    return certified(solution_cache.load_or_solve(recipe, _SHAPES, arrays_of, use=cache))


def _row_weights(objective: str, T: int, tau: int, inside: float) -> RowWeights:
    if objective == "max":
        return lambda v: np.ascontiguousarray(v[::-1]) * (len(v) / v.sum())
    fixed = np.full(T, inside)
    fixed[tau - 1 :: tau] = 1.0
    return lambda _: fixed
