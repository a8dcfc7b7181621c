"""The deployed learner: Algorithm 1 beside one data source, one client at a time, never twice.

    learner = Learner(plan, "store.db", task)
    learner.begin_round(r, x)
    learner.observe(tag, sample)        up to τ times
    release = learner.finish_round()    send release.payload

**Guarantees**, against the server and everyone who reads what is sent, whatever x the server
chooses: `learner.guarantee` for every client's record (replace-one neighbours, one participation,
the whole horizon; lem-priv-analy with exact accounting), also through crashes, retries and restored
backups. What is sent is the prefix sum of clipped gradients and correlated noise on a common grid
(`veilstream.privacy.grid`), of a size that does not depend on the data.

Order of durable writes (see `veilstream.ledger`): the pinned model and the round's noise seeds;
for every step the client's tag and the noisy step; the message. Each is witnessed before anything
that depends on it leaves. After a crash, steps that were not stored get fresh seeds, so no row of
noise ever meets two gradients; stored ones are repeated to the bit.
"""

from __future__ import annotations

import enum
import hashlib
import json
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NewType

import numpy as np
from numpy.typing import NDArray

from veilstream.engines.build import prepare
from veilstream.engines.plan import MethodPlan, Plan
from veilstream.errors import InputError, LedgerError, PrivacyError
from veilstream.learning.admission import Admission
from veilstream.learning.tasks import Sample, Task
from veilstream.ledger.points import reached
from veilstream.ledger.store import Ledger
from veilstream.mechanisms.keystream import KEY_BYTES, NoiseKey, row_opener
from veilstream.mechanisms.stream import NoiseStream
from veilstream.privacy import calibrate
from veilstream.privacy.clipping import Clipped, clip
from veilstream.privacy.grid import OnGrid, grid_for

__all__ = ["Answer", "Learner", "Noised", "Release"]

Float32s = NDArray[np.float32]
Int64s = NDArray[np.int64]

Noised = NewType("Noised", bytes)
"""What may be sent: made by `Learner.finish_round` alone."""

_MAGIC = b"VEIL0001"
_HEADER = struct.Struct("<8sIIQid")  # magic, epoch, round, steps so far, d, grid
_SNAPSHOT_STEPS = 64


class Answer(enum.Enum):
    """All that a client is told; the same whatever became of its data."""

    TAKEN = "taken"
    REFUSED = "refused"


@dataclass(frozen=True)
class Release:
    """A round's message, and its hash, which the server acknowledges."""

    epoch: int
    round: int
    payload: Noised
    hash: str

    def __repr__(self) -> str:
        return f"Release(epoch={self.epoch}, round={self.round}, {len(self.payload)} bytes)"


class Learner:
    """One data source's side of a run. Open until `close`; a store has one learner at a time."""

    _epoch: int
    _round: int
    _taken: int  # steps of the open round that are stored
    _snapshot_at: int
    _pinned: str | None  # hash of the open round's model
    _sealed_model: str | None  # hash of the last finished round's model
    _z: Float32s
    _prefix: Int64s  # all noisy steps of the epoch, in units of the grid
    _noise_prefix: NDArray[np.float64]
    _noise: NoiseStream

    def __init__(
        self,
        plan: Plan,
        store: Path | str,
        task: Task,
        *,
        witness: Path | str | None = None,
        model_norm_cap: float = 1e6,
    ) -> None:
        self._method = _deployable(plan)
        self._plan, self._task = plan, task
        self._admission = Admission.of(task)
        prepared = prepare(plan, self._method)
        assert prepared.factorization is not None
        self._tau, self._rounds = prepared.steps, plan.learning.rounds
        # One step at a time: the mechanism whose sensitivity counts is the one in blocks of one.
        self._mechanism = prepared.factorization.with_block_length(1)
        self.noise_std, self.guarantee = calibrate(
            plan.budget_of(self._method), self._mechanism, plan.clip_norm_of(self._method),
            neighbours=plan.neighbours, accounting=plan.accounting_of(self._method),
        )  # fmt: skip
        self.grid = grid_for(plan.clip_norm_of(self._method), self.noise_std)
        self._cap = model_norm_cap
        self._gradient = _compiled(task)
        self._ledger = Ledger(store, witness)
        try:
            self._recover()
        except BaseException:
            self._ledger.close()
            raise

    # --- where it stands -------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Which mechanism is running, from 0."""
        return self._epoch

    @property
    def round(self) -> int:
        """The round that is open, or is to be begun next."""
        return self._round

    @property
    def horizon_reached(self) -> bool:
        """Whether every round of this epoch has been sealed."""
        return self._round == self._rounds

    # --- a round ---------------------------------------------------------------------------------

    def begin_round(
        self, r: int, x: NDArray[Any], acknowledged: tuple[int, str] | None = None
    ) -> None:
        """Pin the model of round r; refused before any client's data are read if anything is wrong.

        ``acknowledged`` is the last (round, hash) that the server has accepted from this learner:
        if it is newer than the store, the store is an old copy.
        """
        self._check_acknowledged(acknowledged)
        model = self._checked_model(x)
        digest = hashlib.sha256(model.tobytes()).hexdigest()
        if r == self._round - 1 and self._sealed_model == digest:
            return  # asked again for what is sealed: finish_round repeats it
        if r != self._round:
            raise InputError(
                "round", r, f"round {self._round}, which comes next", "rounds come in order, once"
            )
        if self.horizon_reached:
            raise PrivacyError(
                f"round {r} is past the horizon of {self._rounds} rounds: nothing was released "
                "(new_epoch() starts a fresh mechanism with new clients)"
            )
        if self._pinned is not None:
            if self._pinned != digest:
                raise PrivacyError(
                    f"round {r} was begun with another model: nothing was released "
                    "(a learner answers one model a round)"
                )
            return
        first = r * self._tau
        seeds = {
            self._seed_name(first + t): secrets.token_bytes(KEY_BYTES) for t in range(self._tau)
        }
        self._ledger.write(
            "pin", {"epoch": self._epoch, "round": r, "x": digest},
            keep={"x": model.tobytes(), **seeds}, destroy=self._ledger.names("x"),
        )  # fmt: skip
        self._ledger.witness()
        reached("pinned")
        self._pinned, self._z = digest, model.copy()

    def observe(self, client: bytes | str, sample: Sample) -> Answer:
        """Take one client: clip, add noise, step, store, forget the data, answer.

        A client who was taken before is answered and not used. Data that cannot be used at all are
        refused before the step; data whose gradient turns out unusable count as a zero gradient.
        """
        tag = self._ledger.keyed(client.encode() if isinstance(client, str) else bytes(client))
        if self._ledger.times(tag):
            return Answer.TAKEN
        if self._pinned is None:
            raise InputError("round", None, "a round that has been begun", "call begin_round")
        if self._taken == self._tau:
            raise InputError(
                "client", "<not shown>", f"at most {self._tau} clients a round", "finish_round"
            )
        if not self._admission.accepts(sample):
            return Answer.REFUSED
        self._step(self._clipped_gradient(sample), tag)
        return Answer.TAKEN

    def finish_round(self) -> Release:
        """Seal the round and return its message: the same bytes however often it is asked.

        Steps without a client have a zero gradient and keep their noise.
        """
        if self._pinned is None:
            return self._last_release()
        nobody = Clipped(np.zeros(self._task.dim, np.float32))
        while self._taken < self._tau:
            self._step(nobody, None)
        steps = (self._round + 1) * self._tau
        header = _HEADER.pack(
            _MAGIC, self._epoch, self._round, steps, self._task.dim, self.grid.step
        )
        payload = header + self._prefix.astype("<i8").tobytes()
        digest = hashlib.sha256(payload).hexdigest()
        reached("message-computed")
        old = [*self._ledger.names("noisy/"), *self._ledger.names("message")]
        self._ledger.write(
            "message", {"epoch": self._epoch, "round": self._round, "hash": digest,
                        "x": self._pinned},
            keep={"message": payload}, destroy=old,
        )  # fmt: skip
        reached("message-stored")
        self._ledger.witness()
        reached("message-witnessed")
        self._sealed_model, self._pinned = self._pinned, None
        self._round, self._taken = self._round + 1, 0
        if self.horizon_reached:
            self._destroy_secrets()
        elif steps - self._snapshot_at >= _SNAPSHOT_STEPS:
            self._keep_snapshot()
        return self._last_release()

    def acknowledge(self, r: int, digest: str) -> None:
        """Remember that the server has accepted round r's message."""
        release = self._last_release()
        if (r, digest) != (release.round, release.hash):
            raise InputError(
                "acknowledged", (r, digest), f"round {release.round} and its hash",
                "the server acknowledges what it was sent",
            )  # fmt: skip
        body = {"epoch": self._epoch, "round": r, "hash": digest}
        if not any(rec.kind == "ack" and rec.body == body for rec in self._ledger.records[-4:]):
            self._ledger.write("ack", body)
            self._ledger.witness()
        reached("acknowledged")

    def new_epoch(self) -> None:
        """Start a fresh mechanism for new clients; those who took part are never taken again."""
        if not self.horizon_reached:
            raise PrivacyError(
                f"epoch {self._epoch} has {self._rounds - self._round} rounds left: a new one may "
                "start when its horizon has ended (veilstream ledger epoch --abandon gives it up)"
            )
        self._write_epoch(self._epoch + 1)

    def close(self) -> None:
        """Let go of the store."""
        self._ledger.close()

    def __enter__(self) -> Learner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- a step ----------------------------------------------------------------------------------

    def _clipped_gradient(self, sample: Sample) -> Clipped:
        """Never raises: what cannot be used becomes zero, and uses up its step."""
        try:
            raw = np.asarray(self._gradient(self._z, sample), np.float32)
        except Exception:  # a client's data must not be able to stop or steer a learner
            raw = np.zeros(self._task.dim, np.float32)
        if raw.shape != (self._task.dim,):
            raw = np.zeros(self._task.dim, np.float32)
        return clip(raw, self.grid.clip_norm)

    def _step(self, clipped: Clipped, tag: bytes | None) -> None:
        step = self._round * self._tau + self._taken
        units: OnGrid = self.grid.gradient(clipped)
        before = self.grid.noise(self._noise_prefix)
        self._noise_prefix += self._noise.step()
        noisy: Int64s = units + (self.grid.noise(self._noise_prefix) - before)
        reached("step-computed")
        self._ledger.write(
            "step", {"epoch": self._epoch, "step": step},
            keep={self._noisy_name(step): noisy.astype("<i8").tobytes()}, tag=tag,
        )  # fmt: skip
        reached("step-stored")
        self._ledger.witness()
        reached("step-witnessed")
        self._apply(noisy)

    def _apply(self, noisy: Int64s) -> None:
        """Move the local model and the prefix by a noisy step."""
        size = self._method.step_size * (1.0 + self._round) ** -self._method.step_decay
        self._z = self._z - np.float32(size) * self.grid.value(noisy)
        if radius := self._plan.learning.projection_radius:
            length = float(np.linalg.norm(self._z))
            self._z = self._z * np.float32(min(1.0, radius / length if length else 1.0))
        self._prefix = self._prefix + noisy
        self._taken += 1

    # --- recovery --------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Bring memory to where the ledger stands."""
        settings = self._settings()
        epochs = [r for r in self._ledger.records if r.kind == "epoch"]
        if not epochs:
            self._write_epoch(0)
            return
        stored = epochs[-1].body
        if stored["settings"] != settings:
            changed = [k for k in settings if stored["settings"].get(k) != settings[k]]
            before = {k: stored["settings"].get(k) for k in changed}
            raise InputError(
                "plan", {k: settings[k] for k in changed},
                f"what this store was begun with: {before}",
                "use the same plan, or another store with other clients",
            )  # fmt: skip
        self._begin_epoch(stored["epoch"])
        pinned = None
        steps = 0
        for record in self._ledger.records[epochs[-1].number + 1 :]:
            if record.kind == "pin":
                pinned = record.body["x"]
            elif record.kind == "step":
                steps += 1
            elif record.kind == "message":
                self._round, self._sealed_model, pinned = record.body["round"] + 1, pinned, None
        if self._round:
            payload = self._ledger.blob("message")
            self._prefix = np.frombuffer(payload, "<i8", offset=_HEADER.size).astype(np.int64)
        if self.horizon_reached:
            if self._ledger.names("seed/") or self._ledger.names("snapshot"):
                self._destroy_secrets()
            return
        self._restore_noise(steps)
        if pinned is not None:
            self._pinned = pinned
            self._z = np.frombuffer(self._ledger.blob("x"), "<f4").astype(np.float32)
            for step in range(self._round * self._tau, steps):
                content = self._ledger.blob(self._noisy_name(step))
                self._apply(np.frombuffer(content, "<i8").astype(np.int64))
            self._reseed(steps)

    def _reseed(self, done: int) -> None:
        """Fresh seeds for steps that are not stored: what a crash left behind is never used."""
        names = [self._seed_name(s) for s in range(done, (self._round + 1) * self._tau)]
        if names:
            fresh = {name: secrets.token_bytes(KEY_BYTES) for name in names}
            self._ledger.write("reseed", {"epoch": self._epoch}, keep=fresh, destroy=names)
            self._ledger.witness()

    def _restore_noise(self, steps: int) -> None:
        if self._ledger.names("snapshot"):
            content = self._ledger.blob("snapshot")
            (position,) = struct.unpack("<Q", content[:8])
            d = self._task.dim
            self._noise_prefix = np.frombuffer(content, "<f8", count=d, offset=8).copy()
            state = np.frombuffer(content, "<f4", offset=8 + 8 * d).reshape(-1, d)
            self._noise.restore(position, state)
            self._snapshot_at = position
        while self._noise.position < steps:
            self._noise_prefix += self._noise.step()

    def _keep_snapshot(self) -> None:
        """Noise state, so that a restart is quick and old seeds can go."""
        position, state = self._noise.snapshot()
        content = struct.pack("<Q", position) + self._noise_prefix.astype("<f8").tobytes()
        content += state.astype("<f4").tobytes()
        old = [*self._ledger.names("snapshot"), *self._ledger.names("seed/")]
        self._ledger.write(
            "snapshot", {"epoch": self._epoch, "step": position},
            keep={"snapshot": content}, destroy=old,
        )  # fmt: skip
        self._ledger.witness()
        self._snapshot_at = position
        reached("snapshot-stored")

    def _destroy_secrets(self) -> None:
        old = [
            *self._ledger.names("seed/"),
            *self._ledger.names("snapshot"),
            *self._ledger.names("x"),
        ]
        self._ledger.write("end", {"epoch": self._epoch}, destroy=old)
        self._ledger.witness()
        self._ledger.forget()
        reached("epoch-closed")

    # --- epochs and checks -----------------------------------------------------------------------

    def _write_epoch(self, epoch: int) -> None:
        self._ledger.write(
            "epoch", {"epoch": epoch, "settings": self._settings()},
            destroy=self._ledger.names("message"),
        )  # fmt: skip
        self._ledger.witness()
        self._begin_epoch(epoch)

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch, self._round, self._taken, self._snapshot_at = epoch, 0, 0, 0
        self._pinned = self._sealed_model = None
        self._z = np.zeros(self._task.dim, np.float32)
        self._prefix = np.zeros(self._task.dim, np.int64)
        self._noise_prefix = np.zeros(self._task.dim, np.float64)
        self._noise = NoiseStream(
            self._mechanism.program,
            std=self.noise_std,
            dim=self._task.dim,
            open_row=self._open_row,
            private=True,
        )

    def _open_row(self, step: int) -> Any:
        """Keystream of a step's own seed, from the ledger."""
        return row_opener(NoiseKey(self._ledger.blob(self._seed_name(step))))(step)

    def _settings(self) -> dict[str, Any]:
        """All that the guarantee rests on; a store keeps to it."""
        settings: dict[str, Any] = {
            "d": self._task.dim,
            "rounds": self._rounds,
            "local_steps": self._tau,
            "mechanism": self._mechanism.name,
            "clip_norm": self.grid.clip_norm,
            "noise_std": self.noise_std,
            "grid": self.grid.step,
            "guarantee": self.guarantee.as_dict(),
        }
        as_stored: dict[str, Any] = json.loads(json.dumps(settings))
        return as_stored

    def _checked_model(self, x: NDArray[Any]) -> Float32s:
        try:
            model = np.ascontiguousarray(x, np.float32)
        except (TypeError, ValueError):
            raise InputError(
                "x", type(x).__name__, "an array of numbers", "check the server"
            ) from None
        if model.shape != (self._task.dim,):
            raise InputError(
                "x", f"shape {model.shape}", f"shape ({self._task.dim},)", "check the server"
            )
        length = float(np.sqrt((model.astype(np.float64) ** 2).sum()))
        if not np.isfinite(length) or length > self._cap:
            raise InputError(
                "x", f"norm {length}", f"a norm of at most {self._cap:g}", "check the server"
            )
        return model

    def _check_acknowledged(self, acknowledged: tuple[int, str] | None) -> None:
        if acknowledged is None:
            return
        r, digest = acknowledged
        known = {
            record.body["round"]: record.body["hash"]
            for record in self._ledger.records
            if record.kind == "message" and record.body["epoch"] == self._epoch
        }
        if known.get(r) != digest:
            raise LedgerError(
                f"the server has accepted round {r} with hash {digest[:16]}, which this store "
                f"{'does not know' if r not in known else 'knows with another hash'}",
                "this store is an old copy: put the newest one back",
            )

    def _last_release(self) -> Release:
        messages = [r for r in self._ledger.records if r.kind == "message"]
        if not messages or messages[-1].body["epoch"] != self._epoch:
            raise InputError("round", None, "a round that has been finished", "begin_round first")
        body = messages[-1].body
        payload = Noised(self._ledger.blob("message"))
        return Release(body["epoch"], body["round"], payload, body["hash"])

    def _seed_name(self, step: int) -> str:
        return f"seed/{self._epoch}/{step:010d}"

    def _noisy_name(self, step: int) -> str:
        return f"noisy/{self._epoch}/{step:010d}"


def _deployable(plan: Plan) -> MethodPlan:
    """The plan's one private method."""
    private = [m for m in plan.methods if m.method.private]
    if len(private) != 1:
        raise InputError(
            "methods", [m.name for m in plan.methods], "exactly one private method",
            "a learner runs one; keep comparisons for simulation",
        )  # fmt: skip
    if plan.learning.clients_per_step != 1 or not private[0].method.local_updates:
        raise InputError(
            "learning.clients_per_step", plan.learning.clients_per_step, "1",
            "a deployed learner takes one client a step",
        )  # fmt: skip
    return private[0]


def _compiled(task: Task) -> Callable[[Float32s, Sample], Any]:
    import jax

    gradient = jax.jit(task.gradient)
    return lambda z, sample: gradient(
        z, Sample(np.asarray(sample.features), np.asarray(sample.target))
    )
