"""A gradient must be a pure function of (model, record): what is not is refused at the start."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from tests.support.federation import Plain, plan_of
from veilstream.deployment.learner import Learner
from veilstream.errors import InputError
from veilstream.learning.models.host_call import host_call
from veilstream.learning.models.linear_dicts import DictLogistic
from veilstream.learning.purity import check_pure, example_records
from veilstream.learning.tasks import FromLoss, LeastSquares, Logistic, Ripple


class RunningMean(Plain):
    """Centres each record by the mean of those before it."""

    def __init__(self):
        self._sum, self._count = np.zeros(self.dim), 0

    def host_gradient(self, z, sample):
        self._sum, self._count = self._sum + sample.features, self._count + 1
        centred = sample.features - self._sum / self._count
        return super().host_gradient(z, sample._replace(features=centred))


class Drawn(Plain):
    """Drops features at random."""

    def host_gradient(self, z, sample):
        kept = np.random.default_rng().random(self.dim) < 0.5
        return super().host_gradient(z, sample) * kept + np.float32(
            np.random.default_rng().random()
        )


class OneLate(Plain):
    """Answers each record with the gradient of the one before."""

    def __init__(self):
        self._last = None

    def host_gradient(self, z, sample):
        last, self._last = self._last, sample
        return super().host_gradient(z, sample if last is None else last)


IMPURE = [RunningMean, Drawn, OneLate]


@pytest.mark.parametrize("task", IMPURE)
def test_a_task_that_is_not_pure_is_refused_before_its_store_exists(task, tmp_path):
    store = tmp_path / "s.db"
    with pytest.raises(InputError, match=rf"task = '{task.__name__}'.*pure function.*no state"):
        Learner(plan_of(), store, task())
    assert not store.exists()


class Counting(FromLoss):
    """Run by JAX, with a host call that counts inside the compiled gradient."""

    dim, features_shape, labels, classifies = Plain.dim, Plain.features_shape, Plain.labels, True
    calls = 0

    def _scaled(self, features):
        self.calls += 1
        return np.asarray(features * self.calls, np.float32)

    def loss(self, params, sample):
        raise NotImplementedError

    def gradient(self, params, sample):
        return host_call(self._scaled, (self.dim,), np.float32, sample.features)


def test_a_compiled_task_is_checked_before_a_round_is_begun(tmp_path):
    task = Counting()
    with Learner(plan_of(), tmp_path / "s.db", task, create=True) as learner:
        assert task.calls == 0  # a restart that only sends again need not wait for JAX
        with pytest.raises(InputError, match=r"task = 'Counting'.*pure function"):
            learner.begin_round(0, np.zeros(task.dim, np.float32))
        assert not learner.pinned
        with pytest.raises(InputError, match="a round that has been finished"):
            learner.finish_round()


@pytest.mark.parametrize("task", [Logistic(3, 0.1), LeastSquares(3), DictLogistic(8)])
def test_our_own_host_gradients_are_pure(task):
    check_pure(task, task.host_gradient)


def test_our_own_compiled_gradients_are_pure():
    import jax

    for task in (Logistic(3), Ripple(4)):
        check_pure(task, jax.jit(task.gradient))


def test_a_gradient_that_raises_counts_as_zero_and_is_as_pure_as_that():
    def raises(z, sample):
        raise ValueError

    check_pure(Plain(), raises)


def test_examples_are_admitted_records_and_not_alike():
    zero, other = example_records(Plain())
    assert not zero.features.any()
    assert other.features.all()
    assert (zero.target, other.target) == (-1.0, 1.0)


def test_what_is_worked_out_for_a_token_is_forgotten_with_the_call(monkeypatch):
    """Tokens are people's data: a second record with the same token is hashed anew."""
    hashed = []
    real = hashlib.blake2b

    def counted(text, **options):
        hashed.append(text)
        return real(text, **options)

    monkeypatch.setattr(hashlib, "blake2b", counted)
    encoder, record = DictLogistic(16).encoder, {"who": "someone"}
    encoder.encode([record, record])
    assert hashed == [b"who=someone"]
    encoder.encode_one(record)
    encoder.encode_one(record)
    assert hashed == [b"who=someone"] * 3
