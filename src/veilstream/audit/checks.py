"""What is looked for in every audit beside its bounds on μ: one hypothesis a check.

Cells of the first and of a later message; noise in every coordinate, and in telemetry's together;
coordinates, epochs and steps that share noise; where seeds come from; and, if asked, the same
through a running federation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from veilstream.audit.cells import DIM, cell_std, later_message, learner_cells
from veilstream.audit.federated import FEDERATION_DIM, federation_checks
from veilstream.audit.small_runs import SMALL_DIM, learners_needed, small_checks
from veilstream.audit.statistics import Law
from veilstream.audit.statistics.cells import CellLaw, cell_fit
from veilstream.audit.statistics.check import Check
from veilstream.audit.statistics.coordinates import every_coordinate, whitened
from veilstream.audit.statistics.lattice import lattice_fit
from veilstream.audit.statistics.pairs import duplicates, lags
from veilstream.audit.transcript import Transcript, law_of_terms
from veilstream.deployment import learner as learner_module
from veilstream.deployment.terms import Terms
from veilstream.plans.plan import Plan
from veilstream.privacy.seeds import generator_p

Tick = Callable[[int], None]


def ticks_of_checks(rounds: int, draws: int, *, federation: bool) -> int:
    """How many rounds they take."""
    cells = (later_message(rounds) + 1) * -(-draws // min(DIM, draws))
    return cells + 2 * rounds * learners_needed(rounds) + (rounds if federation else 0)


def deployed_checks(
    plan: Plan,
    terms: Terms,
    transcripts: Sequence[Transcript],
    *,
    draws: int,
    federation: bool = False,
    tick: Tick = lambda _: None,
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
    if federation:
        small = dataclasses.replace(terms, dim=max(FEDERATION_DIM, 2 * terms.rounds + 2))
        checks += federation_checks(plan, small, tick=tick)
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
