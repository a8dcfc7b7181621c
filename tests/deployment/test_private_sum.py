"""Private sums without a learner: the literal computation, and all that is refused."""

from __future__ import annotations

import copy
import math
import os
import pickle
import re
import subprocess
import sys
import threading

import numpy as np
import pytest

import veilstream as vs
from veilstream.deployment import private_sum as module
from veilstream.deployment.release import HEADER_BYTES
from veilstream.errors import HorizonExhausted, InputError, PrivacyError
from veilstream.mechanisms.fine_normals import fine_row
from veilstream.mechanisms.keystream import Row, fresh_secret
from veilstream.privacy.grid_noise import GridNoise

T, D = 7, 5
BUDGET = vs.Budget(2.0, 1e-3)


def sum_of(name: str = "toeplitz", **options) -> vs.PrivateSum:
    mechanism = vs.mechanisms.MECHANISMS[name](T)
    return vs.PrivateSum(mechanism, BUDGET, clip_norm=1.0, dim=D, **options)


@pytest.fixture
def secrets(monkeypatch):
    """Every secret that is drawn, in order."""
    drawn: list[bytes] = []

    def noted():
        drawn.append(fresh_secret())
        return drawn[-1]

    monkeypatch.setattr(module, "fresh_secret", noted)
    monkeypatch.setattr(module, "check_generator_once", lambda draw: None)
    return drawn


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("name", list(vs.mechanisms.MECHANISMS))
def test_payloads_are_the_literal_sums(name, kind, secrets):
    """Clipped in rational terms, rounded towards zero, plus B·z rounded to nearest."""
    private = sum_of(name)
    rng = np.random.default_rng(3)
    gradients = [scale * rng.standard_normal(D).astype(kind) for scale in (0.1, 1, 9, 0, 1, 3, 2)]
    messages = [vs.decode(private.add(gradient)) for gradient in gradients]
    assert len(secrets) == len(set(secrets)) == T
    mechanism = vs.mechanisms.MECHANISMS[name](T).with_block_length(1)
    decoder = np.cumsum(mechanism.noising_matrix(), axis=0)
    draws = np.array([fine_row(Row(secret, s), D) for s, secret in enumerate(secrets)])
    noise = private.noise_std * decoder @ draws
    total = np.zeros(D)
    for step, (message, raw) in enumerate(zip(messages, gradients, strict=True)):
        wide = raw.astype(np.float64)
        total += wide * min(1.0, 1.0 / max(np.linalg.norm(wide), 1e-300))
        assert (message.round, message.steps, message.grid) == (step, step + 1, private.grid.step)
        np.testing.assert_allclose(
            message.prefix * message.grid,
            total + noise[step],
            rtol=0,
            atol=private.grid.step * (step + 1.5) + 1e-6 * (step + 1),
        )


def test_the_noise_is_drawn_anew_and_nothing_else_changes_a_payload():
    payloads = {bytes(sum_of().add(np.zeros(D))) for _ in range(20)}
    assert len(payloads) == 20
    assert {len(payload) for payload in payloads} == {HEADER_BYTES + 8 * D}
    private = sum_of()
    first = vs.decode(private.add(np.zeros(D))).prefix * private.grid.step
    assert np.abs(first).max() > 1e-3 * private.noise_std


def test_what_the_promise_says_of_it():
    private = sum_of(neighbours="zero-out", participation=(2, 3))
    assert (private.guarantee.epsilon, private.guarantee.delta) == (2.0, 1e-3)
    assert private.guarantee.horizon == T
    assert private.guarantee.neighbours.value == "zero-out"
    assert private.guarantee.participation.times == 2
    assert private.guarantee.noise_std == private.noise_std
    assert private.guarantee.epsilon_at(1e-3) <= 2.0


@pytest.mark.parametrize(
    "bad",
    [
        np.zeros(D + 1),
        np.zeros((1, D)),
        np.zeros(()),
        np.zeros(D, int),
        np.zeros(D, complex),
        np.zeros(D, np.float16),
        np.zeros(D, object),
        "text",
        None,
        [[1.0]],
        np.zeros(D, bool),
    ],
)
def test_what_is_no_gradient_is_refused_and_uses_nothing_up(bad, secrets):
    private = sum_of()
    with pytest.raises(InputError, match=rf"gradient = .*expected float32 or float64 .*\({D},\)"):
        private.add(bad)
    assert private.position == 0
    assert secrets == []
    private.add(np.zeros(D))
    assert private.position == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_counts_as_zero_and_takes_its_step(bad, secrets):
    private = sum_of("independent")
    gradient = np.full(D, 0.3)
    gradient[2] = bad
    message = vs.decode(private.add(gradient))
    noise = private.noise_std * fine_row(Row(secrets[0], 0), D)
    np.testing.assert_allclose(message.prefix * message.grid, noise, atol=0.51 * message.grid)
    assert private.position == 1


def test_after_the_horizon_nothing_more():
    private = sum_of()
    for step in range(T):
        assert private.position == step
        private.add(np.zeros(D))
    for _ in range(2):
        with pytest.raises(HorizonExhausted, match=f"horizon of {T} steps"):
            private.add(np.zeros(D))
    assert private.position == T


FORKED = """
import os, sys
import numpy as np
import veilstream as vs

private = vs.PrivateSum(vs.mechanisms.tree(4), vs.Budget(2.0, 1e-3), clip_norm=1.0, dim=3)
private.add(np.zeros(3))
child = os.fork()
if child:
    os.waitpid(child, 0)
try:
    private.add(np.zeros(3))
    print("parent" if child else "child", "released", private.position, flush=True)
except Exception as error:
    print("parent" if child else "child", type(error).__name__, error, flush=True)
"""


def test_a_forked_process_is_refused_and_its_parent_is_not():
    """For real, where nothing has threads; the child has the same state and the same sum."""
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True)
    said = sorted(done.stdout.splitlines())
    assert len(said) == 2
    assert re.match(r"child PrivacyError .*another process.*nothing was released", said[0])
    assert said[1] == "parent released 2"


def test_another_process_uses_nothing_up(secrets, monkeypatch):
    private = sum_of()
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(PrivacyError, match="another process"):
        private.add(np.zeros(D))
    assert secrets == []
    assert private.position == 0


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_cannot_be_copied(take):
    with pytest.raises(TypeError, match="cannot be copied: its noise would be used twice"):
        take(sum_of())


def test_an_interrupted_step_ends_it(monkeypatch):
    """The noise may have moved and the sum not: nothing may follow."""
    private = sum_of()

    def interrupted(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(GridNoise, "_round", interrupted)
        with pytest.raises(KeyboardInterrupt):
            private.add(np.zeros(D))
    with pytest.raises(PrivacyError, match="half-way"):
        private.add(np.zeros(D))


def test_a_delta_that_cannot_be_kept_is_refused_at_once():
    with pytest.raises(InputError, match=r"privacy\.delta"):
        vs.PrivateSum(vs.mechanisms.tree(T), vs.Budget(1.0, 1e-60), clip_norm=1.0, dim=D)


def test_threads_that_share_a_sum_never_share_noise():
    """Every message's noise is its own: with a step between, two threads' gradients stay hidden."""
    mechanism = vs.mechanisms.buffered(400)
    private = vs.PrivateSum(mechanism, BUDGET, clip_norm=1.0, dim=30_000)
    sent: list[tuple[int, np.ndarray]] = []

    def add(sign: float) -> None:
        gradient = np.full(30_000, sign / np.sqrt(30_000))
        for _ in range(200):
            message = vs.decode(private.add(gradient))
            sent.append((message.round, message.prefix))

    threads = [threading.Thread(target=add, args=(sign,)) for sign in (1.0, -1.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(r for r, _ in sent) == list(range(400))
    prefixes = np.array([prefix for _, prefix in sorted(sent, key=lambda each: each[0])])
    steps = np.diff(prefixes, axis=0)
    bare = 2.0 * private.guarantee.clip_norm / private.grid.step  # what two gradients can differ by
    assert np.linalg.norm(steps[1:] - steps[:-1], axis=1).min() > 20 * bare
