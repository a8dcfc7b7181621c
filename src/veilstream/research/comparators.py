"""The losses that regret compares with: the best of each round, and of one model for all rounds."""

from __future__ import annotations

import io
import pkgutil
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from veilstream.files import write_file
from veilstream.learning.task_registry import task_kind
from veilstream.plans.clients import stream_of
from veilstream.plans.plan import Plan
from veilstream.research import optima
from veilstream.research.regret import path_variation

Floats = NDArray[np.float64]

_ROUNDS = 200  # rounds whose problems are solved together


@dataclass(frozen=True)
class Comparators:
    """For one seed."""

    round_values: Floats  # (f^r)* of every round: the infimum over all models
    separable: float  # Share of rounds whose clients some model separates: there the infimum is 0, not attained
    offline_losses: Floats | None  # f^r(x*) of every round, for x* best over all rounds; None where x* is not attained
    path_variation: float | None  # C_R; None where it is undefined
    remark: str = ""

    def save(self, path: Path) -> None:
        """Write it to a file, so that a resumed run need not solve it again."""
        absent = np.zeros(0)
        held = {
            "round_values": self.round_values,
            "separable": np.float64(self.separable),
            "offline_losses": absent if self.offline_losses is None else self.offline_losses,
            "path_variation": np.array([] if self.path_variation is None else self.path_variation),
            "remark": np.array(self.remark),
        }
        buffer = io.BytesIO()
        np.savez(buffer, **held)  # type: ignore[arg-type]
        write_file(path, buffer.getvalue(), shared=True)

    @classmethod
    def load(cls, path: Path, rounds: int) -> Comparators | None:
        """What `save` kept; None where nothing whole of so many rounds is there."""
        try:
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as held:
                offline, varied = held["offline_losses"], held["path_variation"]
                found = cls(
                    held["round_values"],
                    float(held["separable"]),
                    offline if offline.size else None,
                    float(varied) if varied.size else None,
                    str(held["remark"]),
                )
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error):
            return None
        return found if found.round_values.shape == (rounds,) else None


def has_comparators(plan: Plan) -> bool:
    """Whether the least loss of a round can be computed for this task on these data."""
    kind = task_kind(plan.learning.task)
    if plan.order == "secret":  # a round's clients are then those who chose it
        return False
    return kind is not None and kind.comparator is not None and plan.data.kind in ("synthetic", "ripple")


def comparators(plan: Plan, seed: int) -> Comparators:
    """Solve a seed's comparators; they are the same for every method."""
    kind = task_kind(plan.learning.task)
    assert kind is not None
    assert kind.comparator is not None
    solved: Comparators = pkgutil.resolve_name(kind.comparator)(plan, seed)
    return solved


def ripple(plan: Plan, seed: int) -> Comparators:
    """The clients of a round share the minimiser, whose loss is 0."""
    return Comparators(np.zeros(plan.learning.rounds), 0.0, None, None, "the minimum of each round is known: 0")


def logistic(plan: Plan, seed: int) -> Comparators:
    """Of `learning.linear_tasks.Logistic`."""

    def losses(scores: Floats, targets: Floats) -> Floats:
        return np.asarray(np.logaddexp(0.0, -targets * scores), np.float64)

    return _solved(plan, seed, optima.logistic_optimum, optima.offline_logistic_optimum, losses)


def least_squares(plan: Plan, seed: int) -> Comparators:
    """Of `learning.linear_tasks.LeastSquares`."""

    def losses(scores: Floats, targets: Floats) -> Floats:
        return 0.5 * (scores - targets) ** 2

    return _solved(plan, seed, optima.least_squares_optimum, optima.offline_least_squares_optimum, losses)


def _solved(
    plan: Plan,
    seed: int,
    of_rounds: Callable[[Floats, Floats, float], optima.RoundOptimum],
    of_all: Callable[[Callable[[], Iterator[tuple[Floats, Floats]]], int, float], optima.OfflineOptimum],
    losses: Callable[[Floats, Floats], Floats],
) -> Comparators:
    """The best model of each round, and of all rounds, for a loss that is linear in the features."""
    ridge = plan.learning.ridge
    problems = _problems_of(plan, seed)
    best = [of_rounds(features, targets, ridge) for features, targets in problems()]
    values = np.concatenate([each.value for each in best])
    separable = float(np.concatenate([each.separable for each in best]).mean())

    def chunks() -> Iterator[tuple[Floats, Floats]]:
        for features, targets in problems():
            yield features.reshape(-1, features.shape[-1]), targets.reshape(-1)

    offline = of_all(chunks, plan.data.dim, ridge)
    if not offline.attained:
        remark = "no single model attains the least loss over all rounds: static regret is undefined"
        return Comparators(values, separable, None, None, remark)
    x = offline.minimiser
    penalty = 0.5 * ridge * float(x @ x)
    of_offline = [losses(features @ x, targets).mean(axis=1) + penalty for features, targets in problems()]
    varied, remark = path_variation(np.concatenate([each.minimiser for each in best]), x)
    known = None if np.isnan(varied) else varied
    return Comparators(values, separable, np.concatenate(of_offline), known, remark)


def _round_problems(plan: Plan, seed: int) -> Iterator[tuple[Floats, Floats]]:
    """Features (rounds, clients of all learners, d) and targets, some rounds at a time."""
    stream = stream_of(plan)
    R = plan.learning.rounds
    together = max(1, min(_ROUNDS, plan.run.memory_mib * 2**20 // (8 * _clients(plan) * plan.data.dim)))
    for first in range(0, R, together):
        drawn = [stream.round(seed, r) for r in range(first, min(first + together, R))]
        features = np.array([s.features for s in drawn], np.float64)
        targets = np.array([s.target for s in drawn], np.float64)
        yield features.reshape(len(drawn), -1, plan.data.dim), targets.reshape(len(drawn), -1)


def _clients(plan: Plan) -> int:
    return plan.learning.learners * plan.learning.local_steps * plan.learning.clients_per_step


def _problems_of(plan: Plan, seed: int) -> Callable[[], Iterable[tuple[Floats, Floats]]]:
    """Re-iterable problems: kept in memory where they fit the plan's budget, else drawn again."""
    if 8 * plan.learning.rounds * _clients(plan) * plan.data.dim > plan.run.memory_mib * 2**20:
        return lambda: _round_problems(plan, seed)
    kept = list(_round_problems(plan, seed))
    return lambda: kept
