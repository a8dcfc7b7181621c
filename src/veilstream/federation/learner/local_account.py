"""What a learner shows on its own machine: counts, and how well the model does. Nothing leaves.

Log, API, page and `veilstream ledger status` all show this one account. The published model predicts a
record before anything is learned from it (`prequential_score`). All of it is computed from private records
without noise, so it stays on this machine: no message has a place for it. A file beside the store
keeps it over restarts. A kill loses what was counted since the file was written, a second or a round
ago, except who took part, which the ledger knows.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.learner import Learner
from veilstream.deployment.step_index import Contents
from veilstream.federation.learner.prequential_score import Score, ScoreHistory
from veilstream.federation.learner.published_model import PublishedModel
from veilstream.federation.learner.record_guard import GuardWarning, RecordGuard
from veilstream.files import write_file
from veilstream.learning.tasks import Sample
from veilstream.plans.records import schema_of
from veilstream.records.admission import Answer
from veilstream.records.baselines import LabelBaselines
from veilstream.records.schema import Encoded, Refusal
from veilstream.streams.intake import ClientSource
from veilstream.streams.table_source import RowCounts, TableSource

_log = logging.getLogger(__name__)

_WRITE_EVERY_S = 1.0
_AT_ONCE = 256


def account_path(store: Path) -> Path:
    """The account's file, beside its store."""
    return store.with_suffix(".local.json")


def read_account(store: Path) -> dict[str, Any] | None:
    """The account as last shown; None if there is none, or it cannot be read."""
    try:
        found: dict[str, Any] = json.loads(account_path(store).read_text(encoding="utf-8"))["shown"]
        account_line(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return found


@dataclass
class Counts:
    """What became of records and steps, over all restarts."""

    used: int = 0
    """Records of which a step was made."""
    refused_steps: int = 0
    """Refused records whose client took a step, with a zero gradient."""
    returning: int = 0
    """Records of people who may not take part again yet."""
    not_admitted: int = 0
    """Records that the task does not admit, and their source has not counted."""
    empty_steps: int = 0
    rounds: int = 0
    clipped: int = 0
    """Gradients longer than the clip norm."""
    metrics_failed: int = 0
    """Clients on whom the task's telemetry failed."""


class LocalAccount:
    """The account of one learner, over its restarts; ``unit`` is 1 on the scale of targets in the label's units."""

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
        self.counts = Counts()
        self._rows = source.counts if isinstance(source, TableSource) else RowCounts()
        self._changing = threading.Lock()  # callers' records are counted in another thread
        self.published: PublishedModel | None = None
        """The model that is scored; None: x^r, where no daemon keeps one."""
        self.pause = ""
        """Why rounds are sat out now; empty while they are not."""
        self.score = Score()
        self._history = ScoreHistory(self.score)
        self._waiting: list[tuple[Any, float]] = []
        schema = schema_of(learner.plan) if learner.plan.data.kind == "table" else None
        self.guard = RecordGuard(schema, classifies=bool(learner.task.classifies), say=_say_warning)
        self._guard_failed = False
        self.paused = False
        """Whether the person beside the data has stopped this learner from beginning rounds."""
        self._first_round_at: float | None = None
        self._rounds_since, self._written_at = 0, -math.inf
        self._clipped_before, self._failed_before = learner.steps.clipped, learner.steps.metrics_failed
        if path is not None:
            self._load(path)
        # A kill loses what was counted since the file was written; who took part, the ledger knows.
        visits = learner.ledger.chain.visits.value().count
        self.counts.used = max(self.counts.used, visits - self.counts.refused_steps)

    def looked_at(self, record: Encoded | Refusal) -> None:
        """Count a caller's record, read or refused; a table counts its own."""
        with self._changing:
            self._rows.add(record)

    def observed(self, sample: Sample | None, answer: Answer, *, used: bool) -> None:
        """Count a record that was offered (None: refused before); ``used`` says whether its client took a step."""
        if answer is Answer.REFUSED or sample is None:
            self.counts.not_admitted += sample is not None
            self.counts.refused_steps += used
        elif not used:
            self.counts.returning += 1
        else:
            self.counts.used += 1
            with contextlib.suppress(Exception):  # a score must not stop a learner
                self._waiting.append((np.asarray(sample.features), float(sample.target)))
            if len(self._waiting) >= _AT_ONCE:
                self._predict()

    def wrote_down(self, found: Contents) -> None:
        """Count the clients of an epoch whose order is secret, all at once.

        Such records are not scored, and what their gradients were like is not counted: a score or a count that grows
        by rounds says who each had.
        """
        self.counts.used += found.records - found.unusable
        self.counts.refused_steps += found.unusable
        self.counts.returning += found.again

    def round_ends(self) -> None:
        """Count a round, before it is sealed: the steps that are left have no client."""
        counts, learner = self.counts, self._learner
        counts.empty_steps += learner.local.steps_wanted
        counts.rounds += 1
        if self._first_round_at is None:  # the time before was spent waiting for a server
            self._first_round_at = self._clock()
        else:
            self._rounds_since += 1
        self._watch(lambda: self.guard.passed(self._rows))
        self._predict()
        self._history.round_ends(counts.rounds, self.score)
        if not learner.order_is_secret:
            counts.clipped += learner.steps.clipped - self._clipped_before
            counts.metrics_failed += learner.steps.metrics_failed - self._failed_before
        self._clipped_before, self._failed_before = learner.steps.clipped, learner.steps.metrics_failed

    def _predict(self) -> None:
        """Score the published model on the records used since the last call, and forget them."""
        waiting, self._waiting = self._waiting, []
        task = self._learner.task
        if not waiting:
            return
        with contextlib.suppress(Exception), np.errstate(all="ignore"):
            features = np.stack([features for features, _ in waiting]).astype(np.float32)
            targets = np.array([target for _, target in waiting])
            self._watch(lambda: self.guard.took(features, targets))
            said = self._said(features)
            if said is None or said.shape != (len(waiting),):
                return
            predicted = said
            self._watch(lambda: self.guard.predicted(predicted, targets))
            for one, (_, target) in zip(predicted.tolist(), waiting, strict=True):
                self.score.take(one, target, classifies=task.classifies)

    def _watch(self, look: Callable[[], None]) -> None:
        """Let the guard look; whatever happens to it, the learner goes on."""
        try:
            with self._changing:
                look()
        except Exception as error:  # its text might quote a record
            if not self._guard_failed:
                _log.warning("the guard of records failed (%s): not everything is compared", type(error).__name__)
            self._guard_failed = True

    @property
    def warnings(self) -> tuple[GuardWarning, ...]:
        """What is unusual about the newest records; nothing acts on it by itself."""
        with self._changing:
            return self.guard.warnings

    def go_on(self) -> None:
        """The person beside the data has looked: end a pause, and take newest records as usual."""
        self.paused = False
        with self._changing:
            self.guard.accept()
        self.save()

    def pause_rounds(self) -> None:
        """Begin no round until `go_on`, also after a restart."""
        self.paused = True
        self.save()

    def _said(self, features: NDArray[np.float32]) -> NDArray[np.float64] | None:
        if self.published is not None:
            model = self.published.model
            return None if model is None else model.decisions(features)[0]
        x = self._learner.model
        return None if x is None else np.asarray(self._learner.task.predict(x, features), np.float64)

    def as_dict(self) -> dict[str, Any]:
        """The account as JSON; every place that shows it shows this."""
        learner, counts = self._learner, self.counts
        left = None if learner.over else learner.terms.rounds - learner.round
        by_rounds = not learner.order_is_secret  # whether records may be counted as rounds use them
        scale: dict[str, Any] = {"classifies": bool(learner.task.classifies), "unit": self._unit}
        with self._changing:
            rows = replace(self._rows, refused=self._rows.refused.copy(), clamped=self._rows.clamped.copy())
        return {
            "used": counts.used,
            "refused": {str(r): c for r, c in rows.refused.most_common()},
            "not_admitted": counts.not_admitted + getattr(self._source, "not_admitted", 0),
            "refused_steps": counts.refused_steps,
            "clamped": dict(rows.clamped),
            "returning": counts.returning + rows.not_again + getattr(self._source, "told_without_a_round", 0),
            "other_learners": rows.other_learners,
            "empty_steps": counts.empty_steps,
            "clipped_share": counts.clipped / counts.used if counts.used and by_rounds else None,
            "metrics_failed": counts.metrics_failed,
            "score": {
                "kind": "accuracy" if scale["classifies"] else "root mean squared error",
                "published": None if self.published is None else self.published.facts,
                "records": self.score.records,
                **self.score.shown(**scale),
                **self._in_words(scale["classifies"]),
                "recent": self._history.recent(**scale),
                "over_rounds": self._history.points(**scale),
            },
            "rows_left_about": getattr(self._source, "rows_left", None),
            "places_left": None if left is None or not by_rounds else self._places_left(left),
            "rounds_left": left,
            "seconds_left": self._seconds_left(left),
            "paused": self.paused,
            "warnings": [asdict(warning) | {"text": warning.text} for warning in self.warnings],
            "notices": self._notices(),
        }

    def _in_words(self, classifies: bool) -> dict[str, Any]:
        """The label's name, and how many records of each label the model got right, in the plan's words."""
        plan = self._learner.plan
        named = schema_of(plan).label if plan.data.kind == "table" and plan.data.encode is None else None
        found: dict[str, Any] = {} if named is None else {"label": named.name}
        if classifies:
            found["by_label"] = {
                str(label if named is None else named.in_units(label)): list(counts)
                for label, counts in self.score.by_label().items()
            }
        return found

    def _notices(self) -> list[str]:
        notices = [self.pause] if self.pause else []
        if not self._learner.over and not self._learner.takes_clients:
            notices.append("the last window takes nobody: those who come now can take part from the next epoch on")
        if self.counts.metrics_failed:
            notices.append(
                f"telemetry: the task failed on {self.counts.metrics_failed} of {self.counts.used} clients, who count "
                "as wrong (the log has the first error's kind; try the task on a record of your own)"
            )
        table = self._source.table.notices if isinstance(self._source, TableSource) else []
        return [*notices, *self._learner.ledger.notices, *table]

    def _places_left(self, rounds: int) -> int:
        """Clients who can still take part; an open round may have taken some already."""
        learner = self._learner
        a_round = learner.terms.local_steps * learner.terms.clients_per_step
        return (rounds - learner.pinned) * a_round + learner.clients_wanted

    def _seconds_left(self, rounds: int | None) -> float | None:
        if not rounds or not self._rounds_since or self._first_round_at is None:
            return None
        return rounds * (self._clock() - self._first_round_at) / self._rounds_since

    def round_is_sealed(self) -> None:
        """Save, at most once a second; always at the end of an epoch."""
        if self._learner.over or self._clock() - self._written_at >= _WRITE_EVERY_S:
            self.save()

    def line(self) -> str:
        """One line for a log: counts and scores only."""
        return account_line(self.as_dict())

    def save(self) -> None:
        """Write the file; a full disk costs counts, not rounds."""
        if self._path is None:
            return
        self._written_at = self._clock()
        with self._changing:
            rows = asdict(replace(self._rows, refused=Counter(), clamped=Counter()))
            rows["clamped"] = dict(self._rows.clamped)
            rows["refused"] = [[r.reason, r.column, c] for r, c in self._rows.refused.items()]
            guard = self.guard.kept
        kept: dict[str, Any] = {
            "counts": asdict(self.counts),
            "rows": rows,
            "score": asdict(self.score),
            "history": self._history.kept,
        }
        kept |= {"guard": guard, "paused": self.paused}
        with contextlib.suppress(OSError):
            text = json.dumps({"version": 1, "kept": kept, "shown": self.as_dict()}, indent=1)
            write_file(self._path, text + "\n", partial=f".{self._path.name}.new")

    def _load(self, path: Path) -> None:
        """Go on from the file; one that cannot be read begins again."""
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))["kept"]
            rows = kept["rows"]
            refused = Counter({Refusal(r, c): int(n) for r, c, n in rows.pop("refused")})
            clamped = Counter({str(c): int(n) for c, n in rows.pop("clamped").items()})
            found = RowCounts(refused=refused, clamped=clamped, **{name: int(n) for name, n in rows.items()})
            counts = Counts(**{name: int(n) for name, n in kept["counts"].items()})
            labels = LabelBaselines(**kept["score"].pop("labels"))
            score = Score(**kept["score"], labels=labels)
            history = ScoreHistory(score, kept["history"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return
        self.counts, self.score, self._history = counts, score, history
        for name, value in vars(found).items():  # a table goes on counting in the same object
            setattr(self._rows, name, value)
        self.paused = kept.get("paused") is True
        try:
            self.guard.resume(kept["guard"], self._rows)
        except (ValueError, KeyError, TypeError, AttributeError):
            _log.info("what was usual for records is learned anew: the file beside the store does not say it")


def _say_warning(warning: GuardWarning, begins: bool) -> None:
    fields = {"event": "records changed" if begins else "records as before"}
    if begins:
        _log.warning("%s. Look at the data; `veilstream ledger pause` stops rounds", warning.text, extra=fields)
    else:
        _log.info("%s: as before, or accepted", warning.column or "predictions", extra=fields)


def account_line(shown: dict[str, Any]) -> str:
    """An account in one line."""
    parts = [f"{shown['used']} records used"]
    refused = sum(shown["refused"].values()) + shown["not_admitted"]
    if refused:
        why = "; ".join(f"{reason} {count}" for reason, count in list(shown["refused"].items())[:5])
        parts.append(f"{refused} refused ({why or 'not admitted'})")
    if shown.get("refused_steps"):
        parts.append(f"{shown['refused_steps']} steps of refused records, with a zero gradient")
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
    if shown["metrics_failed"]:
        parts.append(f"telemetry failed on {shown['metrics_failed']} clients")
    score = shown["score"]
    if score["records"]:
        parts.append(f"{score['kind']}: {_figures(score)}")
        recent = score["recent"]
        if 0 < recent["records"] < score["records"]:
            parts.append(f"lately ({recent['records']} records) {_figures(recent)}")
    if shown["rows_left_about"] is not None:
        parts.append(f"about {shown['rows_left_about']} rows left")
    if shown["places_left"] is not None:
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
    """A length of time in the unit that reads best."""
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
