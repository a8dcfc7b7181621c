"""What a learner tells the person beside it: counts, and how well the model does. Nothing leaves.

    account = LocalAccount(learner, source, unit=label_unit(plan), path=account_path(store))
    account.observed(sample, answer, used=True)     for every record that was offered
    account.round_ends()
    account.line()                                  for a log; `as_dict` for an API

The score is prequential: a record is predicted by the server's model of the round before it is
learned from, and so are the two baselines that need no model: the most frequent label so far (or
the mean), and the last label. All of it is computed from private records without noise, so it is
for this machine only: no message has a place for it. A file beside the store keeps it over
restarts; a kill loses what was counted since the last round.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from veilstream.deployment.learner import Learner
from veilstream.files import write_file
from veilstream.learning.admission import Answer
from veilstream.learning.records import Refusal
from veilstream.learning.tasks import Sample
from veilstream.streams.intake import ClientSource
from veilstream.streams.table_source import TableSource

__all__ = ["LocalAccount", "Score", "account_line", "account_path", "read_account"]

_WRITE_EVERY_S = 1.0
_AT_ONCE = 256


def account_path(store: Path) -> Path:
    """Where a store's account lies: beside it."""
    return store.with_suffix(".local.json")


def read_account(store: Path) -> dict[str, Any] | None:
    """What was last shown; None where nothing was, or it cannot be read."""
    try:
        found: dict[str, Any] = json.loads(account_path(store).read_text(encoding="utf-8"))["shown"]
        account_line(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return found


@dataclass
class Score:
    """Errors of the model and of two baselines, over the records that were predicted."""

    records: int = 0
    model: float = 0.0
    """Sum of wrong predictions, or of squared errors; likewise below."""
    majority: float = 0.0
    no_change: float = 0.0
    labels: dict[str, int] = field(default_factory=dict)
    """How often each came, for a classifier."""
    total: float = 0.0
    """Sum of the targets, for a regression."""
    last: float | None = None

    def take(self, predicted: float, target: float, *, classifies: bool) -> None:
        """Count one record: first predict, then look."""
        if classifies:
            most = max(self.labels, key=lambda label: self.labels[label], default=None)
            self.model += predicted != target
            self.majority += most is None or float(most) != target
            self.no_change += self.last != target
            self.labels[repr(target)] = self.labels.get(repr(target), 0) + 1
        else:
            mean = self.total / self.records if self.records else 0.0
            self.model += (predicted - target) ** 2
            self.majority += (mean - target) ** 2
            self.no_change += ((self.last or 0.0) - target) ** 2
            self.total += target
        self.last = target
        self.records += 1

    def shown(self, *, classifies: bool, unit: float) -> dict[str, float]:
        """Accuracies, or root mean squared errors in the label's own units."""
        if not self.records:
            return {}
        sums = {"model": self.model, "majority": self.majority, "no_change": self.no_change}
        if not classifies:
            sums["mean"] = sums.pop("majority")
            return {name: unit * math.sqrt(s / self.records) for name, s in sums.items()}
        return {name: 1.0 - wrong / self.records for name, wrong in sums.items()}


class LocalAccount:
    """Counts of one learner, over its restarts.

    Args:
        learner: whose model predicts.
        source: what is read; a table's own counts are part of the account.
        unit: what 1 on the scale of targets is in the label's own units.
        path: the file that keeps it; None for memory only.

    """

    def __init__(
        self, learner: Learner, source: ClientSource, *, unit: float = 1.0, path: Path | None = None
    ) -> None:
        self._learner, self._source, self._unit, self._path = learner, source, unit, path
        self.used = self.returning = self.not_admitted = self.empty_steps = self.rounds = 0
        self.clipped = 0
        self.score = Score()
        self._waiting: list[tuple[Any, float]] = []
        self._began, self._rounds_since, self._written_at = time.monotonic(), 0, -math.inf
        self._clipped_before = learner.clipped
        if path is not None:
            self._load(path)

    # --- what happens -----------------------------------------------------------------------------

    def observed(self, sample: Sample, answer: Answer, *, used: bool) -> None:
        """A record was offered; ``used`` says whether a step was made of it."""
        if answer is Answer.REFUSED:
            self.not_admitted += 1
        elif not used:
            self.returning += 1
        else:
            self.used += 1
            with contextlib.suppress(Exception):  # a score must not stop a learner
                self._waiting.append((np.asarray(sample.features), float(sample.target)))
            if len(self._waiting) >= _AT_ONCE:
                self._predict()

    def round_ends(self) -> None:
        """Before the round is sealed: what is left of it has no client."""
        self.empty_steps += self._learner.clients_wanted
        self.rounds += 1
        self._rounds_since += 1
        self._predict()
        self.clipped += self._learner.clipped - self._clipped_before
        self._clipped_before = self._learner.clipped
        if time.monotonic() - self._written_at >= _WRITE_EVERY_S:
            self.save()

    def _predict(self) -> None:
        """What the round's model says of the records that were used since; then they are gone."""
        waiting, self._waiting = self._waiting, []
        model, task = self._learner.model, self._learner.task
        if model is None or not waiting:
            return
        with contextlib.suppress(Exception), np.errstate(all="ignore"):
            features = np.stack([features for features, _ in waiting]).astype(np.float32)
            predicted = np.asarray(task.predict(model, features), np.float64)
            if predicted.shape != (len(waiting),):
                return
            for one, (_, target) in zip(predicted.tolist(), waiting, strict=True):
                self.score.take(one, target, classifies=task.classifies)

    # --- what is shown ----------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """For an API or ``--json``."""
        learner, counts = self._learner, self._rows
        left = None if learner.over else learner.terms.rounds - learner.round
        classifies = bool(learner.task.classifies)
        return {
            "used": self.used,
            "refused": {str(r): c for r, c in counts.refused.most_common()} if counts else {},
            "not_admitted": self.not_admitted,
            "clamped": dict(counts.clamped) if counts else {},
            "returning": self.returning + (counts.not_again if counts else 0),
            "other_learners": counts.other_learners if counts else 0,
            "empty_steps": self.empty_steps,
            "clipped_share": self.clipped / self.used if self.used else None,
            "score": {
                "kind": "accuracy" if classifies else "root mean squared error",
                "records": self.score.records,
                **self.score.shown(classifies=classifies, unit=self._unit),
            },
            "rows_left_about": getattr(self._source, "rows_left", None),
            "rounds_left": left,
            "seconds_left": self._seconds_left(left),
        }

    def _seconds_left(self, rounds: int | None) -> float | None:
        if not rounds or not self._rounds_since:
            return None
        return rounds * (time.monotonic() - self._began) / self._rounds_since

    def line(self) -> str:
        """One line for a log: counts and scores only."""
        return account_line(self.as_dict())

    @property
    def _rows(self) -> Any:
        return self._source.counts if isinstance(self._source, TableSource) else None

    # --- the file ---------------------------------------------------------------------------------

    def save(self) -> None:
        """Write it down; a disk that is full costs counts, not rounds."""
        if self._path is None:
            return
        self._written_at = time.monotonic()
        counts = self._rows
        kept = {
            "used": self.used, "returning": self.returning, "not_admitted": self.not_admitted,
            "empty_steps": self.empty_steps, "rounds": self.rounds, "clipped": self.clipped,
            "score": asdict(self.score),
            "rows": 0 if counts is None else counts.rows,
            "other_learners": 0 if counts is None else counts.other_learners,
            "not_again": 0 if counts is None else counts.not_again,
            "refused": [[r.reason, r.column, c] for r, c in counts.refused.items()]
            if counts else [],
            "clamped": dict(counts.clamped) if counts else {},
        }  # fmt: skip
        with contextlib.suppress(OSError):
            text = json.dumps({"kept": kept, "shown": self.as_dict()}, indent=1)
            write_file(self._path, text + "\n", partial=f".{self._path.name}.new")

    def _load(self, path: Path) -> None:
        """Go on from the file; one that cannot be read begins again."""
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))["kept"]
            self.score = Score(**kept["score"])
            for name in ("used", "returning", "not_admitted", "empty_steps", "rounds", "clipped"):
                setattr(self, name, int(kept[name]))
            if (counts := self._rows) is not None:
                for name in ("rows", "other_learners", "not_again"):
                    setattr(counts, name, int(kept[name]))
                counts.refused = Counter({Refusal(r, c): int(n) for r, c, n in kept["refused"]})
                counts.clamped = Counter({str(c): int(n) for c, n in kept["clamped"].items()})
        except (OSError, ValueError, KeyError, TypeError):
            return


def account_line(shown: dict[str, Any]) -> str:
    """An account in one line, for a log or a screen."""
    parts = [f"{shown['used']} records used"]
    refused = sum(shown["refused"].values()) + shown["not_admitted"]
    if refused:
        why = "; ".join(f"{reason} {count}" for reason, count in list(shown["refused"].items())[:5])
        parts.append(f"{refused} refused ({why or 'not admitted'})")
    if shown["clamped"]:
        per = ", ".join(f"{column} {count}" for column, count in shown["clamped"].items())
        parts.append(f"outside their range: {per}")
    if shown["returning"]:
        parts.append(f"{shown['returning']} of people who may not take part again yet")
    if shown["other_learners"]:
        parts.append(f"{shown['other_learners']} of other learners")
    parts.append(f"{shown['empty_steps']} steps without a client")
    if shown["clipped_share"] is not None:
        parts.append(f"{100 * shown['clipped_share']:.0f}% of gradients clipped")
    score = shown["score"]
    if score["records"]:
        figures = ", ".join(
            f"{name.replace('_', ' ')} {score[name]:.4g}"
            for name in ("model", "majority", "mean", "no_change") if name in score
        )  # fmt: skip
        parts.append(f"{score['kind']}: {figures}")
    if shown["rows_left_about"] is not None:
        parts.append(f"about {shown['rows_left_about']} rows left")
    if shown["rounds_left"] is not None:
        parts.append(f"{shown['rounds_left']} rounds left")
    if shown["seconds_left"] is not None:
        parts.append(f"{_duration(shown['seconds_left'])} at this rate")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
