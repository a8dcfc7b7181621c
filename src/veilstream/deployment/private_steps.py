"""A training loop's releases: one noisy gradient a step, and the ledger that remembers what was spent.

What `vs.torch` and `vs.optax` are made of. One step is one durable write (`veilstream.deployment.ledger`): who
took part, the secret that the step's noise was drawn from, fresh from the operating system, and the noisy gradient,
all witnessed before the gradient is handed out. After a crash a step that was not stored is as if it had never been,
secret and all, so no row of noise ever meets two gradients; the last stored ones are handed out again to the bit.
No clocks, sockets or frameworks here.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.epochs import ORDER_SECRET, restore_noise, secret_name
from veilstream.deployment.ledger.chain import Body
from veilstream.deployment.ledger.store import Ledger
from veilstream.deployment.ledger.visits import checked_tag
from veilstream.deployment.local_rounds import NoisySum, pack_step, unpack_step
from veilstream.deployment.process_secrecy import no_core_dumps, without_values
from veilstream.deployment.terms import NOISE_LAW, causes, differences, program_digest, settings_digest
from veilstream.errors import HorizonExhausted, InputError, PrivacyError
from veilstream.mechanisms import Factorization, Participation
from veilstream.mechanisms.keystream import fresh_secret
from veilstream.privacy.gradient_types import ClippedGradient, add_noise
from veilstream.privacy.guarantee import Accounting, Budget, Guarantee, Neighbours, Order
from veilstream.privacy.noise_law import ReleaseNoise, calibrate_release
from veilstream.privacy.seeds import check_generator_once, checked_seed
from veilstream.records.participation import MOST_TOGETHER, Epochs, spent

Float32s = NDArray[np.float32]
_SNAPSHOT_STEPS = 64
_WORTH_A_SNAPSHOT = 8  # steps since the last one, at a regular end
_LARGEST_BLOB = 900_000_000  # SQLite's limit is 10^9 bytes
_MOST_TOGETHER = 2048
_MODEL, _NOISY, _NOTE = "model", "noisy/", "note/"
_STEP = struct.Struct("<Q")
_WORKED_OUT = frozenset(["noise_std", "grid", "program"]) | {
    f"guarantee.{name}"
    for name in ("clip_norm", "noise_std", "mu", "sensitivity", "epsilon_exact", "arithmetic_mu", "arithmetic_delta")
}
"""What follows from the settings that a script gives."""


@dataclass(frozen=True, kw_only=True)
class StepTerms:
    """What a training loop promises, and what it is a promise about."""

    noise: ReleaseNoise
    clients_per_step: int
    dim: int
    about: dict[str, Any]
    """What else a store belongs to: the model's parameters, the records, their order."""

    @classmethod
    def of(
        cls,
        budget: Budget,
        mechanism: Factorization,
        clip_norm: float,
        dim: int,
        *,
        clients_per_step: int,
        participation: Participation,
        accounting: Accounting | str = Accounting.EXACT,
        order: Order | str = Order.KNOWN,
        neighbours: Neighbours | str = Neighbours.REPLACE_ONE,
        about: dict[str, Any],
    ) -> StepTerms:
        """Least noise that keeps the budget for steps of so many clients (`calibrate_release`)."""
        if not 1 <= clients_per_step <= _MOST_TOGETHER:
            raise InputError("batch_size", clients_per_step, f"1 to {_MOST_TOGETHER} records a step", "smaller batches")
        noise = calibrate_release(
            budget,
            mechanism,
            clip_norm,
            dim,
            participation=participation,
            accounting=accounting,
            clients_per_step=clients_per_step,
            order=order,
            neighbours=neighbours,
        )
        if 8 * dim * (noise.mechanism.program.state_size + 2) > _LARGEST_BLOB:
            raise InputError(
                "mechanism",
                f"{noise.mechanism.program.state_size} state vectors of {dim} numbers",
                f"state of at most {_LARGEST_BLOB // 10**6} MB, which the store can keep",
                "fewer buffers or bands, or train fewer parameters",
            )
        return cls(noise=noise, clients_per_step=clients_per_step, dim=dim, about=about)

    @property
    def guarantee(self) -> Guarantee:
        """The promise."""
        return self.noise.guarantee

    @property
    def secretly(self) -> bool:
        """Whether every record chooses its step unseen."""
        return self.guarantee.order is Order.SECRET

    @property
    def settings(self) -> dict[str, Any]:
        """As JSON holds them: kept in the ledger, compared whenever it is opened."""
        return settings_digest(
            {
                "kind": "training loop",
                "d": self.dim,
                "mechanism": self.noise.mechanism.name,
                "clip_norm": self.noise.grid.clip_norm,
                "noise_std": self.noise.std,
                "grid": self.noise.grid.step,
                "guarantee": self.guarantee.as_dict(),
                "noise_law": NOISE_LAW,
                "program": program_digest(self.noise.mechanism.program),
                **self.about,
            }
        )


class Resumed(NamedTuple):
    """Where a loop was interrupted: its state before a step, and the noisy gradients from that step on."""

    state: bytes
    step: int
    """The step that the state is from just before."""
    notes: list[bytes]
    gradients: list[Float32s]


class PrivateSteps:
    """Noisy mean gradients, one a step, through crashes. Open until `close`; a store has one at a time.

    **Guarantees**: `guarantee` for every client's record (unit: one client's record; the neighbours,
    participation and horizon that it names), against whoever sees all gradients that `take` returns and
    everything that is computed from them, and chooses each next model by them (adaptive continual release;
    lem-priv-analy with the law of `veilstream.privacy.grid_noise`). It presumes that clients' gradients
    reach the outside through `take` alone, and that no record is used in another store besides. Who is in which
    step is taken to be known; under a secret order, drawn by `order_secret`, unseen by anyone outside: all clients are
    written down before the first step (`enrol`), and steps without them.

    Args:
        terms: the promise.
        store: the ledger's file; begun where there is none.
        witness: the second file, best on another disk, by which an old copy of the store is recognised; beside
            the store where it is left out.
        begun: what to keep with a new store, by name (`kept`).
        state_steps: every so many steps the loop's own state is kept, for `resumed`; None for never.
        noisy_sum: for studies, which need known draws; a deployed loop leaves it out.

    Raises:
        InputError: for a store that was begun with other terms.
        LedgerError: for a store that is damaged, or older than its witness remembers.
        StoreBusy: while another process has it.

    """

    @without_values
    def __init__(
        self,
        terms: StepTerms,
        store: Path | str,
        *,
        witness: Path | str | None = None,
        begun: dict[str, bytes] | None = None,
        state_steps: int | None = None,
        noisy_sum: type[NoisySum] = NoisySum,
    ) -> None:
        no_core_dumps()
        check_generator_once(fresh_secret)
        self.terms, self.guarantee, self.grid = terms, terms.guarantee, terms.noise.grid
        self.horizon = terms.noise.mechanism.horizon
        self._state_steps = state_steps
        self._study = noisy_sum is not NoisySum
        self._process = os.getpid()
        self._one_call = threading.RLock()
        self._broken = False
        self._ahead: tuple[bytes, Future[NDArray[np.int64]]] | None = None
        self._beside = ThreadPoolExecutor(1, "veilstream-noise")
        self.ledger = Ledger(store, witness, create=True)
        try:
            self._recover(begun or {}, noisy_sum)
        except BaseException:
            self.close()
            raise

    @property
    def step(self) -> int:
        """How many steps have been taken; also the number of the next one."""
        return self.ledger.chain.standing.steps

    @property
    def over(self) -> bool:
        """Whether no noise is left."""
        return self.step >= self.horizon

    def kept(self, name: str) -> bytes:
        """What was kept under this name when the store was begun."""
        return self.ledger.blob(name)

    @property
    def order_secret(self) -> bytes | None:
        """What records choose their steps by (`records.secret_order`); None without a secret order, or at the end."""
        return self.ledger.blob(ORDER_SECRET) if self.ledger.names(ORDER_SECRET) else None

    @without_values
    def enrol(self, clients: Sequence[bytes | str]) -> None:
        """Count these clients, all of a secret order, as taking part; done before, nothing happens.

        Raises:
            InputError: for a client who took part before, or comes twice.

        """
        self._check_open()
        if self.ledger.chain.standing.ordered:
            return
        epoch = self.ledger.chain.epoch
        tags = sorted(self.ledger.keyed(checked_tag(client)) for client in clients)
        past = self.ledger.past_visits(tags) if self.ledger.chain.visits.value().count else {}
        if len(set(tags)) < len(tags) or any(visit.epoch != epoch for visit in past.values()):
            raise InputError("clients", "<not shown>", "clients who come once, and never came before", "other records")
        missing = [tag for tag in tags if tag not in past]
        for first in range(0, len(missing), MOST_TOGETHER):
            body = Body(epoch=epoch, step=0, places=MOST_TOGETHER)
            self._write("clients", body, tags=missing[first : first + MOST_TOGETHER], points="clients")
        self._write("ordered", Body(epoch=epoch), points="ordered")

    @without_values
    def check(self, clients: Sequence[bytes | str]) -> list[bytes]:
        """Their keyed tags, if these clients may be used in the next step together; spends nothing.

        Raises:
            InputError: for clients who may not.
            PrivacyError: past the horizon, or after an interruption.

        """
        self._check_open()
        if len(clients) > self.terms.clients_per_step:
            raise InputError("batch", len(clients), f"at most {self.terms.clients_per_step} records", "smaller batches")
        tags = [self.ledger.keyed(checked_tag(client)) for client in clients]
        if len(set(tags)) < len(tags):
            raise InputError(
                "batch",
                f"{len(tags) - len(set(tags))} of {len(tags)} records",
                "at most one record of each client",
                "another order, or smaller batches",
            )
        past, allowed = self.ledger.past_visits(tags), self.guarantee.participation
        epoch = Epochs(self.ledger.chain.epoch)
        why = [spent([past[tag]], self.step, allowed, epoch) for tag in tags if tag in past]
        if late := [each for each in why if each is not None]:
            raise InputError(
                "batch",
                f"{len(late)} of {len(tags)} records ({late[0]})",
                f"records that take part {allowed}",
                "a loader that neither repeats nor drops records, or more passes in the promise",
            )
        return tags

    @without_values
    def take(
        self,
        clients: Sequence[bytes | str] | None,
        gradient: Callable[[], ClippedGradient],
        state: Callable[[], bytes] | None = None,
        note: bytes = b"",
    ) -> Float32s:
        """The next step: these clients' summed, clipped and noised gradient over `clients_per_step`.

        Args:
            clients: who is in the step, each once; None under a secret order, where `enrol` was told.
            gradient: computes what they contribute, once; noise is drawn meanwhile. If it raises, nothing is spent.
            state: the loop's own state before this step, for `resumed`; asked for every ``state_steps`` steps.
            note: to be given back by `resumed` with this step's gradient.

        Returns:
            What may be used, shown and sent: everything computed from it is as private.

        Raises:
            InputError: for clients who may not be used in this step.
            HorizonExhausted: after the last step.
            PrivacyError: after an interruption, or in another process.
            LedgerError: where the store can no longer be trusted.

        """
        with self._one_call:
            if (clients is None) is not self.terms.secretly:
                raise InputError("clients", type(clients).__name__, "None exactly under a secret order", "enrol(...)")
            if clients is None and not self.ledger.chain.standing.ordered:
                raise InputError("clients", None, "all of them, before the first step", "enrol(...)")
            self._check_open()
            tags = [] if clients is None else self.check(clients)
            seed, cells = self._next_noise()
            clipped = gradient()
            moved = cells.result()
            if clipped.reveal().shape != moved.shape:
                raise InputError("gradient", clipped.reveal().shape, f"shape {moved.shape}", "one model")
            self._ahead = None
            self._broken = True
            noisy = add_noise(clipped, moved)
            self.ledger.reached("step-computed")
            self._store(tags, seed, pack_step(noisy), state, note)
            if self.over:
                self._end()
            elif self.step - self._snapshot_step >= _SNAPSHOT_STEPS:
                self._keep_snapshot()
            self._broken = False
            return self.grid.value(noisy)

    def resumed(self) -> Resumed | None:
        """The loop's last kept state, and what was handed out since; None before the first step."""
        if not self.ledger.names(_MODEL):
            return None
        content = self.ledger.blob(_MODEL)
        (first,) = _STEP.unpack_from(content)
        steps = range(first, self.step)
        gradients = [self.grid.value(unpack_step(self.ledger.blob(f"{_NOISY}{step:010d}"))) for step in steps]
        notes = [self.ledger.blob(f"{_NOTE}{step:010d}") for step in steps]
        return Resumed(content[_STEP.size :], first, notes, gradients)

    def close(self) -> None:
        """Let go of the store."""
        self._beside.shutdown(wait=True)
        unhurt = hasattr(self, "_snapshot_step") and not (self._broken or self.ledger.failed or self._ahead)
        if unhurt and not self.over and self.step - self._snapshot_step >= _WORTH_A_SNAPSHOT:
            self._keep_snapshot()  # so that the next round begins quickly
        self._ahead = None
        self.ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("private steps cannot be copied: their noise would be used twice")

    def _recover(self, begun: dict[str, bytes], noisy_sum: type[NoisySum]) -> None:
        standing, settings = self.ledger.chain.standing, self.terms.settings
        if standing.between:
            body = Body(epoch=standing.epoch + 1, settings=settings, study=self._study or None)
            if self.terms.secretly:
                begun = begun | {ORDER_SECRET: checked_seed(fresh_secret())}
            self._write("epoch", body, keep=begun, destroy=self.ledger.names("") or None)
        else:
            assert standing.settings is not None
            if unlike := causes(differences(settings, standing.settings)):
                changed = {key: pair for key, pair in unlike.items() if key not in _WORKED_OUT} or unlike
                raise InputError(
                    "store",
                    {key: now for key, (now, _) in changed.items()},
                    f"what {self.ledger.path} was begun with: { {key: then for key, (_, then) in changed.items()} }",
                    "the same model, loader and budget as before; another training run needs a store and records "
                    "of its own",
                )
            if standing.study != self._study:
                raise InputError("store", str(self.ledger.path), "a deployed loop's, not a study's", "another store")
        noise = self.terms.noise
        self._sum = noisy_sum(noise.mechanism.program, std=noise.std, grid=noise.grid, dim=self.terms.dim)
        self._snapshot_step = self.step
        if self.over:
            self._end()
        else:
            self._snapshot_step = restore_noise(self.ledger, self._sum, self.ledger.chain.epoch, self.step)

    def _next_noise(self) -> tuple[bytes, Future[NDArray[np.int64]]]:
        """This step's secret and its noise; drawn before and not used, because a gradient failed, it is still fresh."""
        if self._ahead is None:
            seed = checked_seed(fresh_secret())
            row = self._sum.row(self.step, seed)
            self._ahead = seed, self._beside.submit(self._sum.noise.step, row)
        return self._ahead

    def _store(
        self, tags: list[bytes], seed: bytes, noisy: bytes, state: Callable[[], bytes] | None, note: bytes
    ) -> None:
        step, epoch = self.step, self.ledger.chain.epoch
        keep, gone = {secret_name(epoch, step): seed}, list[str]()
        if state is not None and self._state_steps is not None:
            if step % self._state_steps == 0 or not self.ledger.names(_MODEL):
                keep[_MODEL] = _STEP.pack(step) + state()
                gone = [*self.ledger.names(_NOISY), *self.ledger.names(_NOTE)]
            keep |= {f"{_NOISY}{step:010d}": noisy, f"{_NOTE}{step:010d}": note}
        many = self.terms.clients_per_step if tags else 1
        body = Body(epoch=epoch, step=step, steps=1, places=many if many > 1 else None)
        padded = [*tags, *[None] * (many - len(tags))]
        self._write("steps", body, keep=keep, destroy=gone or None, tags=padded, points="step")

    def _keep_snapshot(self) -> None:
        """Keep the noise's state, so that a restart is quick and old secrets can go."""
        noise = self._sum.noise
        self._write(
            "snapshot",
            Body(epoch=self.ledger.chain.epoch, step=noise.position),
            keep={"snapshot": noise.snapshot()},
            destroy=self.ledger.names("seed/"),
        )
        self._snapshot_step = noise.position
        self.ledger.reached("snapshot-stored")
        self.ledger.forget(wait_s=0.0)

    def _end(self) -> None:
        """Destroy the secrets; what was handed out stays, for `resumed`."""
        if not self.ledger.chain.standing.ended:
            secret = [name for each in ("seed/", "snapshot", ORDER_SECRET) for name in self.ledger.names(each)]
            self._write("end", Body(epoch=self.ledger.chain.epoch), destroy=secret)
        self.ledger.forget()
        self.ledger.reached("epoch-closed")

    def _write(self, kind: str, body: Body, *, points: str = "", **more: Any) -> None:
        self.ledger.write(kind, body, **more)
        if points:
            self.ledger.reached(f"{points}-stored")
        self.ledger.witness()
        if points:
            self.ledger.reached(f"{points}-witnessed")

    def _check_open(self) -> None:
        if os.getpid() != self._process:
            raise PrivacyError(
                "this store belongs to another process, and two of them would use its noise twice: "
                "nothing was released (open it in one process)"
            )
        self.ledger.check()
        if self._broken:
            raise PrivacyError(
                "an earlier step was interrupted half-way: nothing was released (start the script again; it goes on "
                "where its store stands)"
            )
        if self.over:
            raise HorizonExhausted(self.horizon, self.step)
