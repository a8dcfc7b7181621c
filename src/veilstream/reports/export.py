"""A run folder for other viewers: TensorBoard's event files, or an MLflow tracking store.

One folder or run for each method and seed; a federation is one. Nothing is exported that report.html does not show.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError, MissingExtra
from veilstream.privacy.guarantee import Guarantee
from veilstream.reports.charts import thinned
from veilstream.runs.folder import Run, flat_keys
from veilstream.runs.tables import ListedEstimate, read_rounds

_log = logging.getLogger(__name__)

MOST_POINTS = 1000  # points of one curve
_AT_ONCE = 1000  # metrics that MLflow takes in one call
_LONGEST_SETTING = 500


@dataclass(frozen=True)
class Curve:
    """Finite values of one metric, and their rounds."""

    metric: str
    rounds: list[int]
    values: list[float]


@dataclass(frozen=True)
class TrackedRun:
    """One run, as a tracker lists it."""

    name: str
    settings: dict[str, str]
    tags: dict[str, str]
    curves: list[Curve]


def tracked_runs(run: Run) -> list[TrackedRun]:
    """Every run of a folder."""
    return _of_server(run) if run.is_federation else _of_methods(run)


def _of_methods(run: Run) -> list[TrackedRun]:
    summary = run.simulation
    rounds = range(1, summary.rounds + 1)
    columns = {column: (rounds, run.history(column)) for column in ("loss", "prequential_accuracy")}
    if run.has_held_out:
        columns["held_out_accuracy"] = run.held_out_accuracy()  # type: ignore[assignment]
    telemetry = run.telemetry()
    made = []
    for name, method in summary.methods.items():
        settings = _settings(run, method.guarantee) | {"method": name, "mechanism": method.mechanism or "none"}
        for place, seed in enumerate(summary.seeds):
            curves = [_curve(column, at, values[name][place]) for column, (at, values) in columns.items()]
            curves += _telemetry([row for row in telemetry if (row.method, row.seed) == (name, str(seed))])
            tags = _tags(run) | {"veilstream.simulated": "true", "veilstream.seed": str(seed)}
            made.append(TrackedRun(f"{name}, seed {seed}", settings, tags, [c for c in curves if c.rounds]))
    return made


def _of_server(run: Run) -> list[TrackedRun]:
    listed = read_rounds(run.path)
    if listed.remark:
        _log.warning("%s: %s", run.path, listed.remark)
    rounds = [row.round + 1 for row in listed.rounds]
    curves = [
        _curve("round_seconds", rounds, [row.seconds for row in listed.rounds]),
        _curve("learners_answered", rounds, [row.answered for row in listed.rounds]),
        *_telemetry(run.telemetry()),
    ]
    tags = _tags(run) | {"veilstream.simulated": "false"}
    return [TrackedRun(run.path.name, _settings(run, run.guarantee), tags, [c for c in curves if c.rounds])]


def _telemetry(rows: list[ListedEstimate]) -> list[Curve]:
    curves = []
    for metric in dict.fromkeys(row.metric for row in rows):
        own = [row for row in rows if row.metric == metric]
        curves += [
            _curve(f"telemetry/{metric}/{column}", [row.round for row in own], [getattr(row, column) for row in own])
            for column in ("estimate", "low", "high")
        ]
    return curves


def _curve(metric: str, rounds: Sequence[int], values: Sequence[float] | NDArray[Any]) -> Curve:
    given = np.asarray(values, np.float64)
    there = np.flatnonzero(np.isfinite(given))
    there = there[thinned(len(there), MOST_POINTS)] if len(there) else there
    return Curve(metric, [rounds[int(i)] for i in there], [float(given[i]) for i in there])


def _settings(run: Run, promise: Guarantee | None) -> dict[str, str]:
    settings = {key: str(value) for key, value in flat_keys(run.plan).items() if not key.startswith("methods")}
    if promise is None:
        return settings | {"promise": "none"}
    keys = ("epsilon", "delta", "neighbours", "accounting", "horizon", "noise_std")
    return settings | {f"promise.{key}": str(getattr(promise, key)) for key in keys}


def _tags(run: Run) -> dict[str, str]:
    versions = {key: str(value) for key, value in run.versions.items() if key in ("veilstream", "commit", "began")}
    return {f"veilstream.{key}": value for key, value in {"folder": str(run.path.absolute()), **versions}.items()}


def to_tensorboard(run: Run, out: Path) -> list[Path]:
    """Write event files that `tensorboard --logdir OUT` shows, into a new or empty folder."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise MissingExtra("tensorboardX", "tensorboard", "event files") from error
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError("--to", str(out), "a new or empty folder", "name another")
    when = _when(run)
    folders = []
    for tracked in tracked_runs(run):
        folder = out / (re.sub(r"[^\w.@+=-]+", "_", tracked.name).strip("._") or "run")
        with SummaryWriter(str(folder)) as writer:
            for curve in tracked.curves:
                for round_, value in zip(curve.rounds, curve.values, strict=True):
                    writer.add_scalar(curve.metric, value, round_, walltime=when)
            writer.add_text("settings", _table(tracked), 0, walltime=when)
        folders.append(folder)
    return folders


def to_mlflow(run: Run, uri: str) -> list[str]:
    """Add a run to an MLflow tracking store or server, in an experiment of the plan's name."""
    for refused in ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        os.environ.setdefault(refused, "true")  # else MLflow tells its makers what is done here
    try:
        import alembic  # noqa: F401
        import sqlalchemy  # noqa: F401
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise MissingExtra("mlflow-skinny", "mlflow", "an MLflow store") from error
    tracked = tracked_runs(run)
    name, when = run.plan.name, int(1000 * _when(run))
    made = []
    try:
        client = MlflowClient(tracking_uri=uri)
        found = client.get_experiment_by_name(name)
        listed = client.create_experiment(name) if found is None else found.experiment_id
        folder = _plain(str(run.path.absolute()))
        if client.search_runs([listed], f"tags.`veilstream.folder` = '{folder}'", max_results=1):
            raise InputError(
                "run",
                str(run.path),
                f"a folder that experiment {name!r} does not have yet",
                "delete its runs there first",
            )
        for each in tracked:
            tags = {key: _plain(value) for key, value in each.tags.items()} | {"mlflow.source.name": folder}
            id_ = client.create_run(listed, start_time=when, tags=tags, run_name=each.name).info.run_id
            client.log_batch(id_, params=[Param(k, v[:_LONGEST_SETTING]) for k, v in each.settings.items()])
            metrics = [
                Metric(curve.metric, value, when, round_)
                for curve in each.curves
                for round_, value in zip(curve.rounds, curve.values, strict=True)
            ]
            for first in range(0, len(metrics), _AT_ONCE):
                client.log_batch(id_, metrics=metrics[first : first + _AT_ONCE])
            client.set_terminated(id_, end_time=when)
            made.append(id_)
    except MlflowException as error:
        why = f"{str(error).splitlines()[0]}; try sqlite:///mlflow.db"
        raise InputError("--to", uri, "an MLflow store or server that can be written", why) from error
    return made


def _plain(text: str) -> str:
    """Text that may stand in quotes in a search."""
    return text.replace("'", "")


def _when(run: Run) -> float:
    """When the folder was written: every export of it says the same."""
    return (run.path / "plan.toml").stat().st_mtime


def _table(tracked: TrackedRun) -> str:
    rows = {**tracked.settings, **tracked.tags}
    lines = [f"| {key} | {value.replace('|', ' ')} |" for key, value in rows.items()]
    return "\n".join(["| key | value |", "| --- | --- |", *lines])
