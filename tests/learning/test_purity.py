"""A gradient must be a pure function of (model, record): what is not is refused at the start."""

from __future__ import annotations

import dataclasses
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
from veilstream.plans.plan import TelemetryPlan


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
        return super().host_gradient(z, sample) * kept + np.float32(np.random.default_rng().random())


class OneLate(Plain):
    """Answers each record with the gradient of the one before."""

    def __init__(self):
        self._last = None

    def host_gradient(self, z, sample):
        last, self._last = self._last, sample
        return super().host_gradient(z, sample if last is None else last)


class LargestSeen(Plain):
    """Divides each feature by the largest that was seen: state that only ever grows."""

    def __init__(self):
        self._largest = np.zeros(self.dim)

    def host_gradient(self, z, sample):
        self._largest = np.maximum(self._largest, np.abs(sample.features))
        scaled = sample.features / np.where(self._largest > 0, self._largest, 1.0)
        return super().host_gradient(z, sample._replace(features=scaled))


class LongestGradient(Plain):
    """Scales by the longest gradient that was seen."""

    def __init__(self):
        self._longest = 1e-9

    def host_gradient(self, z, sample):
        gradient = super().host_gradient(z, sample)
        self._longest = max(self._longest, float(np.linalg.norm(gradient)))
        return (gradient / self._longest).astype(np.float32)


class LateMomentum(Plain):
    """Momentum after ten records of warming up."""

    def __init__(self):
        self._velocity, self._count = np.zeros(self.dim, np.float32), 0

    def host_gradient(self, z, sample):
        gradient = super().host_gradient(z, sample)
        self._count += 1
        if self._count <= 10:
            return gradient
        self._velocity = np.float32(0.9) * self._velocity + gradient
        return self._velocity


IMPURE = [RunningMean, Drawn, OneLate, LargestSeen, LongestGradient, LateMomentum]


@pytest.mark.parametrize("task", IMPURE)
def test_a_task_that_is_not_pure_is_refused_before_its_store_exists(task, tmp_path):
    store = tmp_path / "s.db"
    with pytest.raises(InputError, match=rf"task = '{task.__name__}'.*pure function.*no state"):
        Learner(plan_of(), store, task())
    assert not store.exists()


class MeanFromGradients(Plain):
    """A running mean that gradients update and predictions use, as in batch normalisation."""

    def __init__(self, keep=0.9):
        self._keep, self._mean, self._count = keep, 0.0, 0

    def _see(self, features):
        self._count += 1
        keep = self._keep if self._keep is not None else 1.0 - 1.0 / self._count
        self._mean = keep * self._mean + (1.0 - keep) * float(features.sum())

    def host_gradient(self, z, sample):
        self._see(sample.features)
        return super().host_gradient(z, sample)

    def predict(self, params, features):
        return np.where(features @ params - self._mean >= 0, 1.0, -1.0)


class MeanFromPredictions(MeanFromGradients):
    """The other way round."""

    def host_gradient(self, z, sample):
        centred = sample.features - self._mean
        return Plain.host_gradient(self, z, sample._replace(features=centred))

    def predict(self, params, features):
        self._see(features)
        return Plain.predict(self, params, features)


@pytest.mark.parametrize("telemetry", [None, TelemetryPlan()])
@pytest.mark.parametrize("keep", [0.9, 0.0, None], ids=["decaying", "last", "of all"])
@pytest.mark.parametrize("kind", [MeanFromGradients, MeanFromPredictions])
def test_state_between_gradients_and_predictions_is_refused(kind, keep, telemetry, tmp_path):
    """Without telemetry too: a learner's own score asks for predictions of clients' records."""
    task = kind(keep)
    if kind is MeanFromGradients:
        check_pure(task, task.host_gradient)  # gradients by themselves are
    plan = dataclasses.replace(plan_of(), telemetry=telemetry)
    with (
        Learner(plan, tmp_path / "s.db", task, create=True) as learner,
        pytest.raises(InputError, match=rf"{kind.__name__}.*gradient, predictions and losses"),
    ):
        learner.begin_round(0, np.zeros(task.dim, np.float32))


def test_state_between_gradients_and_losses_is_refused(tmp_path):
    class Losses(MeanFromGradients):
        predict = Plain.predict

        def loss(self, params, sample):
            return np.float64(abs(self._mean))

    task = Losses()
    plan = dataclasses.replace(plan_of(), telemetry=TelemetryPlan(metrics=("loss",)))
    with (
        Learner(plan, tmp_path / "s.db", task, create=True) as learner,
        pytest.raises(InputError, match="gradient, predictions and losses"),
    ):
        learner.begin_round(0, np.zeros(task.dim, np.float32))


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
    zero, *others = example_records(Plain())
    assert not zero.features.any()
    sizes = [float(np.abs(other.features).max()) for other in others]
    assert sizes == sorted(sizes)
    assert sizes[-1] > 100 * sizes[0]
    assert all(other.features.all() for other in others)
    assert {float(other.target) for other in others} == {-1.0, 1.0}
    assert np.sign([other.features.sum() for other in others[-2:]]).tolist() in ([1, -1], [-1, 1])


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
