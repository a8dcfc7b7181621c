"""The server's long-lived process: transport and coordinator; no noise, no clients' data.

The model API, which strangers reach, is a process of its own (`model_process`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from veilstream.errors import UnknownName
from veilstream.federation.addresses import Address
from veilstream.federation.keys.identity import ServerKeys
from veilstream.federation.protocol.transport import ServerSide, Transport, supervisor
from veilstream.federation.server.coordinator import Coordinator
from veilstream.federation.server.open_round import Standing
from veilstream.federation.server.run_files import lock_run
from veilstream.federation.server.server_metrics import CountedTransport, ServerMetrics
from veilstream.federation.server.successive_runs import open_run
from veilstream.federation.transports import TRANSPORTS, TransportSetting
from veilstream.http_client import is_loopback
from veilstream.learning.tasks import Task
from veilstream.plans.plan import Plan
from veilstream.plans.tasks import task_of

if TYPE_CHECKING:
    from veilstream.federation.server.model_process import ModelProcess, RelayedPage

    class LiveFederationPage(RelayedPage, Protocol):
        """A live page that is told how the server stands."""

        def standing(self, now: Standing) -> None:
            """From the server's own thread, often."""

    LiveView = Callable[[Coordinator, ServerMetrics, Path], LiveFederationPage]


LIVE = "/live"
"""Where the live page is, at the model API's address."""

_log = logging.getLogger(__name__)

_LOOK_S = 0.2
_END_S = 10.0  # that learners have to confirm the end, where the server does not stay


@dataclass
class ServerService:
    """`veilstream server`: transport, coordinator and the model API."""

    plan: Plan
    keys: Path
    folder: Path
    address: Address
    model_api: Address | None = None
    insecure: bool = False
    task: Task | None = None
    exit_when_done: bool = False
    """Return after the last round; else go on serving models until ``stop`` or Ctrl-C."""
    next_run: bool = False
    """Begin the run after the newest one, from its last model (`successive_runs`)."""
    roll_back: int | None = None
    void: tuple[str, ...] = ()
    reset: tuple[str, ...] = ()
    live: LiveView | None = None
    """Makes the live page that is published beside the models; None: there is none."""
    transport: ServerSide | str = "direct"
    """What carries messages, or its name among `TRANSPORTS`."""

    def __post_init__(self) -> None:
        if isinstance(self.transport, str) and self.transport not in TRANSPORTS:
            raise UnknownName("--transport", self.transport, TRANSPORTS)

    def run(
        self, watch: Callable[[Standing], None] = lambda _: None, stop: threading.Event | None = None
    ) -> Coordinator:
        """Run to the horizon, then serve until stopped; started again, it goes on, or serves the finished run."""
        stop = threading.Event() if stop is None else stop
        keys = ServerKeys.load(self.keys)
        metrics = ServerMetrics(certificate=None if self.insecure else self.keys / "tls.pem")
        task = task_of(self.plan) if self.task is None else self.task
        opening = open_run(self.folder, self.plan, task, next_run=self.next_run)
        self.folder, x0 = opening.folder, opening.x0
        page: LiveFederationPage | None = None
        api: ModelProcess | None = None

        def moved(now: Standing) -> None:
            metrics.standing(now)
            if page is not None:
                page.standing(now)
            if api is not None:
                api.tell()
            watch(now)

        with ExitStack() as stack:
            stack.callback(lock_run(self.folder).close)
            coordinator = _coordinator_for(self.plan)(
                self.plan, x0, keys, self.folder, start=opening.start, among=opening.among, task=task, watch=moved
            )
            if self.roll_back is not None:
                coordinator.roll_back(self.roll_back)
            for learner in self.void:
                coordinator.void(learner)
            for learner in self.reset:
                coordinator.reset(learner)
            _log.info("guarantee: %s", coordinator.terms.guarantee)
            for remark in coordinator.terms.guarantee.remarks:
                _log.warning("guarantee: %s", remark)
            if self.live is not None:
                page = self.live(coordinator, metrics, self.folder)
            api = self._publish(coordinator, metrics, page, stack)
            if coordinator.finished and self.exit_when_done:
                return coordinator
            carrying = self._carrying(coordinator.terms.wire_dim)
            stack.callback(carrying.close)
            carrying.start()
            transport = CountedTransport(carrying, metrics)
            check = supervisor(carrying)
            if not coordinator.finished:
                at = f" at {self.address[0]}:{self.address[1]}" if isinstance(self.transport, str) else ""
                _log.info("run %s waits for learners%s", coordinator.run, at)
                coordinator.go(transport, look=check)
            if self.exit_when_done:
                left = coordinator.end_all(transport, _END_S, check)
                if left:
                    _log.warning("%s did not confirm the end of the run", ", ".join(left))
            else:
                self._serve_on(coordinator, transport, check, stop)
        return coordinator

    def _carrying(self, dim: int) -> ServerSide:
        if not isinstance(self.transport, str):
            return self.transport
        setting = TransportSetting(
            keys=self.keys,
            address=self.address,
            dim=dim,
            answer_within_s=self.plan.federation.deadline_s,
            insecure=self.insecure,
        )
        return TRANSPORTS[self.transport](setting)

    def _publish(
        self, coordinator: Coordinator, metrics: ServerMetrics, page: LiveFederationPage | None, stack: ExitStack
    ) -> ModelProcess | None:
        if self.model_api is None:
            return None
        from veilstream.federation.server.model_process import ModelProcess

        tls = None if self.insecure else (self.keys / "tls.pem", self.keys / "tls.key")
        local = is_loopback(self.model_api[0])
        api = ModelProcess(
            coordinator, self.plan, self.model_api, tls, metrics=metrics, page=page, path=LIVE, local=local
        )
        stack.callback(api.close)
        scheme = "http" if tls is None else "https"
        host = f"[{self.model_api[0]}]" if ":" in self.model_api[0] else self.model_api[0]
        at = f"{scheme}://{host}:{api.port}"
        _log.info("models are published at %s/model/latest", at)
        if page is not None:
            _log.info("the live page is at %s%s", at, LIVE)
        return api

    def _serve_on(
        self, coordinator: Coordinator, transport: Transport, check: Callable[[], None], stop: threading.Event
    ) -> None:
        _log.info("all %d rounds are done; serving until stopped", coordinator.terms.rounds)
        try:
            while not stop.wait(_LOOK_S):
                check()
                coordinator.after_end(transport)
        except KeyboardInterrupt:
            _log.info("stopped; the run is complete")


def _coordinator_for(plan: Plan) -> type[Coordinator]:
    """A server that sees each learner's sums loads no ciphers."""
    if plan.trust is None:
        return Coordinator
    from veilstream.federation.server.sum_coordinator import SumCoordinator

    return SumCoordinator
