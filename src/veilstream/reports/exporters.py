"""A run folder for other people's viewers: TensorBoard's event files, or an MLflow tracking store.

    to_tensorboard(run, Path("board"))                one folder for each method and seed
    to_mlflow(run, "sqlite:///mlflow.db", "air")      one run for each method and seed

The packages are extras (`veilstream[tensorboard]`, `veilstream[mlflow]`) and are loaded here only.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from veilstream.errors import InputError, MissingExtra
from veilstream.reports.tracked_curves import TrackedRun, tracked_runs
from veilstream.runs.folder import Run

MOST_POINTS = 1000
"""Of a curve, where nobody says otherwise."""
_AT_ONCE = 1000  # metrics that MLflow takes in one call
_LONGEST_SETTING = 500


def to_tensorboard(run: Run, out: Path, most_points: int = MOST_POINTS) -> list[Path]:
    """Write event files that `tensorboard --logdir OUT` shows.

    Args:
        run: what is exported.
        out: a folder, new or empty: TensorBoard would show two exports as one curve.
        most_points: of each curve.

    Returns:
        A folder for each tracked run.

    Raises:
        InputError: for a folder with something in it, or a run that cannot be read.
        MissingExtra: without tensorboardX.

    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise MissingExtra("tensorboardX", "tensorboard", "event files") from error
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError("--out", str(out), "a new or empty folder", "name another")
    when = _when(run)
    folders = []
    for tracked in tracked_runs(run, most_points):
        folder = out / _file_name(tracked.name)
        with SummaryWriter(str(folder)) as writer:
            for curve in tracked.curves:
                for round_, value in zip(curve.rounds, curve.values, strict=True):
                    writer.add_scalar(curve.metric, value, round_, walltime=when)
            writer.add_text("settings", _table(tracked), 0, walltime=when)
        folders.append(folder)
    return folders


def to_mlflow(run: Run, uri: str, experiment: str | None = None, most_points: int = MOST_POINTS) -> list[str]:
    """Add a run to an MLflow tracking store or server.

    Args:
        run: what is exported.
        uri: of the store, as `sqlite:///mlflow.db` or `http://127.0.0.1:5000`.
        experiment: where the runs are listed; the plan's name where it is left out.
        most_points: of each curve.

    Returns:
        The ids of the runs that were made.

    Raises:
        InputError: the folder is in that experiment already, the store cannot be used, or the run
            cannot be read.
        MissingExtra: without mlflow-skinny and what it needs for its stores.

    """
    for refused in ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        os.environ.setdefault(refused, "true")  # else it would tell its makers what is done here
    try:
        import alembic  # noqa: F401
        import sqlalchemy  # noqa: F401
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise MissingExtra("mlflow-skinny", "mlflow", "an MLflow store") from error
    tracked = tracked_runs(run, most_points)
    name, when = experiment or run.plan.name, int(1000 * _when(run))
    made = []
    try:
        client = MlflowClient(tracking_uri=uri)
        found = client.get_experiment_by_name(name)
        listed = client.create_experiment(name) if found is None else found.experiment_id
        folder = str(run.path.absolute()).replace("'", "")
        same = f"tags.`veilstream.folder` = '{folder}'"
        if client.search_runs([listed], same, max_results=1):
            raise InputError(
                "RUN",
                str(run.path),
                f"a folder that experiment {name!r} does not have yet",
                "name another with --experiment, or delete its runs there",
            )
        for each in tracked:
            tags = {key: value.replace("'", "") for key, value in each.tags.items()}
            begun = client.create_run(listed, start_time=when, tags=tags, run_name=each.name)
            id_ = begun.info.run_id
            settings = [Param(k, v[:_LONGEST_SETTING]) for k, v in each.settings.items()]
            client.log_batch(id_, params=settings, tags=[RunTag("mlflow.source.name", folder)])
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
        raise InputError(
            "--out",
            uri,
            "an MLflow store or server that can be written",
            f"{str(error).splitlines()[0]}; try sqlite:///mlflow.db",
        ) from error
    return made


def _when(run: Run) -> float:
    """When the folder was written: an export says the same whenever it is made."""
    return (run.path / "plan.toml").stat().st_mtime


def _file_name(text: str) -> str:
    """A folder's name that every system takes."""
    return re.sub(r"[^\w.@+=-]+", "_", text).strip("._") or "run"


def _table(tracked: TrackedRun) -> str:
    """Settings and promise as Markdown, which TensorBoard shows."""
    rows = {**tracked.settings, **tracked.tags}
    lines = [f"| {key} | {value.replace('|', ' ')} |" for key, value in rows.items()]
    return "\n".join(["| key | value |", "| --- | --- |", *lines])
