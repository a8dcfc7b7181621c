"""MF (ii): the best factorization there is (eq-ABC), certified and cached."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError, SolverError, UnknownName
from veilstream.mechanisms import solution_cache
from veilstream.mechanisms.checks import checked_horizon, positive_integer, positive_number
from veilstream.mechanisms.factorization import Factorization
from veilstream.mechanisms.markov import causal_noise
from veilstream.mechanisms.optimal_solver import Optimum, PrefixProblem, RowWeights, chains_of, solve
from veilstream.mechanisms.steps import VaryingSteps
from veilstream.mechanisms.workload import Workload, check_workload
from veilstream.mechanisms.workload_solver import WorkloadProblem
from veilstream.progress import progress

Floats = NDArray[np.float64]

OBJECTIVES = ("mean", "max", "rounds")


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
    if workload is not None:
        if objective != "mean" or local_steps != 1:
            raise InputError(
                "objective", objective, "left out beside a workload, as is local_steps", "the workload says what counts"
            )
        check_workload(workload, T)
        if not workload.plain:
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
