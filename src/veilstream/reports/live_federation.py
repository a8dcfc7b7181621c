"""The live page of a server: rounds as they are closed, and who is there.

It shows less than the server knows: no reason that a learner gave, no path and no version of this
machine, of the plan only numbers (no data source, column or label), and no learner's name unless
the operator asks for names (an absence may say something about the place). Its memory is bounded,
however long the run and however many the learners.
"""

from __future__ import annotations

import logging
import statistics
import time
import tomllib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from numpy.typing import NDArray

from veilstream.errors import VeilstreamError
from veilstream.federation.server.attendance import NO_CLIENTS
from veilstream.federation.server.coordinator import Coordinator
from veilstream.federation.server.open_round import Standing
from veilstream.federation.server.server_metrics import ServerMetrics
from veilstream.learning.telemetry_estimates import Estimate
from veilstream.plans.plan import Plan
from veilstream.reports.federation_report import ROUND_CHARTS, federation_state, round_charts
from veilstream.reports.live_state import LiveState
from veilstream.reports.page_kit import Absence, Chart, Headline, Mark, Table, facts
from veilstream.reports.telemetry import federation_headline, telemetry_charts
from veilstream.runs.folder import Run
from veilstream.runs.tables import ListedEstimate, read_rounds

_log = logging.getLogger(__name__)

_EVERY_S = 0.5  # between two events
_TELEMETRY_EVERY_S = 5.0
_REDRAW_AFTER = 1000  # rounds that are appended to a chart before it is thinned out anew
_MOST_ROWS = 200
_RECENT = 100
_COLUMNS = ("seconds", "answered", "sent", "received")
_GOOD, _PLAIN = ("answered", "asked", "done"), ("void", "sits out", "not enrolled")
_SAID = {"away": "has been away", "sits out": "has sat out", "cannot take part": "has not been able to take part"}
_MOST_ABSENT = 8


class LiveFederation(LiveState):
    """A coordinator's live page."""

    def __init__(
        self,
        coordinator: Coordinator,
        metrics: ServerMetrics,
        folder: Path,
        path: str,
        *,
        named: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._coordinator, self._metrics, self._run = coordinator, metrics, Run(folder)
        self._plan = self._run.plan
        self._clock, self._round_began, self._told_at = clock, clock(), -_EVERY_S
        names = sorted(coordinator.fold.seats)
        self._names = {n: n if named else f"learner {i}" for i, n in enumerate(names, 1)}
        self._missed: frozenset[str] = frozenset()
        self._since_start: dict[str, tuple[int, int | None]] = {
            name: (seat.epoch, None) for name, seat in coordinator.fold.seats.items()
        }
        self._rounds = ThinnedRounds(_COLUMNS)
        earlier = read_rounds(folder)
        if earlier.remark:
            _log.warning("%s: %s", folder, earlier.remark)
        done = coordinator.round  # one that was listed just before a kill is done, and listed, once more
        for row in (each for each in earlier.rounds if each.round < done):
            self._rounds.add(row.round + 1, [row.seconds, row.answered, np.nan, np.nan])
        told = self._run.telemetry()
        self._first: list[ListedEstimate | Estimate] = [row for row in told if row.round == told[0].round]
        self._pending: list[tuple[int, list[float]]] = []
        self._bytes = (0, 0)
        self._appended, self._looked_at, self._telemetry_of = 0, -_TELEMETRY_EVERY_S, 0
        state = federation_state(self._run)
        plan = public_plan(self._plan)
        state["provenance"] = {"facts": facts([("Run", coordinator.run)]), "command": "", "plan": plan}
        state["charts"]["rounds"] = self._charts()
        state["audit"] = None
        super().__init__(state, path)
        self._state |= self._parts()

    def standing(self, now: Standing) -> None:
        """The coordinator moved, or still waits; readers hear at most twice a second."""
        moment = self._clock()
        self._follow_epochs()
        if now.closed is not None:
            self._round_began = moment
            self._missed = frozenset(now.closed.missing)
            self._close(now)
        last = now.round == now.rounds
        if moment - self._told_at < _EVERY_S and not last:
            return
        self._told_at = moment
        self._tell(moment, last)

    def _close(self, now: Standing) -> None:
        assert now.closed is not None
        sent, received = (self._metrics.counted(f"message_{way}_bytes") for way in ("sent", "received"))
        before, self._bytes = self._bytes, (sent, received)
        seen = [now.seconds, float(len(now.closed.accepted))]
        row = [*seen, float(sent - before[0]), float(received - before[1])]
        self._pending.append((now.closed.round + 1, row))

    def _follow_epochs(self) -> None:
        for name, seat in self._coordinator.fold.seats.items():
            if seat.epoch > self._since_start[name][0]:
                self._since_start[name] = (seat.epoch, self._coordinator.round)

    def _tell(self, moment: float, last: bool) -> None:
        pending, self._pending = self._pending, []
        for round_, row in pending:
            self._rounds.add(round_, row)
        self._appended += len(pending)
        patch = {k: v for k, v in self._parts().items() if self._state.get(k) != v}
        telemetry = self._new_telemetry(moment, last)
        if not pending and telemetry is None:
            if patch:
                self.change(patch)
            return
        charts: dict[str, Any] = {"rounds": self._charts()}
        whole = telemetry is not None or self._appended >= _REDRAW_AFTER or not self._state["charts"]["rounds"]
        if telemetry is not None:
            charts["telemetry"] = telemetry
        if whole:
            self._appended = 0
            # A reader's charts may lack appended points, so all charts are sent.
            told = {**patch, "charts": {**self._state["charts"], **charts}}
        else:
            told = {**patch, "append": _points(pending)}
        self.change({**patch, "charts": charts}, told)

    def _new_telemetry(self, moment: float, last: bool) -> list[Chart] | None:
        if moment - self._looked_at < _TELEMETRY_EVERY_S and not last:
            return None
        self._looked_at = moment
        path = self._run.path / "telemetry.csv"
        try:
            size = path.stat().st_size if path.exists() else 0
            if size == self._telemetry_of:
                return None
            self._telemetry_of = size
            return telemetry_charts(self._run)
        except (OSError, VeilstreamError) as error:
            _log.warning("no private telemetry on the live page: %s", error)
            return None

    def _parts(self) -> dict[str, Any]:
        states = self._states()
        return {
            "headline": self._headline(Counter(states.values())),
            "absent": self._absent(states),
            "results": self._table(states),
            "notices": self._notices(),
        }

    def _states(self) -> dict[str, str]:
        here, fold = self._coordinator, self._coordinator.fold
        answered, reachable, refused, absences = set(fold.answered), here.reachable, here.refused, here.absences
        overdue = self._clock() - self._round_began > self._plan.federation.deadline_s
        states = {}
        for name, seat in fold.seats.items():
            if seat.state in ("held", "void"):
                states[name] = "left out" if seat.state == "held" else "void"
            elif name in refused:
                states[name] = "cannot take part"
            elif fold.finished:
                states[name] = "done"
            elif name in answered:
                states[name] = "answered"
            elif name not in here.seated:
                states[name] = "not enrolled" if seat.state == "new" and name not in absences else "away"
            elif name not in reachable:
                states[name] = "away"
            elif name in absences and absences[name].why == NO_CLIENTS:
                states[name] = "sits out"
            else:
                states[name] = "late" if overdue or name in self._missed else "asked"
        return states

    def _absent(self, states: Mapping[str, str]) -> list[Absence]:
        """Who takes no part now, those for longest first; at most a few, the table has them all."""
        found: list[Absence] = []
        for name, now in states.items():
            if now in _GOOD or now in ("void", "late", "not enrolled"):
                continue
            since, why = self._since_and_why(name, now)
            said = now if since is None else _SAID.get(now, now)
            found.append({"who": self._names[name], "now": said, "since": since, "why": why})
        found.sort(key=lambda each: (each["since"] is None, each["since"]))
        if (more := len(found) - _MOST_ABSENT) > 0:
            found[_MOST_ABSENT:] = [{"who": f"{more} more", "now": "take no part", "since": None, "why": ""}]
        return found

    def _since_and_why(self, name: str, now: str) -> tuple[float | None, str]:
        known = self._coordinator.absences.get(name)
        if now in ("cannot take part", "left out"):
            return None if known is None else known.since, "the server’s log says why, and what to do"
        return (None, "") if known is None else (known.since, known.why)

    def _headline(self, counts: Mapping[str, int]) -> Headline:
        here, plan = self._coordinator, self._plan
        done, rounds, learners = here.round, here.terms.rounds, here.terms.learners
        unbounded = plan.learning.unbounded
        present = counts["answered"] + counts["asked"] + counts["late"] + counts["sits out"] + counts["done"]
        beside = [("rounds done", f"{done:,}" if unbounded else f"{done:,} of {rounds:,}")]
        if not unbounded:
            beside.append(("rounds left", f"{rounds - done:,}"))
        beside.append(("learners present", f"{present} of {learners}"))
        if (core := here.core) is not None:
            beside.append(("part of every sum", f"{core[0]} learners; rounds need {core[1]}"))
        troubles = ("late", "sits out", "cannot take part", "left out", "void")
        beside += [(word, str(counts[word])) for word in troubles if counts[word]]
        if fresh := sum(since is not None for _, since in self._since_start.values()):
            beside.append(("in a new epoch", str(fresh)))
        recent = [s for s in self._rounds.recent("seconds", _RECENT) if s == s]
        if recent:
            beside.append(("median round", f"{statistics.median(recent):.2f} s"))
        if any(self._bytes):
            beside.append(("received", _amount(self._bytes[1])))
            beside.append(("sent", _amount(self._bytes[0])))
        latest = [] if self._coordinator.telemetry is None else self._coordinator.telemetry.latest
        self._first = self._first or list(latest)
        return federation_headline([*self._first, *latest], plan, facts(beside))

    def _table(self, states: Mapping[str, str]) -> Table:
        fold, terms = self._coordinator.fold, self._coordinator.terms
        shown = list(states)
        if len(shown) > _MOST_ROWS:
            shown.sort(key=lambda n: (states[n] in _GOOD, n))
        rows: list[list[str | Mark]] = []
        for name in sorted(shown[:_MOST_ROWS]):
            seat, (_, new) = fold.seats[name], self._since_start[name]
            epoch = str(seat.epoch) + ("" if new is None else f", new since round {new}")
            taken, now = str(seat.round), states[name]
            left = "–" if self._plan.learning.unbounded else str(terms.rounds - seat.round)
            state: Mark = {"text": now, "mark": "good" if now in _GOOD else "plain" if now in _PLAIN else "bad"}
            rows.append([self._names[name], state, taken, left, epoch])
        left_out = len(states) - len(rows)
        note = (
            "Each client’s promise holds from its one step on, for the whole run; how many rounds are done or left "
            "changes nothing about it. Rounds that are left are places for people who have not come yet. Rounds are "
            "counted within a learner’s epoch."
        )
        if left_out:
            note += f" {left_out:,} learners without trouble are not listed."
        return {
            "columns": ["learner", "now", "rounds taken part", "rounds left", "epoch"],
            "rows": rows,
            "note": note,
            "main": None,
        }

    def _notices(self) -> list[str]:
        if self._coordinator.finished:
            return ["All rounds are done; the server keeps serving models."]
        return []

    def _charts(self) -> list[Chart]:
        return round_charts(*self._rounds.table())


def _points(rows: list[tuple[int, list[float]]]) -> dict[str, Any]:
    added: dict[str, Any] = {}
    for key, (_, _, _, series) in ROUND_CHARTS.items():
        places = {name: _COLUMNS.index(column) for column, name in series.items()}
        added[key] = {
            "x": [round_ for round_, _ in rows],
            "series": {name: [[row[at]] for _, row in rows] for name, at in places.items()},
        }
    return added


def _amount(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


_MOST = 4096
_NEWEST = 128


class ThinnedRounds:
    """Rows of numbers by round, for charts, in bounded memory.

    Guarantees: at most ``most`` rows are held, evenly spread over the run, and the newest 128.
    """

    def __init__(self, columns: Sequence[str], most: int = _MOST) -> None:
        self._columns, self._most, self._every, self._seen = tuple(columns), most, 1, 0
        self._rows: list[tuple[int, tuple[float, ...]]] = []
        self._newest: deque[tuple[int, tuple[float, ...]]] = deque(maxlen=_NEWEST)

    def __len__(self) -> int:
        return len(self._newest)

    def add(self, round_: int, values: Sequence[float]) -> None:
        """Add the next round's numbers."""
        row = (round_, tuple(values))
        self._newest.append(row)
        if self._seen % self._every == 0:
            self._rows.append(row)
        self._seen += 1
        if len(self._rows) > self._most:
            self._rows, self._every = self._rows[::2], 2 * self._every

    def recent(self, column: str, count: int) -> list[float]:
        """The newest values of a column."""
        at = self._columns.index(column)
        return [values[at] for _, values in list(self._newest)[-count:]]

    def table(self) -> tuple[NDArray[np.int64], dict[str, NDArray[np.float64]]]:
        """Rounds, and the columns at them."""
        rows = dict([*self._rows, *list(self._newest)[-1:]])
        values = np.array(list(rows.values()), np.float64).reshape(-1, len(self._columns))
        by_column = {name: values[:, i] for i, name in enumerate(self._columns)}
        return np.array(list(rows), np.int64), by_column


_TABLES = ("learning", "privacy", "telemetry", "federation", "methods")
_WORDS = ("mechanism", "accounting", "neighbours", "objective", "metrics")
"""Keys whose values are names of ours: an operator cannot write anything else there."""


def public_plan(plan: Plan) -> str:
    """The plan as TOML without anything that an operator wrote in their own words.

    Guarantees: it holds no path, address, column, label, task or method name of the plan, and
    nothing about data. A key that is added to plans later stays out unless it is a number.
    """
    tables = tomllib.loads(plan.to_toml())
    return tomli_w.dumps({name: _public(tables[name]) for name in _TABLES if name in tables})


def _public(table: Any) -> Any:
    if isinstance(table, list):
        return [_public(entry) for entry in table]
    return {key: content for key, content in table.items() if isinstance(content, int | float) or key in _WORDS}
