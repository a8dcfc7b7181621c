"""`veilstream export`: a run folder for TensorBoard or MLflow."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Target(StrEnum):
    """What a run is exported to."""

    MLFLOW = "mlflow"
    TENSORBOARD = "tensorboard"


def export_command(
    run: Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)],
    to: Annotated[Target, typer.Option(help="For which viewer.", show_default=False)],
    out: Annotated[
        str | None,
        typer.Option(
            help="tensorboard: a new or empty folder. mlflow: the tracking store or server.",
            show_default="RUN/tensorboard; MLFLOW_TRACKING_URI, or sqlite:///mlflow.db",
        ),
    ] = None,
    experiment: Annotated[
        str | None, typer.Option(help="mlflow: where runs are listed.", show_default="the plan's name")
    ] = None,
    points: Annotated[int, typer.Option(help="At most so many of each curve.")] = 1000,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Copy a run's curves, settings and promise to TensorBoard or MLflow.

    A simulation becomes one run for each method and seed, a federation one run with its rounds and
    its private telemetry. Needs the extra of the same name: `pip install "veilstream[mlflow]"`.

    Example: `veilstream export runs/demo --to tensorboard`, then `tensorboard --logdir
    runs/demo/tensorboard`
    """
    from veilstream.cli.tables import print_json
    from veilstream.reports.exporters import to_mlflow, to_tensorboard
    from veilstream.runs.folder import Run

    folder = Run(run)
    if to is Target.TENSORBOARD:
        where = Path(out) if out else run / "tensorboard"
        made = [str(path) for path in to_tensorboard(folder, where, points)]
        hint = f"tensorboard --logdir {where}"
    else:
        uri = out or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        made = to_mlflow(folder, uri, experiment, points)
        hint = f"mlflow ui --backend-store-uri {uri}"
    if json:
        print_json({"run": str(run), "to": to.value, "made": made})
        return
    typer.echo(f"{len(made)} runs exported; {hint}")
