"""A ledger and the epoch that runs on it, kept in step: how an epoch begins, goes on and ends.

What happens within a round is `veilstream.deployment.learner`. Every change is written down and
witnessed before anything that depends on it leaves. If a call is interrupted, memory lags the
ledger, and the learner must restart.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.client_steps import ClientTelemetry
from veilstream.deployment.ledger.chain import BOOKMARKS, Body
from veilstream.deployment.ledger.store import Ledger
from veilstream.deployment.local_rounds import LocalRounds, NoisySum, unpack_step
from veilstream.deployment.release import Release
from veilstream.deployment.step_index import remove_index
from veilstream.deployment.terms import Terms, check_settings
from veilstream.errors import InputError, LedgerError, PrivacyError
from veilstream.learning.tasks import Task
from veilstream.mechanisms.keystream import fresh_secret
from veilstream.plans.plan import Plan
from veilstream.privacy.gradient_types import Noised
from veilstream.privacy.seeds import SEED_BYTES, checked_seed
from veilstream.privacy.telemetry import Telemetry
from veilstream.streams.intake import SourceBookmark

_log = logging.getLogger(__name__)
Float32s = NDArray[np.float32]

_SNAPSHOT_STEPS = 64
_SALT_BYTES = 16
ORDER_SECRET = "order/secret"
"""Blob: what decides at which step of the epoch a client is used, where nobody outside may know."""
ORDER_FILES = "order/files"
"""Blob: how far each source of such an epoch had been read before and when it began; salted."""
ARRIVED = "arrived/"
"""Blobs under names that begin so hold records that arrived in a round, until the window in which they are used."""
OPEN_ROUND = "open-round"
"""Blob: what the open round has come to after a group of steps."""
MASKING, MASKED = "masks", "sent-masked"
"""Blobs: keys and decisions that masks need, and the newest masked message."""


def secret_name(epoch: int, step: int) -> str:
    """Blob: a step's secret, until it is destroyed.

    Secrets of steps that were stored together lie one after the other, under the first one's name.
    """
    return f"seed/{epoch}/{step:010d}"


def restore_noise(ledger: Ledger, noisy: NoisySum, epoch: int, steps: int) -> int:
    """Bring an epoch's noise to where its stored steps have come; returns where it was last kept whole."""
    if ledger.names("snapshot"):
        noisy.noise.restore(ledger.blob("snapshot"))
    snapshot_step = noisy.noise.position
    while noisy.noise.position < steps:
        together = ledger.blob(secret_name(epoch, noisy.noise.position))
        for at in range(0, len(together), SEED_BYTES):
            noisy.replay(together[at : at + SEED_BYTES])
    return snapshot_step


@dataclass(frozen=True)
class LearnerParts:
    """What a learner is made of. Audits and studies put their own in place.

    Their epochs are marked in the ledger: no deployed learner goes on with one, and no study's with
    a deployed one. They join a run only where the caller has the same parts in hand; a deployed
    daemon has none.
    """

    ledger: Callable[..., Ledger] = Ledger
    rounds: Callable[[Terms, int], LocalRounds] = LocalRounds
    telemetry: Callable[[Task, Telemetry, float], ClientTelemetry] = ClientTelemetry
    order_secret: Callable[[], bytes] = fresh_secret


DEPLOYED = LearnerParts()


class EpochLedger:
    """One ledger, and the epoch that runs on it. For one thread at a time."""

    local: LocalRounds
    run: str | None
    snapshot_step: int
    """Where the noise was last kept whole."""

    def __init__(
        self,
        plan: Plan,
        terms: Terms,
        store: Path | str,
        witness: Path | str | None,
        *,
        create: bool,
        parts: LearnerParts,
    ) -> None:
        self.plan, self.terms, self._parts = plan, terms, parts
        self._study = parts is not DEPLOYED
        self.broken = False
        """Whether a call was interrupted, so that only a restart may go on."""
        self.model: Float32s | None = None
        self.bookmarks: dict[str, SourceBookmark] = {}
        """How far sources have been read, by name, as far as that is not written down yet."""
        self.not_forgotten = 0
        """Snapshots since this start after which destroyed secrets stayed in the log file: someone read the store."""
        self._forgotten = True  # whether no destroyed secret is left in the log file
        self.ledger = parts.ledger(store, witness, create=create)
        try:
            self._recover()
        except BaseException:
            self.ledger.close()
            raise

    @property
    def epoch(self) -> int:
        """Which mechanism is running, from 0."""
        return self.local.epoch

    @property
    def sums(self) -> bool:
        """Whether only sums over learners may be seen: then no message of one learner ever leaves."""
        return self.plan.trust is not None

    @property
    def epochs_left(self) -> int:
        """How many more epochs a server may lead this learner into (`federation.epochs`)."""
        return max(0, self.plan.federation.epochs - 1 - self.ledger.chain.standing.followed)

    @contextmanager
    def whole_or_broken(self) -> Iterator[None]:
        """For what must be done whole: after an interruption only a restart may go on."""
        self.ledger.check()
        if self.broken:
            raise PrivacyError(
                "an earlier call was interrupted half-way: nothing was released "
                "(start the learner again; it goes on where its store stands)"
            )
        self.broken = True
        yield
        self.broken = False

    def write(self, kind: str, body: Body, *, points: str = "", **more: Any) -> None:
        """Store and witness a record; ``points`` names the crash points on the way."""
        self.ledger.write(kind, body, **more)
        if points:
            self.ledger.reached(f"{points}-stored")
        self.ledger.witness()
        if points:
            self.ledger.reached(f"{points}-witnessed")

    def pin(self, r: int, model: Float32s, digest: str, acknowledged: tuple[int, str] | None) -> None:
        """Begin round r at this model."""
        body = Body(epoch=self.epoch, round=r, x=digest, acknowledged=acknowledged)
        self.write("pin", body, keep={"x": model.tobytes()})
        self.ledger.reached("pinned")
        self.local.pin(model, digest)
        self.model = model

    def write_steps(self, kind: str, body: Body, keep: dict[str, bytes], **clients: Any) -> None:
        """Store and witness steps that memory has taken, and how far the source was read for them."""
        self.write(kind, body, keep=keep | self._bookmark_blobs(), points="step", **clients)
        self.bookmarks = {}

    def write_order(self, keep: dict[str, bytes]) -> None:
        """Bind an epoch with a secret order to its files, once all of its clients are written down."""
        self.write("ordered", Body(epoch=self.epoch), keep=keep | self._bookmark_blobs(), points="ordered")
        self.bookmarks = {}

    def write_arrived(self, body: Body, keep: dict[str, bytes], tags: Sequence[bytes]) -> None:
        """Store and witness who has arrived, their records, and how far the source was read for them."""
        self.write("arrived", body, keep=keep | self._bookmark_blobs(), tags=tags, points="arrived")
        self.bookmarks = {}

    def forget_used(self, names: list[str]) -> None:
        """Destroy records that arrived, after the window in which they were used."""
        self.write("window", Body(epoch=self.epoch, round=self.local.round), destroy=names, points="window")
        self.ledger.forget(wait_s=0.0)  # what stays in the log file is encrypted, and the key goes with the epoch

    def seal(self) -> None:
        """End the open round, whose steps all count, with its message."""
        release = self.local.message()
        body = Body(epoch=release.epoch, round=release.round, hash=release.hash, x=self.local.pinned)
        self.ledger.reached("message-computed")
        self.write("message", body, keep={"message": release.payload} | self._bookmark_blobs(), points="message")
        self.bookmarks = {}
        self.local.seal(release)
        self._after_round()

    def _after_round(self) -> None:
        if self.local.horizon_reached:
            if not self.sums:  # else the last round's sum is still to be opened
                self.destroy_secrets()
        elif self.local.step - self.snapshot_step >= _SNAPSHOT_STEPS:
            self._keep_snapshot()

    def miss(self, noisy: Sequence[Noised], seeds: Sequence[bytes]) -> None:
        """Take and store rounds that this learner was not part of; their noise counts in its next increment."""
        first = self.local.step
        for each in noisy:
            self.local.miss(each)
        release = self.local.missed_message()
        body = Body(epoch=self.epoch, round=release.round, step=first, steps=len(seeds), hash=release.hash)
        keep = {secret_name(self.epoch, first): b"".join(seeds), "message": release.payload}
        self.write("missed", body, keep=keep, points="step")
        self._after_round()

    @property
    def masking(self) -> bytes | None:
        """The state of this epoch's masks, as `keep_masking` kept it; secret."""
        return self.ledger.blob(MASKING) if self.ledger.names(MASKING) else None

    @property
    def masked(self) -> bytes:
        """The newest masked message, as it may be sent."""
        return self.ledger.blob(MASKED)

    def keep_masking(self, kind: str, state: bytes, masked: bytes | None = None, **facts: Any) -> None:
        """Store and witness a state of the masks (and a message), before anything of it leaves.

        ``kind`` is "key", "keys", "mask", "sign", "share", "void" or "opened"; ``facts`` are the body's.
        """
        keep = {MASKING: state} if masked is None else {MASKING: state, MASKED: masked}
        with self.whole_or_broken():
            self.write(kind, Body(epoch=self.epoch, **facts), keep=keep, points="masking")
            if kind == "opened" and facts["counted"]:
                self.local.clear()

    def note_read(self, mark: SourceBookmark) -> None:
        """A source has been read so far: to be stored with the next write."""
        self.bookmarks[mark.source] = mark

    def stored_bookmarks(self) -> list[SourceBookmark]:
        """How far each source had been read, as stored."""
        kept = (self.ledger.blob(name) for name in self.ledger.names(BOOKMARKS))
        return [SourceBookmark(*json.loads(content[_SALT_BYTES:])) for content in kept]

    def _bookmark_blobs(self) -> dict[str, bytes]:
        """With salt: a hash of records stays in the chain for ever, and must not tell of them."""
        return {
            BOOKMARKS + self.ledger.keyed(mark.source.encode()).hex()[:32]: secrets.token_bytes(_SALT_BYTES)
            + json.dumps([mark.source, mark.text]).encode()
            for mark in self.bookmarks.values()
        }

    def _keep_snapshot(self) -> None:
        """Keep the noise's state, so that a restart is quick and old secrets can go."""
        noise = self.local.noise
        self.write(
            "snapshot",
            Body(epoch=self.epoch, step=noise.position),
            keep={"snapshot": noise.snapshot()},
            destroy=self.ledger.names("seed/"),
        )
        self.snapshot_step = noise.position
        self.ledger.reached("snapshot-stored")
        if not self.ledger.forget(wait_s=0.0):
            self.not_forgotten += 1
            if self.not_forgotten == 1:
                _log.warning(
                    "the store is being read, so destroyed secrets stay in its log file until the next snapshot "
                    "(every %d steps or more): close what reads it. Further times are counted and not logged",
                    _SNAPSHOT_STEPS,
                )

    def destroy_secrets(self) -> None:
        """At the end of an epoch.

        While someone reads the store, its log file stays; this is then done again when the learner
        starts, and before a new epoch.
        """
        if not self.ledger.chain.standing.ended:
            left = self.terms.rounds - self.local.round
            body = Body(epoch=self.epoch, rounds_left=left or None)
            own = self.ledger.names("message") if self.sums else []  # it was never sent, and never may be
            self.write("end", body, destroy=[*self.ledger.chain.secrets, *own])
        self._forgotten = self.ledger.forget()
        remove_index(self.ledger.path)
        self.ledger.reached("epoch-closed")

    def join(self, run: str, parts: LearnerParts) -> None:
        """Give this epoch to one run of the server."""
        if self._parts is not parts:
            raise InputError("run", run, "no run", "this learner is an audit's or a study's, not a deployment's")
        if self.run is None:
            with self.whole_or_broken():
                self.write("join", Body(epoch=self.epoch, run=run))
            self.run = run
        elif self.run != run:
            raise InputError(
                "run",
                run,
                f"run {self.run!r}, which this learner's epoch {self.epoch} is for",
                "finish that one; `veilstream ledger epoch` begins an epoch with new clients",
            )

    def end(self) -> None:
        """End this epoch now, whatever rounds are left; an open round is dropped."""
        if self.local.over and self.ledger.chain.standing.ended:
            return
        with self.whole_or_broken():
            sealed, model, rounds = self.local.sealed, self.local.sealed_model, self.local.round
            self.local = self.new_rounds(self.epoch)  # the noise's state goes with the old one
            if self.sums:
                self.local.round = rounds
            elif sealed is not None:
                self.local.resume(sealed.payload, model)
            self.local.end()
            self.destroy_secrets()

    def follow(self, run: str, ended: Collection[str]) -> bool:
        """Go along into the server's next run, if the plan allows; whether an epoch was begun."""
        if self.run is None or self.run == run or self.run not in ended:
            return False
        self.end()
        if not self.epochs_left:
            allowed = self.plan.federation.epochs
            raise InputError(
                "run",
                run,
                f"at most {allowed} epochs under one plan (federation.epochs), which this learner has been through",
                "its operator begins another with `veilstream ledger epoch`, for new clients",
            )
        if not self._forgotten:
            self._forget_or_refuse()
        followed = self.ledger.chain.standing.followed + 1
        with self.whole_or_broken():
            self._write_epoch(self.epoch + 1, followed=followed, run=run)
            self.run = run
        return True

    def begin_next(self) -> None:
        """Start a fresh mechanism, if this one is over."""
        if not self.local.over:
            raise PrivacyError(
                f"epoch {self.epoch} has {self.terms.rounds - self.local.round} rounds left: nothing was "
                "released (a new one may start when its horizon has ended; "
                "`veilstream ledger epoch --abandon` gives it up)"
            )
        self.end()
        if not self._forgotten:
            self._forget_or_refuse()
        with self.whole_or_broken():
            self._write_epoch(self.epoch + 1)

    def _forget_or_refuse(self) -> None:
        """No epoch begins while secrets of the last one may lie in the log file."""
        if not self.ledger.forget():
            raise LedgerError(
                "the store is being read, so destroyed secrets may stay in its log",
                "close what reads it, then ask again",
            )

    def _write_epoch(self, epoch: int, *, followed: int | None = None, run: str | None = None) -> None:
        body = Body(epoch=epoch, settings=self.terms.settings, followed=followed, run=run, study=self._study or None)
        keep = None
        remove_index(self.ledger.path)
        if self.plan.order == "secret":
            keep = {ORDER_SECRET: checked_seed(self._parts.order_secret())}
        self.write("epoch", body, keep=keep, destroy=self.ledger.names("message"))
        self._begin(epoch)

    def _begin(self, epoch: int) -> None:
        self.local = self.new_rounds(epoch)
        self.snapshot_step, self.run = 0, None

    def new_rounds(self, epoch: int) -> LocalRounds:
        """The rounds of an epoch, before the first."""
        return self._parts.rounds(self.terms, epoch)

    def _recover(self) -> None:
        standing = self.ledger.chain.standing
        if standing.between:
            # A store's first epoch, or one that `veilstream ledger epoch` asked for.
            self._forget_or_refuse()
            self._write_epoch(standing.epoch + 1)
            return
        assert standing.settings is not None
        check_settings(self.terms.settings, standing.settings)
        if standing.study != self._study:
            began, opens = ("a study's", "a deployed") if standing.study else ("a deployed", "a study's")
            raise LedgerError(
                f"{began} learner began epoch {standing.epoch}, and {opens} one opens it",
                "give each a store of its own",
            )
        self._begin(standing.epoch)
        self.run = standing.run
        local, ledger = self.local, self.ledger
        if ledger.names("x"):
            self.model = np.frombuffer(ledger.blob("x"), "<f4").astype(np.float32)
        if self.sums and standing.ended:
            local.round = standing.rounds
        elif standing.rounds:
            local.resume(ledger.blob("message"), standing.sealed_model)
        if standing.cleared:
            local.clear()
        if standing.ended:
            local.end()
        if local.over and (standing.ended or not self.sums):
            self.destroy_secrets()
        if local.over:  # its noise is not restored: the secrets are destroyed, or of no use
            return
        self.snapshot_step = restore_noise(ledger, local, local.epoch, standing.steps)
        if standing.pinned is not None:
            assert self.model is not None
            local.pin(self.model, standing.pinned)
            if ledger.names(OPEN_ROUND):
                local.restore_open(ledger.blob(OPEN_ROUND))
            for t in range(local.taken, local.taken + standing.steps - local.step):
                local.apply(unpack_step(ledger.blob(f"noisy/{t}")))

    def last_release(self) -> Release:
        """The last sealed round's message."""
        self.ledger.check()
        if self.local.sealed is None:
            raise InputError("round", None, "a round that has been finished", "begin_round first")
        return self.local.sealed
