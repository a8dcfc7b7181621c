"""`veilstream new`: a project to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from veilstream.cli.options import Json


def new_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")], json: Json = False
) -> None:
    """Make a project: a commented plan, made-up records, and a README with the next commands.

    Example: `veilstream new my-project`, then follow my-project/README.md.
    """
    from veilstream.cli.tables import print_json
    from veilstream.plans.new_project import new_project

    files = new_project(folder)
    if json:
        print_json({"folder": str(folder), "files": [str(path) for path in files]})
        return
    typer.echo(f"{folder}: plan.toml, records/, README.md with the next commands")
    typer.echo(f"cd {folder} && veilstream data check records/north.csv --plan plan.toml")
