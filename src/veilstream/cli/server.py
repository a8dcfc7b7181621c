"""`veilstream server` and `veilstream learner`: one command per machine."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from veilstream.errors import InputError

if TYPE_CHECKING:
    from veilstream.federation.services.coordinator import Standing

__all__ = ["learner_command", "parse_address", "server_command"]

PlanFile = Annotated[Path, typer.Option("--plan", help="The plan, the same on every machine.")]
EngineName = Annotated[
    str, typer.Option("--engine", help="What carries messages: direct, flower or flare.")
]
TrustEngine = Annotated[
    bool,
    typer.Option(
        "--trust-engine", help="Needed for flare: see what it can read in docs/privacy.md."
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Loopback only: without TLS (FLARE keeps its own).")
]


def server_command(
    plan: PlanFile,
    keys: Annotated[Path, typer.Option(help="The server's folder of keys.")] = Path("keys/server"),
    listen: Annotated[str, typer.Option(help="HOST:PORT for learners.")] = "127.0.0.1:8400",
    model_api: Annotated[
        str | None, typer.Option(help="HOST:PORT where models are published.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder.", show_default=False)] = None,
    engine: EngineName = "direct",
    trust_engine: TrustEngine = False,
    insecure: Insecure = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON at the end.")] = False,
) -> None:
    """Hold the model: announce it, collect learners' releases, publish every new one.

    Started again after a crash it goes on from its checkpoint, to the same numbers. Make keys first
    with `veilstream keys make`.
    """
    from veilstream.cli.tables import print_json
    from veilstream.federation.services.server import ServerService
    from veilstream.federation.services.supervision import check_trusted
    from veilstream.plans.plan import Plan

    check_trusted(engine, trusted=trust_engine)
    loaded = Plan.load(plan)
    folder = out or Path("runs") / loaded.name
    _end_on_sigterm()
    service = ServerService(
        loaded, keys, folder, parse_address("--listen", listen), engine,
        None if model_api is None else parse_address("--model-api", model_api), insecure,
    )  # fmt: skip
    with _Watch(loaded.learning.rounds) as watch:
        done = service.run(watch.standing, _say)
    if json:
        print_json({"run": done.run, "rounds": done.round, "folder": str(folder)})
    else:
        typer.echo(f"{done.run}: {done.round} rounds; {folder}")


def learner_command(
    server: Annotated[str, typer.Option(help="HOST:PORT of the server.")],
    plan: PlanFile,
    data: Annotated[
        str,
        typer.Option(help="A .csv or .jsonl file, `live` (people call its API), plan:INDEX."),
    ],
    id_: Annotated[str | None, typer.Option("--id", help="This learner's name.")] = None,
    keys: Annotated[
        Path | None, typer.Option(help="Its folder of keys.", show_default="keys/learners/ID")
    ] = None,
    store: Annotated[Path | None, typer.Option(help="Its ledger.", show_default="ID.db")] = None,
    witness: Annotated[
        Path | None, typer.Option(help="The ledger's witness, best on another device.")
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
    reply_after: Annotated[
        float | None,
        typer.Option(
            help="Replies leave so many seconds after their request, whoever came.",
            show_default="live: federation.patience_s + 1; else when computed",
        ),
    ] = None,
    reply_when_full: Annotated[
        bool,
        typer.Option(
            "--reply-when-full",
            help="Live: reply as soon as a round is full; its time shows whether clients came.",
        ),
    ] = False,
    engine: EngineName = "direct",
    trust_engine: TrustEngine = False,
    insecure: Insecure = False,
) -> None:
    """Learn beside the data: clients' records stay here, only noisy sums leave.

    Runs until it is stopped (Ctrl-C, SIGTERM), and may be killed at any time: started again it goes
    on where its ledger stands. `veilstream ledger status STORE` shows where that is. The first
    start needs `--new-store`; on a ledger that exists it changes nothing.
    """
    from veilstream.deployment.process_secrecy import no_core_dumps, terse_tracebacks
    from veilstream.federation.services.learner import LearnerService
    from veilstream.federation.services.supervision import check_trusted
    from veilstream.plans.plan import Plan

    no_core_dumps()
    terse_tracebacks()
    if id_ is None and keys is None:
        raise InputError("--id", None, "a learner's name, or --keys", "try --id north")
    folder = keys or Path("keys/learners") / str(id_)
    name = folder.resolve().name
    if id_ is not None and id_ != name:
        raise InputError("--id", id_, f"the name of its keys ({name})", "leave one of them out")
    at = None if learner_api is None else parse_address("--learner-api", learner_api)
    if data == "live" and at is None:
        raise InputError(
            "--learner-api", None, "an address, since people call", "--learner-api 127.0.0.1:8490"
        )
    check_trusted(engine, trusted=trust_engine)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    service = LearnerService(
        Plan.load(plan), folder, store or Path(f"{name}.db"), data,
        parse_address("--server", server), engine, witness, at, insecure,
        new_store=new_store,
        reply_after_s=reply_after, reply_when_full=reply_when_full,
    )  # fmt: skip
    service.run(_say, stop, lambda r: _say(f"round {r}"))


def parse_address(option: str, text: str) -> tuple[str, int]:
    """HOST:PORT."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 <= int(port) < 65536:
        raise InputError(option, text, "HOST:PORT", "try 127.0.0.1:8400")
    return host.strip("[]"), int(port)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _end_on_sigterm() -> None:
    """As Ctrl-C: children are ended, what is done is kept."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)


class _Watch:
    """A live bar where stderr is a terminal; notes as lines in any case."""

    def __init__(self, rounds: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(),
            TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn(),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("rounds", total=rounds)

    def standing(self, now: Standing) -> None:
        """Show it."""
        missing = f", waiting for {' '.join(now.missing)}" if now.missing else ""
        self._bar.update(self._task, completed=now.round, description=f"rounds{missing}")
        if now.note:
            self._bar.console.print(now.note, markup=False, soft_wrap=True)

    def __enter__(self) -> _Watch:
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()
