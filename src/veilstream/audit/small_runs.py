"""Many small learners, each through several epochs: for what only repetition shows.

Few coordinates, so that all pairs can be compared; several learners, so that there are enough
rounds; two epochs each, so that noise which an epoch repeats is seen beside the first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.audit.deployed import Unkind
from veilstream.audit.disposable import in_memory
from veilstream.audit.statistics import Law
from veilstream.audit.statistics.check import Check
from veilstream.audit.statistics.coordinates import whitened
from veilstream.audit.statistics.groups import CoordinateGroup
from veilstream.audit.statistics.pairs import all_pairs
from veilstream.audit.statistics.repeats import epoch_against_epoch, repeated_rows
from veilstream.audit.transcript import Transcript, law_of_terms
from veilstream.deployment.learner import Learner
from veilstream.deployment.terms import Terms
from veilstream.plans.plan import Plan

Floats = NDArray[np.float64]

SMALL_DIM = 128
_ROWS = 256  # messages of all learners together
_EPOCHS = 2
_MOST_LEARNERS = 32


def learners_needed(rounds: int) -> int:
    """So many that there are enough messages, and at least two."""
    return max(2, min(_MOST_LEARNERS, -(-_ROWS // (_EPOCHS * rounds))))


def listen_epochs(
    plan: Plan,
    terms: Terms,
    *,
    epochs: int = _EPOCHS,
    seed: int = 0,
    make: Callable[[Plan, Any], Learner] = in_memory,
    tick: Callable[[int], None] = lambda _: None,
) -> list[Transcript]:
    """One learner with new clients in each of some epochs; a transcript for each."""
    transcripts = []
    task = Unkind(terms, seed=seed)
    x = np.zeros(terms.dim, np.float32)
    with make(plan, task) as learner:
        for epoch in range(epochs):
            if epoch:
                learner.new_epoch()
            before = task.known
            payloads, known = [], []
            for r in range(terms.rounds):
                learner.begin_round(r, x)
                for t in range(terms.local_steps):
                    step = (epoch * terms.rounds + r) * terms.local_steps + t
                    learner.observe(f"client {step}", task.sample(step))
                payloads.append(learner.finish_round().payload)
                known.append(task.known - before)
                tick(1)
            transcripts.append(Transcript.of(payloads, known))
    return transcripts


def small_checks(
    plan: Plan,
    terms: Terms,
    *,
    learners: int | None = None,
    also: Iterable[Transcript] = (),
    make: Callable[[Plan, Any], Learner] = in_memory,
    tick: Callable[[int], None] = lambda _: None,
) -> list[Check]:
    """All pairs of coordinates, every epoch against the first, every step against every other.

    With telemetry, its coordinates in all of these runs and in those of ``also``, together.
    """
    law = law_of_terms(terms)
    count = learners_needed(terms.rounds) if learners is None else learners
    heard = [listen_epochs(plan, terms, seed=k, make=make, tick=tick) for k in range(count)]
    whites = [[whitened(epoch.residuals, law) for epoch in epochs] for epochs in heard]
    rows = np.concatenate([epoch for learner in whites for epoch in learner])
    checks = [all_pairs(rows), _worst_epochs(whites), repeated_rows(rows)]
    return checks + telemetry_checks((*itertools.chain(*heard), *also), terms, law)


def telemetry_checks(transcripts: Iterable[Transcript], terms: Terms, law: Law) -> list[Check]:
    """Of telemetry's coordinates by themselves, over all that was heard; none without telemetry."""
    if terms.telemetry is None:
        return []
    group = CoordinateGroup("telemetry's coordinates, all learners", law, terms.grid.step)
    behind = -len(terms.telemetry.metrics)
    for heard in transcripts:
        group.add(heard.units[:, behind:], heard.known[:, behind:])
    return group.checks()


def _worst_epochs(whites: list[list[Floats]]) -> Check:
    """The learner whose epochs agree most, with Bonferroni's factor."""
    checks = [epoch_against_epoch(epochs) for epochs in whites]
    worst = min(checks, key=lambda check: check.p)
    return replace(worst, p=min(1.0, len(checks) * worst.p))
