"""With the same draws, a deployed learner's releases are the simulation's, but for rounding."""

from __future__ import annotations

import numpy as np
import pytest

import veilstream as vs
from tests.reliability import parity
from veilstream.engines.build import task_of
from veilstream.learning.tasks import Sample


def check(rounds: int) -> None:
    found = parity.study(rounds)
    assert {(c.mechanism, c.local_steps) for c in found} == {
        (name, tau) for name in vs.mechanisms.MECHANISMS for tau in parity.LOCAL_STEPS
    }
    for c in found:
        assert c.used < 1.0, c
        # A gradient is cut by one unit at most, on average by half of one, and little else differs.
        assert c.prefix_units < 1.0 * rounds * c.local_steps + 2.0, c
        assert c.largest_units > 10_000 * c.prefix_units, c


def test_releases_and_models_are_the_simulations_to_the_grids_precision():
    check(4)


@pytest.mark.slow
def test_releases_and_models_are_the_simulations_to_the_grids_precision_long():
    check(40)


# --- the study can fail --------------------------------------------------------------------------


class SlightlyMoreNoise(parity.GivenNoise):
    def _open_row(self, step):
        return super()._open_row(step) * np.float32(1.001)


class AnotherRow(parity.GivenNoise):
    """Mixes up the last two rows."""

    def _open_row(self, step):
        last = self._rounds * self._tau - 1
        return super()._open_row({last: last - 1, last - 1: last}.get(step, step))


class AnotherModel(parity.GivenNoise):
    """Takes its steps from a model that is slightly off."""

    def _pin(self, r, model, *rest):
        super()._pin(r, model + np.float32(1e-3), *rest)


class ForgetsClients(parity.GivenNoise):
    """Looks at the first client of a round only."""

    def observe(self, client, sample):
        if self._taken:
            sample = Sample(np.zeros(parity.DIM), 1.0)
        return super().observe(client, sample)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    plan = parity.parity_plan(["buffered"], 3, 4)
    return plan, parity.simulate(plan, tmp_path_factory.mktemp("parity") / "run")["buffered"]


@pytest.mark.parametrize(
    "broken", [SlightlyMoreNoise, AnotherRow, AnotherModel, ForgetsClients, None]
)
def test_the_study_finds_a_broken_learner(broken, simulated, tmp_path):
    plan, expected = simulated
    right = parity.deploy(plan, tmp_path / "right", task_of(plan))
    made = right if broken is None else parity.deploy(plan, tmp_path, task_of(plan), broken)
    # The allowance is that of the learner as it should be: a broken one brings no excuse along.
    found = parity.compare("buffered", 3, expected, made, honest=right)
    assert (found.used < 1.0) == (broken is None)
