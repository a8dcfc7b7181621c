"""`veilstream aggregator`: the command of a machine between learners and the server."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from veilstream.cli.service_options import Insecure, LogFormat, LogLevel, PlanFile, parse_address
from veilstream.federation.logs import Format, Level, configure_logs


def aggregator_command(
    server: Annotated[str, typer.Option(help="HOST:PORT of the server.")],
    plan: PlanFile,
    keys: Annotated[Path, typer.Option(help="Its folder, KEYS/aggregators/NAME.")],
    listen: Annotated[str, typer.Option(help="HOST:PORT for learners.")] = "127.0.0.1:8410",
    store: Annotated[
        Path | None, typer.Option(help="Where learners' last messages are kept.", show_default="NAME.store")
    ] = None,
    insecure: Insecure = False,
    log_level: LogLevel = Level.INFO,
    log_format: LogFormat = Format.TEXT,
) -> None:
    """Stand between learners and the server: verify releases, send their sum.

    Learners dial it as if it were the server, with the keys that they have. The model is the same
    to the bit. It runs until it is stopped and may be killed at any time; its store must last, as
    the server's folder must. Make its keys with
    `veilstream keys add KEYS NAME --aggregator --host HOST --learner north --learner south`.
    """
    from veilstream.federation.aggregator import AggregatorService
    from veilstream.plans.plan import Plan

    configure_logs(log_level, log_format)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    AggregatorService(
        Plan.load(plan),
        keys,
        store or Path(f"{keys.resolve().name}.store"),
        parse_address("--listen", listen),
        parse_address("--server", server),
        insecure,
    ).run(stop)
