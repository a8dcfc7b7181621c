"""MF (ii): the best factorization there is (eq-ABC), certified and cached."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError, SolverError, UnknownName
from veilstream.mechanisms import solution_cache
from veilstream.mechanisms.checks import checked_horizon, positive_integer, positive_number
from veilstream.mechanisms.factorization import Factorization, steps_of_strategy
from veilstream.mechanisms.markov import causal_noise
from veilstream.mechanisms.optimal_solver import (
    Optimum,
    PrefixProblem,
    RowWeights,
    chains_of,
    solve,
)
from veilstream.mechanisms.steps import VaryingSteps
from veilstream.mechanisms.workload import MatrixWorkload, Workload, check_workload
from veilstream.mechanisms.workload_solver import MatrixProblem, WorkloadProblem
from veilstream.progress import progress

__all__ = ["OBJECTIVES", "OptimalFactorization", "WorkloadOptimum", "optimal"]

Floats = NDArray[np.float64]

OBJECTIVES = ("mean", "max", "rounds")


class OptimalFactorization(Factorization):
    """A factorization that knows how far from the best possible one it can be."""

    objective: str
    row_weights: Floats
    """u: how much the error of each prefix sum counts."""
    multipliers: Floats
    """v: the certificate. (tr (V^½ AᵀUA V^½)^½)² / (Σu·Σv) is the lower bound, for any v > 0."""
    lower_bound: float
    """No factorization of this horizon has a smaller (weighted) error."""

    def objective_value(self) -> float:
        """The error that was minimised, of the program that runs."""
        rows = self.row_norms_squared()
        error = (
            rows.max() if self.objective == "max" else np.average(rows, weights=self.row_weights)
        )
        return float(error) * self.sensitivity() ** 2

    @property
    def duality_gap(self) -> float:
        """(value - lower bound) / lower bound, of the float32 program that really runs."""
        return self.objective_value() / self.lower_bound - 1.0


class WorkloadOptimum(OptimalFactorization):
    """`optimal` for a workload: least noise in what is published.

    `mean_error` and `max_error` are still those of prefix sums; `workload.error(mechanism)` is
    that of what is published.
    """

    workload: Workload | MatrixWorkload

    def objective_value(self) -> float:
        """Weighted mean over published models and, at less weight, the others."""
        return self.workload.weighted_error(self)


def optimal(
    horizon: int,
    objective: str = "mean",
    *,
    local_steps: int = 1,
    interior_weight: float = 0.1,
    workload: Workload | MatrixWorkload | None = None,
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
                "objective", objective, "left out beside a workload, as is local_steps",
                "the workload says what counts",
            )  # fmt: skip
        check_workload(workload, T)
        if not (isinstance(workload, Workload) and workload.plain):
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
        "mechanism": "optimal", "version": 1, "horizon": T, "objective": objective,
        "local_steps": tau, "interior_weight": inside,
    }  # fmt: skip

    def solution() -> _Solution:
        with progress(f"optimal({T}): solving", total=None) as tick:
            found = solve(
                T, lambda t: PrefixProblem(_row_weights(objective, t, tau, inside)), tick=tick
            )
            return found, causal_noise(chains_of(found.row_weights, found.multipliers), tick=tick)

    return _solved(OptimalFactorization, T, objective, recipe, solution, cache)


def _of_workload(workload: Workload | MatrixWorkload, cache: bool) -> WorkloadOptimum:
    T = workload.horizon
    recipe: dict[str, object] = {"mechanism": "optimal", "version": 1, "horizon": T,
                                 "workload": workload.as_dict()}  # fmt: skip

    def solution() -> _Solution:
        with progress(f"optimal({T}) for its workload: solving", total=None) as tick:
            if isinstance(workload, MatrixWorkload):
                dense = MatrixProblem(workload.matrix())
                found = solve(T, lambda _: dense, from_shorter=False, tick=tick)
                return found, steps_of_strategy(dense.strategy_matrix(found.multipliers))
            tau = workload.local_steps
            problems = {T: WorkloadProblem(workload.system())}

            def problem(t: int) -> WorkloadProblem:
                return problems.get(t) or WorkloadProblem(workload.at_rounds(t // tau).system())

            found = solve(T, problem, multiple_of=tau, tick=tick)
            return found, causal_noise(problems[T].chains(found.multipliers), tick=tick)

    result = _solved(WorkloadOptimum, T, "workload", recipe, solution, cache)
    result.workload = workload
    return result


_Solution = tuple[Optimum, VaryingSteps]
_SHAPES = {
    "transition": 3, "entry": 2, "output": 2, "feed": 1, "row_weights": 1, "multipliers": 1,
    "lower_bound": 0,
}  # fmt: skip


_Optimal = TypeVar("_Optimal", bound=OptimalFactorization)


def _solved(
    kind: type[_Optimal],
    T: int,
    objective: str,
    recipe: dict[str, object],
    solution: Callable[[], _Solution],
    cache: bool,
) -> _Optimal:
    """The factorization of this recipe, from disk or anew."""

    def arrays_of() -> dict[str, Floats]:
        try:
            found, steps = solution()
        except (np.linalg.LinAlgError, ArithmeticError) as error:
            raise SolverError(
                f"optimal({T}): {error}; numbers beyond what floats resolve (weights, steps or "
                "entries of the workload that are closer in size; or `buffered`)"
            ) from error
        return {
            "transition": steps.transition, "entry": steps.entry, "output": steps.output,
            "feed": steps.feed, "row_weights": found.row_weights, "multipliers": found.multipliers,
            "lower_bound": np.array(found.lower_bound),
        }  # fmt: skip

    arrays = solution_cache.load_or_solve(recipe, _SHAPES, arrays_of, use=cache)
    steps = VaryingSteps(arrays["transition"], arrays["entry"], arrays["output"], arrays["feed"])
    result = kind("optimal", T, steps)
    result.objective = objective
    result.row_weights = arrays["row_weights"]
    result.multipliers = arrays["multipliers"]
    result.lower_bound = float(arrays["lower_bound"])
    return result


def _row_weights(objective: str, T: int, tau: int, inside: float) -> RowWeights:
    if objective == "max":
        return lambda v: np.ascontiguousarray(v[::-1]) * (len(v) / v.sum())
    fixed = np.full(T, inside)
    fixed[tau - 1 :: tau] = 1.0
    return lambda _: fixed
