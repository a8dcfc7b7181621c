"""The two long-lived processes of a federation: a server, and a learner beside its data."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from veilstream.engines.build import task_of
from veilstream.engines.federation.carrier import Carrier
from veilstream.engines.federation.coordinator import Coordinator, Standing
from veilstream.engines.federation.daemon import Daemon
from veilstream.engines.federation.desk import Desk
from veilstream.engines.federation.keys import LearnerKeys, ServerKeys
from veilstream.engines.federation.publish import Publisher
from veilstream.engines.federation.reply_times import WHEN_FULL, reply_times
from veilstream.engines.federation.sources import LiveSource, open_source
from veilstream.engines.learner import Learner
from veilstream.engines.plan import Plan
from veilstream.errors import InputError, UnknownName
from veilstream.learning.tasks import Task

__all__ = [
    "ENGINES",
    "TRUST_NEEDED",
    "Address",
    "Engine",
    "LearnerService",
    "Node",
    "ServerService",
    "check_trusted",
    "learner_node",
    "server_engine",
    "tended",
]

Address = tuple[str, int]
ENGINES = ("flower", "flare")
TRUST_NEEDED = {
    "flare": "FLARE's site process runs under the learner's account and takes orders: the server, "
    "another learner and any local account can read the learner's files through it (records, "
    "store, seeds), which no noise protects"
}
"""Engines that see more than messages, and what that means."""
_TEND_S = 1.0


def check_trusted(engine: str, *, trusted: bool) -> None:
    """Refuse an engine that can read a learner's files, unless someone says that it is trusted."""
    if why := "" if trusted else TRUST_NEEDED.get(engine, ""):
        raise InputError(
            "--engine", engine, f"--trust-engine beside it, since {why}",
            "use --engine flower; or, if all of these are trusted, add --trust-engine",
        )  # fmt: skip


class Engine(Carrier, Protocol):
    """The server's side of an engine."""

    def start(self) -> None:
        """Begin to carry."""

    def tend(self) -> str | None:
        """Repair what has died; a line to show, if anything happened."""


class Node(Protocol):
    """A learner's side of an engine."""

    def start(self) -> None:
        """Connect; an error if the server refuses."""

    def tend(self) -> str | None:
        """Repair what has died; a line to show, if anything happened."""

    def close(self) -> None:
        """Disconnect."""


def server_engine(
    name: str, keys: Path, state: Path, address: Address, *, insecure: bool
) -> Engine:
    """The engine of this name."""
    if name == "flower":
        from veilstream.engines.flower import FlowerServer

        return FlowerServer(keys, state, address, insecure=insecure)
    if name == "flare":
        from veilstream.engines.flare import FlareServer

        return FlareServer(keys, state, address, insecure=insecure)
    raise UnknownName("engine", name, ENGINES)


def learner_node(
    name: str, keys: Path, socket: Path, state: Path, server: Address, *, insecure: bool
) -> Node:
    """The engine of this name, at a learner."""
    if name == "flower":
        from veilstream.engines.flower import FlowerNode

        return FlowerNode(keys, socket, state, server, insecure=insecure)
    if name == "flare":
        from veilstream.engines.flare import FlareNode

        return FlareNode(keys, socket, state, server, insecure=insecure)
    raise UnknownName("engine", name, ENGINES)


@dataclass
class ServerService:
    """`veilstream server`: engine, coordinator and the page of models."""

    plan: Plan
    keys: Path
    folder: Path
    address: Address
    engine: str = "flower"
    publish: Address | None = None
    insecure: bool = False
    task: Task | None = None

    def run(
        self,
        watch: Callable[[Standing], None] = lambda _: None,
        say: Callable[[str], None] = lambda _: None,
    ) -> Coordinator:
        """Run to the end of the horizon; started again after a kill, go on."""
        keys = ServerKeys.load(self.keys)
        task = task_of(self.plan) if self.task is None else self.task
        x0 = np.asarray(task.init(self.plan.run.first_seed), np.float32)
        coordinator = Coordinator(
            self.plan, x0, keys, self.folder, engine=self.engine, task=task, watch=watch
        )
        say(str(coordinator.terms.guarantee))
        with ExitStack() as stack:
            if self.publish is not None:
                tls = None if self.insecure else (self.keys / "tls.pem", self.keys / "tls.key")
                page = Publisher(coordinator, self.publish, tls)
                stack.callback(page.close)
                scheme = "http" if tls is None else "https"
                say(f"models at {scheme}://{self.publish[0]}:{page.port}/model/latest")
            if not coordinator.finished:
                engine = server_engine(
                    self.engine, self.keys, self.folder / "engine", self.address,
                    insecure=self.insecure,
                )  # fmt: skip
                stack.callback(engine.close)
                engine.start()
                say(f"run {coordinator.run} waits for learners at {_shown(self.address)}")
                with tended([engine], say) as check:
                    coordinator.go(engine, look=check)
        return coordinator


@dataclass
class LearnerService:
    """`veilstream learner`: ledger, daemon, data source, and the engine's relay."""

    plan: Plan
    keys: Path
    store: Path
    data: str
    server: Address
    engine: str = "flower"
    witness: Path | None = None
    desk: Address | None = None
    insecure: bool = False
    task: Task | None = None
    new_store: bool = False
    """Begin a store where there is none."""
    reply_after_s: float | None = None
    """When releases leave after their request; None: by the source (`reply_times`)."""
    reply_when_full: bool = False

    def run(
        self,
        say: Callable[[str], None] = lambda _: None,
        stop: threading.Event | None = None,
        on_round: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Answer the server until ``stop``."""
        stop = threading.Event() if stop is None else stop
        keys = LearnerKeys.load(self.keys)
        source = open_source(self.data, self.plan)
        window_s = source.window_s if isinstance(source, LiveSource) else None
        times = reply_times(window_s, self.reply_after_s, when_full=self.reply_when_full)
        if self.reply_when_full:
            say(f"warning: {WHEN_FULL}")
        task = task_of(self.plan) if self.task is None else self.task
        with ExitStack() as stack:
            learner = Learner(
                self.plan, self.store, task, witness=self.witness, create=self.new_store
            )
            stack.callback(learner.close)
            say(str(learner.guarantee))
            for notice in learner.notices:
                say(f"warning: {notice}")
            daemon = Daemon(learner, keys, source, log=say, replies=times or "when done")
            socket = stack.enter_context(_short_path(self.store.parent, f"{keys.name}.sock"))
            daemon.listen(socket)
            threading.Thread(target=daemon.serve, daemon=True).start()
            stack.callback(daemon.close)
            if self.desk is not None:
                live = source if isinstance(source, LiveSource) else None
                desk = Desk(daemon, live, self.desk)
                stack.callback(desk.close)
                say(f"desk at http://{self.desk[0]}:{desk.port}/")
            state = self.store.with_suffix(".engine")
            node = learner_node(
                self.engine, self.keys, socket, state, self.server, insecure=self.insecure
            )
            stack.callback(node.close)
            node.start()
            say(f"{keys.name} at epoch {learner.epoch}, round {learner.round}")
            seen = -1
            with tended([node], say) as check:
                while not stop.wait(0.1):
                    check()
                    if learner.round != seen:
                        seen = learner.round
                        on_round(seen)


@contextmanager
def tended(
    sides: Sequence[Engine | Node], say: Callable[[str], None] = lambda _: None
) -> Iterator[Callable[[], None]]:
    """Look after engines while something else runs.

    Yields a function that raises what could not be repaired.
    """
    ended = threading.Event()
    problems: list[Exception] = []

    def look() -> None:
        while not ended.wait(_TEND_S):
            for side in sides:
                try:
                    note = side.tend()
                except Exception as error:  # for whoever asks, not for a thread's last words
                    problems.append(error)
                    return
                if note:
                    say(note)

    def check() -> None:
        if problems:
            raise problems[0]

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield check
    finally:
        ended.set()
        thread.join(10.0)


@contextmanager
def _short_path(folder: Path, name: str) -> Iterator[Path]:
    """A path for a Unix socket, whose name may have 100 bytes; else one in a temporary folder."""
    path = folder.resolve() / name
    if len(os.fsencode(path)) <= 90:
        yield path
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        return
    with tempfile.TemporaryDirectory(prefix="veilstream-") as short:
        yield Path(short) / name


def _shown(address: Address) -> str:
    return f"{address[0]}:{address[1]}"
