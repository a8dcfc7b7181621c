"""`veilstream demo`: what `./run` shows a stranger in the first minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from veilstream.cli.plan import compare_with_progress
from veilstream.cli.tables import as_json, print_comparison, print_json
from veilstream.privacy.guarantee import Budget
from veilstream.reports.comparison import Setting
from veilstream.reports.error_figure import check_figure_path, draw_error_over_time

__all__ = ["command"]


def command(
    epsilon: Annotated[float, typer.Option(help="Privacy budget ε.")] = 2.0,
    delta: Annotated[float, typer.Option(help="Privacy budget δ.")] = 1e-3,
    rounds: Annotated[int, typer.Option(help="R: how many models are released.")] = 1000,
    out: Annotated[Path, typer.Option(help="Where the figure goes.")] = Path("runs/demo"),
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show every mechanism in the paper's first setting: a table and a figure of error over time.

    20 learners meet 4 clients each between two released models, 1000 times; every client has
    (2, 1e-3)-local differential privacy. The less noise reaches the model, the better it learns.
    """
    target = out / "error-over-time.png"
    check_figure_path(target)
    setting = Setting(
        budget=Budget(epsilon, delta),
        rounds=rounds,
        local_steps=4,
        clip_norm=1.0,
        learners=20,
        dim=100,
    )
    comparison = compare_with_progress(setting, None)
    figure = draw_error_over_time(comparison, target)
    if json:
        print_json(as_json(comparison) | {"figure": str(figure)})
        return
    print_comparison(comparison)
    typer.echo(f"Figure: {figure}")
