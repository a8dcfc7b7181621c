"""Many runs of the deployed learner with a canary: each coordinate of `Apart` is one run.

The canary comes at the step (or steps) where theory says that it is told apart most easily, with
the gradient +B_g or, by a fair coin, -B_g (0 for zero-out neighbours). The other clients are

* ``silent``: zero gradients, so the transcript is the canary and noise;
* ``loud``: their gradients point where the model x of the round points, which an adaptive server
  chose from earlier messages and therefore knows: subtracted;
* ``echo``: their gradients point where the local model went since the round began. If local steps
  are not protected one by one, they shout what the canary whispered. What they say is not known to
  the adversary, and stays in the transcript.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import block_diag

from veilstream.audit.deployed import AuditServer, TelemetryTask
from veilstream.audit.disposable import Apart
from veilstream.audit.statistics import FALSE_ALARMS, Law, ManyRun, many_run
from veilstream.audit.statistics.law import patterns
from veilstream.audit.transcript import law_of_terms, reach_of
from veilstream.deployment.learner import Learner
from veilstream.deployment.release import decode
from veilstream.deployment.terms import Terms
from veilstream.errors import InputError
from veilstream.learning.tasks import Sample
from veilstream.plans.plan import Plan
from veilstream.streams.intake import Offered

Float32s = NDArray[np.float32]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Others = Literal["silent", "loud", "echo"]

BATCH = 8000
"""Runs of one learner: few enough for the draws of a group of steps to be made together."""
_NUMBERS = 100_000_000  # of all transcripts together
_CANARY, _OTHER = 1.0, 0.0
_CANARYS_TAG = "canary"
_ENDLESS = 1e12  # g / (|g| + gamma) is then a direction, to float32


class Canary(TelemetryTask):
    """A task in which a sample says who comes, and the audit what follows."""

    def __init__(self, terms: Terms, second: Bools, others: Others) -> None:
        self.dim = len(second)
        reach, B = reach_of(terms) * terms.clients_per_step, terms.grid.clip_norm
        # Three times too long: clipping is part of what is audited. Where gradients are normalised
        # it takes more to come as close to the bound as anyone can.
        times = 3.0 if terms.gamma is None else _ENDLESS
        self._canary = (times * np.where(second, B, B - reach)).astype(np.float32)
        self._loud = np.float32(times * B)
        self.others = others
        self.x = np.zeros(self.dim, np.float32)

    def host_gradient(self, z: Float32s, sample: Sample) -> Float32s:
        """Of the canary, or of someone else."""
        if float(sample.target) == _CANARY:
            return self._canary
        towards = np.zeros(self.dim, np.float32)
        if self.others == "loud":
            towards = np.sign(self.x)
        elif self.others == "echo":
            towards = np.sign(self.x - z)
        return towards * self._loud


def canary_runs(
    plan: Plan,
    terms: Terms,
    runs: int,
    *,
    others: Others = "silent",
    adaptive: bool = False,
    insist: bool = False,
    epochs: int = 1,
    batch: int = BATCH,
    make: Callable[[Plan, Any], Learner] = Apart,
    seed: int | None = None,
    false_alarms: float = FALSE_ALARMS,
    tick: Callable[[int], None] = lambda _: None,
) -> ManyRun:
    """Run, collect every message of every run, and judge.

    With ``insist`` the canary comes again at every step after its own, under the same tag, and in
    every one of ``epochs``: a learner that keeps count does not notice. ``seed`` is of the coins.
    Clients of a round come in one call, in every second batch one by one. ``tick`` counts rounds.
    """
    law = law_of_terms(terms)
    visits = patterns(terms.rounds * terms.local_steps, terms.guarantee.participation)[law.worst]
    coins = np.random.default_rng(seed)
    if terms.rounds * epochs * runs > _NUMBERS:
        most = _NUMBERS // (terms.rounds * epochs)
        raise InputError("runs", runs, f"at most {most} for {terms.rounds} rounds", "or fewer rounds")
    transcripts = np.empty((epochs, terms.rounds, runs))
    second = coins.integers(0, 2, runs).astype(bool)
    for first in range(0, runs, batch):
        here = slice(first, min(first + batch, runs))
        task = Canary(terms, second[here], others)
        with make(plan, task) as learner:
            for epoch in range(epochs):
                if epoch:
                    learner.new_epoch()
                together = (first // batch) % 2 == 0
                rows = _epoch(terms, learner, task, visits, adaptive, insist, epoch, together)
                for r, row in enumerate(rows):
                    transcripts[epoch, r, here] = row
                    tick(1)
    plain = others != "echo" and epochs == 1
    if epochs > 1:
        law = _repeated(law, epochs)
    expected = None if law.expected is None or not plain else float(law.expected[law.worst])
    return many_run(
        transcripts.reshape(-1, runs),
        second,
        law,
        delta=terms.guarantee.delta,
        expected=expected,
        centre=terms.grid.clip_norm / terms.clients_per_step - 0.5 * law.reach,
        false_alarms=false_alarms,
    )


def _epoch(
    terms: Terms,
    learner: Learner,
    task: Canary,
    visits: tuple[int, ...],
    adaptive: bool,
    insist: bool,
    epoch: int,
    together: bool,
) -> Iterator[Floats]:
    """The messages of a batch, round by round, less what others are known to have said."""
    own = dataclasses.replace(terms, dim=task.dim)
    server = AuditServer(own, adaptive=adaptive, epoch=epoch)
    tau, share = terms.local_steps, terms.grid.clip_norm / terms.clients_per_step
    known = np.zeros(task.dim)
    for r in range(terms.rounds):
        task.x = server.x
        learner.begin_round(r, server.x)
        others_used = 0
        steps = range(r * tau, (r + 1) * tau)
        offered = [each for step in steps for each in offered_in_step(terms, visits, insist, epoch, step)]
        for group in [offered] if together else [[each] for each in offered]:
            outcomes = learner.take_many(group)
            others_used += sum(
                outcome.used for each, outcome in zip(group, outcomes, strict=False) if each.tag != _CANARYS_TAG
            )
        if task.others == "loud":
            known = known + others_used * share * np.sign(server.x)
        payload = learner.finish_round().payload
        message = decode(payload)
        server.take(payload)
        # The runs alone: telemetry is of all of them at once here. `telemetry_runs` has its canary.
        yield message.prefix[: task.dim] * message.grid - known


def offered_in_step(terms: Terms, visits: tuple[int, ...], insist: bool, epoch: int, step: int) -> list[Offered]:
    """Who comes for a step. Nobody is left over if the canary counts as often as it may."""
    nothing = np.zeros((), np.float32)
    canary = Offered(_CANARYS_TAG, Sample(nothing, _CANARY))
    others = [Offered(f"client {epoch}/{step}/{k}", Sample(nothing, _OTHER)) for k in range(terms.clients_per_step)]
    if step in visits and epoch == 0:
        return [canary, *others[1:]]
    return [canary, *others] if insist and (epoch or step > visits[0]) else others


def _repeated(law: Law, epochs: int) -> Law:
    """Epochs have independent noise; the promise is for one of them."""
    assert law.covariance is not None
    apart = block_diag(*[law.covariance] * epochs)
    return dataclasses.replace(law, shifts=np.tile(law.shifts, (epochs, 1)), covariance=apart)
