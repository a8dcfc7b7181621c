"""What came of a run, typed: summary.json and guarantee.json of a run folder, read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from veilstream.privacy.guarantee import Guarantee


@dataclass(frozen=True)
class Figure:
    """A final figure: mean and standard deviation over seeds."""

    mean: float
    std: float


@dataclass(frozen=True)
class MethodSummary:
    """One method of a simulation."""

    name: str
    mechanism: str | None  # None for a method without noise
    guarantee: Guarantee | None
    noise_std: float
    final: Mapping[str, Figure]
    remark: str

    @property
    def protects(self) -> str:
        """(ε, δ) for a table."""
        return f"({self.guarantee.epsilon:g}, {self.guarantee.delta:g})" if self.guarantee else "nothing"

    @property
    def budget(self) -> tuple[float, float, str] | None:
        """ε, δ and the accounting: methods with the same budget are compared with each other."""
        g = self.guarantee
        return (g.epsilon, g.delta, g.accounting.value) if g else None


@dataclass(frozen=True)
class SimulationSummary:
    """A simulation, complete or not."""

    name: str
    complete: bool
    rounds: int
    seeds: Sequence[int]
    data: str
    methods: Mapping[str, MethodSummary]
    main: MethodSummary  # the recommended method
    comparators: Sequence[str] | None  # remarks on the optima of regret; None where there is none

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> SimulationSummary:
        """From summary.json."""
        methods = {str(name): _method(str(name), entry) for name, entry in content["methods"].items()}
        optima = content["comparators"]
        return cls(
            name=str(content["name"]),
            complete=bool(content["complete"]),
            rounds=int(content["rounds"]),
            seeds=[int(seed) for seed in content["seeds"]],
            data=str(content["data"]),
            methods=methods,
            main=methods[content["main_method"]],
            comparators=None if optima is None else [str(text) for text in optima["remarks"]],
        )


def _method(name: str, entry: Mapping[str, Any]) -> MethodSummary:
    final = dict(entry["final"])
    remark, promise, mechanism = final.pop("remark", ""), entry["guarantee"], entry["mechanism"]
    return MethodSummary(
        name=name,
        mechanism=None if mechanism is None else str(mechanism),
        guarantee=None if promise is None else Guarantee.from_dict(promise),
        noise_std=float(entry["noise_std"]),
        final={key: Figure(float(f["mean"]), float(f["std"])) for key, f in final.items() if f is not None},
        remark=str(remark),
    )


@dataclass(frozen=True)
class LearnerSummary:
    """One learner of a federation."""

    epoch: int
    rounds: int


@dataclass(frozen=True)
class FederationSummary:
    """A finished federation."""

    run: str
    rounds: int
    guarantee: Guarantee
    learners: Mapping[str, LearnerSummary]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> FederationSummary:
        """From summary.json."""
        learners = content["learners"].items()
        return cls(
            run=str(content["run"]),
            rounds=int(content["rounds"]),
            guarantee=Guarantee.from_dict(content["guarantee"]),
            learners={str(n): LearnerSummary(int(s["epoch"]), int(s["rounds"])) for n, s in learners},
        )
