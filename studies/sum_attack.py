"""An attack on sums: told everything but the noise of h learners, how well can somebody tell two records apart?

    python -m studies.sum_attack

The attacker is the server, colluding with all learners but h: it knows their noise and every gradient but one client's,
which is one of two that lie as far apart as clipping allows. It reads the opened sums of all rounds (whole numbers, of
the deployed rounds: `LocalRounds` with fresh secrets) and does the best test there is for them: the sums' increments,
mapped back to draws by C, along the client's column. The mean difference of 400 pairs, in standard deviations, is μ̂,
with a standard error of √(2/400) = 0.071.

* h = 2 and 8: μ̂ is within what the promise allows.
* h - 1: with one honest learner fewer than the plan counts on μ̂ is larger, and within the floor's μ.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass

import numpy as np

from veilstream.deployment.local_rounds import LocalRounds
from veilstream.deployment.terms import Terms
from veilstream.plans.plan import Plan
from veilstream.privacy.gradient_types import RawGradient

DIM, ROUNDS = 4, 24


def terms_of(honest: int, epsilon: float = 2.0) -> Terms:
    """Ten learners, of whom so many are counted on."""
    plan = Plan.parse(
        f"""
        name = "attacked"
        [learning]
        rounds = {ROUNDS}
        local_steps = 1
        learners = 10
        [data]
        dim = {DIM}
        [privacy]
        epsilon = {epsilon}
        delta = 1e-3
        trust = "sum"
        honest = {honest}
        [[methods]]
        name = "ours"
        mechanism = "buffered"
        step_size = 0.1
        """
    )
    return Terms.of(plan, DIM)


@dataclass(frozen=True)
class Found:
    """What an attack measured, and what it may."""

    honest: int
    """Learners whose noise the attacker does not know."""
    pairs: int
    mu: float
    error: float
    promised: float
    """Of the promise that counts on as many; of the floor where there are fewer than it counts on."""

    @property
    def within(self) -> bool:
        """Whether it stays below what is allowed, but for chance of 2e-4 (3.5 standard errors)."""
        return self.mu <= self.promised + 3.5 * self.error


def opened_sums(terms: Terms, learners: int, sign: float, step: int) -> np.ndarray:
    """The prefix sums over these learners after each round, in units of the clip norm; all other noise is taken off."""
    total = np.zeros((terms.rounds, DIM))
    for learner in range(learners):
        local = LocalRounds(terms, 0)
        for r in range(terms.rounds):
            gradient = np.zeros(DIM, np.float32)
            if learner == 0 and r == step:
                gradient[0] = sign * 100.0  # clipped to the norm
            local.miss(local.noisy(local.clip(RawGradient(gradient)), secrets.token_bytes(32)))
            total[r] += local.prefix * terms.grid.step
    return total


def attack(terms: Terms, unknown: int, pairs: int = 400) -> Found:
    """Tell a client's two records apart, by the best test for sums over so many learners."""
    strategy = terms.mechanism.strategy_matrix()
    step = int(np.argmax((strategy**2).sum(axis=0)))
    column = strategy[:, step]

    def score(sign: float) -> float:
        increments = np.diff(opened_sums(terms, unknown, sign, step)[:, 0], prepend=0.0)
        drawn = strategy @ increments / (terms.noise_std * math.sqrt(unknown))
        return float(column @ drawn / np.linalg.norm(column))

    one, other = (np.array([score(sign) for _ in range(pairs)]) for sign in (1.0, -1.0))
    trust, promise = terms.guarantee.trust, terms.guarantee
    assert trust is not None
    allowed = promise.curve if unknown >= trust.honest else promise.floor
    return Found(unknown, pairs, float(one.mean() - other.mean()), math.sqrt(2.0 / pairs), allowed.mu)


def main() -> None:
    """The command line."""
    for honest in (2, 8):
        terms = terms_of(honest)
        for unknown in (honest, honest - 1):
            print(f"promise counts on {honest}:", attack(terms, unknown))


if __name__ == "__main__":
    main()
