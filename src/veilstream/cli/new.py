"""`veilstream new`: a project to start from."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from veilstream.cli.options import Json


def new_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    flower: Annotated[bool, typer.Option("--flower", help="Also a Flower app, for `flwr run .`")] = False,
    json: Json = False,
) -> None:
    """Make a project: a commented plan, made-up records, and a README with the next commands.

    Example: `veilstream new my-project`, then follow my-project/README.md.
    """
    from veilstream.cli.tables import print_json
    from veilstream.plans.new_project import new_flower_app, new_project

    command = called_as(folder)
    files = new_flower_app(folder, command) if flower else new_project(folder, command)
    if json:
        print_json({"folder": str(folder), "files": [str(path) for path in files]})
        return
    typer.echo(f"{folder}: plan.toml, records/, README.md with the next commands")
    if flower:
        run = "flwr run . --federation-config 'num-supernodes=3' --stream"
        typer.echo(f"cd {shlex.quote(str(folder))} && {run}   # the same in Flower's simulation engine")
    typer.echo(f"cd {shlex.quote(str(folder))} && {command} data check records/north.csv --plan plan.toml")


def called_as(folder: Path) -> str:
    """What to type in this folder: a clone's ./run, the installed command, or Python's module."""
    if run := os.environ.get("VEILSTREAM_RUN"):
        return shlex.quote(os.path.relpath(run, folder.absolute()))
    if shutil.which("veilstream"):
        return "veilstream"
    script = Path(sys.argv[0])
    if script.name == "veilstream" and script.is_file():  # called by its path
        return shlex.quote(str(script.absolute()))
    return f"{shlex.quote(sys.executable)} -P -m veilstream"  # no modules of the folder that it is called in
