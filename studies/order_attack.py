"""An attack on a secret order: told everything but one record and its step, how often is the record guessed?

    python -m studies.order_attack --runs 400

A fair coin gives one client one of two records whose gradients lie as far apart as clipping allows. The attacker is
the server. It knows both records, all others *and their steps* (read from the learner's ledger), and all messages of a
deployed `Learner` with secrets of the operating system; not the client's step. It does the best test there is: the
likelihood ratio of the two mixtures over steps, on the messages mapped back to draws. It chooses each model after the
message before it, in one of two ways:

* *still*: the record's gradient has one direction in all rounds;
* *turning*: its direction in a round is where the last message's noise, or the record, points to.

How often it is right is compared with (e^ε + δ) / (1 + e^ε), the most that (ε, δ) allows, and with draws of the law
that the noise should have. What else a round shows is looked at too. Whoever is in a round, it must be the same: how
many bytes store, log and witness grow by, how long a message is, how many gradients are asked for. How long its work
took is compared with its number of records (rank correlation). That time is not seen: a reply leaves at a fixed one.

An attacker who is told the client's step as well shows that the attack would notice a step that comes out: it is right
more often than the law of a secret order has it (`notices`).
"""

from __future__ import annotations

import argparse
import json
import math
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp
from scipy.stats import rankdata

from veilstream.audit.deployed import TelemetryTask
from veilstream.audit.disposable import Disposable, in_memory
from veilstream.audit.statistics.many_run import clopper_pearson
from veilstream.deployment.epochs import ORDER_SECRET
from veilstream.deployment.release import decode
from veilstream.deployment.terms import Terms
from veilstream.learning.tasks import Sample
from veilstream.plans.plan import Plan
from veilstream.records.secret_order import chosen_steps

ROUNDS, MANY = 10, 2  # rounds, and clients a round is expected to have
WRONG = 1e-3  # probability with which each bound may be
LAW_DRAWS = 20_000
WAYS = ("still", "turning")

Floats = NDArray[np.float64]


def plan_of(epsilon: float = 3.0, mechanism: str = "banded") -> Plan:
    return Plan(
        learning={"rounds": ROUNDS, "clients_per_step": MANY, "learners": 1, "task": "custom", "clip_norm": 1.0},
        privacy={"epsilon": epsilon, "delta": 1e-3, "order": "secret"},
        methods=[{"name": "ours", "mechanism": mechanism, "step_size": 0.1}],
    )


class Steered(TelemetryTask):
    """A task in two dimensions, whose model is an angle: a record's gradient is what it says, turned by it."""

    dim = 2

    def __init__(self) -> None:
        self.asked = 0

    def host_gradient(self, z: NDArray[np.float32], sample: Sample) -> NDArray[np.float32]:
        """Three times as long as is let through, by the sign of the target."""
        self.asked += 1
        return (3.0 * float(sample.target) * direction(float(z[0]))).astype(np.float32)


def direction(angle: Any) -> Floats:
    """A vector of length 1."""
    found: Floats = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    return found


def next_angle(way: str, last: Floats) -> Floats:
    """What the server sends after it saw this in the last round."""
    return np.zeros(last.shape[:-1]) if way == "still" else np.arctan2(last[..., 1], last[..., 0])


@dataclass(frozen=True)
class Adversary:
    """Knows C, in units in which noise has a standard deviation of 1 and a record moves its step by ``share``."""

    strategy: Floats
    share: float

    @classmethod
    def of(cls, terms: Terms) -> Adversary:
        return cls(
            np.asarray(terms.mechanism.strategy_matrix(), float),
            terms.grid.clip_norm / terms.clients_per_step / terms.noise_std,
        )

    def scores(self, seen: Floats, angles: Floats, sign: float) -> Floats:
        """ln of the density with a record of this sign in step j over that without it: (runs, steps)."""
        moved = sign * self.share * self.strategy[None, :, :, None] * direction(angles)[:, None, :, :]
        found: Floats = np.einsum("nrjd,nrd->nj", moved, seen) - 0.5 * (moved**2).sum(axis=(1, 3))
        return found

    def says_first(self, seen: Floats, angles: Floats) -> NDArray[np.bool_]:
        """The best guess of the record."""
        first, second = (logsumexp(self.scores(seen, angles, sign), axis=1) for sign in (1.0, -1.0))
        found: NDArray[np.bool_] = first > second
        return found

    def says_first_knowing(self, seen: Floats, angles: Floats, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
        """The same by somebody who was told the step."""
        there = np.arange(len(steps))
        first, second = (self.scores(seen, angles, sign)[there, steps] for sign in (1.0, -1.0))
        found: NDArray[np.bool_] = first > second
        return found

    def says_step(self, seen: Floats, angles: Floats, first: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The best guess of the step by somebody who knows the record."""
        both = [self.scores(seen, angles, sign) for sign in (1.0, -1.0)]
        found: NDArray[np.int64] = np.where(first[:, None], *both).argmax(axis=1)
        return found

    def drawn(self, way: str, runs: int, seed: int) -> Heard:
        """Runs of the law: numbers of a seeded generator, and no learner."""
        rng, T = np.random.default_rng([seed, 31]), len(self.strategy)
        steps, first = rng.integers(T, size=runs), rng.integers(2, size=runs).astype(bool)
        seen, angles = np.zeros((runs, T, 2)), np.zeros((runs, T))
        signs = np.where(first, 1.0, -1.0) * self.share
        for r in range(T):
            if r:
                angles[:, r] = next_angle(way, seen[:, r - 1])
            own = direction(angles[np.arange(runs), steps])  # of the step it was used at; not yet come counts nothing
            there = np.where(steps <= r, self.strategy[r, steps], 0.0) * signs
            seen[:, r] = rng.standard_normal((runs, 2)) + there[:, None] * own
        return Heard(seen, angles, steps, first)


@dataclass(frozen=True)
class Heard:
    """What an attacker has of many runs, and what it wants to know."""

    seen: Floats
    """(runs, rounds, 2): C·increments less all other records, noise with a standard deviation of 1."""
    angles: Floats
    steps: NDArray[np.int64]
    first: NDArray[np.bool_]


@dataclass(frozen=True)
class Channels:
    """What else each round of a run showed."""

    grew: tuple[tuple[int, ...], ...]
    """Bytes by which store, log and witness grew, and the message's length; one row a round."""
    asked: tuple[int, ...]
    took: tuple[float, ...]
    counts: tuple[int, ...]
    """Records that the round had."""


@dataclass(frozen=True)
class Found:
    """What an attack found."""

    way: str
    epsilon: float
    delta: float
    runs: int
    right: int
    allowed: float
    """The most that (ε, δ) allows, as a share."""
    by_law: float
    """Of draws of the law."""
    leaked_right: int
    """By an attacker who was told the step."""
    steps_right: int
    steps_by_law: float
    unlike: int
    """Kinds of rounds, beyond one for each place in the epoch, by bytes written, length and gradients asked for."""
    time_correlation: float
    """Of ranks: a round's time and its number of records, at the same place of the epoch."""
    time_error: float

    @property
    def surely(self) -> float:
        """A share that the attack is right at least, at 99.9%."""
        return clopper_pearson(self.right, self.runs, WRONG)[0]

    @property
    def within(self) -> bool:
        """No more than (ε, δ) allows, and no more often than the law (3.5 standard errors), and no channel besides."""
        spread = math.sqrt(self.by_law * (1 - self.by_law) * (1 / self.runs + 1 / LAW_DRAWS))
        return self.surely <= self.allowed and self.right / self.runs <= self.by_law + 3.5 * spread and self.unlike == 0

    @property
    def notices(self) -> bool:
        """Whether somebody who was told the step is right more often than the law of a secret one has it, at 99.9%."""
        return clopper_pearson(self.leaked_right, self.runs, WRONG)[0] > self.by_law


def _bytes_on_disk(store: Path) -> list[int]:
    """Of store, log, witness and what else lies beside them."""
    return [path.stat().st_size for path in sorted(store.parent.iterdir()) if path.is_file()]


def _one(plan: Plan, adversary: Adversary, way: str, first: bool) -> tuple[Floats, Floats, int, Channels]:
    """One learner's epoch: what was seen less all other records, angles, the client's step, and what else showed."""
    task, rng = Steered(), np.random.default_rng()
    signs = rng.choice([-1.0, 1.0], ROUNDS * MANY)
    signs[0] = 1.0 if first else -1.0
    names = [f"p{i}" for i in range(ROUNDS * MANY)]
    records = [(name, Sample(np.array(0.0), sign)) for name, sign in zip(names, signs.tolist(), strict=True)]
    learner: Disposable = in_memory(plan, task)
    try:
        learner.use_records([records[i] for i in rng.permutation(len(records))])
        secret, T = learner.ledger.blob(ORDER_SECRET), ROUNDS
        steps = chosen_steps(secret, [name.encode() for name in names], T)
        learner.write_down_clients()
        C, unit = adversary.strategy, learner.terms.noise_std
        others = np.bincount(steps[1:], signs[1:], minlength=T)
        seen, angles, before = np.zeros((T, 2)), np.zeros(T), np.zeros(2)
        increments, known = np.zeros((T, 2)), np.zeros((T, 2))
        grew, asked, took = [], [], []
        for r in range(T):
            if r:
                angles[r] = float(next_angle(way, seen[r - 1]))
            x = np.array([angles[r], 0.0], np.float32)
            known[r] = others[r] * adversary.share * direction(float(x[0]))
            size, calls, began = _bytes_on_disk(learner.ledger.path), task.asked, time.perf_counter()
            payload = learner.learn_round(r, x).payload
            took.append(time.perf_counter() - began)
            asked.append(task.asked - calls)
            now = _bytes_on_disk(learner.ledger.path)
            grew.append((*(a - b for a, b in zip(now, size, strict=False)), len(payload)))
            message = decode(payload)
            prefix = np.asarray(message.prefix, float) * message.grid / unit
            increments[r], before = prefix - before, prefix
            seen[r] = C[r, : r + 1] @ (increments[: r + 1] - known[: r + 1])
        counts = np.bincount(steps, minlength=T)
        return seen, angles, int(steps[0]), Channels(tuple(grew), tuple(asked), tuple(took), tuple(counts.tolist()))
    finally:
        learner.close()


def _unlike(channels: list[Channels]) -> int:
    """Kinds of rounds at a place of the epoch beyond one, by all that must not differ."""
    places = range(len(channels[0].asked))
    shown = [{(one.grew[r], one.asked[r]) for one in channels} for r in places]
    later = {one.asked[r] for one in channels for r in places if r}  # before the first, the task is checked
    return sum(len(each) - 1 for each in shown) + len(later) - 1


def _ranks_together(channels: list[Channels]) -> tuple[float, float]:
    """Rank correlation of time and number of records within places, and its standard error if there is none."""
    took, counts = (np.array([getattr(one, of) for one in channels], float) for of in ("took", "counts"))
    a, b = (np.apply_along_axis(rankdata, 0, each) for each in (took, counts))
    a, b = a - a.mean(axis=0), b - b.mean(axis=0)
    return float((a * b).sum() / math.sqrt((a * a).sum() * (b * b).sum())), 1.0 / math.sqrt(a.size - a.shape[1])


def attack(way: str = "still", runs: int = 400, epsilon: float = 3.0, seed: int = 0) -> tuple[Found, list[Channels]]:
    """Guess one record of each of so many learners, and say what else was seen of them."""
    plan = plan_of(epsilon)
    terms = Terms.of(plan, 2)
    adversary = Adversary.of(terms)
    coins = np.array([bool(secrets.randbits(1)) for _ in range(runs)])
    each = [_one(plan, adversary, way, bool(coin)) for coin in coins]
    heard = Heard(
        np.stack([one[0] for one in each]),
        np.stack([one[1] for one in each]),
        np.array([one[2] for one in each]),
        coins,
    )
    law, channels = adversary.drawn(way, LAW_DRAWS, seed), [one[3] for one in each]
    epsilon, delta = terms.guarantee.epsilon, terms.guarantee.delta
    correlation, error = _ranks_together(channels)
    found = Found(
        way=way,
        epsilon=epsilon,
        delta=delta,
        runs=runs,
        right=int((adversary.says_first(heard.seen, heard.angles) == coins).sum()),
        allowed=(math.exp(epsilon) + delta) / (1.0 + math.exp(epsilon)),
        by_law=float((adversary.says_first(law.seen, law.angles) == law.first).mean()),
        leaked_right=int((adversary.says_first_knowing(heard.seen, heard.angles, heard.steps) == coins).sum()),
        steps_right=int((adversary.says_step(heard.seen, heard.angles, coins) == heard.steps).sum()),
        steps_by_law=float((adversary.says_step(law.seen, law.angles, law.first) == law.steps).mean()),
        unlike=_unlike(channels),
        time_correlation=correlation,
        time_error=error,
    )
    return found, channels


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--epsilon", type=float, default=3.0)
    given = parser.parse_args()
    for way in WAYS:
        found, _ = attack(way, given.runs, given.epsilon)
        print(json.dumps(asdict(found) | {"surely": found.surely, "within": found.within, "notices": found.notices}))


if __name__ == "__main__":
    main()
