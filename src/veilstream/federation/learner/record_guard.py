"""Watches a learner's records while they come, and warns the person beside the data. It changes nothing.

Every `WINDOW` records, each column's newest records are compared with this learner's own earlier ones: the
shares of refused values and of values outside the plan's range or vocabulary, the distribution of the encoded
values, and how often the model is wrong. So a column that shrank a thousandfold is found, also where it stays
inside its range.

A warning is a fact about private records. It goes to the log, the status and the page of this machine, and
nothing acts on it by itself: a learner that paused, answered late or left because of what records say would
tell the server what they say. Only a person may pause (`Daemon.pause`).

**False alarms.** Where records are exchangeable (in no order that matters), all tests of one window together
raise a false alarm with a probability of at most about `FALSE_ALARMS`, once in a million records. The shares are
tested exactly (hypergeometric); distributions by chi-squared with rare values pooled. Each must also be a large
change, larger than between any earlier windows, so that the hours of a day, or a model that wavers, are learned
as usual. Nothing is compared before `_LEAST_WINDOWS` windows. While a warning stands, its column's newest records
are not learned from; it ends by itself when two windows in a row look as before, or when the person says that
the change is fine (`accept`).

What is kept is bounded: per column at most `_MOST_VALUES` counts and nine numbers between which they are counted.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtrc, gammaln

from veilstream.records.schema import Categorical, Hashed, RecordSchema, Refusal
from veilstream.streams.table_source import RowCounts

WINDOW = 100
"""Records that are compared at a time."""
FALSE_ALARMS = 1e-4
"""Probability of a false alarm in one window, over all of its tests."""
_LEAST_WINDOWS = 5
_LAST_WINDOWS = 40
_MOST_RECORDS = 4000  # earlier ones count half once there are more
_MOST_VALUES = 32
_MOST_COLUMNS = 256  # of records without a schema
_EDGES = 9
_LARGE = {"refused": 0.05, "outside": 0.10, "values": 0.25, "wrong": 0.10}
_LARGER_THAN_EVER = 1.25
_RARE = 5.0
_QUIET_WINDOWS = 2
_LARGE_ERROR = 0.9

Floats = NDArray[np.floating[Any]]
_WHAT = {
    "refused": "refused",
    "outside": "outside the plan's range or vocabulary",
    "values": "distributed unlike before",
    "wrong": "predicted badly",
}


@dataclass(frozen=True)
class GuardWarning:
    """One fact about the newest records, for this machine only."""

    column: str
    what: str
    """refused, outside, values (their distribution) or wrong (the model's predictions)."""
    share: float
    """Of the newest records; for values, how much of the distribution has moved."""
    before: float
    """The same among earlier ones."""
    since_record: int
    """How many records had come by then."""
    since: float
    """Seconds since 1970."""

    @property
    def text(self) -> str:
        """In words."""
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.since))
        since = f"since record {self.since_record:,} ({when})"
        if self.what == "values":
            return f"{self.column}: {100 * self.share:.0f}% of the values have moved, {since}"
        named = f"{self.column}: " if self.column else ""
        return f"{named}{100 * self.share:.0f}% {_WHAT[self.what]}, {100 * self.before:.0f}% before, {since}"


@dataclass
class _Shares:
    """One share: among earlier records, and in each of the last windows."""

    hits: float = 0.0
    records: float = 0.0
    lately: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.hits / self.records if self.records else 0.0

    def learn(self, hits: int, records: int) -> None:
        self.hits, self.records = self.hits + hits, self.records + records
        self.lately = [*self.lately, hits / records][-_LAST_WINDOWS:]
        if self.records > _MOST_RECORDS:
            self.hits, self.records = self.hits / 2, self.records / 2


@dataclass
class _Values:
    """How one column's encoded values are distributed."""

    edges: list[float] | None = None
    """Between which numbers are counted, read off the first window; None for places that are counted as they are."""
    counts: list[float] = field(default_factory=list)
    windows: int = 0
    furthest: float = 0.0

    def moved(self, counts: Floats) -> float:
        """The share of the distribution that has moved."""
        old = np.array(self.counts)
        return 0.5 * float(np.abs(counts / counts.sum() - old / old.sum()).sum())

    def chance(self, counts: Floats) -> float:
        """Probability of such a difference by chance."""
        both = np.stack([np.array(self.counts), counts])
        expected = both.sum(axis=0) * counts.sum() / both.sum()
        rare = expected < _RARE
        both = np.concatenate([both[:, ~rare], both[:, rare].sum(axis=1, keepdims=True)], axis=1)
        both = both[:, both.sum(axis=0) > 0]
        if both.shape[1] < 2:
            return 1.0
        wanted = both.sum(axis=1, keepdims=True) * both.sum(axis=0) / both.sum()
        return float(chdtrc(both.shape[1] - 1, float(((both - wanted) ** 2 / wanted).sum())))

    def learn(self, counts: Floats, moved: float) -> None:
        old = np.array(self.counts) if self.counts else np.zeros(len(counts))
        old = old + counts
        if old.sum() > _MOST_RECORDS:
            old = old / 2
        self.counts, self.windows = old.tolist(), self.windows + 1
        self.furthest = max(self.furthest, moved)


@dataclass(frozen=True)
class _Column:
    """Where a column's numbers stand among the encoded features."""

    name: str
    first: int
    width: int
    places: bool
    """Whether each number is a place, one of which is 1."""
    flagged: bool = False


class RecordGuard:
    """What is usual for one learner's records, and what is not now."""

    def __init__(
        self,
        schema: RecordSchema | None,
        *,
        classifies: bool,
        say: Callable[[GuardWarning, bool], None] = lambda warning, begins: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``say`` is called when a warning begins and, with False, when it ends."""
        self._columns = _columns_of(schema)
        self._label = "the label" if schema is None or not schema.features else schema.label.name
        self._classifies, self._say, self._clock = classifies, say, clock
        self._shares: dict[tuple[str, str], _Shares] = {}
        self._values: dict[str, _Values] = {}
        self._warnings: dict[tuple[str, str], GuardWarning] = {}
        self._quiet: dict[tuple[str, str], int] = {}
        self._window: list[tuple[Any, float]] = []
        self._wrong: list[float] = []
        self._errors: list[float] = []  # of numbers that were predicted; in memory alone
        self._rows_seen = RowCounts()
        self.records = 0

    @property
    def warnings(self) -> tuple[GuardWarning, ...]:
        """What is unusual now, the oldest first."""
        return tuple(sorted(self._warnings.values(), key=lambda warning: warning.since_record))

    def accept(self) -> None:
        """The person has looked: what came since the warnings is usual from here on."""
        for column, what in list(self._warnings):
            self._end(column, what)
            if what == "values":
                self._values.pop(column, None)
            else:
                self._shares.pop((column, what), None)
            if what == "wrong":
                self._errors = []

    # --- what comes ------------------------------------------------------------------------------

    def passed(self, rows: RowCounts) -> None:
        """What a source has counted so far, over all records: compared once enough are new."""
        new = rows.rows - self._rows_seen.rows
        if new < 0:
            self._rows_seen = _copied(rows)
        if new < WINDOW:
            return
        seen, self._rows_seen = self._rows_seen, _copied(rows)
        self.records = max(self.records, rows.rows)
        refused = _by_column(rows.refused) - _by_column(seen.refused)
        moved = rows.clamped - seen.clamped
        columns = [*(each.name for each in self._columns), self._label]
        for column in dict.fromkeys([*columns, *refused]):
            self._share(column, "refused", min(refused[column], new), new)
        for column in dict.fromkeys([*columns, *moved]):
            self._share(column, "outside", min(moved[column], new), new)

    def took(self, features: Floats, targets: Floats) -> None:
        """Records of which steps were made."""
        self._window.extend(zip(features, targets.tolist(), strict=True))
        while len(self._window) >= WINDOW:
            some, self._window = self._window[:WINDOW], self._window[WINDOW:]
            if not self._rows_seen.rows:  # a source that counts no rows
                self.records += WINDOW
            self._distributions(
                np.stack([one for one, _ in some]).reshape(WINDOW, -1), np.array([target for _, target in some])
            )

    def predicted(self, predictions: Floats, targets: Floats) -> None:
        """What the round's model said of records before it learned from them."""
        if self._classifies:
            self._wrong.extend((predictions != targets).astype(float).tolist())
        else:
            errors = np.abs(predictions - targets)
            if len(self._errors) >= WINDOW:
                self._wrong.extend((errors > np.quantile(self._errors, _LARGE_ERROR)).astype(float).tolist())
            if ("", "wrong") not in self._warnings:
                self._errors = [*self._errors, *errors.tolist()][-10 * WINDOW :]
        while len(self._wrong) >= WINDOW:
            some, self._wrong = self._wrong[:WINDOW], self._wrong[WINDOW:]
            self._share("", "wrong", int(sum(some)), WINDOW)

    # --- what is compared ------------------------------------------------------------------------

    @property
    def _alpha(self) -> float:
        """Of one test, so that all of a window's keep to `FALSE_ALARMS`."""
        return FALSE_ALARMS / (3 * (len(self._columns) or 1) + 4)

    def _share(self, column: str, what: str, hits: int, records: int) -> None:
        known = self._shares.setdefault((column, what), _Shares())
        now, before = hits / records, known.share
        large = now - before >= _LARGE[what] and now >= _LARGER_THAN_EVER * max(known.lately, default=1.0)
        odd = (
            large  # looked at first: it costs least
            and len(known.lately) >= _LEAST_WINDOWS
            and _as_many_by_chance(hits, records, known.hits, known.records) < self._alpha
        )
        if self._judge(column, what, odd, now, before):
            known.learn(hits, records)

    def _distributions(self, features: Floats, targets: Floats) -> None:
        columns = self._columns
        if not columns and features.shape[1] <= _MOST_COLUMNS:
            columns = self._columns = [_Column(f"number {i}", i, 1, places=False) for i in range(features.shape[1])]
        for column in columns:
            self._compare(column, features[:, column.first : column.first + column.width])
        self._compare(_Column(self._label, 0, 1, places=False), targets[:, None])

    def _compare(self, column: _Column, numbers: Floats) -> None:
        name, known = column.name, self._values.get(column.name)
        if known is None:
            known = self._values[name] = _Values()
            if not column.places:
                parts = np.quantile(numbers[:, 0], np.linspace(0.1, 0.9, _EDGES), method="inverted_cdf")
                known.edges = sorted(set(parts.tolist()))
                return  # where the edges come from is not counted: it would be too even
        counts = _counted(numbers, known.edges, flagged=column.flagged)
        if not known.counts:
            known.learn(counts, 0.0)
            return
        moved = known.moved(counts)
        large = moved >= _LARGE["values"] and moved >= _LARGER_THAN_EVER * known.furthest
        odd = large and known.windows >= _LEAST_WINDOWS and known.chance(counts) < self._alpha
        if self._judge(name, "values", odd, moved, 0.0):
            known.learn(counts, moved)

    def _judge(self, column: str, what: str, odd: bool, now: float, before: float) -> bool:
        """Begin, keep or end a warning; whether the window may be learned from."""
        key = (column, what)
        if odd:
            self._quiet[key] = 0
            if key not in self._warnings:
                warning = GuardWarning(column, what, now, before, self.records, self._clock())
                self._warnings[key] = warning
                self._say(warning, True)
            return False
        if key not in self._warnings:
            return True
        self._quiet[key] = self._quiet.get(key, 0) + 1
        if self._quiet[key] >= _QUIET_WINDOWS:
            self._end(column, what)
        return False

    def _end(self, column: str, what: str) -> None:
        self._quiet.pop((column, what), None)
        self._say(self._warnings.pop((column, what)), False)

    # --- over restarts ---------------------------------------------------------------------------

    @property
    def kept(self) -> dict[str, Any]:
        """As a local file keeps it: counts and shares, no record."""
        return {
            "records": self.records,
            "shares": [[*key, asdict(shares)] for key, shares in self._shares.items()],
            "values": [[name, asdict(values)] for name, values in self._values.items()],
            "warnings": [asdict(warning) for warning in self._warnings.values()],
        }

    def resume(self, kept: Mapping[str, Any], rows: RowCounts) -> None:
        """Go on from a file; ``rows`` is what the source had counted by then."""
        shares = {(str(column), str(what)): _Shares(**each) for column, what, each in kept["shares"]}
        values = {str(name): _Values(**each) for name, each in kept["values"]}
        found = [GuardWarning(**each) for each in kept["warnings"]]
        if any(warning.what not in _WHAT for warning in found):
            raise ValueError("an unknown kind of warning")
        self.records, self._shares, self._values = int(kept["records"]), shares, values
        self._warnings = {(warning.column, warning.what): warning for warning in found}
        self._rows_seen = _copied(rows)


def _columns_of(schema: RecordSchema | None) -> list[_Column]:
    if schema is None or not schema.features:
        return []
    places = schema.places
    return [
        _Column(
            feature.name,
            places[feature.name].start,
            feature.width,
            places=isinstance(feature, Categorical | Hashed),
            flagged=feature.missing == "flag",
        )
        for feature in schema.features
    ]


def _counted(numbers: Floats, edges: Sequence[float] | None, *, flagged: bool) -> Floats:
    """How many records have each place, or lie at or between the edges."""
    if edges is None:
        there = np.abs(numbers) > 0
        place = np.where(there.any(axis=1), there.argmax(axis=1) % (_MOST_VALUES - 1) + 1, 0)
        return np.bincount(place, minlength=min(numbers.shape[1], _MOST_VALUES - 1) + 1).astype(float)
    values = numbers[:, 0]
    place = np.searchsorted(edges, values, "left") + np.searchsorted(edges, values, "right")
    if flagged:
        place = np.where(numbers[:, -1] != 0, 2 * len(edges) + 1, place)
    return np.bincount(place, minlength=2 * len(edges) + 2).astype(float)


def _as_many_by_chance(hits: int, records: int, earlier: float, of: float) -> float:
    """Probability of at least so many hits among the newest records, if any of all could be the newest."""
    total, everything = round(earlier) + hits, round(of) + records
    many = np.arange(hits, min(records, total) + 1)
    ways = _log_ways(total, many) + _log_ways(everything - total, records - many) - _log_ways(everything, records)
    return float(min(1.0, np.exp(ways).sum()))


def _log_ways(of: Any, chosen: Any) -> Any:
    """Logarithm of how many ways there are to choose."""
    with np.errstate(all="ignore"):
        ways = gammaln(of + 1.0) - gammaln(chosen + 1.0) - gammaln(of - chosen + 1.0)
        return np.where((chosen >= 0) & (chosen <= of), ways, -math.inf)


def _by_column(refused: Mapping[Refusal, int]) -> Counter[str]:
    counts = Counter[str]()
    for refusal, count in refused.items():
        counts[refusal.column] += count
    return counts


def _copied(rows: RowCounts) -> RowCounts:
    return RowCounts(rows.rows, rows.refused.copy(), rows.clamped.copy(), rows.other_learners, rows.not_again)
