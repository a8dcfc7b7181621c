"""What experiment trackers are told of a run folder: curves by run, settings, and the promise.

A simulation becomes one tracked run for each method and seed, a federation one. Nothing is told
that report.html does not show.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.reports.charts import thinned
from veilstream.runs.folder import Run, flat_keys
from veilstream.runs.tables import read_rounds

_log = logging.getLogger(__name__)

_TAGGED = ("veilstream", "commit", "began")
_HISTORY = ("loss", "prequential_accuracy")


@dataclass(frozen=True)
class Curve:
    """Values of one metric at rounds; what is no number is left out."""

    metric: str
    rounds: list[int]
    values: list[float]


@dataclass(frozen=True)
class TrackedRun:
    """One run, as a tracker lists it."""

    name: str
    settings: dict[str, str]
    tags: dict[str, str]
    curves: list[Curve] = field(default_factory=list)


def tracked_runs(run: Run, most_points: int) -> list[TrackedRun]:
    """All of a folder.

    Args:
        run: a simulation's folder, complete or not, or a federation's.
        most_points: of each curve, evenly spread, the first and the last among them.

    Raises:
        InputError: for a folder whose files are missing or damaged, or fewer than two points.

    """
    if most_points < 2:
        raise InputError("--points", most_points, "at least 2", "try 1000")
    return _of_server(run, most_points) if run.is_federation else _of_methods(run, most_points)


def _of_methods(run: Run, most: int) -> list[TrackedRun]:
    summary, seeds = run.summary, run.summary["seeds"]
    measured = {column: run.history(column) for column in _HISTORY}
    looked: list[int] = []
    held: dict[str, NDArray[Any]] = {}
    if (run.path / "accuracy.csv").exists():
        looked, found = run.held_out_accuracy()
        held = dict(found)
    telemetry = run.telemetry()
    made = []
    for name, method in summary["methods"].items():
        settings = _settings(run) | {"method": name, "mechanism": method["mechanism"] or "none"}
        settings |= _promise(method["guarantee"])
        for place, seed in enumerate(seeds):
            curves = [
                _curve(column, range(1, summary["rounds"] + 1), values[name][place], most)
                for column, values in measured.items()
            ]
            if held:
                curves.append(_curve("held_out_accuracy", looked, held[name][place], most))
            own = (name, seed)
            told = [row for row in telemetry if (row.get("method"), row.get("seed")) == own]
            curves += _telemetry(told, most)
            tags = _tags(run) | {"veilstream.simulated": "true", "veilstream.seed": str(seed)}
            made.append(TrackedRun(f"{name}, seed {seed}", settings, tags, [c for c in curves if c.rounds]))
    return made


def _of_server(run: Run, most: int) -> list[TrackedRun]:
    listed = read_rounds(run.path)
    if listed.remark:
        _log.warning("%s: %s", run.path, listed.remark)
    rounds = [row.round + 1 for row in listed.rounds]
    curves = [
        _curve("round_seconds", rounds, np.array([row.seconds for row in listed.rounds]), most),
        _curve("learners_answered", rounds, np.array([r.answered for r in listed.rounds]), most),
    ]
    curves += _telemetry(run.telemetry(), most)
    settings = _settings(run) | _promise(run.guarantees)
    tags = _tags(run) | {"veilstream.simulated": "false"}
    return [TrackedRun(run.path.name, settings, tags, [c for c in curves if c.rounds])]


def _telemetry(rows: list[dict[str, str | float]], most: int) -> list[Curve]:
    """Private estimates with the ends of their error bars."""
    by_metric: dict[str, list[dict[str, str | float]]] = {}
    for row in rows:
        by_metric.setdefault(str(row["metric"]), []).append(row)
    curves = []
    for metric, told in by_metric.items():
        at = [int(float(row["round"])) for row in told]
        for column in ("estimate", "low", "high"):
            values = np.array([float(row[column]) for row in told])
            curves.append(_curve(f"telemetry/{metric}/{column}", at, values, most))
    return curves


def _curve(metric: str, rounds: Any, values: NDArray[Any], most: int) -> Curve:
    given = np.asarray(values, np.float64)
    there = np.flatnonzero(np.isfinite(given))
    there = there[thinned(len(there), most)] if len(there) else there
    at = np.asarray(rounds)
    return Curve(metric, [int(at[i]) for i in there], [float(given[i]) for i in there])


def _settings(run: Run) -> dict[str, str]:
    plan = flat_keys(run.plan)
    return {key: str(value) for key, value in plan.items() if not key.startswith("methods")}


def _promise(guarantee: dict[str, Any] | None) -> dict[str, str]:
    if guarantee is None:
        return {"promise": "none"}
    keys = ("epsilon", "delta", "neighbours", "accounting", "horizon", "noise_std")
    return {f"promise.{key}": str(guarantee[key]) for key in keys if key in guarantee}


def _tags(run: Run) -> dict[str, str]:
    said = {"veilstream.folder": str(run.path.absolute())}
    versions = run.versions
    return said | {f"veilstream.{k}": str(v) for k, v in versions.items() if k in _TAGGED}
