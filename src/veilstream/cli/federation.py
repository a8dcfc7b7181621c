"""`veilstream federation`: a whole federation on this machine, to see how it goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Run a whole federation on this machine. Start with `veilstream federation demo`.",
)


@app.command("demo")
def demo_command(
    learners: Annotated[int, typer.Option(min=1, max=64, help="How many learners.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="How many rounds.")] = 30,
    engine: Annotated[
        str, typer.Option("--engine", help="What carries messages: direct, flower or flare.")
    ] = "direct",
    trust_engine: Annotated[
        bool,
        typer.Option(
            "--trust-engine", help="Needed for flare: see what it can read in docs/privacy.md."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for everything.", show_default="runs/federation")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without TLS (FLARE keeps its own).")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON at the end.")] = False,
) -> None:
    """Make keys, start a server and learners as processes of their own, and run to the end.

    Everything goes over loopback, with TLS and keys as between machines; nothing else is reached.
    The data are synthetic. What is left: the run's folder, each learner's ledger, the keys.
    """
    from veilstream.cli.tables import print_json
    from veilstream.federation.services.demo import run_demo
    from veilstream.federation.services.supervision import check_trusted

    check_trusted(engine, trusted=trust_engine)
    result = run_demo(out or Path("runs/federation"), engine, learners, rounds, insecure=insecure)
    if json:
        print_json(result.as_dict())
        return
    typer.echo(result.text())
