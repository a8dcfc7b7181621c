"""Noise of learners that miss rounds where only sums over them are seen."""

from __future__ import annotations

import numpy as np

from veilstream import mechanisms
from veilstream.simulation.noise_source import OwnPaceNoise


class Rota:
    """Who takes part, by rule."""

    learners = 3

    def __init__(self, away: set[tuple[int, int]]) -> None:
        self.away = away

    def taking_part(self, seeds, first, count):
        here = np.ones((count, len(seeds), self.learners), bool)
        for r, learner in self.away:
            if first <= r < first + count:
                here[r - first, :, learner] = False
        return here


def increments(away, one_clock):
    noise = OwnPaceNoise([mechanisms.buffered(12)], [1, 2], Rota(away), steps=1, dim=6, rounds=4, one_clock=one_clock)
    found = [noise.take(first, 4, 4 if first < 8 else 0)[0] for first in (0, 4, 8)]
    return np.concatenate(found).reshape(12, 2, 3, 2)


def test_noise_of_missed_rounds_comes_with_the_next_one_and_sums_agree_from_then_on():
    away = {(2, 1), (3, 1), (4, 1), (7, 0)}
    everyone, some = increments(set(), True), increments(away, True)
    prefixes, with_gaps = everyone.cumsum(0), some.cumsum(0)
    assert all((some[r, :, learner] == 0).all() for r, learner in away)
    for r in range(12):
        for learner in range(3):
            if (r, learner) not in away:
                assert np.allclose(prefixes[r, :, learner], with_gaps[r, :, learner], atol=1e-5)


def test_without_one_clock_a_learners_noise_goes_at_its_own_pace():
    away = {(2, 1)}
    everyone, some = increments(set(), False), increments(away, False)
    assert np.array_equal(some[3, :, 1], everyone[2, :, 1])
