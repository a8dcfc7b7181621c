"""Low-order bits of what is sent: nothing on the grid, the gradient itself without it."""

from __future__ import annotations

import numpy as np
import pytest
from studies import precision
from studies.precision import HORIZON, SETTINGS, Float32Draws, Setting, attack, sent

from veilstream.deployment.learner import Learner
from veilstream.deployment.local_rounds import LocalRounds
from veilstream.deployment.release import decode
from veilstream.learning.tasks import Sample
from veilstream.mechanisms.keystream import NoiseKey, Row
from veilstream.plans.plan import Plan
from veilstream.privacy.grid import Grid
from veilstream.privacy.grid_noise import GridNoise


def check(releases: int) -> None:
    counts = precision.study(releases)
    result = precision.figure(counts)
    assert all(count.releases >= releases for count in counts)
    assert result.telling_events == 0
    assert result.naive_mistaken == 0
    assert all(count.naive_telling > 0 for count in counts)
    assert result.low_bits_alarms == 0, f"least p = {result.low_bits_least_p:.2g}"


def test_messages_on_the_grid_tell_nothing_and_naive_ones_do():
    check(100_000)


@pytest.mark.slow
def test_messages_on_the_grid_tell_nothing_and_naive_ones_do_long():
    check(2_000_000)


class FarTooFine(Grid):
    """A grid below float32's own steps."""

    def gradient(self, clipped, clients_per_step=1):
        return np.trunc(np.asarray(clipped, np.float64) / self.step).astype(np.int64)


def test_the_study_finds_float32_noise():
    counts = [attack(setting, 40_000, noise=Float32Draws) for setting in SETTINGS]
    assert precision.figure(counts).low_bits_alarms > 0


def finer(setting):
    return FarTooFine(setting.grid.step * 2.0**-11, setting.clip_norm)


def test_the_study_finds_float32_noise_on_a_grid_that_is_too_fine_for_it():
    setting = Setting("independent", 1.0, 0.5)
    broken = attack(setting, 40_000, grid=finer(setting), noise=Float32Draws)
    assert broken.telling > 0
    assert precision.figure([broken]).low_bits_alarms > 0


@pytest.mark.parametrize("mechanism", ["independent", "buffered"])
def test_noise_as_it_is_deployed_has_nothing_in_its_low_bits_on_a_finer_grid_either(mechanism):
    setting = Setting(mechanism, 1.0, 0.5)
    count = attack(setting, 40_000, grid=finer(setting))
    assert precision.figure([count]).low_bits_alarms == 0


class OneNumber:
    """A task whose gradient is what the client says."""

    dim, classifies, features_shape = 1, False, (1,)

    def host_gradient(self, z, sample):
        return np.asarray(sample.features, np.float32)


@pytest.mark.parametrize("mechanism", ["independent", "buffered"])
@pytest.mark.parametrize("at", range(HORIZON))
def test_the_study_sends_what_a_learner_sends(mechanism, at, tmp_path, monkeypatch):
    setting = Setting(mechanism, 0.7, 8.0)
    plan = Plan(
        learning={"rounds": HORIZON, "clip_norm": 0.7, "task": "custom"},
        privacy={"epsilon": 8.0, "delta": precision.DELTA},
        methods=[{"name": "ours", "mechanism": mechanism, "step_size": 0.1}],
    )
    key = NoiseKey.from_seed(at)
    monkeypatch.setattr(LocalRounds, "row", lambda self, step, secret: Row(key.secret, step))
    with Learner(plan, tmp_path / "s.db", OneNumber(), create=True) as learner:
        assert (learner.grid, learner.noise_std) == (setting.grid, setting.noise_std)
        for r in range(at + 1):
            client = Sample(np.array([0.7 if r == at else 0.0]), 0.0)
            release = learner.learn_round(r, np.zeros(1), [(f"{r}", client)])
    noise = GridNoise(setting.factorization.program, std=setting.noise_std, grid=setting.grid, dim=1)
    expected = sent(setting, setting.grid, 0.7, at, noise, key.secret).message
    np.testing.assert_array_equal(decode(release.payload).prefix, expected)
