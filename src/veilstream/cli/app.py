"""One command, `veilstream`: results on stdout, progress on stderr, documented exit codes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from veilstream import __version__
from veilstream.cli import demo, plan
from veilstream.errors import VeilstreamError

__all__ = ["main"]

app = typer.Typer(
    name="veilstream",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="""Train one shared model from streams of people's data that stay where they are.

    Start with `veilstream demo`, then `veilstream plan --help`.

    Exit codes: 0 done · 1 other error · 2 a value was refused · 3 an optional package is missing ·
    4 going on would break the privacy promise · 5 a solver did not converge · 130 interrupted.
    """,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"veilstream {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print and exit.")
    ] = False,
) -> None:
    pass


app.command("plan")(plan.command)
app.command("demo")(demo.command)


def main() -> None:
    """Run the command; deliberate errors become one clear line and a documented exit code."""
    try:
        app()
    except VeilstreamError as error:
        sys.stderr.write(f"veilstream: {error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("veilstream: interrupted; nothing half-written was left\n")
        sys.exit(130)
