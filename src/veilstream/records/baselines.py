"""Two predictions of a label that need no model, for judging what a model's accuracy is worth."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class BaselinesRight(NamedTuple):
    """Whether each baseline predicted a label."""

    majority: bool
    no_change: bool


@dataclass
class LabelBaselines:
    """The most frequent label so far (majority; the first of equals), and the last label (no change)."""

    counts: dict[str, int] = field(default_factory=dict)
    last: str | None = None

    def take(self, label: str) -> BaselinesRight:
        """First predict, then count the label."""
        most = max(self.counts, key=lambda known: self.counts[known], default=None)
        right = BaselinesRight(most == label, self.last == label)
        self.counts[label] = self.counts.get(label, 0) + 1
        self.last = label
        return right
