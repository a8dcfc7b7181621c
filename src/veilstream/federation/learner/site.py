"""The learner's side of the messages: a request in, a reply out.

`Site` is all that decides what a request may do: its signature, whom it is to, that both sides have the
same terms, which run an epoch belongs to, and that an old request binds nothing. It has no sockets,
timers or files but the learner's ledger, so whatever carries bytes can drive it: the daemon of
`veilstream learner`, a framework's client, a mail.

Only releases leave: no loss, no count of clients. When a reply leaves tells whoever carries it as much as
its driver lets it: see `reply_times` for what the daemon does where people arrive while it waits.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.epochs import DEPLOYED, LearnerParts
from veilstream.deployment.learner import Learner
from veilstream.deployment.release import Release
from veilstream.deployment.terms import SAME_TERMS, both_sides, differences
from veilstream.errors import InputError, LedgerError, PrivacyError, ProtocolError, VeilstreamError
from veilstream.federation.keys.identity import LearnerKeys
from veilstream.federation.learner.masked_rounds import ANSWERS, KINDS, MaskedRounds
from veilstream.federation.learner.source_round import offer_clients
from veilstream.federation.learner.source_start import fit_source, least_clients, resume_source
from veilstream.federation.protocol.messages import LONGEST_TEXT, Buffer, Reply, Request, digest
from veilstream.federation.protocol.sizes import request_limit
from veilstream.learning.tasks import Task
from veilstream.plans.data_source import open_source
from veilstream.plans.plan import Plan
from veilstream.plans.tasks import task_of
from veilstream.streams.intake import ClientSource, Offered
from veilstream.streams.waiting_source import WaitingSource
from veilstream.wording import shown

_log = logging.getLogger(__name__)

_CLOCKS_APART_S = 3600
_STOPPED = "it has stopped (its own log says why)"


_Several = Iterable[Offered | tuple[Any, ...]] | ClientSource


class Clients(Protocol):
    """Who takes part in a round, as a `Site` asks for them."""

    def turn(self, round_: int) -> AbstractContextManager[object]:
        """Around all of a round that is not only repeated."""

    def wait_here(self) -> bool:
        """Whether enough clients wait for a round to begin; False costs nothing, and the server asks again."""

    def take(self, round_: int) -> None:
        """Give the learner the clients of the round that it has open."""

    def sealed(self) -> None:
        """The round's release has been made."""

    def ended_run(self) -> None:
        """The server has said that the run is over, and the epoch is closed."""


class NoAnswer(Exception):
    """The driver was closed while a reply waited for its time: nothing leaves."""


class Site:
    """One learner that answers one server, for any transport: bytes in and out.

    Args:
        learner: the ledger, the noise and the model.
        keys: the learner's folder of keys, as `veilstream keys` or `make_keys` made it. Left out, messages are
            not signed: the transport has to make sure that requests come from the server alone.
        name: the learner's name, where there are no keys.
        clock: seconds since 1970: an old request binds this learner to no run.
        parts: those of a study's learner; a deployed one leaves it out.

    """

    def __init__(
        self,
        learner: Learner,
        keys: LearnerKeys | Path | str | None = None,
        *,
        name: str | None = None,
        clock: Callable[[], float] = time.time,
        parts: LearnerParts = DEPLOYED,
    ) -> None:
        self.learner, self.keys = learner, _learner_keys(keys, name)
        self._clock, self._parts = clock, parts
        self.busy = threading.Lock()
        """Held while a request is answered: they are answered one after the other."""
        self._instance = secrets.token_hex(8)
        self._limit = request_limit(learner.terms.wire_dim)
        self._masked: MaskedRounds | None = None
        if learner.plan.trust is not None:
            self._masked = MaskedRounds(learner, self.keys)
        self.dismissed = False
        """Whether the server has said since this start that the run is over."""
        self.failure: VeilstreamError | None = None
        """Why the learner must be opened anew before it can answer again: a write that failed, or a defect."""
        self.source: tuple[ClientSource, int] | None = None
        """The learner's own clients, and how many must wait for a round to begin."""
        self.published: Callable[[NDArray[Any], int, str], None] = lambda model, round_, run: None
        """Takes the model that the server has published, after how many rounds, and of which run."""

    @property
    def core(self) -> tuple[int, int] | None:
        """Learners that were part of every sum, and how many must be; None where there are no sums, or none yet."""
        return None if self._masked is None else self._masked.core

    @property
    def name(self) -> str:
        """The learner's name."""
        return self.keys.name

    @classmethod
    def open(
        cls,
        plan: Plan | Path | str,
        store: Path | str,
        data: str,
        *,
        keys: LearnerKeys | Path | str | None = None,
        name: str | None = None,
        witness: Path | str | None = None,
        create: bool = False,
        task: Task | None = None,
        min_clients: int | None = None,
        parts: LearnerParts = DEPLOYED,
    ) -> Site:
        """A learner with its store and its data source, as `veilstream learner` opens them; to be closed.

        Args:
            plan: the run, or its file.
            store: the ledger's file; ``create`` begins it where there is none.
            data: a file of records, ``plan:INDEX``, or ``module:function``: as `veilstream learner --data`.
            keys: as for `Site`.
            name: as for `Site`.
            witness: the ledger's second file.
            create: begin a store where there is none.
            task: what is learned, where the plan's own is not wanted.
            min_clients: how many clients must wait for a round to begin; a whole round of a file where it is left out
                here and in the plan.
            parts: as for `Site`.

        """
        plan = plan if isinstance(plan, Plan) else Plan.load(plan)
        _refuse_secret_order(plan)
        if plan.trust is not None:
            raise InputError(
                "privacy.trust",
                "sum",
                '"each" for a Site, whose server is in Python',
                "`veilstream learner` takes part where only sums are seen",
            )
        known = _learner_keys(keys, name)
        source = open_source(data, plan, known.name)
        if isinstance(source, WaitingSource):
            raise InputError("data", data, "a file, plan:INDEX or module:function", "people call `veilstream learner`")
        task = task_of(plan) if task is None else task
        learner = Learner(plan, store, task, witness=witness, create=create, parts=parts)
        try:
            resume_source(source, learner, known.name)
            fit_source(source, learner)
            least = least_clients(plan, learner, source) if min_clients is None else min_clients
        except BaseException:
            learner.close()
            raise
        site = cls(learner, known, parts=parts)
        site.source = (source, least)
        return site

    def close(self) -> None:
        """Let go of the store."""
        with self.busy:
            self.learner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answer(
        self,
        request: bytes,
        clients: Iterable[Offered | tuple[Any, ...]] | ClientSource | None = None,
        *,
        min_clients: int = 1,
    ) -> bytes:
        """A reply to any bytes. A refusal says why, and nothing about data; an error is logged here.

        Args:
            request: what the server sent.
            clients: for a round that is begun now: pairs of tag and record, of which no more are consumed than
                the round uses, or a source of records. Left out, those of the learner's own source (`open_site`).
            min_clients: how many of a source's clients must wait, or the reply is "absent" and costs nothing.

        Returns:
            The signed reply; empty where nothing may leave until the learner is opened anew (`failure`).

        Raises:
            InputError: under a secret order, whose replies have to leave at fixed times.

        """
        if clients is None:
            clients, min_clients = (), 1
            if self.source is not None:
                clients, min_clients = self.source
        _refuse_secret_order(self.learner.plan)
        given = _Given(self.learner, clients, min_clients)
        return self.reply(request, given, lambda _, text: _log.error("learner %s: %s", self.name, text))

    def reply(self, data: bytes, clients: Clients, note: Callable[[str, str], None]) -> bytes:
        """`answer`, with the driver's own way to find clients and to log a refusal (its kind, and its text)."""
        if self.failure is not None:
            return b""
        try:
            request = self.read(data)
            with self.busy:
                reply = self._answer(request, digest(data), clients)
        except NoAnswer:
            return b""
        except VeilstreamError as error:
            if self._must_open_anew(error):
                return b""
            note(type(error).__name__, f"request refused: {shown(error, LONGEST_TEXT)}")
            reply = Reply("refusal", self.name, digest(data), {"why": _outside(error)})
        except Exception as error:  # a defect; its text might quote data, so it is not shown
            if self._must_open_anew(None):
                return b""
            note(type(error).__name__, f"{type(error).__name__} while answering; this is a defect")
            reply = Reply("refusal", self.name, digest(data), {"why": _STOPPED})
        return reply.sign(self.keys.identity)

    def read(self, data: bytes) -> Request:
        """Check that a request is from the server and to this learner.

        Raises:
            ProtocolError: it is not.

        """
        if len(data) > self._limit:
            raise ProtocolError(f"a request of {len(data)} bytes", f"at most {self._limit} are read")
        request = Request.read(data, self.keys.server)
        unnamed = request.kind in ("enrol", "end") and request.learner == ""
        if request.learner != self.name and not unnamed:
            raise ProtocolError(
                f"a request to {request.learner!r} at learner {self.name!r}", "check which keys this machine was given"
            )
        return request

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

    def _answer(self, request: Request, answers: str, clients: Clients) -> Reply:
        if request.kind == "enrol":
            return self._enrol(request, answers)
        if request.kind == "end":
            return self._end(request, answers, clients)
        self._join(request)
        if (why := self._of_lost_epoch(request)) is not None:
            _log.debug("%s: the server asks who is here and goes on", why)
            return Reply("refusal", self.name, answers, {"why": why})
        if (self._masked is None) != (request.kind == "round") or request.kind not in ("round", *KINDS):
            raise ProtocolError(
                f"a request of kind {request.kind!r} at a learner whose plan has another privacy.trust", SAME_TERMS
            )
        if self._masked is not None:
            body = self._masked.answer(request, lambda r, model: self._masked_round(r, model, request, clients))
            return Reply(ANSWERS[request.kind], self.name, answers, {}, body)
        release = self._release(request, clients)
        if release is None:
            return Reply("absent", self.name, answers)
        return Reply("release", self.name, answers, {}, release.payload)

    def _enrol(self, request: Request, answers: str) -> Reply:
        learner = self.learner
        unlike = differences(request.settings, learner.settings)
        if unlike:
            both = both_sides(unlike)
            raise ProtocolError(f"server and learner {self.name!r} have different plans ({both})", SAME_TERMS)
        self._check_time(request)
        if learner.follow(request.run, request.follows):
            self.dismissed = False
            a_person = learner.plan.epochs_per_person
            _log.info(
                "run %s follows: epoch %d begins, with fresh noise, for %s; federation.epochs allows %d more after it",
                shown(request.run),
                learner.epoch,
                "new clients only" if a_person == 1 else f"clients who were in fewer than {a_person} epochs",
                learner.epochs_left,
            )
        self._join(request)
        facts = {
            "epoch": learner.epoch,
            "round": learner.round,
            "daemon": self._instance,
            "settings": learner.settings,
            "time": int(self._clock()),
        }
        return Reply("enrolled", self.name, answers, facts)

    def _end(self, request: Request, answers: str, clients: Clients) -> Reply:
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
        clients.ended_run()
        self.dismissed = True
        return Reply("ended", self.name, answers, {"epoch": learner.epoch, "round": learner.round})

    def _join(self, request: Request) -> None:
        """Bind this epoch to a run, once, by a recent request."""
        self._check_time(request)
        self.learner.join(request.run, self._parts)

    def _check_time(self, request: Request) -> None:
        """Only a recent request may bind the epoch to another run: a kept one could name a run that is over."""
        apart = int(self._clock()) - request.time
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

    def _release(self, request: Request, clients: Clients) -> Release | None:
        """Do the round, or repeat its sealed release; a round begun with another x is finished.

        None if too few clients wait: then nothing was pinned or spent.
        """
        learner, r = self.learner, request.round
        x = self._models(request)
        if r == learner.round - 1:
            learner.check_acknowledged(request.acknowledged)
            return learner.sealed_release()
        with clients.turn(r):
            if not (learner.pinned and r == learner.round):
                if learner.would_begin(r, x, request.acknowledged) and not clients.wait_here():
                    return None
                learner.begin_round(r, x, request.acknowledged)
            clients.take(r)
            release = learner.finish_round()
            clients.sealed()
            return release

    def _masked_round(self, r: int, model: Buffer, request: Request, clients: Clients) -> None:
        """Do the local part of a round that all learners share; without clients its noise alone."""
        learner = self.learner
        x = self._numbers(model, request)
        with clients.turn(r):
            first = learner.round + learner.pinned
            learner.catch_up(r)
            if learner.order_is_secret and first < r:
                _log.warning(
                    "%d rounds went on without this learner: whoever's step was in them is not used and has taken part",
                    r - first,
                )
            if learner.round > r:
                return
            if not learner.pinned:
                if not clients.wait_here():
                    learner.catch_up(r + 1)
                    return
                learner.begin_round(r, x)
            clients.take(r)
            learner.seal_round()
            clients.sealed()

    def _models(self, request: Request) -> NDArray[Any]:
        """x^r; the published model, where the request has one, is handed on."""
        return self._numbers(request.body, request)

    def _numbers(self, content: Buffer, request: Request) -> NDArray[Any]:
        body = bytes(content)
        if len(body) % 4:
            raise InputError("x", f"{len(body)} bytes", "float32 numbers", "check the server")
        x = np.frombuffer(body, "<f4")
        if request.published is None:
            return x
        dim = self.learner.task.dim
        self.published(x[-dim:], request.published, request.run)
        return x[:dim] if len(x) == 2 * dim else x


class _Given:
    """Clients in an iterable, or in a source of which so many must wait."""

    def __init__(self, learner: Learner, clients: _Several, least: int) -> None:
        self._learner, self._clients, self._least = learner, clients, least

    def turn(self, round_: int) -> AbstractContextManager[object]:
        return nullcontext()

    def wait_here(self) -> bool:
        terms, source = self._learner.terms, self._clients
        if isinstance(source, Iterable) or self._least == 0:
            return True
        return source.ready(self._least, terms.local_steps * terms.clients_per_step, self._learner.may_take)

    def take(self, round_: int) -> None:
        if isinstance(self._clients, Iterable):
            self._learner.take_many(self._clients)
        else:
            offer_clients(self._learner, self._clients, round_)

    def sealed(self) -> None:
        pass

    def ended_run(self) -> None:
        pass


def _learner_keys(keys: LearnerKeys | Path | str | None, name: str | None) -> LearnerKeys:
    if (keys is None) == (name is None):
        raise InputError(
            "keys",
            None if keys is None else "<given>",
            "the learner's keys, or its name where the transport says who sends",
            'vs.Site(learner, "keys/learners/north"), or vs.Site(learner, name="north")',
        )
    if name is not None:
        return LearnerKeys.unsigned(name)
    return keys if isinstance(keys, LearnerKeys) else LearnerKeys.load(Path(str(keys)))


def _refuse_secret_order(plan: Plan) -> None:
    if plan.order == "secret":
        raise InputError(
            "privacy.order",
            plan.order,
            '"known" for a Site, which replies when it is done: how long a round took tells who was in it',
            "`veilstream learner` replies at fixed times",
        )


def _outside(error: VeilstreamError) -> str:
    """What the server may know: its own mistakes in full, and nothing of the learner's machine."""
    if isinstance(error, InputError | ProtocolError):
        return str(error)[:LONGEST_TEXT]
    if isinstance(error, LedgerError):
        return "its store is not the newest, or damaged (its own log says more)"
    return _STOPPED
