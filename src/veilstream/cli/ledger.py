"""`veilstream ledger`: look at a learner's store, check it, and go on after a loss."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from veilstream.cli.options import Json, parse_address
from veilstream.errors import InputError

if TYPE_CHECKING:
    from veilstream.deployment.ledger.inspect import Status


app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Look at a learner's ledger, check it, and go on after a loss.

    A ledger is a store (SQLite) and its witness, a file best kept on another device. **Never
    restore an old copy of a store**: it has forgotten who took part. The learner refuses it.
    """,
)

Store = Annotated[Path, typer.Argument(help="The learner's store.", show_default=False)]
WitnessFile = Annotated[
    Path | None,
    typer.Option("--witness", help="Its witness, if it is no longer where the store remembers it.", show_default=False),
]


@app.command("status")
def status_command(store: Store, witness: WitnessFile = None, json: Json = False) -> None:
    """Show where a learner stands. Changes nothing, and may be used while the learner runs.

    Example: `veilstream ledger status learner.db`
    """
    from veilstream.deployment.ledger.inspect import inspect

    _show(inspect(store, witness), json, local=True)


LearnerApiAddress = Annotated[str, typer.Option("--learner-api", help="HOST:PORT of its learner API, on this machine.")]


@app.command("page")
def page_command(store: Store, learner_api: LearnerApiAddress = "127.0.0.1:8490", json: Json = False) -> None:
    """Print a link to a running learner's local page: counts, score, what is left.

    The link opens the page once, within a minute. The browser then has access for twelve hours, or until
    the learner ends. The page shows exact figures without noise: keep them on this machine.

    Example: `veilstream ledger page learner.db --learner-api 127.0.0.1:8490`
    """
    from veilstream.cli.tables import print_json
    from veilstream.federation.learner.access import page_link, read_token, token_path

    link = page_link(parse_address("--learner-api", learner_api), read_token(token_path(store)))
    if json:
        print_json({"link": link})
    else:
        typer.echo(link)


@app.command("pause")
def pause_command(store: Store, learner_api: LearnerApiAddress = "127.0.0.1:8490", json: Json = False) -> None:
    """Let a running learner begin no round, until `resume`. For the person beside the data.

    The server sees a learner that sits rounds out, as when nobody comes. So it learns that someone decided, and
    not why. A learner never pauses by itself: that would tell the server what records say.

    Example: `veilstream ledger pause learner.db`
    """
    _tell(store, learner_api, json, pause=True)


@app.command("resume")
def resume_command(store: Store, learner_api: LearnerApiAddress = "127.0.0.1:8490", json: Json = False) -> None:
    """End a pause, and accept what the learner warns of: newest records count as usual from here on.

    Example: `veilstream ledger resume learner.db`
    """
    _tell(store, learner_api, json, pause=False)


def _tell(store: Path, learner_api: str, json: bool, *, pause: bool) -> None:
    from veilstream.cli.tables import print_json
    from veilstream.federation.learner.access import read_token, tell_to_pause, token_path

    token = read_token(token_path(store))
    paused = tell_to_pause(parse_address("--learner-api", learner_api), token, pause=pause)
    if json:
        print_json({"paused": paused})
    else:
        typer.echo("paused: no round begins, and nothing is spent" if paused else "it goes on")


@app.command("verify")
def verify_command(
    store: Store,
    witness: WitnessFile = None,
    renew_witness: Annotated[
        bool,
        typer.Option(
            "--renew-witness",
            help="Write a lost witness again. Only if this store is the newest: otherwise an old copy "
            "would no longer be recognised.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Check every record, everything it refers to, and every entry of the witness.

    Exit code 0: nothing was changed or lost. 4: something was; the message says what to do.
    """
    from veilstream.deployment.ledger.inspect import verify
    from veilstream.deployment.ledger.rescue import renew_witness as renew

    if renew_witness:
        renew(store, witness)
    _show(verify(store, witness), json, verified=True)


@app.command("epoch")
def epoch_command(
    store: Store,
    witness: WitnessFile = None,
    abandon: Annotated[bool, typer.Option("--abandon", help="Give up an epoch before its last round.")] = False,
    lost: Annotated[
        bool,
        typer.Option(
            "--lost",
            help="The store is gone, damaged or old: begin a new one from the witness. The old one is put aside, "
            "not deleted.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Begin a new epoch when the learner next starts: fresh noise, new clients only.

    The old epoch's secrets are destroyed (with --lost: if the old store can still be opened). Clients who
    took part before are left out for good, so the promise holds for each of them whatever happened to
    the store. The new epoch may have another plan.
    """
    from veilstream.cli.tables import print_json
    from veilstream.deployment.ledger.inspect import inspect
    from veilstream.deployment.ledger.rescue import ask_for_epoch, begin_again, holds_secrets

    if lost and abandon:
        raise InputError("--abandon", True, "not together with --lost", "--lost gives the epoch up anyway")
    if lost:
        aside, carried = begin_again(store, witness)
        status = inspect(store, witness)
        answer = {
            "store": str(store),
            "carried_clients": carried,
            "put_aside": None if aside is None else str(aside),
            "records": status.records,
        }
        text = f"{store}: a new store; {carried} clients who took part are left out"
        if aside is not None:
            text += f"\nThe old store is kept as {aside}"
            if holds_secrets(aside):
                text += ": it may hold seeds of its noise, so destroy it"
    else:
        epoch = ask_for_epoch(store, witness, abandon=abandon)
        answer = {"store": str(store), "next_epoch": epoch}
        text = f"{store}: the learner begins epoch {epoch} when it next starts"
    if json:
        print_json(answer)
    else:
        typer.echo(text)


def _show(status: Status, json: bool, *, verified: bool = False, local: bool = False) -> None:
    from veilstream.cli.tables import print_json
    from veilstream.federation.learner.local_account import account_line, read_account

    account = read_account(Path(status.store)) if local else None
    if json:
        more = {"local": account} if local else {}
        print_json({**status.as_dict(), "verified": verified, **more})
        return
    if (g := status.guarantee) is not None:
        typer.echo(f"Guarantee     ({g.epsilon:g}, {g.delta:g}), {g.neighbours.value}")
    where = "not begun" if status.epoch is None else f"{status.epoch}"
    if status.epoch is not None:
        # A training loop has steps and no rounds.
        where += "" if status.rounds is None else f", {status.round} of {status.rounds} rounds sealed"
        where += ", one begun" if status.pinned else ""
        where += "; over, secrets destroyed" if status.ended else ""
    typer.echo(f"Epoch         {where}")
    acknowledged = "none" if status.acknowledged is None else f"up to round {status.acknowledged}"
    typer.echo(f"Acknowledged  {acknowledged}")
    typer.echo(f"Clients       {status.clients} took part, {status.steps} steps in this epoch")
    typer.echo(f"Secrets       {status.secrets} held")
    typer.echo(f"Records       {status.records}, {status.witnessed} witnessed in {status.witness}")
    typer.echo(f"Chain head    {status.head}")
    typer.echo(f"Writer        {'none' if status.holder is None else f'process {status.holder}'}")
    if account is not None:
        typer.echo(f"Local         {account_line(account)} (as of the last round; never sent)")
        for notice in account.get("notices", ()):
            typer.echo(f"Notice        {notice}")
    if verified:
        typer.echo("Verified      every record, everything it refers to, every entry of the witness")
