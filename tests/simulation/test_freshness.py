"""The study of freshness: the same people whatever the releases, changes and late labels as said."""

from __future__ import annotations

import numpy as np
import pytest
from studies import freshness
from studies.freshness import LEARNERS, TIMES, Changing


def people(world: Changing, which: str) -> np.ndarray:
    """Everyone's features in the order of coming, (times, learners, d)."""
    met = []
    for round_ in range(4 * world.releases // 20):
        sample = world.round(0, round_) if which == "learned" else world.held_out(0, TIMES * LEARNERS, round_)
        met.append(np.asarray(sample.features).reshape(LEARNERS, -1, freshness.DIM).transpose(1, 0, 2))
    return np.concatenate(met)


@pytest.mark.parametrize("which", ["learned", "decided"])
def test_all_numbers_of_releases_meet_the_same_people(which):
    many, few = (people(Changing(4, 0, releases), which) for releases in (200, 20))
    np.testing.assert_array_equal(many, few)


def test_who_is_learned_from_was_decided_so_many_times_before():
    world = Changing(4, 20, 200)
    np.testing.assert_array_equal(people(world, "learned")[20:], people(world, "decided")[:-20])


@pytest.mark.parametrize("changes", [0, 4, 16])
def test_the_model_changes_as_often_as_said(changes):
    world = Changing(changes, 0, 20)
    for seed in range(5):
        models = np.array([world.model(seed, time) for time in range(TIMES)])
        assert (np.abs(np.diff(models, axis=0)).max(axis=1) > 0).sum() == changes


def test_every_noise_has_the_same_grid():
    rows = [row for row, _ in freshness.settings(50)]
    grids = {}
    for row in rows:
        grids.setdefault((row["noise"], row["epsilon"]), []).append((row["step"], row["average"]))
    assert len(grids) == 5
    assert len({tuple(grid) for grid in grids.values()}) == 1
