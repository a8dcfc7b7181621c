"""`veilstream federation`: a whole federation on this machine, to see how it works."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from veilstream.cli.options import Changes, PlanFile, TrustCarrier, overrides_of
from veilstream.federation.logs import configure_logs

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Run a whole federation on this machine. Start with `veilstream federation demo`.",
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON at the end.")]


class Transport(Enum):
    """Transports that a demonstration starts."""

    DIRECT = "direct"
    FLOWER = "flower"


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
    transport: Annotated[Transport, typer.Option(help="What carries messages.")] = Transport.DIRECT,
    trust_carrier: TrustCarrier = False,
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
    result = run_demo(out or new_folder("federation"), transport.value, chosen, trust_carrier=trust_carrier)
    if json:
        print_json(result.as_dict())
    else:
        typer.echo(result.text())


@app.command("flower-app")
def flower_app_command(
    folder: Annotated[Path, typer.Argument(help="A new folder for the app.", metavar="DIR")],
    plan: PlanFile,
    keys: Annotated[Path, typer.Option(help="The server's folder of keys.")] = Path("keys/server"),
    out: Annotated[Path | None, typer.Option(help="The run's folder.", show_default="runs/NAME of the plan")] = None,
    json: Json = False,
) -> None:
    """Write the Flower app that carries this federation; `flwr run DIR` submits it.

    Plan, keys and the run's folder are on the SuperLink's machine. After a crash of the SuperLink or of
    its run, `flwr run DIR` goes on from the run's folder.
    """
    from veilstream.cli.tables import print_json
    from veilstream.federation.flower.app_folder import write_app
    from veilstream.plans.plan import Plan

    run = out or Path("runs") / Plan.load(plan).name
    write_app(folder, plan=plan, keys=keys, out=run)
    if json:
        print_json({"app": str(folder), "run": str(run.absolute())})
    else:
        typer.echo(f"{folder}: submit it with `flwr run {folder} SUPERLINK`")
