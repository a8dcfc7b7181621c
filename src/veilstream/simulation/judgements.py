"""Every method's last models, judged: the parts of summary.json that say how good they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.learning.judged import Judged
from veilstream.learning.quality import LabelQuality
from veilstream.learning.tasks import Task
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import Prepared
from veilstream.simulation.final_figures import FinalFigures
from veilstream.simulation.seed_batches import Results
from veilstream.simulation.verdict import Evidence, Verdicts
from veilstream.streams.pool import Stream


@dataclass(frozen=True)
class Judgements:
    """Of a run's methods; empty where nobody is held out, or models were too many to keep."""

    plan: Plan
    prepared: Sequence[Prepared]
    results: Results
    figures: FinalFigures | None

    @classmethod
    def of(cls, plan: Plan, prepared: Sequence[Prepared], task: Task, stream: Stream, results: Results) -> Judgements:
        """Of the models that were published last."""
        figures = None if results.models is None else FinalFigures.of(plan, task, stream, results.seeds)
        return cls(plan, prepared, results, figures)

    @cached_property
    def methods(self) -> list[list[Judged] | None]:
        """Each method's models; None for one that says no label or number of a row."""
        if self.figures is None or self.results.models is None:
            return [None] * len(self.prepared)
        return [self.figures.judged(models) for models in self.results.models]

    def final(self, index: int) -> dict[str, Any]:
        """A method's figures."""
        found = self.methods[index]
        return {} if self.figures is None or found is None else self.figures.figures(found)

    def sentence(self, index: int) -> str | None:
        """The verdict on one method."""
        found = self.methods[index]
        return None if self.figures is None or found is None else Verdicts(self.plan, self.figures).of(found).sentence

    def summary(self, main: int) -> dict[str, Any]:
        """Baselines, held-out rows and the verdict on the main method; each None where nothing is known."""
        told: dict[str, Any] = {"baselines": None, "held_out": None, "verdict": None}
        if self.figures is None:
            return told
        if self.figures.judges[0].labels is None:
            told["unit"] = self.plan.data.label
        told |= {"baselines": self.figures.baselines(), "held_out": self.figures.held_out(self.methods[main])}
        if self.methods[main] is not None:
            losses = self.results.history["loss"][..., : self.results.rounds].astype(np.float64)
            each = [Evidence(*parts) for parts in zip(self.prepared, self.methods, losses, strict=True)]
            others = [other for i, other in enumerate(each) if i != main]
            told["verdict"] = Verdicts(self.plan, self.figures).advised(each[main], others).as_dict()
        return told

    def with_final(self, accuracy: NDArray[Any]) -> NDArray[Any]:
        """Held-out accuracy by round, with that of all held-out rows as the last."""
        whole = accuracy.copy()
        for index, found in enumerate(self.methods):
            if found is not None:
                whole[index, :, -1] = [one.quality.accuracy for one in found if isinstance(one.quality, LabelQuality)]
        return whole
