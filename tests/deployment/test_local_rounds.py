"""A learner's rounds by themselves: no ledger, no files, no randomness; against sums by hand."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from tests.deployment.test_learner import TAU, D, Still, model, plan_of
from tests.support.known_secrets import known_secrets
from veilstream.deployment.learner import Learner
from veilstream.deployment.local_rounds import LocalRounds, pack_step, unpack_step
from veilstream.deployment.release import decode
from veilstream.deployment.terms import Terms
from veilstream.errors import InputError, PrivacyError
from veilstream.learning.tasks import Sample
from veilstream.mechanisms.keystream import Row
from veilstream.privacy.gradient_types import Noised, RawGradient
from veilstream.privacy.grid_noise import GridNoise
from veilstream.records.admission import Answer
from veilstream.runs.released_model import model_sha256

ROUNDS = 3


def gradient(step: int) -> RawGradient:
    return RawGradient(np.linspace(-0.2, 0.3, D).astype(np.float32) * (step + 1) / 7)


def secret(step: int) -> bytes:
    return hashlib.sha256(b"step %d" % step).digest()


def rounds_of(epoch: int = 0) -> LocalRounds:
    return LocalRounds(Terms.of(plan_of(), D), epoch)


def pinned(r: int = 0) -> LocalRounds:
    local = rounds_of()
    local.pin(model(r), model_sha256(model(r)))
    return local


def do_step(local: LocalRounds) -> None:
    local.apply(local.noisy(local.clip(gradient(local.step)), secret(local.step)))


def do_round(local: LocalRounds, r: int) -> bytes:
    digest = model_sha256(model(r))
    assert local.wants(r, digest)
    local.pin(model(r), digest)
    while local.steps_wanted:
        do_step(local)
    release = local.message()
    local.seal(release)
    return bytes(release.payload)


def test_prefixes_and_local_models_are_the_sums_written_out():
    local, terms = rounds_of(), Terms.of(plan_of(), D)
    noise = GridNoise(terms.mechanism.program, std=terms.noise_std, grid=terms.grid, dim=D)
    total = np.zeros(D, np.int64)
    for r in range(ROUNDS):
        z = model(r).astype(np.float64)
        eta = terms.method.step_size * (1.0 + r) ** -terms.method.step_decay
        local.pin(model(r), model_sha256(model(r)))
        for t in range(TAU):
            step = r * TAU + t
            assert local.step == step
            raw = gradient(step).reveal().astype(np.float64)
            assert np.linalg.norm(raw) < terms.grid.clip_norm  # so that clipping changes nothing
            units = np.trunc(raw / terms.grid.step).astype(np.int64)
            noisy = units + noise.step(Row(secret(step), step))
            total, z = total + noisy, z - eta * noisy * terms.grid.step
            do_step(local)
            np.testing.assert_array_equal(local.prefix, total)
            np.testing.assert_allclose(local.model.reveal(), z, rtol=1e-5, atol=1e-5)
        message = decode(local.message().payload)
        local.seal(local.message())
        assert (message.epoch, message.round, message.steps) == (0, r, (r + 1) * TAU)
        np.testing.assert_array_equal(message.prefix, total)


def test_a_learner_sends_what_its_rounds_say(tmp_path):
    """With the same gradients and secrets, ledger and all."""
    local, drawn = rounds_of(), iter(range(10_000))
    task = Still(lambda z, sample: gradient(int(sample.features[0])).reveal())
    with (
        known_secrets(lambda: secret(next(drawn))),
        Learner(plan_of(), tmp_path / "s.db", task, create=True) as learner,
    ):
        for r in range(ROUNDS):
            learner.begin_round(r, model(r))
            for t in range(TAU):
                client = Sample(np.full(D, float(r * TAU + t)), 1.0)
                assert learner.observe(f"{r}/{t}", client) is Answer.TAKEN
            assert bytes(learner.finish_round().payload) == do_round(local, r)


def test_what_is_computed_does_not_count_until_it_is_applied_or_sealed():
    local = pinned()
    before = local.prefix.copy(), local.model.reveal().copy(), local.taken
    noisy = local.noisy(local.clip(gradient(0)), secret(0))
    np.testing.assert_array_equal(local.prefix, before[0])
    np.testing.assert_array_equal(local.model.reveal(), before[1])
    assert local.taken == before[2] == 0
    local.apply(noisy)
    np.testing.assert_array_equal(local.prefix, noisy)
    while local.steps_wanted:
        do_step(local)
    assert local.message() == local.message()
    assert (local.round, local.sealed) == (0, None)
    release = local.message()
    local.seal(release)
    assert (local.round, local.taken, local.pinned) == (1, 0, None)
    assert local.sealed == release
    assert local.sealed_model == model_sha256(model(0))


def test_a_round_has_one_model_comes_in_order_and_ends_at_the_horizon():
    local = pinned()
    digest, other = model_sha256(model(0)), model_sha256(model(1))
    assert not local.wants(0, digest)
    with pytest.raises(PrivacyError, match="begun with another model"):
        local.wants(0, other)
    with pytest.raises(InputError, match="which is open"):
        local.wants(2, digest)
    with pytest.raises(InputError, match="a round that was begun"):
        local.message()  # steps are missing
    while local.steps_wanted:
        do_step(local)
    local.seal(local.message())
    assert not local.wants(0, digest)  # sealed: asked again, it is only repeated
    with pytest.raises(InputError, match="a round that was begun"):
        local.message()
    for r in range(1, local.terms.rounds):
        do_round(local, r)
    assert local.horizon_reached
    with pytest.raises(PrivacyError, match="past the horizon"):
        local.wants(local.terms.rounds, other)


def test_rounds_that_are_resumed_go_on_to_the_same_bytes():
    whole, first = rounds_of(), rounds_of()
    sent = [do_round(whole, r) for r in range(ROUNDS)]
    do_round(first, 0)
    resumed = rounds_of()
    resumed.resume(sent[0], first.sealed_model)
    for step in range(TAU):
        resumed.replay(secret(step))
    assert not resumed.wants(0, model_sha256(model(0)))
    assert [do_round(resumed, r) for r in range(1, ROUNDS)] == sent[1:]


def test_what_is_shown_cannot_be_changed():
    local = pinned()
    for shown in (local.prefix, local.noise.fraction, local.noise.state, local.noise.known):
        with pytest.raises(ValueError, match="read-only"):
            shown[...] = 1
    assert "hidden" in repr(local.model)


@pytest.mark.parametrize("largest", [0, 2**31 - 1, -(2**31), 2**31, -(2**62)])
def test_packed_steps_are_read_back_whole(largest):
    noisy = Noised(np.array([largest, 1, -1], np.int64))
    np.testing.assert_array_equal(unpack_step(pack_step(noisy)), noisy)
