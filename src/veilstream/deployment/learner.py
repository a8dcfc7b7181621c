"""The deployed learner: Algorithm 1 beside one data source, one client at a time.

    learner = Learner(plan, "store.db", task, create=True)     the first time
    learner.begin_round(r, x)
    learner.observe(tag, sample)        up to τ times
    release = learner.finish_round()    send release.payload

**Guarantees**, against the server and everyone who reads what is sent, whatever x the server
chooses: `learner.guarantee` for every client's record (replace-one neighbours among records that
are admitted, the plan's participation, the whole horizon; lem-priv-analy with the plan's
accounting), also through crashes, retries and restored backups. What is sent is the prefix sum of
clipped gradients and correlated noise on a common grid (`veilstream.privacy.grid`), of a size that
does not depend on the data. Noise comes from seeds that the operating system drew; nothing lets an
operator choose them.

What a round computes is `veilstream.deployment.local_rounds`; here it is written down in this order
(`veilstream.deployment.ledger`): the pinned model; for every step, in one transaction, the client's
tag, the secret its noise was drawn from, fresh from the operating system, the noisy step, and how
far the data source has been read; the message. Each is witnessed before anything that depends on it
leaves. After a crash, a step that was not stored is as if it had never been, secret and all, so no
row of noise ever meets two gradients; stored ones are repeated to the bit.
"""

from __future__ import annotations

import functools
import json
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.client_gradients import ClientGradients
from veilstream.deployment.ledger.chain import BOOKMARKS
from veilstream.deployment.ledger.crash_points import reached
from veilstream.deployment.ledger.store import Ledger
from veilstream.deployment.ledger.tags import tag_forms
from veilstream.deployment.local_rounds import LocalRounds, model_hash, pack_step
from veilstream.deployment.process_secrecy import no_core_dumps, without_values
from veilstream.deployment.recovery import recover, secret_name
from veilstream.deployment.release import Release
from veilstream.deployment.server_input import (
    check_known,
    checked_acknowledgement,
    checked_model,
    checked_round,
)
from veilstream.deployment.terms import Terms, check_settings
from veilstream.errors import InputError, LedgerError, PrivacyError
from veilstream.learning.admission import Admission, Answer
from veilstream.learning.tasks import LeastSquares, Logistic, Ripple, Sample, Task, TaskDetails
from veilstream.mechanisms.keystream import fresh_secret
from veilstream.plans.plan import Plan
from veilstream.privacy.gradient_types import ClippedGradient, RawGradient
from veilstream.privacy.seeds import check_generator_once, checked_seed
from veilstream.streams.intake import SourceBookmark

__all__ = ["Learner"]


Float32s = NDArray[np.float32]
P = ParamSpec("P")
R = TypeVar("R")

_SNAPSHOT_STEPS = 64
_SALT_BYTES = 16


def _check_dim(plan: Plan, task: Task) -> None:
    """The server makes its model from the plan alone: the task that the plan names has its size.

    A task of another class (an audit's, a study's, one that the plan names by its module) has a
    size of its own, which server and learner compare when they meet.
    """
    own = ":" in plan.learning.task
    known = isinstance(task, Logistic | LeastSquares | Ripple) and not own
    if known and plan.feature_count != task.dim:
        field = "data.features" if plan.data.kind == "table" else "data.dim"
        raise InputError(
            field, plan.feature_count, f"the {task.dim} parameters of the task that was given",
            f"[data] dim = {task.dim} in the plan, the same on every side",
        )  # fmt: skip


def _is_longer(raw: RawGradient, clip_norm: float) -> bool:
    with np.errstate(all="ignore"):
        numbers = raw.reveal().astype(np.float64)
        return not float(np.sqrt(numbers @ numbers)) <= clip_norm


def one_at_a_time(method: Callable[P, R]) -> Callable[P, R]:
    """A learner's method that waits until no other thread is in one."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        learner: Any = args[0]
        with learner.one_call:
            return method(*args, **kwargs)

    return call


class Learner:
    """One data source's side of a run. Open until `close`; a store has one learner at a time.

    Calls from several threads are done one after the other.

    ``create=True`` begins a store where there is none, and opens one that is there: a restart with
    the same arguments goes on. Without it, a store that is missing is an `InputError`. From its
    first learner on, a process leaves no core dumps (`veilstream.deployment.process_secrecy`).

    Args:
        plan: the run; it must have one private method with one client a step.
        store: the ledger's file.
        task: what is learned; its gradient must be a pure function of (model, record).
        witness: the second file, best on another disk, by which an old copy of the store is
            recognised; beside the store where it is left out.
        create: begin a store where there is none.

    Raises:
        InputError: for a plan that cannot be deployed, a task that is not pure or does not say
            what its records look like, a store that is missing.
        LedgerError: for a store that is damaged, or older than its witness remembers.
        StoreBusy: while another process has it.

    """

    _local: LocalRounds
    _snapshot_at: int
    _run: str | None  # the server's run that this epoch belongs to

    @without_values
    def __init__(
        self, plan: Plan, store: Path | str, task: Task, *, witness: Path | str | None = None,
        create: bool = False,
    ) -> None:  # fmt: skip
        no_core_dumps()
        _check_dim(plan, task)
        self._plan, self.task = plan, task
        self._admission = Admission.of(task)
        self.terms = terms = Terms.of(plan, task.dim, task)
        self.noise_std, self.guarantee, self.grid = terms.noise_std, terms.guarantee, terms.grid
        self._gradients = ClientGradients(task)
        if TaskDetails.of(task).host_gradient is not None:
            self._gradients.check_pure()
        check_generator_once(fresh_secret)
        self.one_call = threading.RLock()
        self._broken = False
        self._forgotten = True  # whether no destroyed secret is left in the log file
        self._model: Float32s | None = None  # the newest that the server sent
        self._read: SourceBookmark | None = None  # how far, and not written down yet
        self.clipped = 0
        """Gradients since this start that were longer than the clip norm: for this machine only."""
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
    def newest_model(self) -> Float32s | None:
        """What the server last sent; None before the first."""
        return self._model

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

    # --- a round ---------------------------------------------------------------------------------

    @without_values
    @one_at_a_time
    def begin_round(
        self, r: int, x: NDArray[Any], acknowledged: tuple[int, str] | None = None
    ) -> None:
        """Pin the model of round r; refused before any client's data are read if anything is wrong.

        Args:
            r: the round, in order from 0.
            x: the server's model, ``task.dim`` numbers.
            acknowledged: the last (round, hash) that the server has accepted from this learner: if
                the store does not know it, the store is an old copy.

        Raises:
            InputError: for another round than the next, or a model of another shape or size.
            PrivacyError: past the horizon, or for another model than a round was begun with.
            LedgerError: where the server remembers more than the store.

        """
        model = self._model_of_round(r, x, acknowledged)
        if model is None:
            return  # open already, or sealed: finish_round repeats it
        self._gradients.check_pure()
        with self._whole_or_broken():
            self._pin(checked_round("round", r), model, model_hash(model), acknowledged)

    @without_values
    @one_at_a_time
    def would_begin(
        self, r: int, x: NDArray[Any], acknowledged: tuple[int, str] | None = None
    ) -> bool:
        """Whether `begin_round` would begin a round now; pins and spends nothing.

        Args:
            r: as for `begin_round`.
            x: as for `begin_round`.
            acknowledged: as for `begin_round`.

        Returns:
            False where the round is open or sealed already.

        Raises:
            InputError: as `begin_round`.
            PrivacyError: as `begin_round`.

        """
        return self._model_of_round(r, x, acknowledged) is not None

    def _model_of_round(
        self, r: int, x: NDArray[Any], acknowledged: tuple[int, str] | None
    ) -> Float32s | None:
        """The model that the round is to be pinned to; None where it is open or sealed."""
        r = checked_round("round", r)
        self.check_acknowledged(acknowledged)
        model = checked_model(x, self.task.dim, self._plan.learning.model_norm_cap)
        return model if self._local.wants(r, model_hash(model)) else None

    @without_values
    @one_at_a_time
    def observe(
        self, client: bytes | str, sample: Sample, bookmark: SourceBookmark | None = None
    ) -> Answer:
        """Take one client: clip, add noise, step, store, forget the data, answer.

        A client who was taken before is answered and not used (or used again, as far as the plan's
        participation goes). Data that cannot be used at all are refused before the step; data whose
        gradient turns out unusable count as a zero gradient. Spellings of a text tag are one client
        (`veilstream.deployment.ledger.tags`); one that has nothing but white space is refused.

        Args:
            client: the client's tag, the same whenever the same person comes.
            sample: its record.
            bookmark: how far its source has been read with it. It is stored with the step that uses
                the record, or with the next one where none does: after a restart the source goes on
                behind it, so no record is used a second time.

        Returns:
            Taken or refused: the same whatever became of the data.

        Raises:
            InputError: where no round has been begun, or it has all its clients.
            LedgerError: where the store can no longer be trusted.

        """
        self._read = bookmark or self._read
        names, admitted = tag_forms(client), self._admission.admitted(sample)
        if not names or admitted is None:  # looked at first: it says nothing of who took part
            return Answer.REFUSED
        self._ledger.check()
        tags = [self._ledger.keyed(name) for name in names]
        if self._spent(tags):
            return Answer.TAKEN
        if not self.pinned:
            raise InputError("round", None, "a round that has been begun", "call begin_round")
        if not self.clients_wanted:
            most = f"at most {self.terms.local_steps} clients a round"
            raise InputError("client", "<not shown>", most, "finish_round")
        self._gradients.check_pure()
        with self._whole_or_broken():
            raw = self._gradients.raw(self._local.model, admitted)
            self._step(self._local.clip(raw), tags[0])
            self.clipped += _is_longer(raw, self.grid.clip_norm)
        return Answer.TAKEN

    @without_values
    @one_at_a_time
    def may_take(self, client: bytes | str) -> bool:
        """Whether this client could take the next step, as far as the promise goes.

        Says who took part, so its answer must not leave this machine.
        """
        names = tag_forms(client)
        return bool(names) and not self._spent([self._ledger.keyed(name) for name in names])

    @one_at_a_time
    def note_read(self, bookmark: SourceBookmark) -> None:
        """A source has been read so far, without a record to use; stored with the next write."""
        self._read = bookmark

    @one_at_a_time
    def bookmarks(self) -> list[SourceBookmark]:
        """How far each source had been read, as stored."""
        kept = (self._ledger.blob(name) for name in self._ledger.names(BOOKMARKS))
        return [SourceBookmark(*json.loads(content[_SALT_BYTES:])) for content in kept]

    @without_values
    @one_at_a_time
    def finish_round(self) -> Release:
        """Seal the round and return its message: the same bytes however often it is asked.

        Steps without a client have a zero gradient and keep their noise.

        Returns:
            What may be sent, `Release.payload`, with its hash.

        Raises:
            InputError: where no round has been begun or finished.

        """
        if self.pinned:
            with self._whole_or_broken():
                self._seal()
        return self._last_release()

    @one_at_a_time
    def sealed_release(self) -> Release:
        """The last finished round's message, again; seals nothing."""
        return self._last_release()

    @without_values
    @one_at_a_time
    def learn_round(
        self, r: int, x: NDArray[Any], clients: Iterable[tuple[bytes | str, Sample]],
        acknowledged: tuple[int, str] | None = None,
    ) -> Release:  # fmt: skip
        """A whole round from a stream of (tag, sample): takes no more of it than it uses.

        Args:
            r: as for `begin_round`.
            x: as for `begin_round`.
            clients: pairs of a tag and a record.
            acknowledged: as for `begin_round`.

        Returns:
            As `finish_round`.

        Raises:
            InputError: as `begin_round`.

        """
        self.begin_round(r, x, acknowledged)
        stream = iter(clients)
        while self.clients_wanted:
            try:
                tag, sample = next(stream)
            except StopIteration:
                break
            self.observe(tag, sample)
            del sample
        return self.finish_round()

    @without_values
    @one_at_a_time
    def acknowledge(self, r: int, digest: str) -> None:
        """Remember that the server has accepted round r's message.

        (`begin_round` takes the same along, without a write of its own.)

        Args:
            r: the round.
            digest: the hash of its message.

        Raises:
            InputError: where that is not the last message.

        """
        r, digest = checked_acknowledgement((r, digest))
        release = self._last_release()
        if (r, digest) != (release.round, release.hash):
            raise InputError(
                "acknowledged", (r, digest[:64]), f"round {release.round} and its hash",
                "the server acknowledges what it was sent",
            )  # fmt: skip
        body = {"epoch": self.epoch, "round": r, "hash": digest}
        if self._ledger.chain.standing.answered != body:
            self._write("ack", body)
        reached("acknowledged")

    @without_values
    def predict(self, features: NDArray[Any]) -> Any:
        """What the server's newest model says of a client; None before the first model.

        Answered here, with a model that is public anyway.
        """
        if self._model is None or features.shape != self._admission.shape:
            return None
        said = np.asarray(self.task.predict(self._model, features[None]))  # a batch of one
        return (said[0] if said.shape[:1] == (1,) else said).tolist()

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
                "run", run, f"run {self._run!r}, which this learner's epoch {self.epoch} is for",
                "finish that one; `veilstream ledger epoch` begins an epoch with new clients",
            )  # fmt: skip

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
                "run", run, f"at most {allowed} epochs under one plan (federation.epochs), which "
                "this learner has been through",
                "its operator begins another with `veilstream ledger epoch`, for new clients",
            )  # fmt: skip
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

    def __enter__(self) -> Learner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what a round consists of ----------------------------------------------------------------

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

    def _pin(
        self, r: int, model: Float32s, digest: str, acknowledged: tuple[int, str] | None
    ) -> None:
        body: dict[str, Any] = {"epoch": self.epoch, "round": r, "x": digest}
        if acknowledged is not None:
            body["acknowledged"] = list(acknowledged)
        self._write("pin", body, keep={"x": model.tobytes()})
        reached("pinned")
        self._local.pin(model, digest)
        self._model = model

    def _step(self, gradient: ClippedGradient, tag: bytes | None) -> None:
        local, step = self._local, self._local.step
        secret = checked_seed(fresh_secret())
        noisy = local.noisy(gradient, secret)
        reached("step-computed")
        self._write(
            "step", {"epoch": local.epoch, "step": step}, tag=tag, points="step",
            keep={secret_name(local.epoch, step): secret, f"noisy/{local.taken}": pack_step(noisy)}
            | self._bookmark_blob(),
        )  # fmt: skip
        self._read = None
        local.apply(noisy)

    def _bookmark_blob(self) -> dict[str, bytes]:
        """With salt: a hash of records stays in the chain for ever, and must not tell of them."""
        if self._read is None:
            return {}
        name = BOOKMARKS + self._ledger.keyed(self._read.source.encode()).hex()[:32]
        content = json.dumps([self._read.source, self._read.text]).encode()
        return {name: secrets.token_bytes(_SALT_BYTES) + content}

    def _seal(self) -> None:
        local = self._local
        while local.clients_wanted:
            self._step(local.nothing(), None)
        release = local.message()
        body = {"epoch": release.epoch, "round": release.round, "hash": release.hash}
        reached("message-computed")
        self._write(
            "message", body | {"x": local.pinned},
            keep={"message": release.payload} | self._bookmark_blob(), points="message",
        )  # fmt: skip
        self._read = None
        local.seal(release)
        if self.horizon_reached:
            self._destroy_secrets()
        elif local.step - self._snapshot_at >= _SNAPSHOT_STEPS:
            self._keep_snapshot()

    def _write(self, kind: str, body: dict[str, Any], *, points: str = "", **more: Any) -> None:
        """Store and witness."""
        self._ledger.write(kind, body, **more)
        if points:
            reached(f"{points}-stored")
        self._ledger.witness()
        if points:
            reached(f"{points}-witnessed")

    # --- recovery --------------------------------------------------------------------------------

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

    def _keep_snapshot(self) -> None:
        """Noise state, so that a restart is quick and old secrets can go."""
        noise = self._local.noise
        self._write(
            "snapshot", {"epoch": self.epoch, "step": noise.position},
            keep={"snapshot": noise.snapshot()}, destroy=self._ledger.names("seed/"),
        )  # fmt: skip
        self._snapshot_at = noise.position
        reached("snapshot-stored")

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
        reached("epoch-closed")

    # --- epochs and checks -----------------------------------------------------------------------

    def _write_epoch(self, epoch: int, about: dict[str, Any] | None = None) -> None:
        self._write(
            "epoch", {"epoch": epoch, "settings": self.settings} | (about or {}),
            destroy=self._ledger.names("message"),
        )  # fmt: skip
        self._begin_epoch(epoch)

    def _begin_epoch(self, epoch: int) -> None:
        self._local = self.new_rounds(epoch)
        self._snapshot_at, self._run = 0, None

    def new_rounds(self, epoch: int) -> LocalRounds:
        """The rounds of an epoch; audits and studies put others in their place."""
        return LocalRounds(self.terms, epoch)

    def _spent(self, tags: list[bytes]) -> bool:
        """Whether this client, under all its tags together, may not take the next step."""
        visits = [visit for tag in tags if (visit := self._ledger.visit(tag)) is not None]
        step = self._local.step
        allowed = self._plan.participation
        return bool(visits) and (
            any(visit.epoch != self.epoch for visit in visits)
            or sum(visit.times for visit in visits) >= allowed.times
            or any(step - visit.step < allowed.min_separation for visit in visits)
        )

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
