"""Which learners take part in which rounds, where some miss rounds, come late or leave for good.

As in deployment, an absent learner meets no client, sends nothing and spends no step, and its noise
waits for its next round. Its clients are not asked later; a model is still measured on them. Where only sums are seen,
rounds wait for those without whom no sum would be opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.plans.plan import Plan
from veilstream.privacy.guarantee import SumTrust

Bools = NDArray[np.bool_]
Float32s = NDArray[np.float32]

_SPANS, _ROUND = 11, 12  # generators of their own, beside those of the streams


@dataclass(frozen=True, kw_only=True)
class Attendance:
    """Attendance as a function of (seed, round), asked in any order.

    Every learner misses each round with probability ``missing``. The nearest number to the share
    ``late`` of the learners comes at a round from 1 to the last, the share ``leaving`` is gone from
    a later round on, or stays to the end; both are drawn by seed.
    """

    learners: int
    rounds: int
    missing: float
    late: float = 0.0
    leaving: float = 0.0
    trust: SumTrust | None = None
    """Whom the promise counts on where only sums are seen: rounds then wait until enough are back."""

    @classmethod
    def of(cls, plan: Plan) -> Attendance | None:
        """As the plan says; None where everyone always takes part."""
        data = plan.data
        if not data.partial_attendance:
            return None
        return cls(
            learners=plan.learning.learners,
            rounds=plan.learning.rounds,
            missing=data.missing,
            late=data.late,
            leaving=data.leaving,
            trust=plan.trust,
        )

    @lru_cache(maxsize=1024)  # noqa: B019 - frozen, few, and asked for every round
    def span(self, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Each learner's first round, and the one from which on it is gone, (n,) each."""
        rng = np.random.default_rng([seed, _SPANS])
        n, R = self.learners, self.rounds
        first, gone = np.zeros(n, np.int64), np.full(n, R)
        late = rng.permutation(n)[: round(self.late * n)]
        leaving = rng.permutation(n)[: round(self.leaving * n)]
        first[late] = rng.integers(min(1, R - 1), R, len(late))
        gone[leaving] = rng.integers(first[leaving] + 1, R + 1)
        return first, gone

    def taking_part(self, seeds: Sequence[int], first: int, count: int) -> Bools:
        """Who takes part in ``count`` rounds from ``first``, (count, seeds, n)."""
        found = np.empty((count, len(seeds), self.learners), np.bool_)
        for s, seed in enumerate(seeds):
            if self.trust is not None:
                found[:, s] = self._in_sums(seed)[first : first + count]
                continue
            comes, gone = self.span(seed)
            for r in range(first, first + count):
                drawn = np.random.default_rng([seed, _ROUND, r]).random(self.learners)
                found[r - first, s] = (drawn >= self.missing) & (comes <= r) & (r < gone)
        return found

    @lru_cache(maxsize=1024)  # noqa: B019 - as above
    def _in_sums(self, seed: int) -> Bools:
        """Who is part of each round's sum, (rounds, n).

        A server opens none without `honest + colluding` learners that were part of all before, nor of fewer than t
        learners. So a round waits until enough of those who are away are back; those who have left for good are not,
        and there the run is over.
        """
        trust, (comes, gone) = self.trust, self.span(seed)
        assert trust is not None
        needed = trust.honest + trust.colluding
        least = max(needed, (trust.learners + trust.colluding) // 2 + 1)
        core = np.ones(self.learners, np.bool_)
        found = np.zeros((self.rounds, self.learners), np.bool_)
        for r in range(self.rounds):
            drawn = np.random.default_rng([seed, _ROUND, r]).random(self.learners)
            there = (comes <= r) & (r < gone)
            here = (drawn >= self.missing) & there
            for who, least_here in ((core, needed), (there, least)):
                back = np.flatnonzero(who & there & ~here)
                lacking = max(0, least_here - int((who & here).sum()))
                here[back[np.argsort(-drawn[back])][:lacking]] = True
            core &= here
            if core.sum() < needed or here.sum() < least:
                raise InputError(
                    "data.leaving",
                    self.leaving,
                    f"learners who stay, or come from the start: with seed {seed} the run is over at round {r}, where "
                    f"{int(core.sum())} learners are left that were part of every sum, of {int(here.sum())}, and sums "
                    f"need {needed} of {least}",
                    f"rounds = {max(1, r)}, a smaller privacy.honest, or fewer that leave or come late",
                )
            found[r] = here
        return found

    def rounds_taken(self, seeds: Sequence[int], first: int, count: int) -> NDArray[np.int64]:
        """Each learner's own rounds before each of them, by which its local steps fall, (count, seeds, n)."""
        present = self.taking_part(seeds, 0, first + count)
        taken: NDArray[np.int64] = np.cumsum(present, axis=0)
        return (taken - present)[first:]

    def weights(self, seeds: Sequence[int], first: int, count: int) -> Float32s:
        """What each learner's release counts, in units of 1/n, (count, seeds, n)."""
        return self.taking_part(seeds, first, count).astype(np.float32)
