"""`veilstream federation`: a whole federation on this machine, to see how it works."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from veilstream.cli.options import Changes, overrides_of
from veilstream.federation.logs import configure_logs

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Run a whole federation on this machine. Start with `veilstream federation demo`.",
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON at the end.")]


@app.command("demo")
def demo_command(
    plan: Annotated[
        Path | None,
        typer.Option(
            help="Your own plan, with your files and your model, or the name of a preset: mnist_private, ...",
            show_default="logistic regression on made-up clients",
        ),
    ] = None,
    changes: Changes = None,
    learners: Annotated[
        int | None, typer.Option(min=1, max=64, help="How many learners.", show_default="3, or the plan's")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="How many rounds.", show_default="30, or the plan's")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for everything.", show_default="runs/federation, or runs/federation-2 and so on"),
    ] = None,
    json: Json = False,
) -> None:
    """Make keys, start a server and learners as processes of their own, and run to the end.

    Everything goes over loopback, with TLS and keys as between machines. Without a plan the data are
    made up. If the plan has [data] kind = "table", each learner gets a file of its own records in the
    folder, without the people who are held out to measure on. The folder keeps the last model
    (model.npz), the run, each learner's ledger and the keys.

    Examples: `veilstream federation demo --plan plan.toml --out federation`, `veilstream federation demo --plan
    mnist_private --set learning.rounds=20`
    """
    from veilstream.cli.tables import print_json
    from veilstream.federation.demo import demo_plan, run_demo
    from veilstream.plans.experiments import plan_path
    from veilstream.plans.plan import Plan
    from veilstream.runs.folder import new_folder

    configure_logs()
    given = {"learning.learners": learners, "learning.rounds": rounds}
    counts = {key: count for key, count in given.items() if count is not None}
    overrides = overrides_of(changes) | counts
    chosen = demo_plan(3, 30, overrides) if plan is None else Plan.load(plan_path(plan), overrides)
    result = run_demo(out or new_folder("federation"), chosen)
    if json:
        print_json(result.as_dict())
    else:
        typer.echo(result.text())
