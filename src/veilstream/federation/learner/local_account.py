"""What a learner tells the person beside it: counts, and how well the model does. Nothing leaves.

    account = LocalAccount(learner, source, unit=label_unit(plan), path=account_path(store))
    account.looked_at(refusal)                      for every record that a caller sent
    account.observed(sample, answer, used=True)     for every record that was offered
    account.round_ends()
    account.as_dict()                               for the API, the page and `ledger status`
    account.line()                                  for a log

There is one account, and log, API, page and `veilstream ledger status` all show it. A record is
predicted by the server's model of the round before it is learned from (`prequential_score`). All of
it is computed from private records without noise, so it is for this machine only: no message has a
place for it. A file beside the store keeps it over restarts; a kill loses what was counted since it
was written, a second or a round ago, but for who took part, which the ledger knows.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from veilstream.deployment.learner import Learner
from veilstream.federation.learner.prequential_score import Score, ScoreHistory
from veilstream.files import write_file
from veilstream.learning.tasks import Sample
from veilstream.records.admission import Answer
from veilstream.records.schema import Encoded, Refusal
from veilstream.streams.intake import ClientSource
from veilstream.streams.table_source import RowCounts, TableSource, count_record

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


class LocalAccount:
    """Counts of one learner, over its restarts.

    Args:
        learner: whose model predicts.
        source: what is read; a table's own counts are part of the account.
        unit: what 1 on the scale of targets is in the label's own units.
        path: the file that keeps it; None for memory only.
        clock: seconds, for the time that is left.

    """

    def __init__(
        self,
        learner: Learner,
        source: ClientSource,
        *,
        unit: float = 1.0,
        path: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._learner, self._source, self._unit, self._path = learner, source, unit, path
        self._clock = clock
        self.used = self.returning = self.not_admitted = self.empty_steps = self.rounds = 0
        self.clipped = self.metrics_failed = 0
        self._rows = source.counts if isinstance(source, TableSource) else RowCounts()
        self._changing = threading.Lock()  # callers' records are counted in another thread
        self.pause = ""
        """Why rounds are sat out now; nothing while they are not."""
        self.score = Score()
        self._history = ScoreHistory(self.score)
        self._waiting: list[tuple[Any, float]] = []
        self._first_round_at: float | None = None
        self._rounds_since, self._written_at = 0, -math.inf
        self._clipped_before, self._failed_before = learner.steps.clipped, learner.steps.metrics_failed
        if path is not None:
            self._load(path)
        # A kill loses what was counted since the file was written; who took part, the ledger knows.
        self.used = max(self.used, learner.ledger.chain.visits.value().count)

    # --- what happens -----------------------------------------------------------------------------

    def looked_at(self, record: Encoded | Refusal) -> None:
        """A record that someone called with was read, or refused; a table counts its own."""
        with self._changing:
            count_record(self._rows, record)

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
        if self._first_round_at is None:  # what came before was waiting for a server
            self._first_round_at = self._clock()
        else:
            self._rounds_since += 1
        self._predict()
        self._history.round_ends(self.rounds, self.score)
        self.clipped += self._learner.steps.clipped - self._clipped_before
        self.metrics_failed += self._learner.steps.metrics_failed - self._failed_before
        self._clipped_before = self._learner.steps.clipped
        self._failed_before = self._learner.steps.metrics_failed

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
        """All of it; every place that shows an account shows this."""
        learner = self._learner
        left = None if learner.over else learner.terms.rounds - learner.round
        scale: dict[str, Any] = {"classifies": bool(learner.task.classifies), "unit": self._unit}
        with self._changing:
            counts = replace(self._rows, refused=self._rows.refused.copy(), clamped=self._rows.clamped.copy())
        return {
            "used": self.used,
            "refused": {str(r): c for r, c in counts.refused.most_common()},
            "not_admitted": self.not_admitted + getattr(self._source, "not_admitted", 0),
            "clamped": dict(counts.clamped),
            "returning": self.returning + counts.not_again + getattr(self._source, "told_without_a_round", 0),
            "other_learners": counts.other_learners,
            "empty_steps": self.empty_steps,
            "clipped_share": self.clipped / self.used if self.used else None,
            "metrics_failed": self.metrics_failed,
            "score": {
                "kind": "accuracy" if scale["classifies"] else "root mean squared error",
                "records": self.score.records,
                **self.score.shown(**scale),
                "recent": self._history.recent(**scale),
                "over_rounds": self._history.points(**scale),
            },
            "rows_left_about": getattr(self._source, "rows_left", None),
            "places_left": None if left is None else self._places_left(left),
            "rounds_left": left,
            "seconds_left": self._seconds_left(left),
            "notices": self._notices(),
        }

    def _notices(self) -> list[str]:
        """What the person beside it should know, a sentence each."""
        table = self._source.table.notices if isinstance(self._source, TableSource) else []
        failed = []
        if self.metrics_failed:
            failed = [
                f"telemetry: the task failed on {self.metrics_failed} of {self.used} clients, who "
                "count as wrong (the log has the first error's kind; try the task on a record of "
                "your own)"
            ]
        return [*([self.pause] if self.pause else []), *failed, *self._learner.ledger.notices, *table]

    def _places_left(self, rounds: int) -> int:
        """Steps that can still have a client; an open round may have taken some already."""
        learner = self._learner
        taken = learner.terms.local_steps - learner.clients_wanted if learner.pinned else 0
        return rounds * learner.terms.local_steps - taken

    def _seconds_left(self, rounds: int | None) -> float | None:
        if not rounds or not self._rounds_since or self._first_round_at is None:
            return None
        return rounds * (self._clock() - self._first_round_at) / self._rounds_since

    def round_is_sealed(self) -> None:
        """Write it down, once a second at most; at the end of an epoch always."""
        if self._learner.over or self._clock() - self._written_at >= _WRITE_EVERY_S:
            self.save()

    def line(self) -> str:
        """One line for a log: counts and scores only."""
        return account_line(self.as_dict())

    # --- the file ---------------------------------------------------------------------------------

    def save(self) -> None:
        """Write it down; a disk that is full costs counts, not rounds."""
        if self._path is None:
            return
        self._written_at = self._clock()
        counts = self._rows
        with self._changing:
            rows = {
                "rows": counts.rows,
                "other_learners": counts.other_learners,
                "not_again": counts.not_again,
                "clamped": dict(counts.clamped),
                "refused": [[r.reason, r.column, c] for r, c in counts.refused.items()],
            }
        kept = rows | {
            "used": self.used,
            "returning": self.returning,
            "not_admitted": self.not_admitted,
            "empty_steps": self.empty_steps,
            "rounds": self.rounds,
            "clipped": self.clipped,
            "metrics_failed": self.metrics_failed,
            "score": asdict(self.score),
            "history": self._history.kept,
        }
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
            self.metrics_failed = int(kept.get("metrics_failed", 0))
            counts = self._rows
            for name in ("rows", "other_learners", "not_again"):
                setattr(counts, name, int(kept[name]))
            counts.refused = Counter({Refusal(r, c): int(n) for r, c, n in kept["refused"]})
            counts.clamped = Counter({str(c): int(n) for c, n in kept["clamped"].items()})
            self._history = ScoreHistory(self.score, kept.get("history", ()))
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
        parts.append(f"outside the plan's range or vocabulary: {per}")
    if shown["returning"]:
        parts.append(f"{shown['returning']} of people who may not take part again yet")
    if shown["other_learners"]:
        parts.append(f"{shown['other_learners']} of other learners")
    parts.append(f"{shown['empty_steps']} steps without a client")
    if shown["clipped_share"] is not None:
        parts.append(f"{100 * shown['clipped_share']:.0f}% of gradients clipped")
    if shown.get("metrics_failed"):
        parts.append(f"telemetry failed on {shown['metrics_failed']} clients")
    score = shown["score"]
    if score["records"]:
        parts.append(f"{score['kind']}: {_figures(score)}")
        recent = score.get("recent", {})
        if 0 < recent.get("records", 0) < score["records"]:
            parts.append(f"lately ({recent['records']} records) {_figures(recent)}")
    if shown["rows_left_about"] is not None:
        parts.append(f"about {shown['rows_left_about']} rows left")
    if shown.get("places_left") is not None:
        parts.append(f"places for {shown['places_left']} more people")
    if shown["rounds_left"] is not None:
        parts.append(f"{shown['rounds_left']} round{'s' * (shown['rounds_left'] != 1)} left")
    if shown["seconds_left"] is not None:
        parts.append(f"{duration(shown['seconds_left'])} at this rate")
    return ", ".join(parts)


def _figures(score: dict[str, Any]) -> str:
    names = [name for name in ("model", "majority", "mean", "no_change") if name in score]
    return ", ".join(f"{name.replace('_', ' ')} {score[name]:.4g}" for name in names)


def duration(seconds: float) -> str:
    """In the unit that reads best."""
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
