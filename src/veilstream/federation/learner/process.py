"""The learner's long-lived process, beside its data: ledger, daemon, data source, transport."""

from __future__ import annotations

import functools
import logging
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from veilstream.deployment.learner import Learner
from veilstream.deployment.ledger.paths import check_room
from veilstream.errors import InputError, StorageError
from veilstream.federation.addresses import Address
from veilstream.federation.keys.identity import LearnerKeys
from veilstream.federation.learner.access import open_token, token_path
from veilstream.federation.learner.daemon import Daemon
from veilstream.federation.learner.health import LearnerHealth
from veilstream.federation.learner.local_account import LocalAccount, account_path
from veilstream.federation.learner.published_model import PublishedModel, published_path
from veilstream.federation.learner.reply_times import reply_times
from veilstream.federation.learner.source_start import least_clients, resume_source
from veilstream.federation.protocol.transport import Node, supervisor
from veilstream.learning.tasks import Task
from veilstream.plans.data_source import open_source
from veilstream.plans.plan import Plan
from veilstream.plans.records import label_unit
from veilstream.plans.tasks import task_of
from veilstream.streams.intake import ClientSource, WholeSource
from veilstream.streams.table_source import TableSource
from veilstream.streams.waiting_source import LiveSource, WaitingSource

if TYPE_CHECKING:
    from veilstream.federation.learner.learner_api import LearnerApi
    from veilstream.federation.learner.local_page import LearnerPages


_log = logging.getLogger(__name__)

_LAST_REPLY_S = 1.0  # for the last reply to reach the server
_TELL_EVERY_S = 60.0
_AGAIN_S = (1.0, 30.0)  # before a disk is tried again: first, and at most
_SAY_AGAIN_S = 300.0
_ROOM_BYTES = 1 << 20  # that must fit beside store and witness, to go on after a failure


@dataclass
class LearnerService:
    """`veilstream learner`: ledger, daemon, data source, and a transport to the server."""

    plan: Plan
    keys: Path
    store: Path
    data: str
    server: Address
    """Where to dial."""
    witness: Path | None = None
    learner_api: Address | None = None
    insecure: bool = False
    task: Task | None = None
    new_store: bool = False
    reply_after_s: float | None = None
    """When releases leave after their request; None: as the source needs (`reply_times`)."""
    exit_when_done: bool = False
    """Return when the server has said that the run is over and no other epoch may follow."""
    end_with_file: bool = False
    """Return when the file ends; otherwise wait for rows to be appended."""
    pages: LearnerPages | None = None
    query: str | None = None
    key: str | None = None
    """Of a SQLite file, instead of the plan's."""
    health: LearnerHealth = field(default_factory=LearnerHealth, init=False)
    _api: LearnerApi | None = field(default=None, init=False)
    _files: tuple[Path, ...] = field(default=(), init=False)
    """Store and witness, once they have been open."""
    _wait_s: float = field(default=_AGAIN_S[0], init=False)

    def run(self, stop: threading.Event | None = None) -> None:
        """Answer the server until ``stop``, also after the last round.

        While a disk cannot be written the learner is not connected, and tries again; its API stays and says so.

        Raises:
            StorageError: a disk cannot be written already when the store is opened first.

        """
        stop = threading.Event() if stop is None else stop
        keys = LearnerKeys.load(self.keys)
        if not self.insecure:
            self.health.certificate = self.keys / "tls.pem"
        try:
            self._live(keys, stop)
            while self.health.blocked and not stop.is_set():
                self._live(keys, stop)
        finally:
            if self._api is not None:
                self._api.close()

    def _live(self, keys: LearnerKeys, stop: threading.Event) -> None:
        """Answer until ``stop``; or until a disk cannot be written, and then until it can."""
        began = time.monotonic()
        try:
            self._answer(keys, stop)
        except StorageError as error:
            if not self._files:
                raise
            if time.monotonic() - began > _AGAIN_S[1]:
                self._wait_s = _AGAIN_S[0]
            self._wait_for_room(error, keys.name, stop)

    def _wait_for_room(self, error: StorageError, name: str, stop: threading.Event) -> None:
        self.health.blocked, self.health.times_blocked = error.what, self.health.times_blocked + 1
        fields = {"event": "blocked"}
        _log.error("learner %s: %s; it leaves the server and tries again until it can", name, error.what, extra=fields)
        began = time.monotonic()
        say_at = began + _SAY_AGAIN_S
        while not stop.wait(self._wait_s):
            self._wait_s = min(2 * self._wait_s, _AGAIN_S[1])
            try:
                for file in self._files:
                    check_room(file, _ROOM_BYTES)
            except OSError as again:
                if time.monotonic() >= say_at:
                    say_at = time.monotonic() + _SAY_AGAIN_S
                    _log.error("learner %s still cannot write: %s", name, again, extra=fields)
                continue
            passed_s, fields = time.monotonic() - began, {"event": "writable"}
            _log.info("learner %s: its disk can be written again, after %.0f s", name, passed_s, extra=fields)
            return

    def _answer(self, keys: LearnerKeys, stop: threading.Event) -> None:
        secret = self.plan.order == "secret"
        at_once = secret and self.plan.window is None
        whole = self.end_with_file or at_once
        source = open_source(self.data, self.plan, keys.name, whole=whole, query=self.query, key=self.key)
        if at_once and not isinstance(source, WholeSource):
            raise InputError(
                "--data",
                self.data,
                'records that are all there before an epoch begins, under privacy.order = "secret"',
                "a file, a folder or a SQLite table; privacy.window = W is for records that arrive one after the other",
            )
        if self.end_with_file and not isinstance(source, TableSource):
            raise InputError("--end-with-file", True, "a file as --data", "leave it out")
        window_s = source.window_s if isinstance(source, WaitingSource) else None
        replies = reply_times(window_s, self.reply_after_s)
        if window_s is not None:
            self._check_deadline(replies.after_s)
        task = task_of(self.plan) if self.task is None else self.task
        with ExitStack() as stack:
            learner = Learner(self.plan, self.store, task, witness=self.witness, create=self.new_store)
            stack.callback(learner.close)
            self._files = (learner.ledger.path, learner.ledger.witness_path)
            if not self.health.times_blocked:
                _log.info("guarantee: %s", learner.guarantee)
                for remark in learner.guarantee.remarks:
                    _log.warning("guarantee: %s", remark)
                for notice in learner.ledger.notices:
                    _log.warning("%s", notice)
                if window_s is not None:
                    self._tell_waiting(learner, replies.after_s)
            resume_source(source, learner, keys.name)
            account = LocalAccount(learner, source, unit=label_unit(self.plan), path=account_path(self.store))
            daemon = Daemon(
                learner,
                keys,
                source,
                replies="by source" if secret and self.reply_after_s is None else replies,
                min_clients=least_clients(self.plan, learner, source),
                account=account,
                published=PublishedModel(learner, published_path(self.store)),
            )
            self.health.warnings = lambda: [warning.text for warning in account.warnings]
            stack.callback(account.save)
            stack.callback(daemon.close)
            if self.learner_api is not None:
                self._publish(daemon, source, self.learner_api)
            node = self._node(daemon, learner)
            stack.callback(node.close)
            self.health.connected = functools.partial(getattr, node, "online", None)
            self.health.blocked = ""
            node.start()
            progress = _Progress(daemon, account)
            stack.callback(progress.log_account)
            check = supervisor(node)
            while not stop.wait(0.1):
                check()
                if daemon.failure is not None:
                    raise daemon.failure
                if self._api is not None:
                    self._api.log_refusals()
                daemon.log_refusals()
                progress.log()
                if self.exit_when_done and daemon.dismissed and not learner.epochs_left:
                    stop.wait(_LAST_REPLY_S)
                    return
                if self.end_with_file and daemon.file_has_ended():
                    stop.wait(_LAST_REPLY_S)
                    _log.info("learner %s ends with its file %s", keys.name, self.data)
                    return

    def _tell_waiting(self, learner: Learner, reply_s: float) -> None:
        a_round = learner.terms.local_steps * learner.terms.clients_per_step
        _log.info(
            "each round takes %g s whoever comes (federation.patience_s and a second, or --reply-after) and takes %d "
            "clients at most: %.3g a second. More learning.local_steps, more clients_per_step or less patience_s "
            "take more",
            reply_s,
            a_round,
            a_round / reply_s if reply_s else float("inf"),
        )

    def _check_deadline(self, reply_s: float) -> None:
        deadline = self.plan.federation.deadline_s
        if deadline <= reply_s:
            _log.warning(
                "federation.deadline_s = %g: the server waits no longer for this learner, which replies after %g s "
                "(federation.patience_s, --reply-after), so its rounds may come too late: give it more than %g",
                deadline,
                reply_s,
                reply_s,
            )

    def _publish(self, daemon: Daemon, source: ClientSource, at: Address) -> None:
        from veilstream.federation.learner.learner_api import LearnerApi

        live = source if isinstance(source, LiveSource) else None
        if self._api is not None:
            self._api.attach(daemon, live)
            return
        path = token_path(self.store)
        token = open_token(path)
        self._api = api = LearnerApi(daemon, live, at, token, self.pages, health=self.health)
        _log.info("learner API at http://%s:%d/; its access token is in %s", at[0], api.port, path)
        _log.info(
            "a link to its local page: veilstream ledger page %s --learner-api %s:%d", self.store, at[0], api.port
        )

    def _node(self, daemon: Daemon, learner: Learner) -> Node:
        from veilstream.federation.direct import DirectNode

        return DirectNode(
            self.keys,
            daemon.handle,
            self.server,
            dim=learner.terms.wire_dim,
            enrolled=learner.round > 0 or learner.epoch > 0,
            insecure=self.insecure,
            run_over=lambda: daemon.dismissed,
        )


class _Progress:
    def __init__(self, daemon: Daemon, account: LocalAccount) -> None:
        self._daemon, self._learner, self._account = daemon, daemon.learner, account
        self._told, self._told_at, self._told_round = "", time.monotonic(), self._learner.round
        self._seen = (self._learner.epoch, self._learner.round)
        self._over: int | None = None
        _log.info("learner %s: epoch %d, round %d", daemon.name, *self._seen)

    def log(self) -> None:
        learner, rounds = self._learner, self._learner.terms.rounds
        now = (learner.epoch, learner.round)
        if now != self._seen and learner.round:
            fields = {"event": "round sealed", "round": learner.round}
            _log.debug("learner %s: %d of %d rounds sealed", self._daemon.name, learner.round, rounds, extra=fields)
            a_tenth = abs(learner.round - self._told_round) >= max(1, rounds // 10)
            if a_tenth or time.monotonic() - self._told_at >= _TELL_EVERY_S:
                self.log_account()
        self._seen = now
        if learner.over and self._over != learner.epoch:
            self._over = learner.epoch
            fields = {"event": "epoch over", "round": learner.round}
            _log.info("learner %s: %s; no more clients are taken", self._daemon.name, self._daemon.ended, extra=fields)

    def log_account(self) -> None:
        line = self._account.line()
        if self._account.counts.rounds and line != self._told:
            fields = {"event": "account", "round": self._learner.round}
            _log.info("learner %s: %s", self._daemon.name, line, extra=fields)
        self._told, self._told_at, self._told_round = line, time.monotonic(), self._learner.round
