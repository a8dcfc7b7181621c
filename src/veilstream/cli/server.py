"""`veilstream server`: the command of the machine that holds the model."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from veilstream.cli.options import Insecure, LogFormat, LogLevel, PlanFile, parse_address
from veilstream.errors import InputError
from veilstream.federation.logs import Format, Level, configure_logs

if TYPE_CHECKING:
    from veilstream.federation.server.open_round import Standing
    from veilstream.federation.server.process import LiveView


_log = logging.getLogger(__name__)


def server_command(
    plan: PlanFile,
    keys: Annotated[Path, typer.Option(help="The server's folder of keys.")] = Path("keys/server"),
    listen: Annotated[str, typer.Option(help="HOST:PORT for learners.")] = "127.0.0.1:8400",
    transport: Annotated[
        str, typer.Option(help="What carries messages: direct, or one that an installed package adds.")
    ] = "direct",
    model_api: Annotated[
        str | None, typer.Option(help="HOST:PORT where models are published.", show_default=False)
    ] = None,
    publish: Annotated[
        bool,
        typer.Option(
            "--publish",
            help="Serve a live page at /live of the model API: rounds, learners, time left. It names "
            "learners only on loopback.",
        ),
    ] = False,
    publish_names: Annotated[
        bool, typer.Option("--publish-names", help="The same, with learners' names for everyone who can reach it.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="The run's folder.", show_default=False)] = None,
    insecure: Insecure = False,
    exit_when_done: Annotated[
        bool,
        typer.Option(
            "--exit-when-done",
            help="End after the last round, for scripts; without it the server keeps serving models.",
        ),
    ] = False,
    next_run: Annotated[
        bool,
        typer.Option(
            "--next",
            help="Begin the next run, in OUT-2 and so on, from the last model: every learner goes "
            "along into a new epoch, as often as federation.epochs allows. Leave it out of later starts.",
        ),
    ] = False,
    roll_back: Annotated[
        int | None,
        typer.Option(help="Continue from the model that was released after this many rounds.", show_default=False),
    ] = None,
    void: Annotated[list[str] | None, typer.Option(help="Never ask this learner again.", show_default=False)] = None,
    reset: Annotated[
        list[str] | None,
        typer.Option(
            help="Accept this learner's epoch and round, whatever they are, when it next enrols.", show_default=False
        ),
    ] = None,
    log_level: LogLevel = Level.INFO,
    log_format: LogFormat = Format.TEXT,
    json: Annotated[bool, typer.Option("--json", help="Print JSON at the end.")] = False,
) -> None:
    """Hold the model: announce it, collect learners' releases, publish every new one.

    Started again after a crash it goes on from its checkpoint, to the same numbers. After the last
    round it goes on serving models until it is stopped (Ctrl-C, SIGTERM; exit code 0), also when it
    is started again on a finished run. Make keys first with `veilstream keys make`.
    """
    from veilstream.cli.tables import print_json
    from veilstream.federation.server.process import ServerService
    from veilstream.plans.plan import Plan

    configure_logs(log_level, log_format)
    loaded = Plan.load(plan)
    folder = out or Path("runs") / loaded.name
    _end_on_sigterm()
    at = None if model_api is None else parse_address("--model-api", model_api)
    service = ServerService(
        loaded,
        keys,
        folder,
        parse_address("--listen", listen),
        at,
        insecure,
        live=_live(at, publish or publish_names, names=publish_names),
        exit_when_done=exit_when_done,
        next_run=next_run,
        roll_back=roll_back,
        void=tuple(void or ()),
        reset=tuple(reset or ()),
        transport=transport,
    )
    last = None if loaded.learning.unbounded else loaded.learning.rounds
    with _Watch(last) as watch:

        def moved(now: Standing) -> None:
            watch.standing(now)
            if now.round == last:
                _report(service.folder)

        done = service.run(moved)
    _report(service.folder)
    if json:
        print_json({"run": done.run, "rounds": done.round, "folder": str(service.folder)})
    else:
        typer.echo(f"{done.run}: {done.round} rounds; {service.folder}")


def _live(at: tuple[str, int] | None, wanted: bool, *, names: bool) -> LiveView | None:
    if not wanted:
        return None
    if at is None:
        raise InputError(
            "--publish", True, "--model-api, since the page is served there", "try --model-api 127.0.0.1:8480"
        )
    from functools import partial

    from veilstream.federation.server.process import LIVE
    from veilstream.http_client import is_loopback
    from veilstream.reports.live_federation import LiveFederation

    return partial(LiveFederation, path=LIVE, named=names or is_loopback(at[0]))


def _report(folder: Path) -> None:
    """Make the run's report.html; a server serves on where it cannot."""
    from veilstream.errors import VeilstreamError
    from veilstream.reports.federation_report import write_federation_report
    from veilstream.runs.folder import Run

    try:
        write_federation_report(Run(folder))
    except (VeilstreamError, OSError) as error:
        _log.warning("no report: %s; `veilstream report %s` makes it", error, folder)
    except Exception:  # a defect of ours: no page may end a server
        _log.exception("no report; rounds and models are not touched by it")


def _end_on_sigterm() -> None:
    """As Ctrl-C: children are ended, what is done is kept."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)


class _Watch:
    def __init__(self, rounds: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed}" + ("" if rounds is None else "/{task.total}")),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("rounds", total=rounds)

    def standing(self, now: Standing) -> None:
        missing = f", waiting for {' '.join(now.missing)}" if now.missing else ""
        self._bar.update(self._task, completed=now.round, description=f"rounds{missing}")

    def __enter__(self) -> _Watch:
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()
