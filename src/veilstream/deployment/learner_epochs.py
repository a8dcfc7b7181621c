"""A deployed learner's store, and the epoch that runs on it: what holds in whichever order clients come."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.client_steps import ClientSteps, check_dim
from veilstream.deployment.epoch_records import EpochRecords
from veilstream.deployment.epochs import DEPLOYED, EpochLedger, LearnerParts
from veilstream.deployment.ledger.chain import Body
from veilstream.deployment.ledger.store import Ledger
from veilstream.deployment.local_rounds import LocalRounds
from veilstream.deployment.process_secrecy import no_core_dumps, without_values
from veilstream.deployment.terms import Terms
from veilstream.deployment.window_records import WindowRecords
from veilstream.errors import InputError, LedgerError
from veilstream.learning.tasks import Task, admission_of
from veilstream.mechanisms.keystream import fresh_secret
from veilstream.plans.plan import Plan
from veilstream.privacy.seeds import check_generator_once, checked_seed
from veilstream.records.participation import MOST_TOGETHER, PastVisits
from veilstream.streams.intake import SourceBookmark

_log = logging.getLogger(__name__)

Float32s = NDArray[np.float32]
P = ParamSpec("P")
R = TypeVar("R")

_GROUP_BYTES = 16 << 20
"""Of noise rows, eight bytes a number, that a group of steps has at most."""


def one_at_a_time(method: Callable[P, R]) -> Callable[P, R]:
    """A learner's method that waits until no other thread is in one."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        learner: Any = args[0]
        with learner.one_call:
            return method(*args, **kwargs)

    return call


class LearnerEpochs:
    """One data source's side of a run, without its rounds: `Learner` has them."""

    @without_values
    def __init__(
        self,
        plan: Plan,
        store: Path | str,
        task: Task,
        *,
        witness: Path | str | None = None,
        create: bool = False,
        parts: LearnerParts = DEPLOYED,
    ) -> None:
        no_core_dumps()
        check_dim(plan, task)
        self.plan, self.task = plan, task
        self.one_call = threading.RLock()
        self._admission = admission_of(task)
        self.terms = terms = Terms.of(plan, task.dim, task)
        self.noise_std, self.guarantee, self.grid = terms.noise_std, terms.guarantee, terms.grid
        self.steps = ClientSteps(task, terms, parts.telemetry)
        check_generator_once(fresh_secret)
        self._planned: dict[bytes, list[PastVisits]] = {}  # of the group that is being put together
        self._steps_together = max(
            1, min(MOST_TOGETHER // terms.clients_per_step, _GROUP_BYTES // (8 * terms.release_dim))
        )
        self.epochs = EpochLedger(plan, terms, store, witness, create=create, parts=parts)
        self._records: EpochRecords | None = None
        self._arrivals: WindowRecords | None = None
        if plan.window is not None:
            self._arrivals = WindowRecords(plan, plan.window, self.epochs, self._admission)
        elif plan.order == "secret":
            self._records = EpochRecords(plan, self.epochs, self._admission)
        if self.order_is_secret:
            self._steps_together = max(1, min(MOST_TOGETHER, _GROUP_BYTES // (8 * terms.release_dim)))

    @property
    def model(self) -> Float32s | None:
        """The newest model that the server has sent, read-only; None before the first."""
        if self.epochs.model is None:
            return None
        shown = self.epochs.model.view()
        shown.flags.writeable = False
        return shown

    @property
    def ledger(self) -> Ledger:
        """The store, to look at; the learner alone writes to it."""
        return self.epochs.ledger

    @property
    def local(self) -> LocalRounds:
        """The epoch's rounds in memory, to look at; the learner alone moves them."""
        return self.epochs.local

    @property
    def settings(self) -> dict[str, Any]:
        """All that the guarantee rests on; a store keeps to it, and so must the server."""
        return self.terms.settings

    @property
    def epoch(self) -> int:
        """Which mechanism is running, from 0."""
        return self.epochs.epoch

    @property
    def run(self) -> str | None:
        """The server's run that this epoch belongs to; None before it has joined one."""
        return self.epochs.run

    @property
    def epochs_left(self) -> int:
        """How many more epochs a server may lead this learner into (`federation.epochs`)."""
        return self.epochs.epochs_left

    @property
    def round(self) -> int:
        """The round that is open, or is to be begun next."""
        return self.local.round

    @property
    def pinned(self) -> bool:
        """Whether a round has been begun and not sealed."""
        return self.local.pinned is not None

    @property
    def clients_wanted(self) -> int:
        """How many clients the open round can still take."""
        if self._arrivals is not None:
            return self._arrivals.room if self.pinned else 0
        return self.local.steps_wanted * self.terms.clients_per_step

    @property
    def takes_clients(self) -> bool:
        """Whether anybody can still take part in this epoch: its last window is too late (`privacy.window`)."""
        return not self.over if self._arrivals is None else self._arrivals.taking

    @property
    def clients_due(self) -> int:
        """How many people arrived in the window before and are used in this one (`privacy.window`)."""
        return 0 if self._arrivals is None else self._arrivals.due

    @property
    def clients_waiting(self) -> int:
        """How many people arrived in this window and are used in the next (`privacy.window`)."""
        return 0 if self._arrivals is None else self._arrivals.waiting

    @property
    def order_is_secret(self) -> bool:
        """Whether nobody outside may know at which step a record is used."""
        return self.plan.order == "secret"

    @property
    def takes_whole_sources(self) -> bool:
        """Whether all records of an epoch come at once, by `use_records`; else one after the other."""
        return self._records is not None

    @property
    def horizon_reached(self) -> bool:
        """Whether every round of this epoch has been sealed."""
        return self.local.horizon_reached

    @property
    def over(self) -> bool:
        """Whether this epoch takes nobody any more: at its horizon, or ended before it."""
        return self.local.over

    @without_values
    @one_at_a_time
    def join(self, run: str, parts: LearnerParts = DEPLOYED) -> None:
        """Give this epoch to one run of the server; another run is refused until the next epoch.

        A study's learner joins only with the very ``parts`` that it was made of.
        """
        self.epochs.join(run, parts)

    @without_values
    @one_at_a_time
    def end_epoch(self) -> None:
        """End this epoch now, whatever rounds are left; done before, nothing happens.

        An open round is dropped: nothing of it is ever released, and its clients count as having
        taken part. Seeds and the state of the noise are destroyed. What was sealed can still be
        sent. Ending early loses the rounds that are left, and nothing of the promise.
        """
        self._give_up_waiting()
        self.epochs.end()

    @without_values
    @one_at_a_time
    def follow(self, run: str, ended: Collection[str]) -> bool:
        """Go along into the server's next run, if the plan allows; whether an epoch was begun.

        A new epoch has a fresh mechanism and takes only clients who were in none before, so every
        client has the promise in exactly one epoch, whatever the server says and however often.
        The plan bounds how many epochs there may be (`federation.epochs`, since the operator last
        began one); the server cannot.

        Args:
            run: the run that begins.
            ended: the runs before it, which the server says are over. If this epoch belongs to one
                of them, it is ended; else nothing happens.

        Raises:
            InputError: the plan allows no further epoch.
            LedgerError: secrets of the last one cannot be destroyed yet.

        """
        if self.run is not None and self.run != run and self.run in ended:
            self._give_up_waiting()
        return self.epochs.follow(run, ended)

    @without_values
    @one_at_a_time
    def new_epoch(self) -> None:
        """Start a fresh mechanism, for those who may take part in a further epoch: by default new clients only."""
        self.epochs.begin_next()

    def _give_up_waiting(self) -> None:
        """Say who waits for a window that an epoch's end leaves out, and let go of what was read for this one."""
        if not self.over and (waiting := self.clients_waiting):
            _log.info(
                "%d people had arrived for a window that did not begin: they are not used and have taken part", waiting
            )
        if self._arrivals is not None:
            self._arrivals.close()

    def close(self) -> None:
        """Let go of the store."""
        for records in (self._records, self._arrivals):
            if records is not None:
                records.close()
        self.ledger.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Learner cannot be copied: two would answer for one store")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @one_at_a_time
    def check_acknowledged(self, acknowledged: tuple[int, str] | None) -> None:
        """Refuse to go on if the server has accepted what this store does not know."""
        if acknowledged is None:
            return
        r, digest = checked_acknowledgement(acknowledged)
        if not self.ledger.knows_message(r, digest):
            raise LedgerError(
                f"the server has accepted round {r} with hash {digest[:16]!r}, which this store does not know",
                "this store and its witness are old copies: put the newest ones back; if they are "
                "lost, begin another store, with other clients only",
            )

    @without_values
    @one_at_a_time
    def acknowledge(self, r: int, digest: str) -> None:
        """Remember that the server has accepted the last round's message, by its hash.

        `begin_round` takes the same along, without a write of its own.

        Args:
            r: the round that the server accepted.
            digest: the hash of its message.

        """
        r, digest = checked_acknowledgement((r, digest))
        release = self.epochs.last_release()
        if (r, digest) != (release.round, release.hash):
            raise InputError(
                "acknowledged",
                (r, digest[:64]),
                f"round {release.round} and its hash",
                "the server acknowledges what it was sent",
            )
        if self.ledger.chain.standing.answered != digest:
            self.epochs.write("ack", Body(epoch=self.epoch, round=r, hash=digest))
        self.ledger.reached("acknowledged")

    @one_at_a_time
    def note_read(self, bookmark: SourceBookmark) -> None:
        """A source has been read so far, without a record to use; stored with the next write."""
        self.epochs.note_read(bookmark)

    @one_at_a_time
    def bookmarks(self) -> list[SourceBookmark]:
        """How far each source had been read, as stored."""
        return self.epochs.stored_bookmarks()

    def _refuse_own_order(self) -> None:
        if self._records is not None:
            raise InputError(
                "privacy.order",
                "secret",
                '"known", to hand over clients one after the other: their order would be the caller\'s',
                "give all records of the epoch to use_records(...) before its first round; or set privacy.window",
            )

    def _fresh_seeds(self, count: int) -> list[bytes]:
        return [checked_seed(fresh_secret()) for _ in range(count)]


def checked_round(field: str, r: Any) -> int:
    """A round's number. The server may send anything, so what is no number is shown by its type alone."""
    if isinstance(r, bool) or not isinstance(r, int | np.integer) or not 0 <= r < 2**63:
        raise InputError(field, type(r).__name__, "a whole number below 2^63", "check the server")
    return int(r)


def checked_acknowledgement(acknowledged: Any) -> tuple[int, str]:
    """Round and hash, as the server says it has them."""
    if type(acknowledged) is not tuple or len(acknowledged) != 2:
        raise InputError("acknowledged", type(acknowledged).__name__, "(round, hash)", "or None")
    r, digest = acknowledged
    if type(digest) is not str:
        raise InputError("acknowledged", type(digest).__name__, "a hash as text", "or None")
    return checked_round("acknowledged", r), digest
