"""What came of a run, typed: summary.json and guarantee.json of a run folder, read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from veilstream.privacy.guarantee import Guarantee


@dataclass(frozen=True)
class Figure:
    """A final figure: mean and standard deviation over seeds."""

    mean: float
    std: float


@dataclass(frozen=True)
class Confusion:
    """How often a label was predicted for a label: rows are the truth, columns the prediction; means over seeds."""

    labels: Sequence[str]
    counts: Sequence[Sequence[float]]


@dataclass(frozen=True)
class HeldOut:
    """The records that final figures are measured on."""

    rows: int
    used: int
    people: int | None  # None where each row is someone else
    split: str  # "time", "people" or "made-up"
    sampling_error: float | None
    """Half of the 95% interval of the main method's accuracy (or RMSE) that the choice of rows leaves open."""


@dataclass(frozen=True)
class Verdict:
    """Whether the main method is better than its baselines, and what to try if not."""

    better: bool
    sentence: str
    advice: Sequence[str]


@dataclass(frozen=True)
class MethodSummary:
    """One method of a simulation."""

    name: str
    mechanism: str | None  # None for a method without noise
    guarantee: Guarantee | None
    noise_std: float
    final: Mapping[str, Figure]
    remark: str
    recall: Mapping[str, Figure] = field(default_factory=dict)  # by label; empty for numbers
    confusion: Confusion | None = None
    verdict: str | None = None  # a sentence; None where nobody is held out

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
    baselines: Mapping[str, Mapping[str, float | str | None]] = field(default_factory=dict)
    """Figures of predictions without a model. On held-out records: "majority" (with its "label") or "mean", and
    "no_change" where time matters. Of labels, as they came: "majority", "learner's share" and, at each budget,
    "noisy count @ ε"."""
    held_out: HeldOut | None = None
    verdict: Verdict | None = None
    unit: str | None = None  # name of the column that is predicted, for a number

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
            baselines={str(name): dict(told) for name, told in (content.get("baselines") or {}).items()},
            held_out=_held_out(content.get("held_out")),
            verdict=_verdict(content.get("verdict")),
            unit=content.get("unit"),
        )


def _method(name: str, entry: Mapping[str, Any]) -> MethodSummary:
    final = dict(entry["final"])
    recall, confusion = final.pop("recall", None) or {}, final.pop("confusion", None)
    remark, promise, mechanism = final.pop("remark", ""), entry["guarantee"], entry["mechanism"]
    return MethodSummary(
        name=name,
        mechanism=None if mechanism is None else str(mechanism),
        guarantee=None if promise is None else Guarantee.from_dict(promise),
        noise_std=float(entry["noise_std"]),
        final=_figures(final),
        remark=str(remark),
        recall=_figures(recall),
        confusion=None if confusion is None else Confusion(confusion["labels"], confusion["counts"]),
        verdict=entry.get("verdict"),
    )


def _figures(told: Mapping[str, Any]) -> dict[str, Figure]:
    return {key: Figure(float(f["mean"]), float(f["std"])) for key, f in told.items() if f is not None}


def _held_out(told: Mapping[str, Any] | None) -> HeldOut | None:
    if told is None:
        return None
    people, error = told.get("people"), told["sampling_error"]
    return HeldOut(int(told["rows"]), int(told["used"]), people, str(told["split"]), error)


def _verdict(told: Mapping[str, Any] | None) -> Verdict | None:
    if told is None:
        return None
    return Verdict(bool(told["better"]), str(told["sentence"]), [str(text) for text in told["advice"]])


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
