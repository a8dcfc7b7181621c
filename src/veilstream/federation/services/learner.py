"""The learner's long-lived process, beside its data: ledger, daemon, data source, transport."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from veilstream.deployment.learner import Learner
from veilstream.errors import InputError, UnknownName
from veilstream.federation.identity import LearnerKeys
from veilstream.federation.services.access_token import open_token, token_path
from veilstream.federation.services.carrier_socket import CarrierSocket
from veilstream.federation.services.daemon import Daemon
from veilstream.federation.services.reply_times import WHEN_FULL, reply_times
from veilstream.federation.services.supervision import ENGINES, Address, Node, supervised
from veilstream.learning.tasks import Task
from veilstream.plans.data_source import open_source
from veilstream.plans.plan import Plan
from veilstream.plans.tasks import task_of
from veilstream.streams.intake import ClientSource, FileSource, LiveSource

if TYPE_CHECKING:
    from veilstream.federation.services.learner_api import LearnerApi

__all__ = ["LearnerService"]

_log = logging.getLogger(__name__)

_LAST_REPLY_S = 1.0  # for the confirmation to reach the server


@dataclass
class LearnerService:
    """`veilstream learner`: ledger, daemon, data source, and a way to the server."""

    plan: Plan
    keys: Path
    store: Path
    data: str
    server: Address | None
    """Where to dial; engines other than direct know that themselves."""
    engine: str = "direct"
    witness: Path | None = None
    learner_api: Address | None = None
    insecure: bool = False
    task: Task | None = None
    new_store: bool = False
    """Begin a store where there is none."""
    reply_after_s: float | None = None
    """When releases leave after their request; None: by the source (`reply_times`)."""
    reply_when_full: bool = False
    token_file: Path | None = None
    """The learner API's access token; None: beside the store, with the suffix .token."""
    exit_when_done: bool = False
    """Return when the server has said that the run is over and no other epoch may follow."""
    socket: Path | None = None
    """Where an engine's carrier connects; None: NAME.sock beside the store."""
    trust_engine: bool = False
    """Answer a carrier of this process's own account, which could read all that is here."""

    def run(self, stop: threading.Event | None = None) -> None:
        """Answer the server until ``stop``, also after the last round (`exit_when_done`)."""
        stop = threading.Event() if stop is None else stop
        keys = LearnerKeys.load(self.keys)
        source = open_source(self.data, self.plan)
        window_s = source.window_s if isinstance(source, LiveSource) else None
        times = reply_times(window_s, self.reply_after_s, when_full=self.reply_when_full)
        if self.reply_when_full:
            _log.warning("%s", WHEN_FULL)
        task = task_of(self.plan) if self.task is None else self.task
        api: LearnerApi | None = None
        with ExitStack() as stack:
            if isinstance(source, FileSource):
                stack.callback(source.close)
            learner = Learner(
                self.plan, self.store, task, witness=self.witness, create=self.new_store
            )
            stack.callback(learner.close)
            _log.info("guarantee: %s", learner.guarantee)
            for notice in learner.notices:
                _log.warning("%s", notice)
            daemon = Daemon(learner, keys, source, replies=times or "when done")
            stack.callback(daemon.close)
            if self.learner_api is not None:
                api = self._api(daemon, source, self.learner_api)
                stack.callback(api.close)
            node = self._node(daemon, learner)
            stack.callback(node.close)
            node.start()
            progress = _Progress(keys.name, daemon)
            with supervised([node]) as check:
                while not stop.wait(0.1):
                    check()
                    if api is not None:
                        api.log_refusals()
                    progress.log()
                    if self.exit_when_done and daemon.dismissed and not learner.epochs_left:
                        stop.wait(_LAST_REPLY_S)
                        return

    def _api(self, daemon: Daemon, source: ClientSource, at: Address) -> LearnerApi:
        from veilstream.federation.services.learner_api import LearnerApi

        path = self.token_file or token_path(self.store)
        token, made = open_token(path)
        api = LearnerApi(daemon, source if isinstance(source, LiveSource) else None, at, token)
        _log.info("learner API at http://%s:%d/; its access token is in %s", at[0], api.port, path)
        if made:
            _log.info("learner API: new access token, shown this once: %s", token)
        return api

    def _node(self, daemon: Daemon, learner: Learner) -> Node:
        """The direct transport, in this process; or a socket for whoever carries elsewhere."""
        if self.engine == "direct":
            if self.server is None:
                raise InputError(
                    "--server", None, "HOST:PORT, since this learner dials", "--server HOST:8400"
                )
            from veilstream.federation.transports.direct import DirectNode

            return DirectNode(
                self.keys, daemon.handle, self.server, dim=int(learner.settings["d"]),
                enrolled=learner.round > 0 or learner.epoch > 0, insecure=self.insecure,
            )  # fmt: skip
        if self.engine not in ENGINES:
            raise UnknownName("engine", self.engine, ENGINES)
        name = self.keys.resolve().name
        return CarrierSocket(
            daemon.handle, self.socket or self.store.absolute().parent / f"{name}.sock",
            dim=int(learner.settings["d"]), trust_own_account=self.trust_engine,
        )  # fmt: skip


class _Progress:
    """Logs where a learner stands, when that changes."""

    def __init__(self, name: str, daemon: Daemon) -> None:
        self._name, self._daemon, self._learner = name, daemon, daemon.learner
        self._seen = (self._learner.epoch, self._learner.round)
        self._over: int | None = None
        _log.info("learner %s: epoch %d, round %d", name, *self._seen)

    def log(self) -> None:
        learner, rounds = self._learner, self._learner.terms.rounds
        now = (learner.epoch, learner.round)
        if now != self._seen and learner.round:
            _log.info("learner %s: %d of %d rounds sealed", self._name, learner.round, rounds)
        self._seen = now
        if learner.over and self._over != learner.epoch:
            self._over = learner.epoch
            _log.info("learner %s: %s; nobody is taken any more", self._name, self._daemon.ended)
