"""One learner that answers its server: ledger, noise, model and data source behind one function.

`handle(request bytes) -> reply bytes` is all that the outside can call: the direct transport from
this process, a framework's process over a Unix socket (`carrier_socket`). Requests are answered one
at a time, and a repeated request gets the same release. Only releases leave: no loss, no count of
refused clients. A release has one size whatever the data. Whether clients wait is looked at once a
slot, and a reply leaves at a time that does not depend on who came (`reply_times`). A round with
fewer than `federation.min_clients` waiting clients is not begun: the reply is "absent", nothing is
spent, and the server asks again.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np

from veilstream.deployment.epochs import DEPLOYED, LearnerParts
from veilstream.deployment.learner import Learner, Outcome
from veilstream.deployment.release import Release
from veilstream.deployment.terms import SAME_TERMS, both_sides, differences
from veilstream.errors import InputError, LedgerError, PrivacyError, ProtocolError, VeilstreamError
from veilstream.federation.keys.identity import LearnerKeys
from veilstream.federation.learner.local_account import LocalAccount
from veilstream.federation.learner.published_model import PublishedModel
from veilstream.federation.learner.reply_times import ReplyTimes, reply_times, secret_order_replies
from veilstream.federation.protocol.messages import LONGEST_TEXT, Reply, Request, digest
from veilstream.federation.repeated_lines import RepeatedLines
from veilstream.records.admission import Answer
from veilstream.streams.intake import ClientSource, Offered, WholeSource
from veilstream.streams.table_source import TableSource
from veilstream.streams.waiting_source import WaitingSource
from veilstream.wording import counted, shown

_log = logging.getLogger(__name__)

_CLOCKS_APART_S = 3600
_STOPPED = "it has stopped (its own log says why)"
_WAITS = "rounds are sat out, and cost nothing, until more come"
_SAT_OUT = "rounds are sat out, and cost nothing, until `veilstream ledger resume`"


class Daemon:
    """One learner, answering one server."""

    def __init__(
        self,
        learner: Learner,
        keys: LearnerKeys,
        source: ClientSource,
        *,
        replies: ReplyTimes | Literal["by source", "when done"] = "by source",
        min_clients: int = 1,
        account: LocalAccount | None = None,
        published: PublishedModel | None = None,
        parts: LearnerParts = DEPLOYED,
    ) -> None:
        """``min_clients``: how many must wait for a round to begin; nothing of ``account`` leaves.

        ``parts``: those of a study's learner; a deployed one leaves it out.
        """
        self.learner, self._keys, self._source = learner, keys, source
        self._min_clients, self.account, self._parts = min_clients, account, parts
        self.published = PublishedModel(learner) if published is None else published
        """What predictions are made with."""
        if account is not None:
            account.published = self.published
        self._said_why = ""
        self._instance = secrets.token_hex(8)
        self._busy = threading.Lock()
        self._lines, self._late = RepeatedLines(), RepeatedLines()
        self._closing = threading.Event()
        window_s = source.window_s if isinstance(source, WaitingSource) else None
        self._replies: ReplyTimes | None
        self._replies_by_source = learner.order_is_secret and replies == "by source"
        if replies == "by source":
            self._replies = reply_times(window_s, None)
        else:
            self._replies = None if replies == "when done" else replies
        if isinstance(source, WaitingSource):
            source.together = learner.terms.clients_per_step
        if isinstance(source, WaitingSource | TableSource):
            often = learner.plan.participation
            source.visits_a_round = min(often.times, 1 + (learner.terms.local_steps - 1) // often.min_separation)
        self.rounds_done = 0
        self.dismissed = False
        """Whether the server has said since this start that the epoch's run is over."""
        self.failure: VeilstreamError | None = None
        """Why the learner must be opened anew before it can answer again: a write that failed, or a defect."""

    @property
    def name(self) -> str:
        """The learner's name, by its keys."""
        return self._keys.name

    @property
    def ended(self) -> str | None:
        """Why no client is taken any more; None while rounds may come."""
        learner = self.learner
        if not learner.over:
            return None
        reason = f"epoch {learner.epoch} has ended after {learner.round} of {learner.terms.rounds}"
        return f"{reason} rounds" + ("; another may begin later" if learner.epochs_left else "")

    def handle(self, data: bytes) -> bytes:
        """A signed reply to any bytes; a refusal says why, and nothing about data.

        Nothing at all if the daemon was closed, or its store has to be opened anew (`failure`).
        """
        if self.failure is not None:
            return b""
        try:
            request = Request.read(data, self._keys.server)
            with self._busy:  # the time of a second request begins when the first is answered
                reply = self._answer(request, digest(data))
        except _NoAnswer:
            return b""
        except VeilstreamError as error:
            if self._must_open_anew(error):
                return b""
            self._note_refused(type(error).__name__, f"request refused: {shown(error, LONGEST_TEXT)}")
            reply = Reply("refusal", self._keys.name, digest(data), {"why": _outside(error)})
        except Exception as error:  # a defect; its text might quote data, so it is not shown
            if self._must_open_anew(None):
                return b""
            self._note_refused(type(error).__name__, f"{type(error).__name__} while answering; this is a defect")
            reply = Reply("refusal", self._keys.name, digest(data), {"why": _STOPPED})
        return reply.sign(self._keys.identity)

    def _must_open_anew(self, error: VeilstreamError | None) -> bool:
        """Whether the store has to be opened anew; ``error``: why the request failed, None for a defect."""
        learner = self.learner
        if not learner.ledger.failed and not learner.epochs.broken:
            return False
        if error is None:
            error = PrivacyError(
                "a defect interrupted a call half-way: nothing was released (start the learner again; it goes on "
                "where its store stands)"
            )
        self.failure = self.failure or error
        return True

    def _note_refused(self, reason: str, text: str) -> None:
        """Write one line a minute for each reason: no server may fill the disk."""
        self.log_refusals()
        if (line := self._lines.add("the server", reason, text)) is not None:
            _log.error("%s", line)

    def log_refusals(self) -> None:
        """Write how many more there were, once a minute; to be called now and then, also when no more come."""
        for line in self._lines.due():
            _log.error("%s", line)

    def _answer(self, request: Request, answers: str) -> Reply:
        unnamed = request.kind in ("enrol", "end") and request.learner == ""
        if request.learner != self._keys.name and not unnamed:
            raise ProtocolError(
                f"a request to {request.learner!r} at learner {self._keys.name!r}",
                "check which keys this machine was given",
            )
        if request.kind == "enrol":
            return self._enrol(request, answers)
        if request.kind == "end":
            return self._end(request, answers)
        self._join(request)
        if (why := self._of_lost_epoch(request)) is not None:
            line = self._lines.add("the server", "lost epoch", f"{why}: the server asks who is here and goes on")
            if line is not None:
                _log.info("%s", line)
            return Reply("refusal", self._keys.name, answers, {"why": why})
        release = self._release(request)
        if release is None:
            return Reply("absent", self._keys.name, answers)
        self.rounds_done += 1
        return Reply("release", self._keys.name, answers, {}, release.payload)

    def _enrol(self, request: Request, answers: str) -> Reply:
        unlike = differences(request.settings, self.learner.settings)
        if unlike:
            both = both_sides(unlike)
            raise ProtocolError(f"server and learner {self._keys.name!r} have different plans ({both})", SAME_TERMS)
        self._check_time(request)
        if self.learner.follow(request.run, request.follows):
            self.dismissed = False
            a_person = self.learner.plan.epochs_per_person
            _log.info(
                "run %s follows: epoch %d begins, with fresh noise, for %s; federation.epochs allows %d more after it",
                shown(request.run),
                self.learner.epoch,
                "new clients only" if a_person == 1 else f"clients who were in fewer than {a_person} epochs",
                self.learner.epochs_left,
            )
        self._join(request)
        facts = {
            "epoch": self.learner.epoch,
            "round": self.learner.round,
            "daemon": self._instance,
            "settings": self.learner.settings,
            "time": int(time.time()),
        }
        return Reply("enrolled", self._keys.name, answers, facts)

    def _end(self, request: Request, answers: str) -> Reply:
        """Close the epoch of a run that the server says is over; repeating it changes nothing.

        A server that says so too early learns less; no client's promise changes.
        """
        learner = self.learner
        if learner.run != request.run:
            raise ProtocolError(
                f"the end of run {request.run!r} at a learner whose epoch {learner.epoch} belongs "
                f"to {'no run yet' if learner.run is None else repr(learner.run)}",
                "nothing needs to be done",
            )
        if not learner.over:
            _log.info(
                "run %s is over: epoch %d ends here after %d of %d rounds, its secrets are destroyed",
                shown(request.run),
                learner.epoch,
                learner.round,
                learner.terms.rounds,
            )
        if request.published is not None:
            self._models(request)
        learner.end_epoch()
        self.published.save()
        self._let_callers_go()
        self.dismissed = True
        facts = {"epoch": learner.epoch, "round": learner.round}
        return Reply("ended", self._keys.name, answers, facts)

    def _join(self, request: Request) -> None:
        """Bind this epoch to a run, once, by a recent request."""
        self._check_time(request)
        self.learner.join(request.run, self._parts)

    def _check_time(self, request: Request) -> None:
        """Only a recent request may bind the epoch to another run: a kept one could name a run that is over."""
        apart = int(time.time()) - request.time
        if self.learner.run != request.run and abs(apart) > _CLOCKS_APART_S:
            raise ProtocolError(
                f"a first request that was signed {abs(apart)} s {'ago' if apart > 0 else 'ahead of time'}",
                f"check both clocks (at most {_CLOCKS_APART_S} s apart); someone may have sent an old request again",
            )

    def _of_lost_epoch(self, request: Request) -> str | None:
        """What is asked for, if it belongs to an epoch whose store was lost: the server does not know that yet."""
        sealed, epoch = request.acknowledged, self.learner.epoch
        if request.epoch >= epoch or sealed is None or self.learner.ledger.knows_message(*sealed):
            return None
        return f"a request for epoch {request.epoch} at a learner whose epoch is {epoch}"

    def _release(self, request: Request) -> Release | None:
        """Do the round, or repeat its sealed release; a round begun with another x is finished.

        None if too few clients wait: then nothing was pinned or spent.
        """
        learner, r = self.learner, request.round
        x = self._models(request)
        if r == learner.round - 1:
            learner.check_acknowledged(request.acknowledged)
            return learner.sealed_release()
        started = self._slot_starts()
        if not (learner.pinned and r == learner.round):
            if learner.would_begin(r, x, request.acknowledged) and not self._clients_wait():
                self._hold(r, started)
                return None
            learner.begin_round(r, x, request.acknowledged)
        try:
            self._take_clients(r)
            if self._closing.is_set():  # the next start does the rest of the round
                raise _NoAnswer
            if self.account is not None:
                self.account.round_ends()
            release = learner.finish_round()
            if self.account is not None:
                self.account.round_is_sealed()
            return release
        finally:
            self._let_callers_go()
            self._hold(r, started)

    @property
    def paused(self) -> bool:
        """Whether the person beside the data has paused this learner: no round begins."""
        return self.account is not None and self.account.paused

    def _clients_wait(self) -> bool:
        learner = self.learner
        if self.paused:
            self._say(logging.WARNING, f"paused by the person beside the data: {_SAT_OUT}")
            return False
        if learner.order_is_secret:
            return self._all_are_there()
        try:
            ready = self._source.ready(
                self._min_clients, learner.terms.local_steps * learner.terms.clients_per_step, learner.may_take
            )
        except Exception as error:  # an InputError: the file was cut or replaced
            self._say(logging.ERROR, f"no round begins: the data source failed ({_why(error)})")
            return False
        if isinstance(self._source, TableSource) and self._source.exhausted:
            some = f", and {counted(self._source.waiting, 'record')} of a round's {self._min_clients} wait"
            self._say(
                logging.INFO, f"{self._source.table.name} has ended{some if self._source.waiting else ''}: {_WAITS}"
            )
        elif not ready:
            self._say(logging.INFO, f"fewer than {self._min_clients} clients wait: {_WAITS}")
        else:
            self._say(logging.DEBUG, "")
        return ready or self._min_clients == 0

    def _all_are_there(self) -> bool:
        """Whether the epoch's records are written down as they are, in their secret order."""
        learner = self.learner
        try:
            if not learner.has_records and isinstance(self._source, WholeSource):
                learner.use_records(self._source)
            written_down = learner.write_down_clients()
        except InputError as error:  # too few, or the file has changed
            self._say(logging.ERROR, f"no round begins: {error}")
            return False
        if written_down is not None and self.account is not None:
            self.account.wrote_down(written_down)
        if self._replies_by_source:
            # A server sees that a round takes as long as another, whatever its steps have.
            self._replies = secret_order_replies(learner.round_work_s())
            self._replies_by_source = False
        self._say(logging.DEBUG, "")
        return True

    def file_has_ended(self) -> bool:
        """Whether a table has too few records for another round; False during a round."""
        if self.learner.order_is_secret:
            return self.learner.over
        if not isinstance(self._source, TableSource) or not self._busy.acquire(blocking=False):
            return False
        try:
            if not self.learner.pinned:
                self._clients_wait()
            return self._source.exhausted
        finally:
            self._busy.release()

    def _say(self, level: int, why: str) -> None:
        if self.account is not None:
            self.account.pause = why
        if why != self._said_why:
            self._said_why = why
            if why:
                _log.log(level, "%s", why)

    def _now(self) -> float:
        return 0.0 if self._replies is None else self._replies.clock()

    def _slot_starts(self) -> float:
        """Wait for the next slot: only then may be looked at what the clients do."""
        if self._replies is None:
            return 0.0
        arrived = self._now()
        started = self._replies.start(arrived)
        self._wait(started - arrived)
        return started

    def _hold(self, r: int, started: float) -> None:
        """Wait until the reply may leave; requests that come meanwhile wait as well."""
        if self._replies is None:
            return
        done = self._now()
        due = self._replies.due(started, done)
        late = due - started - self._replies.after_s
        if late > 0 and self._replies.tells_of_late_replies:
            most = self._replies.after_s + late
            text = (
                f"round {r} is answered {late:g} s late, and how late may depend on clients: set "
                f"--reply-after to more than {most:g} seconds"
            )
            for line in (*self._late.due(), self._late.add("this machine", "late", text)):  # one a minute
                if line is not None:
                    _log.warning("%s", line)
        self._wait(due - done)

    def _wait(self, seconds: float) -> None:
        if self._closing.wait(max(0.0, seconds)):  # closed meanwhile: nothing may leave
            raise _NoAnswer

    def _take_clients(self, r: int) -> None:
        """Offer the source's clients; if the source fails, the round ends without more."""
        learner = self.learner
        if learner.order_is_secret:
            learner.take_round(lambda samples: None if self.account is None else self.account.used(samples))
            return
        failed: list[Exception] = []

        def told(offered: Offered, outcome: Outcome) -> None:
            if self.account is not None:
                self.account.observed(offered.sample, outcome.answer, used=outcome.used)

        def observe(clients: Iterable[Offered]) -> list[Answer]:
            stream = _UntilItFails(clients)
            try:
                outcomes = learner.take_many(stream, told)
            except Exception as error:
                failed.append(error)
                raise
            if stream.failure is not None:
                raise stream.failure
            return [outcome.answer for outcome in outcomes]

        try:
            self._source.serve(r, observe, lambda: learner.clients_wanted)
        except Exception as error:
            if failed:
                raise failed[0] from None
            _log.error("the data source failed (%s); the round goes on without it", _why(error))
        if isinstance(self._source, TableSource):
            learner.note_read(self._source.bookmark)

    def _let_callers_go(self) -> None:
        if self.learner.over and isinstance(self._source, WaitingSource):
            self._source.release()

    def _models(self, request: Request) -> np.ndarray[Any, Any]:
        """x^r; the published model, where the request has one, is kept."""
        body = bytes(request.body)
        if len(body) % 4:
            raise InputError("x", f"{len(body)} bytes", "float32 numbers", "check the server")
        x = np.frombuffer(body, "<f4")
        if request.published is None:
            return x
        dim = self.learner.task.dim
        self.published.take(x[-dim:], request.published, request.run)
        return x[:dim] if len(x) == 2 * dim else x

    def close(self) -> None:
        """Stop answering; a reply that waits for its time does not leave."""
        self._closing.set()
        self.published.save()
        if isinstance(self._source, WaitingSource):
            self._source.close()
        with self._busy:
            self.learner.close()


class _NoAnswer(Exception):
    """The daemon was closed while a reply waited for its time."""


class _UntilItFails:
    """A source's records up to its failure, so that those before the failure count."""

    def __init__(self, clients: Iterable[Offered]) -> None:
        self._clients = clients
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[Offered]:
        try:
            yield from self._clients
        except Exception as error:
            self.failure = error


def _why(error: Exception) -> str:
    """What may be logged of an error: our own text, else its kind alone, since its text might quote data."""
    return str(error) if isinstance(error, InputError) else type(error).__name__


def _outside(error: VeilstreamError) -> str:
    """What the server may know: its own mistakes in full, and nothing of the learner's machine."""
    if isinstance(error, InputError | ProtocolError):
        return str(error)[:LONGEST_TEXT]
    if isinstance(error, LedgerError):
        return "its store is not the newest, or damaged (its own log says more)"
    return _STOPPED
