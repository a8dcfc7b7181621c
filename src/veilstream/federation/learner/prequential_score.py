"""How well a model predicts records before it learns from them, beside two baselines without a model.

``majority`` predicts the most frequent label so far (for a number: the mean), ``no_change`` the last
one. Scores are exact, without noise, and stay on the learner's machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from veilstream.records.baselines import LabelBaselines

RECENT_RECORDS = 100
"""The recent score is that of the last rounds with at least so many records."""

_MOST_STRETCHES = 400
_MOST_POINTS = 30
_LEAST_RECORDS = 20  # a point of fewer would be mostly chance


def _figures(records: int, errors: Sequence[float], *, classifies: bool, unit: float) -> dict[str, float]:
    """Accuracies, or root mean squared errors in the label's own units."""
    if not records:
        return {}
    names = ("model", "majority" if classifies else "mean", "no_change")
    if classifies:
        return {name: 1.0 - wrong / records for name, wrong in zip(names, errors, strict=True)}
    return {name: unit * math.sqrt(s / records) for name, s in zip(names, errors, strict=True)}


@dataclass
class Score:
    """Errors of the model and of two baselines, over the records that were predicted."""

    records: int = 0
    model: float = 0.0
    """Sum of wrong predictions, or of squared errors; likewise below."""
    majority: float = 0.0
    no_change: float = 0.0
    labels: LabelBaselines = field(default_factory=LabelBaselines)
    right: dict[str, int] = field(default_factory=dict)
    """How many records of each label the model predicted right."""
    total: float = 0.0
    last: float = 0.0

    def take(self, predicted: float, target: float, *, classifies: bool) -> None:
        """Count one record: first predict, then look."""
        if classifies:
            label = repr(target)
            right = self.labels.take(label)
            self.model += predicted != target
            self.right[label] = self.right.get(label, 0) + (predicted == target)
            self.majority += not right.majority
            self.no_change += not right.no_change
        else:
            mean = self.total / self.records if self.records else 0.0
            self.model += (predicted - target) ** 2
            self.majority += (mean - target) ** 2
            self.no_change += (self.last - target) ** 2
            self.total += target
            self.last = target
        self.records += 1

    @property
    def errors(self) -> tuple[float, float, float]:
        """Errors of the model, of the majority label (or mean), and of no change."""
        return self.model, self.majority, self.no_change

    def by_label(self) -> dict[float, tuple[int, int]]:
        """For each label that came: how many records had it, and how many of these the model got right.

        Nothing where the count was begun by a version that did not keep it.
        """
        if sum(self.right.values()) != self.records - self.model:
            return {}
        return {float(label): (count, self.right.get(label, 0)) for label, count in sorted(self.labels.counts.items())}

    def shown(self, *, classifies: bool, unit: float) -> dict[str, float]:
        """Accuracies, or root mean squared errors in the label's own units."""
        return _figures(self.records, self.errors, classifies=classifies, unit=unit)


@dataclass(frozen=True)
class Stretch:
    """Errors over some rounds in a row."""

    last_round: int
    """Counted from 1, over all epochs."""
    records: int
    errors: tuple[float, float, float]
    """In the order of `Score.errors`."""

    def joined(self, later: Stretch) -> Stretch:
        """This stretch and the one that follows, as one."""
        a, b = self.errors, later.errors
        errors = (a[0] + b[0], a[1] + b[1], a[2] + b[2])
        return Stretch(later.last_round, self.records + later.records, errors)


class ScoreHistory:
    """A score over rounds: a stretch for each round, or for several if there are very many."""

    def __init__(self, score: Score, kept: Iterable[Sequence[Any]] = ()) -> None:
        """Go on from a file's ``kept`` stretches; ``score`` is the total by then."""
        self._stretches = [
            Stretch(int(last), int(records), (float(a), float(b), float(c))) for last, records, a, b, c in kept
        ]
        self._records, self._errors = score.records, score.errors

    def round_ends(self, round_: int, score: Score) -> None:
        """Note what ``score`` has gained since the last call; ``round_`` counts from 1."""
        gained = score.records - self._records
        if not gained:
            return
        a, b = score.errors, self._errors
        self._stretches.append(Stretch(round_, gained, (a[0] - b[0], a[1] - b[1], a[2] - b[2])))
        self._records, self._errors = score.records, score.errors
        if len(self._stretches) > _MOST_STRETCHES:
            pairs = zip(self._stretches[::2], self._stretches[1::2], strict=False)
            odd = self._stretches[-1:] if len(self._stretches) % 2 else []
            self._stretches = [one.joined(other) for one, other in pairs] + odd

    @property
    def kept(self) -> list[list[float]]:
        """The stretches as a file keeps them."""
        return [[s.last_round, s.records, *s.errors] for s in self._stretches]

    def recent(self, *, classifies: bool, unit: float) -> dict[str, Any]:
        """The score over the last rounds that have `RECENT_RECORDS` records together."""
        latest: Stretch | None = None
        for stretch in reversed(self._stretches):
            latest = stretch if latest is None else stretch.joined(latest)
            if latest.records >= RECENT_RECORDS:
                break
        if latest is None:
            return {"records": 0}
        figures = _figures(latest.records, latest.errors, classifies=classifies, unit=unit)
        return {"records": latest.records, **figures}

    def points(self, *, classifies: bool, unit: float) -> list[dict[str, Any]]:
        """Points for a chart: about sixty at most, each of enough records to mean something."""
        least = max(_LEAST_RECORDS, sum(s.records for s in self._stretches) // _MOST_POINTS)
        points: list[Stretch] = []
        for stretch in self._stretches:
            if points and points[-1].records < least:
                points[-1] = points[-1].joined(stretch)
            else:
                points.append(stretch)
        if len(points) > 1 and points[-1].records < _LEAST_RECORDS:
            points[-2:] = [points[-2].joined(points[-1])]
        return [
            {"round": p.last_round, "records": p.records}
            | _figures(p.records, p.errors, classifies=classifies, unit=unit)
            for p in points
        ]
