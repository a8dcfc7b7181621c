"""The checks of every audit, beside its bounds on μ: one hypothesis each.

Many small learners, each through two epochs, show what only repetition shows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.audit.cells import DIM, cell_std, later_message, learner_cells
from veilstream.audit.deployed import Unkind
from veilstream.audit.disposable import in_memory
from veilstream.audit.statistics import Law
from veilstream.audit.statistics.cells import CellLaw, cell_fit
from veilstream.audit.statistics.check import Check
from veilstream.audit.statistics.coordinates import every_coordinate, whitened
from veilstream.audit.statistics.groups import CoordinateGroup
from veilstream.audit.statistics.lattice import lattice_fit
from veilstream.audit.statistics.pairs import all_pairs, duplicates, lags
from veilstream.audit.statistics.repeats import epoch_against_epoch, repeated_rows
from veilstream.audit.transcript import Transcript, law_of_terms
from veilstream.deployment import learner as learner_module
from veilstream.deployment.learner import Learner
from veilstream.deployment.terms import Terms
from veilstream.plans.plan import Plan
from veilstream.privacy.seeds import generator_p

Tick = Callable[[int], None]
Floats = NDArray[np.float64]

SMALL_DIM = 128
_ROWS = 256  # messages of all learners together
_EPOCHS = 2
_MOST_LEARNERS = 32


def ticks_of_checks(rounds: int, draws: int) -> int:
    """How many rounds they take."""
    cells = (later_message(rounds) + 1) * -(-draws // min(DIM, draws))
    return cells + 2 * rounds * learners_needed(rounds)


def deployed_checks(
    plan: Plan, terms: Terms, transcripts: Sequence[Transcript], *, draws: int, tick: Tick = lambda _: None
) -> tuple[Check, ...]:
    """All of them; ``transcripts`` are runs with many coordinates that were listened to."""
    law = law_of_terms(terms)
    checks = [
        dataclasses.replace(check, name=f"{check.name}, run {k}")
        for k, transcript in enumerate(transcripts)
        for check in run_checks(transcript, terms, law)
    ]
    small_terms = dataclasses.replace(terms, dim=SMALL_DIM)
    checks += small_checks(plan, small_terms, also=transcripts, tick=tick)
    checks.append(seed_check())
    checks += cell_checks(plan, terms, draws, tick=tick)
    return tuple(checks)


def run_checks(transcript: Transcript, terms: Terms, law: Law) -> list[Check]:
    """Of a run with many coordinates: each has its noise, and to itself."""
    steps, grid = terms.rounds * terms.local_steps, transcript.grid
    return [
        every_coordinate(transcript.residuals, law, grid=grid, steps=steps),
        lags(whitened(transcript.residuals, law)),
        duplicates(transcript.units, law, grid=grid, steps=steps),
    ]


def cell_checks(plan: Plan, terms: Terms, draws: int, *, tick: Tick = lambda _: None) -> list[Check]:
    """Of the numbers that are sent, first and later message; and of float32's lattice in them."""
    later = later_message(terms.rounds)
    messages = {0, later}
    checks = []
    for message in sorted(messages):
        std = cell_std(terms, message)
        if not CellLaw.covers(std):
            messages.discard(message)
            checks.append(
                Check(
                    f"cells of message {message + 1}",
                    1.0,
                    f"NOT LOOKED AT: their standard deviation is {std:.3g} units of the grid",
                    "",
                )
            )
    if not messages:
        return checks
    counts = learner_cells(plan, terms, draws, messages=sorted(messages), tick=lambda _: tick(later + 1))
    checks += [cell_fit(seen).check(message + 1) for message, seen in counts.items()]
    if 0 not in counts:
        return checks
    factor = float(terms.mechanism.noising_matrix()[0, 0])
    lattice = lattice_fit(counts[0], factor)
    if lattice is not None:
        checks.append(lattice.check(1))
    return checks


def seed_check() -> Check:
    """Of the function that a deployed learner draws its seeds with."""
    draws = 1 << 14
    repeats, uniform = generator_p(vars(learner_module)["fresh_secret"], draws)
    return Check(
        "seeds",
        0.0 if repeats else uniform,
        f"{repeats} of {draws:,} came twice",
        "seeds are drawn from too few, or are not uniform",
    )


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
    return dataclasses.replace(worst, p=min(1.0, len(checks) * worst.p))
