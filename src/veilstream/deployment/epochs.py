"""A learner's epochs on its ledger: where it stands, how one ends and the next begins.

What happens within a round is `veilstream.deployment.learner`, which builds on this. Every change
is written down and witnessed before anything that depends on it leaves; a call that is interrupted
half-way leaves memory behind the store, so from then on only a restart may go on.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.ledger.store import Ledger
from veilstream.deployment.local_rounds import LocalRounds
from veilstream.deployment.process_secrecy import without_values
from veilstream.deployment.recovery import recover
from veilstream.deployment.release import Release
from veilstream.deployment.server_input import check_known, checked_acknowledgement
from veilstream.deployment.terms import Terms, check_settings
from veilstream.errors import InputError, LedgerError, PrivacyError
from veilstream.plans.plan import Plan

Float32s = NDArray[np.float32]
P = ParamSpec("P")
R = TypeVar("R")


def one_at_a_time(method: Callable[P, R]) -> Callable[P, R]:
    """A learner's method that waits until no other thread is in one."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        learner: Any = args[0]
        with learner.one_call:
            return method(*args, **kwargs)

    return call


class Epochs:
    """One ledger, and the epoch that runs on it; calls from several threads wait for each other.

    Args:
        plan: the run.
        terms: what it promises, which a store keeps to.
        store: the ledger's file.
        witness: its second file; None for one beside it.
        create: begin a store where there is none.

    """

    _local: LocalRounds
    _snapshot_at: int
    _run: str | None  # the server's run that this epoch belongs to

    def __init__(
        self, plan: Plan, terms: Terms, store: Path | str, witness: Path | str | None, *, create: bool
    ) -> None:
        self._plan, self.terms = plan, terms
        self.one_call = threading.RLock()
        self._broken = False
        self._forgotten = True  # whether no destroyed secret is left in the log file
        self._model: Float32s | None = None  # the newest that the server sent
        self._ledger = self._open_ledger(store, witness, create=create)
        try:
            self._recover()
        except BaseException:
            self._ledger.close()
            raise

    _open_ledger = staticmethod(Ledger)

    # --- where it stands -------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """What it runs."""
        return self._plan

    @property
    def model(self) -> Float32s | None:
        """The newest model that the server has sent, read-only; None before the first."""
        if self._model is None:
            return None
        shown = self._model.view()
        shown.flags.writeable = False
        return shown

    @property
    def epoch(self) -> int:
        """Which mechanism is running, from 0."""
        return self._local.epoch

    @property
    def round(self) -> int:
        """The round that is open, or is to be begun next."""
        return self._local.round

    @property
    def pinned(self) -> bool:
        """Whether a round has been begun and not sealed."""
        return self._local.pinned is not None

    @property
    def clients_wanted(self) -> int:
        """How many clients the open round can still take."""
        return self._local.clients_wanted

    @property
    def horizon_reached(self) -> bool:
        """Whether every round of this epoch has been sealed."""
        return self._local.horizon_reached

    @property
    def over(self) -> bool:
        """Whether this epoch takes nobody any more: at its horizon, or ended before it."""
        return self._local.over

    @property
    def run(self) -> str | None:
        """The server's run that this epoch belongs to; None before it has joined one."""
        return self._run

    @property
    def epochs_left(self) -> int:
        """How many more epochs a server may lead this learner into (`federation.epochs`)."""
        allowed = self._plan.federation.epochs
        return max(0, allowed - 1 - self._ledger.chain.standing.followed)

    @property
    def local(self) -> LocalRounds:
        """The epoch's rounds as they are in memory, to look at; the learner alone moves them."""
        return self._local

    @property
    def ledger(self) -> Ledger:
        """The store, to look at; the learner alone writes to it."""
        return self._ledger

    @property
    def broken(self) -> bool:
        """Whether a call was interrupted half-way, so that only a restart may go on."""
        return self._broken

    @property
    def notices(self) -> list[str]:
        """What the person beside it should know of its files, a sentence each."""
        return list(self._ledger.notices)

    @property
    def settings(self) -> dict[str, Any]:
        """All that the guarantee rests on; a store keeps to it, and so must the server."""
        return self.terms.settings

    # --- from epoch to epoch ---------------------------------------------------------------------

    @without_values
    @one_at_a_time
    def join(self, run: str) -> None:
        """Give this epoch to one run of the server; another run is refused until the next epoch."""
        if self._run is None:
            with self._whole_or_broken():
                self._write("join", {"epoch": self.epoch, "run": run})
            self._run = run
        elif self._run != run:
            raise InputError(
                "run",
                run,
                f"run {self._run!r}, which this learner's epoch {self.epoch} is for",
                "finish that one; `veilstream ledger epoch` begins an epoch with new clients",
            )

    @without_values
    @one_at_a_time
    def end_epoch(self) -> None:
        """End this epoch now, whatever rounds are left; done before, nothing happens.

        An open round is dropped: nothing of it is ever released, and its clients count as having
        taken part. Seeds and the state of the noise are destroyed. What was sealed can still be
        sent. Ending early costs what the rounds that are left would have taught, and nothing of the
        promise.
        """
        if self.over and self._ledger.chain.standing.ended:
            return
        with self._whole_or_broken():
            sealed, model = self._local.sealed, self._local.sealed_model
            self._local = self.new_rounds(self.epoch)  # the noise's state goes with the old one
            if sealed is not None:
                self._local.resume(sealed.payload, model)
            self._local.end()
            self._destroy_secrets()

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
        if self._run is None or self._run == run or self._run not in ended:
            return False
        self.end_epoch()
        if not self.epochs_left:
            allowed = self._plan.federation.epochs
            raise InputError(
                "run",
                run,
                f"at most {allowed} epochs under one plan (federation.epochs), which this learner has been through",
                "its operator begins another with `veilstream ledger epoch`, for new clients",
            )
        if not self._forgotten:
            self._forget_or_refuse()
        followed = self._ledger.chain.standing.followed + 1
        with self._whole_or_broken():
            self._write_epoch(self.epoch + 1, {"followed": followed, "run": run})
            self._run = run
        return True

    @without_values
    @one_at_a_time
    def new_epoch(self) -> None:
        """Start a fresh mechanism for new clients; those who took part are never taken again."""
        if not self.over:
            raise PrivacyError(
                f"epoch {self.epoch} has {self.terms.rounds - self.round} rounds left: nothing was "
                "released (a new one may start when its horizon has ended; "
                "`veilstream ledger epoch --abandon` gives it up)"
            )
        if not self._forgotten:
            self._forget_or_refuse()
        with self._whole_or_broken():
            self._write_epoch(self.epoch + 1)

    def _forget_or_refuse(self) -> None:
        """No epoch begins while secrets of the last one may lie in the log file."""
        if not self._ledger.forget():
            raise LedgerError(
                "the store is being read, so destroyed secrets may stay in its log",
                "close what reads it, then ask again",
            )

    def close(self) -> None:
        """Let go of the store."""
        self._ledger.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Learner cannot be copied: two would answer for one store")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- writing and going on --------------------------------------------------------------------

    @contextmanager
    def _whole_or_broken(self) -> Iterator[None]:
        """What is interrupted half-way leaves memory behind the store: only a restart may go on."""
        self._ledger.check()
        if self._broken:
            raise PrivacyError(
                "an earlier call was interrupted half-way: nothing was released "
                "(start the learner again; it goes on where its store stands)"
            )
        self._broken = True
        yield
        self._broken = False

    def _write(self, kind: str, body: dict[str, Any], *, points: str = "", **more: Any) -> None:
        """Store and witness."""
        self._ledger.write(kind, body, **more)
        if points:
            self._ledger.reached(f"{points}-stored")
        self._ledger.witness()
        if points:
            self._ledger.reached(f"{points}-witnessed")

    def _recover(self) -> None:
        """Bring memory to where the ledger stands."""
        standing = self._ledger.chain.standing
        if standing.between:
            # A store's first epoch, or one that `veilstream ledger epoch` asked for.
            self._forget_or_refuse()
            self._write_epoch(standing.epoch + 1)
            return
        assert standing.settings is not None
        check_settings(self.settings, standing.settings)
        self._begin_epoch(standing.epoch)
        found = recover(self._ledger, self._local)
        self._run, self._model, self._snapshot_at = standing.run, found.model, found.snapshot_step
        if self.over:
            self._destroy_secrets()

    def _destroy_secrets(self) -> None:
        """At the end of an epoch.

        While someone reads the store, its log file stays; then this is done again when the learner
        is started, and before a new epoch.
        """
        if not self._ledger.chain.standing.ended:
            left = self.terms.rounds - self.round
            body = {"epoch": self.epoch} | ({"rounds_left": left} if left else {})
            self._write("end", body, destroy=self._ledger.chain.secrets)
        self._forgotten = self._ledger.forget()
        self._ledger.reached("epoch-closed")

    def _write_epoch(self, epoch: int, about: dict[str, Any] | None = None) -> None:
        self._write(
            "epoch", {"epoch": epoch, "settings": self.settings} | (about or {}), destroy=self._ledger.names("message")
        )
        self._begin_epoch(epoch)

    def _begin_epoch(self, epoch: int) -> None:
        self._local = self.new_rounds(epoch)
        self._snapshot_at, self._run = 0, None

    def new_rounds(self, epoch: int) -> LocalRounds:
        """The rounds of an epoch; audits and studies put others in their place."""
        return LocalRounds(self.terms, epoch)

    # --- what the server has ---------------------------------------------------------------------

    @one_at_a_time
    def check_acknowledged(self, acknowledged: tuple[int, str] | None) -> None:
        """Refuse to go on if the server has accepted what this store does not know."""
        if acknowledged is not None:
            check_known(checked_acknowledgement(acknowledged), self._ledger.knows_message)

    def _last_release(self) -> Release:
        self._ledger.check()
        if self._local.sealed is None:
            raise InputError("round", None, "a round that has been finished", "begin_round first")
        return self._local.sealed
