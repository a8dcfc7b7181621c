"""One sentence on whether a model is worth more than a prediction without one, and what to try if it is not.

A model of labels is compared by accuracy with always giving the most frequent label; where the plan weighs labels
(`data.label_shares`, `learning.class_weights`) by balanced accuracy. A model of numbers is compared by squared error
with the mean. Where records have a time, repeating the label of the learner's record before is a baseline too.
"Better" means by more than 1.96 standard errors over held-out people (rows) and seeds, row by row.
Each piece of advice follows from something that this run has shown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.learning.judged import Comparison, Judged, compared
from veilstream.learning.quality import Z95, LabelQuality, NumberQuality
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import Prepared
from veilstream.simulation.final_figures import FinalFigures

_BLIND = 0.1  # recall below which a label is hardly ever given
_RARE = 0.75  # of an even share of the labels: below it, weights would change what a model says
_RANKS = 0.6  # AUC from which a model is said to rank records
_FALLING = 0.002  # share of the loss that the last quarter of the rounds still gained


@dataclass(frozen=True)
class Verdict:
    """What a method's last models are worth."""

    better: bool
    sentence: str
    advice: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For summary.json."""
        return {"better": self.better, "sentence": self.sentence, "advice": list(self.advice)}


@dataclass(frozen=True)
class Evidence:
    """What a run knows of one method besides its figures."""

    prepared: Prepared
    judged: list[Judged] | None
    losses: NDArray[np.float64]  # (seeds, rounds)


class Verdicts:
    """Verdicts on the methods of one run."""

    def __init__(self, plan: Plan, figures: FinalFigures) -> None:
        self._plan, self._figures = plan, figures
        self.balanced = weighs_labels(plan)
        """Whether labels count alike, whatever their number."""

    def of(self, judged: list[Judged]) -> Verdict:
        """On one method, without advice."""
        constant, previous = self._against(judged)
        better = constant.better and (previous is None or previous.better)
        quality = judged[0].quality
        said = self._numbers(judged, constant) if isinstance(quality, NumberQuality) else self._labels(judged, constant)
        if constant.better and previous is not None and not previous.better:
            said += f"; but repeating a learner's last label is no worse ({self._repeating()})"
        return Verdict(better, said + ".")

    def advised(self, main: Evidence, others: list[Evidence]) -> Verdict:
        """On the main method, with what to try."""
        assert main.judged is not None
        found = self.of(main.judged)
        advice = self._on_labels(main.judged)
        if not found.better and not advice:  # a model that ranks has learned; its labels are what is in the way
            advice += self._on_learning(main, [other for other in others if other.judged is not None])
        return Verdict(found.better, found.sentence, tuple(advice))

    def of_deployed(self, judged: list[Judged]) -> Verdict:
        """On models that learners made; no other method ran, so advice is on labels alone."""
        found = self.of(judged)
        return Verdict(found.better, found.sentence, tuple(self._on_labels(judged)))

    def _against(self, judged: list[Judged]) -> tuple[Comparison, Comparison | None]:
        figures = self._figures
        constants = [constant for _, constant in figures.constants]
        same = figures.same_rows
        constant = compared(figures.judges, judged, constants, balanced=self.balanced, same_rows=same)
        if figures.no_change is None:
            return constant, None
        return constant, compared(figures.judges, judged, figures.no_change, balanced=self.balanced, same_rows=same)

    def _repeating(self) -> str:
        assert self._figures.no_change is not None
        each = [one.quality for one in self._figures.no_change]
        if isinstance(each[0], NumberQuality):
            return f"RMSE {_mean(each, 'rmse'):.4g}"
        key = "balanced_accuracy" if self.balanced else "accuracy"
        return f"{_word(key)} {_mean(each, key):.3f}"

    def _labels(self, judged: list[Judged], gained: Comparison) -> str:
        each = [one.quality for one in judged]
        label, key = self._figures.constants[0][0], "balanced_accuracy" if self.balanced else "accuracy"
        base = _mean([constant.quality for _, constant in self._figures.constants], key)
        how = f"{_word(key)} {_mean(each, key):.3f} against {base:.3f} (difference {_interval(gained)})"
        other = "accuracy" if self.balanced else "balanced_accuracy"
        also = [f"{_word(other)} {_mean(each, other):.3f}"]
        area = _mean(each, "auc")
        also += [] if math.isnan(area) else [f"AUC {area:.3f}"]
        recall = self._recall(judged)
        if len(recall) <= 3:
            also.append("recall " + ", ".join(f"{name} {share:.2f}" for name, share in recall.items()))
        elif recall:
            least = min(recall, key=lambda name: recall[name])
            also.append(f'lowest recall {recall[least]:.2f} ("{least}")')
        return f'{_than(gained)} always "{label}": {how}; ' + ", ".join(also)

    def _numbers(self, judged: list[Judged], gained: Comparison) -> str:
        each = [one.quality for one in judged]
        base = _mean([constant.quality for _, constant in self._figures.constants], "rmse")
        unit = "" if self._plan.data.label is None else f" ({self._plan.data.label})"
        r2 = _mean(each, "r2")
        explained = "" if math.isnan(r2) else f", R² {r2:.3f}"
        return f"{_than(gained)} always the mean: RMSE {_mean(each, 'rmse'):.4g} against {base:.4g}{unit}{explained}"

    def _recall(self, judged: list[Judged]) -> dict[str, float]:
        labels = self._figures.judges[0].labels
        assert labels is not None
        found = {}
        for k, name in enumerate(labels.names):
            each = [one.quality.recall[k] for one in judged if isinstance(one.quality, LabelQuality)]
            there = [share for share in each if share is not None]
            if there:
                found[name] = sum(there) / len(there)
        return found

    def _on_labels(self, judged: list[Judged]) -> list[str]:
        """Advice where a model ranks records, and hardly ever gives some label that is rarer than others."""
        if (labels := self._figures.judges[0].labels) is None:
            return []
        area = _mean([one.quality for one in judged], "auc")
        truth = np.concatenate([judge.truth for judge in self._figures.judges])
        rare = {name for k, name in enumerate(labels.names) if np.mean(truth == k) < _RARE / len(labels.names)}
        blind = [name for name, share in self._recall(judged).items() if share < _BLIND and name in rare]
        if not blind or not area >= _RANKS:
            return []
        named = ", ".join(f'"{name}"' for name in blind[:4])
        if self.balanced:
            return []
        return [
            f"it ranks records (AUC {area:.2f}) and hardly ever says {named}: give the labels' shares, as far as they "
            "are known without these records, as data.label_shares, or weights as learning.class_weights"
        ]

    def _on_learning(self, main: Evidence, others: list[Evidence]) -> list[str]:
        """Advice by what a method without noise reaches in the same run."""
        if not np.isfinite(main.losses).all():
            return [f"it diverged: a smaller step size ({_step(main.prepared)})"]
        free = [other for other in others if other.prepared.factorization is None]
        if main.prepared.factorization is None:
            return self._undertrained(main)
        if not free:
            return ['add a method of kind = "noise-free": it shows whether the noise or the features are in the way']
        good = [other for other in free if other.judged is not None and self.of(other.judged).better]
        if not good:
            return self._undertrained(min(free, key=lambda other: float(other.losses[:, -1].mean())))
        names = f"without noise {good[0].prepared.plan.name} is better than that baseline, so the noise is in the way"
        advice = f"{names}: a larger epsilon"
        if self._more_records():
            advice += ", or more rounds (there are records for them)"
        elif self._figures.plan.data.kind == "table":
            advice += ", or more people (all records are used)"
        return [advice]

    def _undertrained(self, free: Evidence) -> list[str]:
        """Advice where even a method without noise is no better."""
        mean = np.nanmean(free.losses, axis=0)
        rounds, name = len(mean), free.prepared.plan.name
        if rounds >= 8:
            quarter = rounds // 4
            before, last = np.nanmean(mean[-2 * quarter : -quarter]), np.nanmean(mean[-quarter:])
            first = np.nanmean(mean[: max(1, rounds // 20)])
            if last > 1.02 * first:
                return [f"{name} loses more at the end than at the start: a smaller step size ({_step(free.prepared)})"]
            if before - last > _FALLING * abs(before):
                more = "more rounds, or a larger step size" if self._more_records() else "a larger step size"
                return [f"{name} was still learning when the run ended: {more} ({_step(free.prepared)})"]
        return [
            f"{name} is no better either, and no longer learns: noise is not in the way. Other features, finer ranges "
            "(low and high close to where values lie), or interactions"
        ]

    def _more_records(self) -> bool:
        stream = self._figures.stream
        if not hasattr(stream, "clients_met"):
            return self._plan.data.kind != "custom"
        met = stream.clients_met(self._plan.run.first_seed)
        return bool(met.unused.min() > 0)


def weighs_labels(plan: Plan) -> bool:
    """Whether the plan says how labels count, so that balanced accuracy is what its models aim at."""
    return plan.learning.class_weights is not None or plan.data.label_shares is not None


def _step(prepared: Prepared) -> str:
    return f"step_size is {prepared.plan.local_step_size:g}"


def _than(gained: Comparison) -> str:
    if gained.better:
        return "Better than"
    return "Worse than" if gained.worse else "No better than"


def _interval(gained: Comparison) -> str:
    if not math.isfinite(gained.gain):
        return "none: it diverged"
    width = f" ± {Z95 * gained.error:.3f}" if math.isfinite(gained.error) else ", of one row"
    return f"{gained.gain:+.3f}{width}"


def _word(key: str) -> str:
    return key.replace("_", " ")


def _mean(each: Any, key: str) -> float:
    values = [getattr(one, key) for one in each]
    return math.nan if any(v is None for v in values) else float(np.mean(values))
