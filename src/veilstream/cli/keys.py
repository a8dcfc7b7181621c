"""`veilstream keys`: identities of a server and its learners."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Make the keys of a federation: a CA, a server, and its learners.

    `veilstream keys make keys --host fl.example.org --learner north --learner south`, then copy
    `keys/server` to the server, `keys/learners/NAME` to each learner, and keep `keys/ca` offline.
    """,
)

Folder = Annotated[Path, typer.Argument(help="The folder of all keys.", show_default=False)]
Name = Annotated[str, typer.Argument(help="Name of the learner.", show_default=False)]
Hosts = Annotated[
    list[str] | None, typer.Option("--host", help="Name or address by which learners reach the server. Repeatable.")
]
Days = Annotated[int, typer.Option(min=1, help="How long certificates last.")]


@app.command("make")
def make_command(
    folder: Folder,
    host: Hosts = None,
    learner: Annotated[list[str] | None, typer.Option("--learner", help="Name of a learner. Repeatable.")] = None,
    days: Days = 825,
) -> None:
    """Make a new CA, the server's keys and the learners' keys."""
    from veilstream.federation.keys.new_keys import make_keys

    make_keys(folder, host or ["127.0.0.1", "localhost"], learner or [], days)
    typer.echo(f"server:   {folder / 'server'}")
    for name in learner or []:
        typer.echo(f"learner:  {folder / 'learners' / name}")
    typer.echo(f"keep offline: {folder / 'ca'}")


@app.command("add")
def add_command(folder: Folder, name: Name) -> None:
    """Make keys for one more learner. Copy the server's folder to the server again."""
    from veilstream.federation.keys.new_keys import add_learner

    typer.echo(f"learner:  {add_learner(folder, name)}")


@app.command("remove")
def remove_command(folder: Folder, name: Name) -> None:
    """Make the server forget a learner. Copy the server's folder to the server again."""
    from veilstream.federation.keys.new_keys import remove_learner

    remove_learner(folder, name)
    typer.echo(f"{folder / 'server'} no longer knows {name}")


@app.command("renew")
def renew_command(
    folder: Folder,
    host: Hosts = None,
    learner: Annotated[
        list[str] | None, typer.Option("--learner", help="Renew this learner's instead. Repeatable.")
    ] = None,
    days: Days = 825,
) -> None:
    """Make a new TLS key and certificate for the server (or learners), from the same CA."""
    from veilstream.federation.keys.new_keys import renew_learner, renew_server

    if learner:
        for name in learner:
            renew_learner(folder, name, days)
            typer.echo(f"renewed:  {folder / 'learners' / name / 'tls.pem'}")
    else:
        renew_server(folder, host or [], days)
        typer.echo(f"renewed:  {folder / 'server/tls.pem'}")
