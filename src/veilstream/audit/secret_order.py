"""Checks of a promise that rests on a secret order: how steps are drawn, and how much tells of them.

Every client of these runs has a coordinate of the model to itself: a gradient of the whole clip norm along it, and
nothing elsewhere. So one learner is as many runs as it has clients, each with noise and a secret step of its own.
Where records are used in the window after the one in which they arrive, all arrive in the first, and the second is
looked at.

* *Where clients are* is read off exactly, as the difference of two runs with the same draws of noise, of which one has
  records that cannot be used. Each client must be in one round, also where the learner is killed half-way; rounds must
  be drawn uniformly, one by one (not dealt out evenly), and have nothing to do with the order in which records lie, nor
  with the rounds of the same people at another learner.
* *What a round asks for* (gradients, bytes) must be the same in every round.
* *Who is told apart*: with fresh noise, a fair coin decides each client's record. The best test of which one it was
  knows all else but the step: the likelihood ratio of the mixture over steps. It must err as often as it does in draws
  of the claimed law, and never less often than (epsilon, delta) allows.
* *Whose round is found*: the best guess of a client's round from all messages is right as often as in those draws.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from scipy.special import logsumexp
from scipy.stats import beta, binom, chi2, norm

from veilstream.audit.deployed import TelemetryTask, vector_by_hand
from veilstream.audit.disposable import _Paired, quick_folder
from veilstream.audit.statistics.check import CONFIDENCE, FALSE_ALARMS, Check
from veilstream.audit.transcript import law_of_terms, reach_of
from veilstream.audit.visits import Killed, kill_at
from veilstream.deployment.epochs import DEPLOYED, LearnerParts
from veilstream.deployment.learner import Learner
from veilstream.deployment.release import decode
from veilstream.deployment.terms import Terms
from veilstream.learning.tasks import Sample
from veilstream.mechanisms.keystream import KEY_BYTES
from veilstream.plans.plan import Plan

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Tick = Callable[[int], None]

CLIENTS = 4000
"""Of one learner, where its epoch takes so many."""
PLACED = 2000
"""Clients whose rounds are looked at, at least."""
_DRAWS = 40_000
_AT_ONCE = 4000
_ENDLESS = 1e12  # as in `veilstream.audit.canary`
_NEAR = 2  # units of the grid by which a share may differ from what is worked out by hand
_SURELY = 1e-10


class OwnCoordinates(TelemetryTask):
    """A task in which client i has coordinate i to itself, with a gradient of ``lengths[i]``; it counts its work."""

    def __init__(self, terms: Terms, lengths: Floats) -> None:
        self.dim = len(lengths)
        times = 3.0 if terms.gamma is None else _ENDLESS  # clipping is part of what is audited
        self._lengths = (times * lengths).astype(np.float32)
        self.asked = 0

    @staticmethod
    def sample(client: int) -> Sample:
        """The record of this client."""
        return Sample(np.array(client, np.float64), 0.0)

    def host_gradient(self, z: NDArray[np.float32], sample: Sample) -> NDArray[np.float32]:
        """Of one record."""
        (row,) = self.host_gradients(z, Sample(np.atleast_1d(sample.features), sample.target))
        found: NDArray[np.float32] = row
        return found

    def host_gradients(self, z: NDArray[np.float32], samples: Sample) -> NDArray[np.float32]:
        """A row for each record."""
        clients = np.asarray(samples.features, np.float64)
        self.asked += len(clients)
        rows = np.zeros((len(clients), self.dim), np.float32)
        places = np.clip(np.rint(clients), 0, self.dim - 1).astype(np.int64)
        rows[np.arange(len(clients)), places] = self._lengths[places]
        return rows


@dataclass(frozen=True)
class Heard:
    """One learner's messages, and how much work each round was."""

    prefixes: Integers
    """(R, n) in units of the grid."""
    grid: float
    sizes: frozenset[int]
    work: tuple[int, ...]
    """Gradients that each undisturbed round asked for."""


def rounds_of(terms: Terms) -> range:
    """Among which rounds the clients of an audit choose: all, or those of the second window."""
    if terms.plan.window is None:
        return range(terms.rounds)
    of_window = terms.plan.window // terms.local_steps
    return range(of_window, 2 * of_window)


def clients_of(terms: Terms) -> int:
    """How many one learner of an audit has: no fewer than the steps they choose among, no more than those take."""
    steps = len(rounds_of(terms)) * terms.local_steps
    return min(steps * terms.clients_per_step, max(steps, CLIENTS))


def hear(
    plan: Plan,
    terms: Terms,
    task: OwnCoordinates,
    records: Sequence[tuple[str, Sample | None]],
    *,
    parts: LearnerParts = DEPLOYED,
    kills: dict[int, str] | None = None,
    tick: Tick = lambda _: None,
) -> Heard:
    """An epoch of one learner; ``kills`` names rounds in which it is ended at a place, and opened anew."""
    payloads, work, x = [], [], np.zeros(task.dim, np.float32)
    with tempfile.TemporaryDirectory(prefix="veilstream-audit-", dir=quick_folder()) as folder:
        store = Path(folder) / "store.db"

        def opened() -> Learner:
            learner = Learner(plan, store, task, create=True, parts=parts)  # type: ignore[arg-type]
            if learner.takes_whole_sources:
                learner.use_records(records)
            learner.steps.check()
            return learner

        def arriving(r: int) -> Sequence[tuple[str, Sample | None]] | None:
            first = r * terms.local_steps * terms.clients_per_step
            return None if learner.takes_whole_sources else records[first:]

        learner = opened()
        try:
            for r in range(terms.rounds):
                before, killed = task.asked, False
                if kills and r in kills:
                    kill_at(learner, kills[r])
                try:
                    payload = learner.learn_round(r, x, arriving(r)).payload
                except Killed:
                    killed = True
                    learner.close()
                    learner = opened()
                    payload = learner.learn_round(r, x, arriving(r)).payload
                vars(learner.ledger).pop("reached", None)
                payloads.append(payload)
                if not killed:
                    work.append(task.asked - before)
                tick(1)
        finally:
            learner.close()
    messages = [decode(payload) for payload in payloads]
    units = np.stack([message.prefix[: task.dim] for message in messages]).astype(np.int64)
    return Heard(units, messages[0].grid, frozenset(map(len, payloads)), tuple(work))


@dataclass(frozen=True)
class Placed:
    """In which round each client of a learner was used, exactly; and what its rounds cost."""

    rounds: Integers
    """From the first of `rounds_of`; -1 where a client was used in none, or in several."""
    several: int
    never: int
    wrong: int
    """Clients who added something else than their share."""
    work: tuple[int, ...]
    sizes: frozenset[int]
    guessed: int
    """Clients whose round is the one that their coordinate of all messages makes likeliest."""


def placed(
    plan: Plan, terms: Terms, *, kills: dict[int, str] | None = None, first: int = 0, tick: Tick = lambda _: None
) -> Placed:
    """Where the clients of one learner are, from the difference of two runs with the same draws."""
    count, B = clients_of(terms), terms.grid.clip_norm
    task, pair = OwnCoordinates(terms, np.full(count, B)), secrets.token_bytes(KEY_BYTES)
    parts = LearnerParts(rounds=functools.partial(_Paired, pair=pair))
    names = [f"client {first + i}" for i in range(count)]
    some = [(name, OwnCoordinates.sample(i)) for i, name in enumerate(names)]
    heard = hear(plan, terms, task, some, parts=parts, kills=kills, tick=tick)
    nobody = hear(plan, terms, task, [(name, None) for name in names], parts=parts, tick=tick)
    added = np.diff(heard.prefixes - nobody.prefixes, axis=0, prepend=0)
    one = dataclasses.replace(terms, dim=1, telemetry=None)
    share = int(vector_by_hand(one, np.array([3.0 * B if terms.gamma is None else _ENDLESS * B]), True)[0])
    times = (added != 0).sum(axis=0)
    among, where = rounds_of(terms), np.abs(added).argmax(axis=0)
    inside = (where >= among.start) & (where < among.stop)
    rounds = np.where((times == 1) & inside, where - among.start, -1)
    law, mixture = law_of_terms(terms), Mixture.of(terms)
    assert law.root is not None
    white = solve_triangular(law.root, heard.prefixes * heard.grid, lower=True)
    guesses = mixture.likeliest_round(white, np.full(count, mixture.first))
    return Placed(
        rounds,
        int((times > 1).sum()),
        int(((times == 0) | ((times == 1) & ~inside)).sum()),
        int((np.abs(added.sum(axis=0)[times == 1] - share) > _NEAR).sum()),
        (*heard.work, *nobody.work),
        heard.sizes | nobody.sizes,
        int((guesses == rounds).sum()),
    )


def order_checks(plan: Plan, terms: Terms, *, seed: int = 0, tick: Tick = lambda _: None) -> list[Check]:
    """How steps are drawn, and what a round's work tells of them."""
    rng = np.random.default_rng([seed, 13])
    learners = max(2, -(-PLACED // clients_of(terms)))
    points = ("step-computed", "step-witnessed", "message-computed", "pinned")
    seen = []
    for k in range(learners):  # the first two have the same people; all but the second are killed now and then
        at = rng.permutation(terms.rounds)[: min(len(points), terms.rounds)].tolist()
        kills = {} if k == 1 else dict(zip(at, points, strict=False))
        first = 0 if k < 2 else k * clients_of(terms)
        seen.append(placed(plan, terms, kills=kills, first=first, tick=tick))
    several, never, wrong = (sum(getattr(each, of) for each in seen) for of in ("several", "never", "wrong"))
    rounds = np.concatenate([each.rounds[each.rounds >= 0] for each in seen])
    among = len(rounds_of(terms))
    counts = [np.bincount(each.rounds[each.rounds >= 0], minlength=among) for each in seen]
    work = {each for one in seen for each in one.work}
    sizes = {each for one in seen for each in one.sizes}
    return [
        Check(
            "secret order: every client in one step",
            0.0 if several or never or wrong else 1.0,
            f"{sum(len(each.rounds) for each in seen):,} clients, with kills: {several} in several rounds, {never} in "
            f"none, {wrong} with another share",
            "a client is used twice, not at all, or with a wrong share",
        ),
        Check(
            "secret order: the work of a round",
            0.0 if len(work) > 1 or len(sizes) > 1 else 1.0,
            f"{'/'.join(map(str, sorted(work)[:4]))} gradients and {'/'.join(map(str, sorted(sizes)[:4]))} bytes in "
            "every round",
            "how long a round takes tells how many it has",
        ),
        _evenly(counts),
        _by_place(seen),
        _of_two(seen[0].rounds, seen[1].rounds, among),
        _guessed(terms, sum(each.guessed for each in seen), len(rounds), seed),
    ]


def _guessed(terms: Terms, right: int, count: int, seed: int) -> Check:
    _, second, found = Mixture.of(terms).drawn(_DRAWS, seed)
    by_law, draws = int(found[~second].sum()), int((~second).sum())
    return Check(
        "secret order: whose round is found",
        _two_rates(right, max(1, count), by_law, draws),
        f"the best guess is right for {right / max(1, count):.2%} of {count:,} clients, for {by_law / draws:.2%} by "
        f"the law, for {1 / len(rounds_of(terms)):.2%} of a blind one",
        "messages tell a client's round better or worse than the claimed noise allows",
    )


def _evenly(counts: Sequence[Integers]) -> Check:
    """Whether clients of a round are as uneven as uniform draws of their own make them, and no more even."""
    statistic, freedom = 0.0, 0
    for each in counts:
        mean = each.sum() / len(each)
        if mean > 0:
            statistic, freedom = statistic + float(((each - mean) ** 2 / mean).sum()), freedom + len(each) - 1
    p = 2.0 * min(float(chi2.cdf(statistic, freedom)), float(chi2.sf(statistic, freedom))) if freedom else 1.0
    return Check(
        "secret order: uniform, each by itself",
        min(1.0, p),
        f"chi-squared {statistic:.1f} with {freedom} degrees of freedom",
        "steps are not drawn uniformly, or are dealt out evenly, as in a permutation",
    )


def _by_place(seen: Sequence[Placed]) -> Check:
    """Whether rounds go with the order of the records; by Hoeffding's inequality, so without an approximation."""
    total = squares = 0.0
    for each in seen:
        count, rounds = len(each.rounds), max(2, int(each.rounds.max()) + 1)
        place = np.linspace(-0.5, 0.5, count)
        there = each.rounds >= 0
        total += float((place * (each.rounds / (rounds - 1) - 0.5))[there].sum())
        squares += float((place[there] ** 2).sum())
    p = min(1.0, 2.0 * math.exp(-2.0 * total**2 / squares)) if squares else 1.0
    return Check(
        "secret order: nothing to do with the order of the records",
        p,
        f"covariance of place and round {total / squares:.3g} of 1" if squares else "nobody was placed",
        "records are used in the order in which they lie",
    )


def _of_two(one: Integers, other: Integers, rounds: int) -> Check:
    """Whether the same people are in the same rounds at two learners, more or less often than by chance."""
    there = (one >= 0) & (other >= 0)
    same, count = int((one == other)[there].sum()), int(there.sum())
    p = 2.0 * min(float(binom.sf(same - 1, count, 1 / rounds)), float(binom.cdf(same, count, 1 / rounds)))
    return Check(
        "secret order: known from nobody's name",
        min(1.0, p),
        f"{same} of {count:,} people in the same round at two learners, {count / rounds:.1f} by chance",
        "steps follow from something else than a secret of the epoch: whoever knows that knows them",
    )


@dataclass(frozen=True)
class Mixture:
    """The law of one client's coordinate, whitened: unit noise, moved along one of these columns."""

    columns: Floats
    """(R, q): what a client of each round it may be in moves the messages by, when its share moves by one."""
    first: float
    second: float
    """The shares of the two records that a client may have."""

    @classmethod
    def of(cls, terms: Terms) -> Mixture:
        """By these terms."""
        law = law_of_terms(terms)
        assert law.root is not None
        columns = solve_triangular(law.root, law.shifts[:, :: terms.local_steps], lower=True)[:, rounds_of(terms)]
        first = terms.grid.clip_norm / terms.clients_per_step
        return cls(columns, first, first - reach_of(terms))

    def log_ratio(self, white: Floats) -> Floats:
        """Of the first record against the second, for each column of whitened messages: the best test."""
        return self._log_mean(white, self.first) - self._log_mean(white, self.second)

    def likeliest_round(self, white: Floats, share: Floats) -> Integers:
        """For clients with these shares."""
        scores = (self.columns.T @ white) * share - 0.5 * share**2 * (self.columns**2).sum(axis=0)[:, None]
        found: Integers = scores.argmax(axis=0)
        return found

    def _log_mean(self, white: Floats, share: float) -> Floats:
        scores = share * (self.columns.T @ white) - 0.5 * share**2 * (self.columns**2).sum(axis=0)[:, None]
        found: Floats = logsumexp(scores, axis=0) - math.log(self.columns.shape[1])
        return found

    def drawn(self, draws: int, seed: int) -> tuple[Floats, NDArray[np.bool_], NDArray[np.bool_]]:
        """Ratios in draws of this law, which had the second record, and of which the round is guessed right."""
        rng, rounds = np.random.default_rng([seed, 17]), self.columns.shape[1]
        found = []
        for first in range(0, draws, _AT_ONCE):
            count = min(_AT_ONCE, draws - first)
            where, second = rng.integers(rounds, size=count), rng.integers(2, size=count).astype(bool)
            share = np.where(second, self.second, self.first)
            white = rng.normal(size=(len(self.columns), count)) + share * self.columns[:, where]
            found.append((self.log_ratio(white), second, self.likeliest_round(white, share) == where))
        ratios, seconds, right = (np.concatenate(each) for each in zip(*found, strict=True))
        return ratios, seconds, right


def mixture_checks(plan: Plan, terms: Terms, runs: int, *, seed: int = 0, tick: Tick = lambda _: None) -> list[Check]:
    """How well clients with a secret step are told apart, and their steps found."""
    count, mixture, law = clients_of(terms), Mixture.of(terms), law_of_terms(terms)
    assert law.root is not None
    ratios, coins = [], []
    rng = np.random.default_rng([seed, 19])
    for k in range(-(-runs // count)):
        second = rng.integers(2, size=count).astype(bool)
        shares = np.where(second, mixture.second, mixture.first)
        task = OwnCoordinates(terms, shares * terms.clients_per_step)
        records: list[tuple[str, Sample | None]] = [(f"{k}/{i}", OwnCoordinates.sample(i)) for i in range(count)]
        heard = hear(plan, terms, task, records, tick=tick)
        white = solve_triangular(law.root, heard.prefixes * heard.grid, lower=True)
        ratios.append(mixture.log_ratio(white))
        coins.append(second)
    ratio, second = np.concatenate(ratios), np.concatenate(coins)
    expected, drawn_second, _ = mixture.drawn(_DRAWS, seed)
    errors, drawn = int(((ratio <= 0) != second).sum()), int(((expected <= 0) != drawn_second).sum())
    conforms = Check(
        "secret order: who is told apart",
        _two_rates(errors, len(ratio), drawn, _DRAWS),
        f"the best test errs in {errors / len(ratio):.2%} of {len(ratio):,} runs, in {drawn / _DRAWS:.2%} by the law",
        "clients are told apart more or less often than the claimed noise and a secret step allow",
    )
    promise = terms.guarantee
    threshold = _threshold(expected, drawn_second, promise.delta)
    surely, likely = (
        _least_epsilon(ratio, second, threshold, promise.delta, level) for level in (_SURELY, 1.0 - CONFIDENCE)
    )
    kept = Check(
        "secret order: the promise",
        0.0 if surely > promise.epsilon else 1.0,
        f"epsilon >= {likely:.3g} of {promise.epsilon:g} at delta {promise.delta:g}, from {len(ratio):,} runs",
        "more is told than was promised",
    )
    assert _SURELY < FALSE_ALARMS
    return [conforms, kept]


def _two_rates(hits: int, runs: int, others: int, draws: int) -> float:
    """p-value for one rate behind both counts."""
    both = (hits + others) / (runs + draws)
    spread = math.sqrt(max(both * (1 - both), 1e-12) * (1 / runs + 1 / draws))
    return float(2.0 * norm.sf(abs(hits / runs - others / draws) / spread))


def _threshold(ratio: Floats, second: NDArray[np.bool_], delta: float) -> float:
    """Where draws of the law show most epsilon; chosen before the runs are looked at."""
    candidates = np.quantile(ratio, np.linspace(0.5, 0.995, 40))
    shown = [_least_epsilon(ratio, second, float(each), delta, 0.5) for each in candidates]
    return float(candidates[int(np.argmax(shown))])


def _least_epsilon(ratio: Floats, second: NDArray[np.bool_], threshold: float, delta: float, level: float) -> float:
    """ε is at least this with probability 1 - ``level``: exact binomial bounds on both errors of one test."""
    said_first = ratio > threshold
    alarms, misses = int((said_first & second).sum()), int((~said_first & ~second).sum())
    most_alarms = float(beta.ppf(1.0 - level / 2, alarms + 1, second.sum() - alarms))
    most_misses = float(beta.ppf(1.0 - level / 2, misses + 1, (~second).sum() - misses))
    found = 0.0
    for one, other in ((most_alarms, most_misses), (most_misses, most_alarms)):
        if 1.0 - delta - other > one > 0.0:
            found = max(found, math.log((1.0 - delta - other) / one))
    return found


def costs_of(terms: Terms, runs: int, cost: Callable[[int, int, int], float]) -> float:
    """Milliseconds, roughly, in the unit of ``cost``."""
    count = clients_of(terms)
    epochs: Any = 2 * max(2, -(-PLACED // count)) + -(-runs // count)
    return 3.0 * float(epochs) * cost(terms.rounds, terms.local_steps, count)
