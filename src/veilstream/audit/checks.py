"""The checks of every audit, beside its bounds on μ: one hypothesis each.

Many small learners, each through three epochs, show what only repetition shows.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from veilstream.audit.cells import DIM, cell_std, later_message, learner_cells
from veilstream.audit.deployed import Unkind, listen
from veilstream.audit.disposable import Twin, in_memory, quick_folder
from veilstream.audit.statistics import FALSE_ALARMS, Law, OneRun, one_run
from veilstream.audit.statistics.cells import CellLaw, cell_fit
from veilstream.audit.statistics.check import Check
from veilstream.audit.statistics.coordinates import every_coordinate, whitened
from veilstream.audit.statistics.differencing import ROUNDING
from veilstream.audit.statistics.groups import CoordinateGroup
from veilstream.audit.statistics.lattice import lattice_fit
from veilstream.audit.statistics.pairs import all_pairs, duplicates, lags
from veilstream.audit.statistics.pooled import every_part, far_values, low_bits, shifted_rows, still_numbers, variance
from veilstream.audit.statistics.repeats import epoch_against_epoch, repeated_rows
from veilstream.audit.transcript import Transcript, law_of_terms
from veilstream.audit.visits import POINTS, Visitors, Way, serve_learner, ways
from veilstream.deployment import learner_epochs as learner_module
from veilstream.deployment.learner import Learner
from veilstream.deployment.release import decode
from veilstream.deployment.terms import Terms
from veilstream.mechanisms.keystream import KEY_BYTES
from veilstream.plans.plan import Plan
from veilstream.privacy.seeds import generator_p

Tick = Callable[[int], None]
Floats = NDArray[np.float64]

SMALL_DIM = 128
GROUP_DIM = 6001
"""Odd, so that the last draw has no partner; small enough for the draws of a group to be made together."""
GROUP_RUNS = 4
COPY_DIM = 400
EPOCHS = 3
MOST_LEARNERS = 32
_ROWS = 256  # messages of all learners together, at least


def pooled_checks(name: str, transcripts: Sequence[Transcript], terms: Terms, law: Law) -> list[Check]:
    """Of runs with one law and as many coordinates, together: every part of them, wherever it is."""
    grid, steps = transcripts[0].grid, terms.rounds * terms.local_steps
    clients = terms.local_steps * terms.clients_per_step
    whites = [whitened(heard.residuals, law) for heard in transcripts]
    moved = [heard.moved for heard in transcripts]
    rows = np.concatenate(whites)
    checks = [
        every_part(whites, law, grid=grid, steps=steps),
        far_values(whites, law, grid=grid, steps=steps),
        still_numbers(moved, law, grid=grid, clients_per_round=clients),
        low_bits([heard.units for heard in transcripts], moved, law, grid=grid),
        shifted_rows(rows),
        repeated_rows(rows),
        places_check(transcripts),
    ]
    return [dataclasses.replace(check, name=f"{check.name}, {name}") for check in checks]


def places_check(transcripts: Sequence[Transcript]) -> Check:
    """Everyone who is named takes a place, whatever the record says, and nobody a second one; no chance is in it."""
    left_out, again = (sum(getattr(heard, of) for heard in transcripts) for of in ("left_out", "used_again"))
    return Check(
        "places",
        0.0 if left_out or again else 1.0,
        f"{left_out} stayed empty though enough people came, {again} were of people who had theirs",
        "what a record says decides whether a place is taken, or somebody takes part too often",
    )


def group_checks(
    plan: Plan, terms: Terms, *, seed: int = 0, make: Callable[..., Learner] = Learner, tick: Tick = lambda _: None
) -> list[Check]:
    """Of runs whose steps are stored in groups, as production stores them, short enough to be drawn together."""
    terms = dataclasses.replace(terms, dim=max(GROUP_DIM, 2 * terms.rounds + 3))
    law = law_of_terms(terms)
    heard = [
        listen(
            plan,
            terms,
            Unkind(terms, seed=seed + k),
            adaptive=k % 2 == 1,
            make=make,
            tick=tick,
            **varied(terms.rounds, seed + k),
        )
        for k in range(GROUP_RUNS)
    ]
    found = [
        dataclasses.replace(
            claimed(one_run(each.residuals, law, false_alarms=FALSE_ALARMS / 100)),
            name=f"the claimed noise, in groups, run {k}",
        )
        for k, each in enumerate(heard)
    ]
    return found + pooled_checks("in groups", heard, terms, law)


def varied(rounds: int, seed: int) -> dict[str, Any]:
    """Ways, a restart and kills for a run of `listen`, by chance."""
    rng = np.random.default_rng([seed, 11])
    at = [int(r) for r in rng.permutation(rounds)[: 2 + len(POINTS)]]
    return {"served": ways(rounds, seed), "restarts": set(at[:2]), "kills": dict(zip(at[2:], POINTS, strict=False))}


def claimed(run: OneRun) -> Check:
    """`one_run` has a level of its own, here far below a check's: its alarm counts as certain."""
    ps = [p for p in (run.covariance_p, run.normality_p) if p is not None]
    p = 0.0 if run.alarm else min(1.0, 3.0 * min(ps, default=1.0))
    return Check(
        "the claimed noise",
        p,
        f"mu >= {run.mu_lower:.4g} of {run.claim:.4g}, {run.outside} of {len(run.lower)} steps off",
        "what is sent is not the noise that was claimed",
    )


def copied_store_check(
    plan: Plan, terms: Terms, *, make: Callable[..., Learner] = Learner, tick: Tick = lambda _: None
) -> Check:
    """A store goes on twice from one copy, at the same place with the same clients: its noise must not.

    Seeds that follow from anything that a store holds, or from its clients, come again; drawn ones do not.
    """
    terms = dataclasses.replace(terms, dim=COPY_DIM)
    rounds = min(terms.rounds, 8)
    before = rounds // 2
    task = Unkind(terms)
    x = np.zeros(terms.dim, np.float32)
    law = law_of_terms(terms)
    assert law.root is not None
    root = law.root[:rounds, :rounds]
    lives: list[Floats] = []
    with tempfile.TemporaryDirectory(prefix="veilstream-audit-", dir=quick_folder()) as folder:
        place, kept = Path(folder) / "learner", Path(folder) / "copy"
        store = place / "store.db"
        place.mkdir()
        first: list[NDArray[np.int64]] = []
        for life in range(3):  # the first ends at the copy, the others begin there
            if life == 2:
                shutil.rmtree(place)
                shutil.copytree(kept, place)
            visitors = Visitors(plan, task, first=before * terms.local_steps * terms.clients_per_step if life else 0)
            units = list(first)
            with make(plan, store, task, create=True) as learner:
                for r in range(before if life else 0, rounds if life else before):
                    visitors.begin_round()
                    learner.begin_round(r, x)
                    serve_learner(visitors, Way.GROUP, learner)
                    units.append(decode(learner.finish_round().payload).prefix - task.settle())
                    tick(1)
            if life == 0:
                first = units
                shutil.copytree(place, kept)
                at_copy = task.known
            else:
                lives.append(solve_triangular(root, np.array(units) * terms.grid.step, lower=True)[before:])
                task.reset(at_copy)
    return dataclasses.replace(
        repeated_rows(np.concatenate(lives)),
        name="a store that goes on twice from one copy",
        means="noise follows from what the store holds: its seeds were not drawn",
    )


def run_checks(transcript: Transcript, terms: Terms, law: Law) -> list[Check]:
    """Of a run with many coordinates: each has its noise, and to itself."""
    steps, grid = terms.rounds * terms.local_steps, transcript.grid
    return [
        every_coordinate(transcript.residuals, law, grid=grid, steps=steps),
        lags(whitened(transcript.residuals, law)),
        duplicates(transcript.units, law, grid=grid, steps=steps),
    ]


def cell_checks(
    plan: Plan,
    terms: Terms,
    draws: int,
    *,
    messages: Sequence[int] | None = None,
    dim: int = DIM,
    where: str = "",
    tick: Tick = lambda _: None,
) -> list[Check]:
    """Of the numbers that are sent in some messages; and of float32's lattice in the first of them."""
    wanted = {0, later_message(terms.rounds)} if messages is None else set(messages)
    checks = []
    for message in sorted(wanted):
        std = cell_std(terms, message)
        if not CellLaw.covers(std):
            wanted.discard(message)
            words = f"NOT LOOKED AT: their standard deviation is {std:.3g} units of the grid"
            checks.append(Check(f"cells of message {message + 1}{where}", 1.0, words, ""))
    if not wanted:
        return checks
    counts = learner_cells(plan, terms, draws, messages=sorted(wanted), dim=dim, tick=tick)
    for message, seen in counts.items():
        check = cell_fit(seen).check(message + 1)
        checks.append(dataclasses.replace(check, name=check.name + where))
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


def learners_needed(rounds: int, most: int = MOST_LEARNERS) -> int:
    """So many that there are enough messages, and at least four."""
    return max(4, min(most, -(-_ROWS // (EPOCHS * rounds))))


def listen_epochs(
    plan: Plan,
    terms: Terms,
    *,
    epochs: int = EPOCHS,
    seed: int = 0,
    served: Sequence[Way] = (),
    make: Callable[[Plan, Any], Learner] = in_memory,
    tick: Callable[[int], None] = lambda _: None,
) -> list[Transcript]:
    """One learner with new clients in each of some epochs, who come in every way; a transcript for each."""
    transcripts = []
    task = Unkind(terms, seed=seed)
    visitors = Visitors(plan, task)
    x = np.zeros(terms.dim, np.float32)
    each = iter(served or ways(epochs * terms.rounds, seed))
    with make(plan, task) as learner:
        for epoch in range(epochs):
            if epoch:
                learner.new_epoch()
            before = task.settle()
            payloads, known = [], []
            for r in range(terms.rounds):
                visitors.begin_round()
                learner.begin_round(r, x)
                serve_learner(visitors, next(each), learner)
                payloads.append(learner.finish_round().payload)
                known.append(task.settle() - before)
                tick(1)
            transcripts.append(Transcript.of(payloads, known))
    transcripts[-1] = dataclasses.replace(transcripts[-1], left_out=visitors.left_out, used_again=visitors.used_again)
    return transcripts


def contributions(
    plan: Plan,
    terms: Terms,
    *,
    seed: int = 0,
    make: Callable[[Plan, Any, bytes], Learner] = Twin,
    tick: Tick = lambda _: None,
) -> Check:
    """The same draws with clients and with nobody: messages differ by what clients should add, to the unit.

    Exact, so it sees what no statistic of noisy messages could: a share of one coordinate too much
    or too little, or someone who was used twice, in a group, in a run or in two epochs.
    """
    pair = secrets.token_bytes(KEY_BYTES)
    rounds = 2 * terms.rounds
    some, nobody = (
        listen_epochs(plan, terms, epochs=2, served=served, make=lambda plan, task: make(plan, task, pair), tick=tick)
        for served in (ways(rounds, seed), [Way.EMPTY] * rounds)
    )
    allowed = ROUNDING * terms.local_steps * terms.clients_per_step
    left = np.concatenate(
        [
            np.abs(np.diff(one.prefixes - other.prefixes - one.known, axis=0, prepend=0))
            for one, other in zip(some, nobody, strict=True)
        ]
    )
    at = np.unravel_index(int(np.argmax(left)), left.shape)
    alike = all(one.sizes == other.sizes for one, other in zip(some, nobody, strict=True))
    return Check(
        "contributions, same draws with clients and with nobody",
        1.0 if left[at] <= allowed and alike else 0.0,
        f"{rounds} rounds: {left[at]:,} units unexplained in coordinate {at[1]}, round {at[0]}; {allowed} allowed",
        "clients add other than they should, or steps without clients have other noise",
    )


def small_checks(
    plan: Plan,
    terms: Terms,
    *,
    learners: int | None = None,
    also: Iterable[Transcript] = (),
    seed: int = 0,
    make: Callable[[Plan, Any], Learner] = in_memory,
    tick: Callable[[int], None] = lambda _: None,
) -> list[Check]:
    """All pairs of coordinates, every epoch against each other, every step against every other, every part.

    With telemetry, its coordinates in all of these runs and in those of ``also``, together.
    """
    law = law_of_terms(terms)
    count = learners_needed(terms.rounds) if learners is None else learners
    heard = [listen_epochs(plan, terms, seed=seed + k, make=make, tick=tick) for k in range(count)]
    every = [*itertools.chain(*heard)]
    whites = [[whitened(epoch.residuals, law) for epoch in epochs] for epochs in heard]
    rows = np.concatenate([epoch for learner in whites for epoch in learner])
    by_epoch = [np.concatenate(same) for same in zip(*whites, strict=True)]
    each_epoch = variance(by_epoch, law, grid=every[0].grid, steps=terms.rounds * terms.local_steps)
    checks = [all_pairs(rows), _worst_epochs(whites), each_epoch, *pooled_checks("small learners", every, terms, law)]
    return checks + telemetry_checks((*every, *also), terms, law)


def telemetry_checks(transcripts: Iterable[Transcript], terms: Terms, law: Law) -> list[Check]:
    """Of telemetry's coordinates by themselves, over all that was heard; none without telemetry."""
    if terms.telemetry is None:
        return []
    metrics = terms.telemetry.metrics
    behind = -len(metrics)
    all_of_them = CoordinateGroup("telemetry's coordinates, all learners", law, terms.grid.step)
    each = [CoordinateGroup(f"telemetry's {name}, all learners", law, terms.grid.step) for name in metrics]
    for heard in transcripts:
        all_of_them.add(heard.units[:, behind:], heard.known[:, behind:])
        for k, group in enumerate(each, behind):
            group.add(heard.units[:, k, None], heard.known[:, k, None])
    return [check for group in (all_of_them, *(each if len(each) > 1 else ())) for check in group.checks()]


def _worst_epochs(whites: list[list[Floats]]) -> Check:
    """The learner whose epochs agree most, with Bonferroni's factor."""
    checks = [epoch_against_epoch(epochs) for epochs in whites]
    worst = min(checks, key=lambda check: check.p)
    return dataclasses.replace(worst, p=min(1.0, len(checks) * worst.p))
