"""`veilstream plan`: how much noise a run would need, mechanism by mechanism."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from veilstream.cli.options import Changes, PlanArgument, load_plan


def command(
    plan: PlanArgument,
    changes: Changes = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write comparison.json and error-over-time.png here.", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show what a plan promises, and compare all mechanisms for it: noise, error and cost.

    Budget, rounds, learners and what is published are those of the plan's first private method; the
    guarantee is with the recommended noise. It also says whether the plan can be deployed, and if not, which
    key is in the way. Nothing is trained.

    Examples: `veilstream plan plan.toml`, `veilstream plan demo --set privacy.epsilon=1 --set
    learning.rounds=1000`.
    """
    from veilstream.cli.tables import json_text, print_comparison, print_json
    from veilstream.deployment.deployable import Deployable
    from veilstream.files import write_file
    from veilstream.plans.comparison import Setting, compare, names_for
    from veilstream.progress import progress
    from veilstream.research.error_figure import check_figure_path, draw_error_over_time

    figure = None if out is None else out / "error-over-time.png"
    if figure is not None:
        check_figure_path(figure)
    loaded = load_plan(plan, changes)
    setting, deployable = Setting.of(loaded), Deployable.of(loaded)
    with progress("comparing mechanisms", total=len(names_for(setting))) as done:
        comparison = compare(setting, tick=lambda _: done(1), both_orders=True)
    content = comparison.as_dict() | {"deployed": deployable.as_dict()}
    if figure is not None:
        draw_error_over_time(comparison, figure)
        write_file(figure.with_name("comparison.json"), json_text(content), shared=True)
    if json:
        print_json(content)
        return
    print_comparison(comparison, deployable.text())
    if figure is not None:
        typer.echo(f"Figure: {figure}")
