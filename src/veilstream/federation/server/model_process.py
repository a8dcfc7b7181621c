"""The model API in a process of its own: whatever strangers do to it, rounds go on.

The server's process binds the address, starts the child, and pushes what is published: the number
of rounds that are done, the metrics page, and changes of the live page. The child reads models from
the run's folder. It is told; it cannot ask, so callers cost the server's process nothing. If it
ends, it is started again on the same socket. It runs at a lower priority than the rounds.

    python -P -m veilstream.federation.server.model_process SOCKET LISTENING LEVEL FORMAT
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

from veilstream.errors import VeilstreamError
from veilstream.federation.addresses import Address, listen_at
from veilstream.federation.logs import Format, Level, configure_logs, log_options
from veilstream.federation.processes import Child
from veilstream.federation.server.checkpoint import ModelFile

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from veilstream.federation.http.live_routes import LivePage
    from veilstream.federation.server.coordinator import Coordinator
    from veilstream.federation.server.server_metrics import ServerMetrics
    from veilstream.plans.plan import Plan

    class RelayedPage(LivePage, Protocol):
        """A live page that another process shows."""

        shown_by: str
        """`module:class` that shows the state there, made from a state and a path."""
        relay: Callable[[dict[str, Any], dict[str, Any] | None], None]
        """Called with every change."""


_log = logging.getLogger(__name__)

_START_S = 30.0
_EVERY_S = 0.05  # between two messages
_METRICS_EVERY_S = 1.0
_MOST_CHANGES = 256  # that wait; beyond, the whole page is sent
_AGAIN_S = (1.0, 60.0)  # before an ended child is started again: first, and at most
_SAY_EVERY_S = 60.0
_NICE = 10


class ModelProcess:
    """Publishes a coordinator's models from a child process until `close`."""

    def __init__(
        self,
        coordinator: Coordinator,
        plan: Plan,
        address: Address,
        tls: tuple[Path, Path] | None = None,
        *,
        metrics: ServerMetrics,
        page: RelayedPage | None = None,
        path: str = "",
        local: bool = False,
    ) -> None:
        """``path`` and ``local``: where the page is, and whether callers must name this machine."""
        self._coordinator, self._metrics, self._page = coordinator, metrics, page
        terms = coordinator.terms
        self._first = {
            "run": coordinator.run,
            "rounds": terms.rounds,
            "dim": terms.dim,
            "guarantee": terms.guarantee.as_dict(),
            "plan": plan.to_toml(),
            "models": str(coordinator.models.path.resolve()),
            "tls": None if tls is None else [str(part.resolve()) for part in tls],
            "page": None,
            "shown_by": None if page is None else page.shown_by,
            "path": path,
            "local": local,
        }
        self._text, self._text_at = metrics.text(coordinator), time.monotonic()
        self._changes: list[tuple[dict[str, Any], dict[str, Any] | None]] = []
        self._listening = listen_at(address, "--model-api")
        self.port = int(self._listening.getsockname()[1])
        self._told = threading.Event()
        self._closed = False
        if page is not None:
            page.relay = self._changed
        try:
            self._start()
        except BaseException:
            self._listening.close()
            raise
        self._thread = threading.Thread(target=self._push_all, name="publish", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Number of the child process."""
        return self._child.pid

    def tell(self) -> None:
        """The coordinator moved: send it soon."""
        self._told.set()

    def close(self) -> None:
        """End the child; answers under way have a second to be read."""
        self._closed = True
        self._told.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(_START_S)
        until = time.monotonic() + 5.0
        while self._child.running and time.monotonic() < until:
            time.sleep(0.02)
        self._child.end()
        self._socket.close()
        self._listening.close()

    def _changed(self, patch: dict[str, Any], told: dict[str, Any] | None) -> None:
        """Called while the page's state is locked."""
        self._changes.append((patch, told))
        if len(self._changes) > _MOST_CHANGES:
            assert self._page is not None
            self._changes = [(json.loads(self._page.snapshot()[1]), None)]
        self._told.set()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        fds = (theirs.fileno(), self._listening.fileno())
        module = "veilstream.federation.server.model_process"
        words = [sys.executable, "-P", "-m", module, *map(str, fds), *log_options()]
        self._child = Child(words, None, pass_fds=fds)
        try:
            self._child.start()
            theirs.close()
            first = {**self._first, "round": self._coordinator.round, "metrics": self._text}
            if self._page is not None:
                with self._page.feed.changing:
                    self._changes = []
                    first["page"] = json.loads(self._page.snapshot()[1])
            ours.settimeout(_START_S)
            ours.sendall(_line(first))
            if ours.recv(1) != b"+":
                raise OSError("it ended")
        except OSError as error:
            self._child.end()
            ours.close()
            raise VeilstreamError(
                f"--model-api: its process did not start ({error}); the lines above say why"
            ) from None
        ours.settimeout(None)
        self._socket = ours

    def _push_all(self) -> None:
        wait_s = _AGAIN_S[0]
        while not self._closed:
            self._told.wait(_METRICS_EVERY_S)
            self._told.clear()
            try:
                self._push()
                wait_s = _AGAIN_S[0]
            except OSError:
                if self._closed:
                    return
                self._child.end()
                self._socket.close()
                _log.error(
                    "the model API's process ended (exit code %s); rounds go on, it is started again in %g s",
                    self._child.exit_code,
                    wait_s,
                )
                wait_s = self._start_again(wait_s)
            time.sleep(_EVERY_S)

    def _start_again(self, wait_s: float) -> float:
        until = time.monotonic() + wait_s
        while time.monotonic() < until and not self._closed:
            time.sleep(_EVERY_S)
        if not self._closed:
            with contextlib.suppress(VeilstreamError):  # seen at the next push, and said there
                self._start()
        return min(2 * wait_s, _AGAIN_S[1])

    def _push(self) -> None:
        if not self._child.running:
            raise OSError("ended")
        message: dict[str, Any] = {"round": self._coordinator.round, "idle_s": self._coordinator.idle_s}
        if time.monotonic() - self._text_at >= _METRICS_EVERY_S:
            self._text, self._text_at = self._metrics.text(self._coordinator), time.monotonic()
            message["metrics"] = self._text
        if self._page is not None:
            with self._page.feed.changing:
                message["changes"], self._changes = self._changes, []
        self._socket.sendall(_line(message))


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"


class _Counts:
    """The server's metrics as it pushed them, and this process's own."""

    def __init__(self, pushed: str) -> None:
        self.pushed, self._lock = pushed, threading.Lock()
        self._requests, self._refused, self._said = 0, Counter[str](), Counter[str]()
        self.connections: Callable[[], int] = lambda: 0

    def add(self, name: str, amount: int = 1) -> None:
        """A request for a model."""
        with self._lock:
            self._requests += amount

    def refuse(self, reason: str) -> None:
        """A connection that was cut."""
        with self._lock:
            self._refused[reason] += 1

    def text(self, _: object) -> str:
        """One page of both."""
        from prometheus_client import generate_latest

        return self.pushed + generate_latest(self).decode()

    def collect(self) -> Iterator[Metric]:
        """This process's metric families."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            requests, refused = self._requests, dict(self._refused)
        yield CounterMetricFamily(
            "veilstream_model_requests", "Requests for models that were answered with one.", requests
        )
        yield GaugeMetricFamily(
            "veilstream_model_api_connections", "Open connections of the model API.", self.connections()
        )
        cut = CounterMetricFamily(
            "veilstream_model_api_connections_cut", "Connections that the model API cut.", labels=["reason"]
        )
        for reason, count in sorted(refused.items()):
            cut.add_metric([reason], count)
        yield cut

    def say(self) -> None:
        """One line for all that were cut since the last."""
        with self._lock:
            new, self._said = self._refused - self._said, Counter(self._refused)
        if new:
            reasons = ", ".join(f"{count:,} ({reason})" for reason, count in sorted(new.items()))
            _log.warning("model API: connections cut since the last such line: %s", reasons)


@dataclass
class _Told:
    """What this process was told of the coordinator."""

    run: str
    round: int
    terms: Any
    models: ModelFile
    idle_at: float = field(default_factory=time.monotonic)

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self.idle_at


def _serve(told: socket.socket, listening: socket.socket) -> None:
    from veilstream.federation.server.model_api import ModelApi
    from veilstream.plans.plan import Plan

    lines = told.makefile("rb")
    first = json.loads(lines.readline())
    guarantee = first["guarantee"]
    terms = SimpleNamespace(
        rounds=first["rounds"], dim=first["dim"], guarantee=SimpleNamespace(as_dict=lambda: guarantee)
    )
    run = _Told(first["run"], first["round"], terms, ModelFile(Path(first["models"]), first["dim"]))
    counts, routes = _Counts(first["metrics"]), []
    page: Any = None
    listening.setblocking(False)
    if first["page"] is not None:
        from veilstream.federation.http.live_routes import LiveRoutes

        module, _, name = first["shown_by"].partition(":")
        page = getattr(importlib.import_module(module), name)(first["page"], first["path"])
        port = int(listening.getsockname()[1])
        routes = LiveRoutes(page, first["path"], own_port=(lambda: port) if first["local"] else None).routes
    tls = None if first["tls"] is None else (Path(first["tls"][0]), Path(first["tls"][1]))
    api = ModelApi(run, Plan.parse(first["plan"]), listening, tls, metrics=counts, more=routes)
    counts.connections = lambda: api.connections
    told.sendall(b"+")
    say_at = time.monotonic() + _SAY_EVERY_S
    for line in lines:  # until the server's process closes its end, or ends
        message = json.loads(line)
        run.round, run.idle_at = message["round"], time.monotonic() - message["idle_s"]
        counts.pushed = message.get("metrics", counts.pushed)
        for patch, event in message.get("changes", ()):
            page.change(patch, event)
        if time.monotonic() >= say_at:
            say_at = time.monotonic() + _SAY_EVERY_S
            counts.say()
    counts.say()
    if page is not None:
        page.feed.stop()
    api.close()


def main() -> None:
    """The child's side."""
    told, listening, level, form = sys.argv[1:]
    configure_logs(Level(level), Format(form))
    os.nice(_NICE)
    with contextlib.suppress(ConnectionError):
        _serve(socket.socket(fileno=int(told)), socket.socket(fileno=int(listening)))


if __name__ == "__main__":
    main()
