"""`veilstream learner`: the command of a machine beside the data."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from veilstream.cli.service_options import Insecure, LogFormat, LogLevel, PlanFile, TrustCarrier, parse_address
from veilstream.errors import InputError
from veilstream.federation.logs import Format, Level, configure_logs


def learner_command(
    plan: PlanFile,
    data: Annotated[
        str,
        typer.Option(
            help="A file of records (CSV, JSON lines, Parquet, Arrow, SQLite) whose columns the "
            "plan names; `live`: people call its API; `module:function`: a Python function that, "
            "given how many records were consumed before, yields (tag, sample); `plan:INDEX`: the "
            "plan's own data as learner INDEX of a simulation sees them, from 0, to try things out."
        ),
    ],
    server: Annotated[str | None, typer.Option(help="HOST:PORT of the server; or give --socket.")] = None,
    id_: Annotated[str | None, typer.Option("--id", help="This learner's name.")] = None,
    keys: Annotated[Path | None, typer.Option(help="Its folder of keys.", show_default="keys/learners/ID")] = None,
    store: Annotated[Path | None, typer.Option(help="Its ledger.", show_default="ID.db")] = None,
    witness: Annotated[
        Path | None,
        typer.Option(
            help="The ledger's witness, best on another device. The ledger remembers where it is.",
            show_default="where it was; at first beside the store",
        ),
    ] = None,
    new_store: Annotated[
        bool,
        typer.Option(
            "--new-store",
            help="Begin a ledger if there is none: for the first start. Without it a missing "
            "ledger is an error, since a disk may only not be mounted.",
        ),
    ] = False,
    learner_api: Annotated[
        str | None, typer.Option(help="HOST:PORT for people beside it: observe and predict.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="The learner API's access token; made where there is none.",
            show_default="STORE with the suffix .token",
        ),
    ] = None,
    reply_after: Annotated[
        float | None,
        typer.Option(
            help="Replies leave so many seconds after their request, whoever came.",
            show_default="live: federation.patience_s + 1; else when computed",
        ),
    ] = None,
    accept_refusals: Annotated[
        float,
        typer.Option(
            help="Start although up to this share of the file's next 200 records is refused.", min=0.0, max=1.0
        ),
    ] = 0.05,
    end_with_file: Annotated[
        bool,
        typer.Option(
            "--end-with-file", help="End when the file has ended (exit code 0); else stay, and read what is appended."
        ),
    ] = False,
    exit_when_done: Annotated[
        bool,
        typer.Option(
            "--exit-when-done", help="End when the server has said that the run is over and no epoch may follow."
        ),
    ] = False,
    socket: Annotated[
        Path | None,
        typer.Option(
            help="With Flower, instead of --server: the Unix socket where a SuperNode, under another account, connects."
        ),
    ] = None,
    trust_carrier: TrustCarrier = False,
    insecure: Insecure = False,
    log_level: LogLevel = Level.INFO,
    log_format: LogFormat = Format.TEXT,
) -> None:
    """Learn beside the data: clients' records stay here, only noisy sums leave.

    Runs until it is stopped (Ctrl-C, SIGTERM), also after the last round (callers then get 410),
    and may be killed at any time: started again it goes on where its ledger stands.
    `veilstream ledger status STORE` shows where that is. The first start needs `--new-store`; on a
    ledger that exists it changes nothing.

    Before anything is spent the file's next records are looked at: if more than the share of
    `--accept-refusals` cannot be used, it ends with exit code 2 and says why. A round for which
    fewer than federation.min_clients people wait is sat out and costs nothing. What is used and
    refused, and how well the model does here, is logged now and then and stays on this machine.
    """
    from veilstream.deployment.process_secrecy import no_core_dumps, terse_tracebacks
    from veilstream.federation.learner.process import LearnerService
    from veilstream.plans.plan import Plan

    no_core_dumps()
    terse_tracebacks()
    configure_logs(log_level, log_format)
    if id_ is None and keys is None:
        raise InputError("--id", None, "a learner's name, or --keys", "try --id north")
    folder = keys or Path("keys/learners") / str(id_)
    name = folder.resolve().name
    if id_ is not None and id_ != name:
        raise InputError("--id", id_, f"the name of its keys ({name})", "leave one of them out")
    at = None if learner_api is None else parse_address("--learner-api", learner_api)
    if data == "live" and at is None:
        raise InputError("--learner-api", None, "an address, since people call", "--learner-api 127.0.0.1:8490")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    service = LearnerService(
        Plan.load(plan),
        folder,
        store or Path(f"{name}.db"),
        data,
        None if server is None else parse_address("--server", server),
        witness,
        at,
        insecure,
        new_store=new_store,
        reply_after_s=reply_after,
        token_file=token_file,
        exit_when_done=exit_when_done,
        socket=socket,
        trust_carrier=trust_carrier,
        accept_refusals=accept_refusals,
        end_with_file=end_with_file,
    )
    service.run(stop)
