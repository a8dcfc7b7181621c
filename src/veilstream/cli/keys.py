"""`veilstream keys`: identities of a server and its learners."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from veilstream.cli.options import Json
from veilstream.errors import InputError

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
    """Make keys for one more learner. Copy the server's folder to the server again.

    A run that has begun keeps its learners; the new one takes part in a run of a plan with its number of learners.
    """
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
    everyone: Annotated[bool, typer.Option("--all", help="Renew the server's and every learner's.")] = False,
    days: Days = 825,
) -> None:
    """Make a new TLS key and certificate for the server (or learners), from the same CA.

    A running server or learner uses new files from its next connection on, without a restart: copy `tls.pem` and
    `tls.key` to its folder of keys, if that lies on another machine.
    """
    from veilstream.federation.keys.new_keys import renew_learner, renew_server

    if everyone and learner:
        raise InputError("--all", True, "not together with --learner", "leave one out")
    if everyone:
        learner = sorted(path.parent.name for path in folder.glob("learners/*/identity.key"))
    if everyone or not learner:
        renew_server(folder, host or [], days)
        typer.echo(f"renewed:  {folder / 'server/tls.pem'}")
    for name in learner or []:
        renew_learner(folder, name, days)
        typer.echo(f"renewed:  {folder / 'learners' / name / 'tls.pem'}")


@app.command("show")
def show_command(folder: Folder, json: Json = False) -> None:
    """Show whose certificates a folder has and how many days they last. Shows no secret.

    Takes the folder of all keys, the server's or a learner's.

    Example: `veilstream keys show keys`
    """
    from veilstream.cli.tables import print_json
    from veilstream.federation.keys.shown_keys import certificates_in

    found = certificates_in(folder)
    if json:
        print_json({"certificates": [each.as_dict() for each in found]})
        return
    for each in found:
        left = f"{each.days_left} days left" if each.days_left >= 0 else "ENDED"
        typer.echo(f"{each.whose + ':':<16} until {each.ends[:10]}, {left}  {each.path}")
