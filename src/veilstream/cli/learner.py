"""`veilstream learner`: the command of a machine beside the data."""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from veilstream.cli.options import Insecure, LogFormat, LogLevel, PlanFile, parse_address
from veilstream.errors import InputError
from veilstream.federation.logs import Format, Level, configure_logs

_log = logging.getLogger(__name__)


def learner_command(
    plan: PlanFile,
    data: Annotated[
        str,
        typer.Option(
            help="A file of records (CSV, JSON lines, also .gz, Parquet, Arrow, SQLite) with the plan's columns, a "
            "folder or a quoted pattern of such files; "
            "`live`: records come by its API; `module:function`: a Python function that is given the number of "
            "records consumed before, and yields (tag, sample); `plan:INDEX`: the plan's own data, as learner INDEX "
            "of a simulation sees them, to try things out."
        ),
    ],
    keys: Annotated[Path, typer.Option(help="Its folder of keys, keys/learners/NAME.")],
    server: Annotated[str, typer.Option(help="HOST:PORT of the server.")],
    query: Annotated[
        str | None, typer.Option(help="Which records of a SQLite file; otherwise data.query, or its only table.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(help="Column of a SQLite file that only grows; otherwise data.key, or a table's rowid."),
    ] = None,
    store: Annotated[Path | None, typer.Option(help="Its ledger.", show_default="NAME.db")] = None,
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
            help="Begin a ledger if there is none: for the first start. Otherwise a missing ledger is an error, "
            "since its disk may just not be mounted.",
        ),
    ] = False,
    learner_api: Annotated[
        str | None, typer.Option(help="HOST:PORT, on this machine, to give records and ask for predictions.")
    ] = None,
    reply_after: Annotated[
        float | None,
        typer.Option(
            help="Reply this many seconds after each request, whoever came.",
            show_default="live: federation.patience_s + 1; else when computed",
        ),
    ] = None,
    accept_refusals: Annotated[
        float | None, typer.Option(help="No longer used: what records say never stops a start.", hidden=True)
    ] = None,
    end_with_file: Annotated[
        bool, typer.Option("--end-with-file", help="End when the file ends; otherwise wait for rows to be appended.")
    ] = False,
    exit_when_done: Annotated[
        bool, typer.Option("--exit-when-done", help="End when the run is over and no other epoch may follow.")
    ] = False,
    insecure: Insecure = False,
    log_level: LogLevel = Level.INFO,
    log_format: LogFormat = Format.TEXT,
) -> None:
    """Learn beside the data: clients' records stay here, only noisy sums leave.

    Runs until it is stopped (Ctrl-C, SIGTERM), also after the last round (callers then get 410). It may
    be killed at any time: started again, it goes on where its ledger stands, which `veilstream ledger
    status STORE` shows. The first start needs `--new-store`; a ledger that exists is never replaced.

    The learner looks at the file before it spends anything: if columns are missing or it cannot be read,
    it ends with exit code 2 and says why; what is odd about the next records it logs. A record that
    cannot be used takes its client's step with a zero gradient, so that the server sees no difference. The
    learner sits out a round, at no cost, for which fewer than federation.min_clients people wait. It logs
    what was used and refused, and how well the model does here; that stays on this machine.
    """
    from veilstream.deployment.process_secrecy import no_core_dumps, terse_tracebacks
    from veilstream.federation.learner.process import LearnerService
    from veilstream.plans.plan import Plan
    from veilstream.reports import learner_page

    no_core_dumps()
    terse_tracebacks()
    configure_logs(log_level, log_format, learner=keys.resolve().name)
    if accept_refusals is not None:
        _log.warning("--accept-refusals has no effect any more: refused records take their steps")
    at = None if learner_api is None else parse_address("--learner-api", learner_api)
    if data == "live" and at is None:
        raise InputError("--learner-api", None, "an address, since records come there", "--learner-api 127.0.0.1:8490")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    service = LearnerService(
        Plan.load(plan),
        keys,
        store or Path(f"{keys.resolve().name}.db"),
        data,
        parse_address("--server", server),
        witness,
        at,
        insecure,
        new_store=new_store,
        reply_after_s=reply_after,
        exit_when_done=exit_when_done,
        query=query,
        key=key,
        end_with_file=end_with_file,
        pages=learner_page,
    )
    service.run(stop)
