"""One run of the deployed learner, listened to: real ledger, real seeds, real bytes.

The audit is server and clients at once, so it knows every gradient and can subtract it.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.audit.disposable import Twin, quick_folder
from veilstream.audit.statistics import Differencing, difference
from veilstream.audit.statistics.differencing import clipped_by_hand, told_by_hand
from veilstream.audit.transcript import Transcript
from veilstream.audit.visits import Killed, Visitors, Way, kill_at, serve_learner
from veilstream.deployment.learner import Learner
from veilstream.deployment.terms import Terms
from veilstream.federation.protocol.fold import ServerFold
from veilstream.learning.tasks import Sample, Task
from veilstream.mechanisms.keystream import KEY_BYTES
from veilstream.plans.plan import Plan

RIGHT, WRONG = 0.0, 1.0
"""Targets of clients of whom the prediction is right, and wrong."""


class TelemetryTask:
    """A task that predicts 0 of everyone: who has 0 as target is right, at a great loss."""

    classifies = True
    labels = None
    features_shape = ()

    def predict(self, params: object, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """Zeros."""
        return np.zeros(len(features))

    def loss(self, params: object, sample: Sample) -> float:
        """Beyond every cap for who is right, nothing for the others."""
        return np.inf if float(sample.target) == RIGHT else 0.0


_ONE = "learner"

Float32s = NDArray[np.float32]
Integers = NDArray[np.int64]


def vector_by_hand(terms: Terms, raw: NDArray[np.floating], right: bool) -> Integers:
    """What a client should add, telemetry included, in units of the grid: its share of a step's average."""
    clip_norm, step, told = terms.grid.clip_norm, terms.grid.step, terms.telemetry
    gradient = clipped_by_hand(raw, clip_norm, step, terms.gamma)
    if told is not None:
        behind = told_by_hand(raw, told.metrics, right, clip_norm=clip_norm, width=told.width, step=step)
        gradient = np.concatenate([gradient, behind])
    return np.trunc(gradient / terms.clients_per_step).astype(np.int64)


class Unkind(TelemetryTask):
    """A task whose gradients the audit chooses and remembers.

    ``features`` and ``target`` are the client's number (`sample`). Every third prediction is right.
    """

    def __init__(self, terms: Terms, *, seed: int = 0) -> None:
        self.dim = terms.dim
        self._terms, self._clip_norm, self._seed = terms, terms.grid.clip_norm, seed
        self._before: Integers = np.zeros(terms.release_dim, np.int64)
        self._open: dict[int, Integers] = {}

    @property
    def known(self) -> Integers:
        """Sum of what should have been used so far, in units of the grid."""
        return self._before + sum(self._open.values(), np.zeros_like(self._before))

    def settle(self) -> Integers:
        """`known`, when none of the clients so far will be asked for again."""
        self._before, self._open = self.known, {}
        return self._before

    def reset(self, known: Integers) -> None:
        """Go back to where `known` was this."""
        self._before, self._open = known, {}

    def host_gradient(self, z: Float32s, sample: Sample) -> Float32s:
        """The gradient of this client; counted once, however often it is asked for."""
        client = int(sample.target)
        raw = self._raw(client, z)
        # Not whole numbers are of the learner's check that gradients are pure; `useless` ones count for nothing.
        if float(sample.target).is_integer() and client >= 0:
            self._open[client] = vector_by_hand(self._terms, raw, self._right(client))
        return raw

    def host_gradients(self, z: Float32s, samples: Sample) -> Float32s:
        """A row for each client of a step, as production asks for them."""
        each = zip(samples.features, samples.target, strict=True)
        return np.stack([self.host_gradient(z, Sample(features, target)) for features, target in each])

    @staticmethod
    def sample(client: int) -> Sample:
        """The record of the client with this number."""
        return Sample(np.array(client, np.float64), float(client))

    @staticmethod
    def useless(client: int) -> Sample:
        """A record of the same client that must not be used."""
        return Sample(np.array(-1.0 - client), -1.0 - client)

    def predict(self, params: object, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """The number itself where the client is to be right, else what no client has."""
        return np.array([client if self._right(int(client)) else -0.5 for client in features.tolist()])

    def loss(self, params: object, sample: Sample) -> float:
        """Beyond every cap for who is right, nothing for the others."""
        return np.inf if self._right(int(sample.target)) else 0.0

    def _right(self, step: int) -> bool:
        return step % 3 == 0

    def _raw(self, step: int, z: Float32s) -> Float32s:
        B, d = self._clip_norm, self.dim
        if step < 0:
            return np.full(d, 100.0 * B, np.float32)
        kind = step % 4
        if kind == 0:  # every entry a hundred times too large
            signs = np.random.default_rng([self._seed, step]).choice([-1.0, 1.0], d)
            return (100.0 * B * signs).astype(np.float32)
        if kind == 1:  # where the local model is: on an adaptive server's x, all that was sent
            return (10.0 * B * np.sign(z)).astype(np.float32)
        if kind == 2:
            return np.full(d, np.nan, np.float32)
        return np.full(d, 0.5 * B / np.sqrt(d), np.float32)


class AuditServer:
    """Chooses each next model: always the same one, or the server's own, from what it was sent.

    The fold is the deployed server's, for one learner of weight one in its epoch ``epoch``.
    """

    def __init__(self, terms: Terms, *, adaptive: bool, epoch: int = 0) -> None:
        self._start = np.zeros(terms.dim, np.float32)
        self._fold = ServerFold(replace(terms, learners=1), self._start, [_ONE], bounded=False)
        self._fold.enrol(_ONE, epoch, 0)
        self._adaptive = adaptive

    @property
    def x(self) -> Float32s:
        """What the learner is asked to start from."""
        return self._fold.x.astype(np.float32) if self._adaptive else self._start

    def take(self, payload: bytes) -> None:
        """Move the model by what came."""
        self._fold.accept(_ONE, payload)
        self._fold.close_round()


def listen(
    plan: Plan,
    terms: Terms,
    task: Any = None,
    *,
    adaptive: bool = True,
    restarts: Collection[int] = (),
    kills: Mapping[int, str] | None = None,
    served: Sequence[Way] = (),
    rounds: int | None = None,
    make: Callable[..., Learner] = Learner,
    tick: Callable[[int], None] = lambda _: None,
) -> Transcript:
    """A whole run, with every message asked for twice and the learner started again at some rounds.

    ``restarts`` names rounds after whose first client the learner is closed and opened anew,
    ``kills`` rounds in which it is ended at one of `visits.POINTS`, and opened anew; ``served`` the
    way in which each round's clients come (one call each, where it is left out).
    """
    task = Unkind(terms) if task is None else task
    server = AuditServer(terms, adaptive=adaptive)
    visitors = Visitors(plan, task)
    payloads: list[bytes] = []
    known: list[Integers] = []
    unlike = 0
    with tempfile.TemporaryDirectory(prefix="veilstream-audit-", dir=quick_folder()) as folder:
        store = Path(folder) / "store.db"
        learner = make(plan, store, task, create=True)
        try:
            for r in range(terms.rounds if rounds is None else rounds):
                visitors.begin_round()
                way = served[r] if served else Way.SINGLE
                if kills and r in kills:
                    kill_at(learner, kills[r])
                    way = Way.GROUP
                try:
                    learner.begin_round(r, server.x)
                    if r in restarts:
                        offered = visitors.new()
                        learner.observe(offered.tag, offered.sample)
                        learner.close()
                        learner = make(plan, store, task)
                    serve_learner(visitors, way, learner)
                    payload = learner.finish_round().payload
                except Killed:
                    learner.close()
                    learner = make(plan, store, task)
                    learner.begin_round(r, server.x)
                    if learner.pinned:  # who was stored is answered and not used again
                        learner.take_many(visitors.offered)
                    serve_learner(visitors, way, learner)
                    payload = learner.finish_round().payload
                vars(learner.ledger).pop("reached", None)
                learner.begin_round(r, server.x)  # as after a reply that was lost
                unlike += learner.finish_round().payload != payload
                server.take(payload)
                payloads.append(payload)
                known.append(task.settle())
                tick(1)
        finally:
            learner.close()
    return replace(Transcript.of(payloads, known, unlike), left_out=visitors.left_out, used_again=visitors.used_again)


class Replaced(Unkind):
    """The same clients, but for one, who is as different as a record can be.

    Its gradient is the largest there is, this way or that; with telemetry, the prediction for it is
    right or wrong, and its gradient clipped or just not.
    """

    def __init__(self, terms: Terms, at: int, sign: float, *, seed: int = 0) -> None:
        super().__init__(terms, seed=seed)
        self._at, self._sign = at, sign

    def _raw(self, step: int, z: Float32s) -> Float32s:
        if step != self._at:
            return super()._raw(step, z)
        raw = np.zeros(self.dim, np.float32)
        raw[0] = 7.0 * self._sign * self._clip_norm
        if self._terms.telemetry is not None and self._terms.gamma is None and self._sign < 0.0:
            raw[0] = -self._clip_norm * (1.0 - 2.0**-20)
        return raw

    def _right(self, step: int) -> bool:
        return self._sign > 0.0 if step == self._at else super()._right(step)


def twin_runs(
    plan: Plan,
    terms: Terms,
    at: int = 0,
    *,
    adaptive: bool = False,
    make: Callable[[Plan, Task, bytes], Learner] = Twin,
) -> Differencing:
    """Difference two runs whose client ``at`` (one of step ``at``, if a step has one) has gradient -B_g or +B_g.

    With an adaptive server, or with several steps a round, later clients see models that differ, so
    later gradients differ too; the audit knows them in both worlds.
    """
    made = same_draws(make)
    runs = [
        listen(plan, terms, Replaced(terms, at, sign), adaptive=adaptive, served=_GROUPS * terms.rounds, make=made)
        for sign in (-1.0, 1.0)
    ]
    first, second = runs
    alone = not adaptive and terms.local_steps == 1
    return difference(
        first.prefixes,
        second.prefixes,
        first.known,
        second.known,
        differing_steps=1 if alone else terms.rounds * terms.local_steps,
        sizes=(first.sizes, second.sizes),
    )


_GROUPS = (Way.GROUP,)


def same_draws(make: Callable[[Plan, Task, bytes], Learner]) -> Callable[..., Learner]:
    """Learners whose draws are the same, from a key that the operating system drew."""
    pair = secrets.token_bytes(KEY_BYTES)

    def made(plan: Plan, _: Path, task: Any, **__: Any) -> Learner:
        return make(plan, task, pair)

    return made
