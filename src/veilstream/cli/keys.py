"""`veilstream keys`: identities of a server and its learners."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from veilstream.errors import InputError, UnknownName

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Make the keys of a federation: a CA, a server, and its learners.

    `veilstream keys make keys --host fl.example.org --learner north --learner south`, then copy
    `keys/server` to the server, `keys/learners/NAME` to each learner, and keep `keys/ca` offline.
    """,
)

Folder = Annotated[Path, typer.Argument(help="The folder of all keys.", show_default=False)]
Hosts = Annotated[
    list[str] | None, typer.Option("--host", help="Name or address by which learners reach the server. Repeatable.")
]
EngineName = Annotated[str, typer.Option("--engine", help="direct, flower, or flare (which needs kits).")]
Port = Annotated[int, typer.Option(help="Port of the server; part of FLARE's kits.")]


@app.command("make")
def make_command(
    folder: Folder,
    host: Hosts = None,
    learner: Annotated[list[str] | None, typer.Option("--learner", help="Name of a learner. Repeatable.")] = None,
    engine: EngineName = "direct",
    port: Port = 8400,
    days: Annotated[int, typer.Option(min=1, help="How long certificates last.")] = 825,
) -> None:
    """Make a new CA, the server's keys and the learners' keys."""
    from veilstream.federation.keys.identity import make_keys

    hosts = host or ["127.0.0.1", "localhost"]
    make_keys(folder, hosts, learner or [], days)
    _kits(folder, engine, hosts[0], port)
    typer.echo(f"server:   {folder / 'server'}")
    for name in learner or []:
        typer.echo(f"learner:  {folder / 'learners' / name}")
    typer.echo(f"keep offline: {folder / 'ca'}")


@app.command("add")
def add_command(
    folder: Folder,
    name: Annotated[str, typer.Argument(help="Name of the learner.", show_default=False)],
    host: Hosts = None,
    engine: EngineName = "direct",
    port: Port = 8400,
    aggregator: Annotated[bool, typer.Option("--aggregator", help="For an aggregator, reached by --host.")] = False,
    learner: Annotated[list[str] | None, typer.Option("--learner", help="Who stands behind it. Repeatable.")] = None,
) -> None:
    """Make keys for one more learner or an aggregator. The server must get its folder anew."""
    from veilstream.federation.keys.identity import add_aggregator, add_learner

    if aggregator:
        between = add_aggregator(folder, name, host or ["127.0.0.1", "localhost"], learner or [])
        typer.echo(f"aggregator:  {between}")
        return
    if learner:
        raise InputError("--learner", learner, "nothing without --aggregator", "leave it out")
    where = add_learner(folder, name)
    _kits(folder, engine, (host or ["localhost"])[0], port)
    typer.echo(f"learner:  {where}")


@app.command("remove")
def remove_command(
    folder: Folder, name: Annotated[str, typer.Argument(help="Name of the learner.", show_default=False)]
) -> None:
    """Have the server no longer know a learner. The server must be given its folder anew."""
    from veilstream.federation.keys.identity import remove_learner

    remove_learner(folder, name)
    typer.echo(f"{name} is no longer known to {folder / 'server'}")


@app.command("renew")
def renew_command(
    folder: Folder,
    host: Hosts = None,
    learner: Annotated[
        list[str] | None, typer.Option("--learner", help="Renew this learner's instead. Repeatable.")
    ] = None,
    engine: EngineName = "direct",
    port: Port = 8400,
    days: Annotated[int, typer.Option(min=1, help="How long the certificate lasts.")] = 825,
) -> None:
    """Make a new TLS key and certificate for the server (or learners), from the same CA."""
    from veilstream.federation.keys.identity import renew_learner, renew_server

    for name in learner or []:
        renew_learner(folder, name, days)
        typer.echo(f"renewed:  {folder / 'learners' / name / 'tls.pem'}")
    if learner:
        return
    renew_server(folder, host or [], days)
    _kits(folder, engine, (host or ["localhost"])[0], port)
    typer.echo(f"renewed:  {folder / 'server/tls.pem'}")


def _kits(folder: Path, engine: str, host: str, port: int) -> None:
    if engine == "flare":
        from veilstream.federation.flare import provision

        provision(folder, host, port)
    elif engine not in ("direct", "flower"):
        raise UnknownName("engine", engine, ("direct", "flower", "flare"))
