"""`veilstream learner`'s way of driving a `Site`: its data source, the account for the person beside it, and time.

`handle(request bytes) -> reply bytes` is all that the outside can call. What a request may do is `site`. Requests
are answered one at a time. Whether clients wait is looked at once a slot, and a reply leaves at a time that does
not depend on who came (`reply_times`). A round with fewer than `federation.min_clients` waiting clients is not
begun: the reply is "absent", nothing is spent, and the server asks again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from veilstream.deployment.epochs import DEPLOYED, LearnerParts
from veilstream.deployment.learner import Learner, Outcome
from veilstream.errors import InputError, VeilstreamError
from veilstream.federation.keys.identity import LearnerKeys
from veilstream.federation.learner.local_account import LocalAccount
from veilstream.federation.learner.published_model import PublishedModel
from veilstream.federation.learner.reply_times import SEAL_S, ReplyTimes, reply_times, secret_order_replies
from veilstream.federation.learner.site import NoAnswer, Site
from veilstream.federation.learner.source_round import offer_clients, source_failure
from veilstream.federation.learner.source_start import fit_source
from veilstream.federation.repeated_lines import RepeatedLines
from veilstream.streams.intake import ClientSource, Offered, WholeSource
from veilstream.streams.table_source import TableSource
from veilstream.streams.waiting_source import LiveSource, WaitingSource
from veilstream.wording import counted

_log = logging.getLogger(__name__)

_WAITS = "rounds are sat out, and cost nothing, until more come"
_LEFT = "its rounds are sat out, and cost nothing"
_SAT_OUT = "rounds are sat out, and cost nothing, until `veilstream ledger resume`"
_NOISE_ALONE = (
    "rounds go on with this learner's noise alone, and whoever's step comes meanwhile is not used and has taken part"
)
"""Where all learners share one clock and the order is secret: a record's step does not wait for it."""


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
        self.learner, self._source = learner, source
        self._min_clients, self.account = min_clients, account
        self.site = Site(learner, keys, parts=parts)
        """What hears and says messages."""
        self.published = PublishedModel(learner) if published is None else published
        """What predictions are made with."""
        self.site.published = lambda model, round_, run: self.published.take(model, round_, run)
        if account is not None:
            account.published = self.published
        self._said_why = ""
        self._lines, self._late = RepeatedLines(), RepeatedLines()
        self._closing = threading.Event()
        window_s = source.window_s if isinstance(source, WaitingSource) else None
        self._replies: ReplyTimes | None
        self._replies_by_source = learner.order_is_secret and replies == "by source"
        if replies == "by source":
            self._replies = reply_times(window_s, None)
        else:
            self._replies = None if replies == "when done" else replies
        fit_source(source, learner)

    @property
    def name(self) -> str:
        """The learner's name, by its keys."""
        return self.site.name

    @property
    def dismissed(self) -> bool:
        """Whether the server has said since this start that the epoch's run is over."""
        return self.site.dismissed

    @property
    def failure(self) -> VeilstreamError | None:
        """Why the learner must be opened anew before it can answer again: a write that failed, or a defect."""
        return self.site.failure

    @property
    def ended(self) -> str | None:
        """Why no client is taken any more; None while rounds may come."""
        learner = self.learner
        if not learner.over:
            return None
        reason = f"epoch {learner.epoch} has ended after {learner.round} of {learner.terms.rounds}"
        return f"{reason} rounds" + ("; another may begin later" if learner.epochs_left else "")

    @property
    def takes_nobody(self) -> str | None:
        """Why nobody who calls now can be taken in this epoch; None while they can."""
        if self.ended is not None or self.learner.takes_clients:
            return self.ended
        return f"epoch {self.learner.epoch} is in its last window, which takes nobody: none follows to use them in"

    def handle(self, data: bytes) -> bytes:
        """A signed reply to any bytes; a refusal says why, and nothing about data.

        Nothing at all if the daemon was closed, or its store has to be opened anew (`failure`).
        """
        return self.site.reply(data, self, self._note_refused)

    def _note_refused(self, reason: str, text: str) -> None:
        """Write one line a minute for each reason: no server may fill the disk."""
        self.log_refusals()
        if (line := self._lines.add("the server", reason, text)) is not None:
            _log.error("%s", line)

    def log_refusals(self) -> None:
        """Write how many more there were, once a minute; to be called now and then, also when no more come."""
        for line in self._lines.due():
            _log.error("%s", line)

    @contextmanager
    def turn(self, round_: int) -> Iterator[None]:
        """A round begins with a slot; its reply leaves at a time of its own."""
        started = self._slot_starts()
        if self.learner.pinned:  # since before this start
            self._fix_reply_time()
        try:
            yield
        finally:
            self._let_callers_go()
            self._hold(round_, started)

    def take(self, round_: int) -> None:
        """Offer the source's clients; under a secret order, those that are due."""

        def told(offered: Offered, outcome: Outcome) -> None:
            if self.account is not None:
                self.account.observed(offered.sample, outcome.answer, used=outcome.used)

        if not self.learner.takes_whole_sources:
            offer_clients(self.learner, self._source, round_, told)
        if self.learner.order_is_secret:
            self.learner.take_round()
        if self._closing.is_set():  # the next start does the rest of the round
            raise NoAnswer
        if self.account is not None:
            self.account.round_ends()

    def sealed(self) -> None:
        """Count the round in the account."""
        if self.account is not None:
            self.account.round_is_sealed()

    def ended_run(self) -> None:
        """The run is over: keep its last model, and answer those who wait."""
        self.published.save()
        self._let_callers_go()

    @property
    def _steps_pass(self) -> bool:
        """Whether the steps of a round that is sat out pass, with the people who have them."""
        return self.learner.order_is_secret and self.learner.epochs.sums

    @property
    def paused(self) -> bool:
        """Whether the person beside the data has paused this learner: no round begins."""
        return self.account is not None and self.account.paused

    def wait_here(self) -> bool:
        """Whether enough clients wait for a round; also says why not."""
        learner = self.learner
        if self.paused:
            what = f"{_NOISE_ALONE}, until `veilstream ledger resume`" if self._steps_pass else _SAT_OUT
            self._say(logging.WARNING, f"paused by the person beside the data: {what}")
            return False
        if learner.takes_whole_sources:
            return self._all_are_there()
        self._fix_reply_time()
        somebody = learner.clients_due or (learner.takes_clients and learner.clients_waiting)
        if somebody:  # is used in this window or in the next; who arrives meanwhile is welcome
            self._say(logging.DEBUG, "")
            return True
        if not learner.takes_clients:
            self._say(logging.INFO, f"nobody arrived in the window before the last, which takes nobody: {_LEFT}")
            return False
        try:
            ready = self._source.ready(
                self._min_clients, learner.terms.local_steps * learner.terms.clients_per_step, learner.may_take
            )
        except Exception as error:  # an InputError: the file was cut or replaced
            self._say(logging.ERROR, f"no round begins: the data source failed ({source_failure(error)})")
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
            passes = self._steps_pass and learner.clients_written_down
            self._say(logging.ERROR, f"no round begins: {error}" + (f" ({_NOISE_ALONE})" if passes else ""))
            return False
        if written_down is not None and self.account is not None:
            self.account.wrote_down(written_down)
        self._fix_reply_time()
        self._say(logging.DEBUG, "")
        return True

    def _fix_reply_time(self) -> None:
        """Where the order is secret, a server sees that a round takes as long as another, whatever its steps have."""
        if self._replies_by_source:
            waits_s = self._source.window_s + SEAL_S if isinstance(self._source, WaitingSource) else 0.0
            self._replies = secret_order_replies(self.learner.round_work_s(), waits_s)
            self._replies_by_source = False
            if (deadline_s := self.learner.plan.federation.deadline_s) <= self._replies.after_s:
                _log.warning(
                    "federation.deadline_s = %g: the server waits no longer for this learner, which replies after %g "
                    "s, so its rounds may come too late: give it more",
                    deadline_s,
                    self._replies.after_s,
                )

    def file_has_ended(self) -> bool:
        """Whether a table has too few records for another round; False during a round."""
        if self.learner.takes_whole_sources or self.learner.over:
            return self.learner.over
        if not isinstance(self._source, TableSource) or not self.site.busy.acquire(blocking=False):
            return False
        try:
            if not self.learner.pinned:
                self.wait_here()
            return self._source.exhausted and not (self.learner.clients_due or self.learner.clients_waiting)
        finally:
            self.site.busy.release()

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
            raise NoAnswer

    def _let_callers_go(self) -> None:
        over = self.takes_nobody is not None if isinstance(self._source, LiveSource) else self.learner.over
        if over and isinstance(self._source, WaitingSource):
            self._source.release()

    def close(self) -> None:
        """Stop answering; a reply that waits for its time does not leave."""
        self._closing.set()
        self.published.save()
        if isinstance(self._source, WaitingSource):
            self._source.close()
        with self.site.busy:
            self.learner.close()
