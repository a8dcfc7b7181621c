"""Telemetry of a deployed learner: its clients' metrics, on the grid, through crashes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.support.federation import DIM, Plain, plan_of
from tests.support.known_secrets import NamedLearner
from veilstream.deployment.client_steps import ClientTelemetry
from veilstream.deployment.learner import Learner
from veilstream.deployment.release import decode
from veilstream.errors import InputError, PrivacyError
from veilstream.federation.learner.local_account import LocalAccount, account_line
from veilstream.learning.tasks import Sample
from veilstream.plans.plan import TelemetryPlan
from veilstream.privacy.gradient_types import Hidden, RawGradient
from veilstream.privacy.telemetry import Telemetry
from veilstream.streams.intake import AlwaysReady

METRICS = ("accuracy", "clipped", "present")


def told_plan(**told):
    return dataclasses.replace(plan_of(rounds=4), telemetry=TelemetryPlan(**told))


def record(i, target):
    features = np.zeros(DIM)
    features[i % DIM] = 1.0
    return Sample(features, target)


def noise_of(plan, tmp_path, rounds):
    """What the same draws put into empty rounds: all that is there without a client."""
    with NamedLearner(plan, tmp_path / "empty.db", Plain(), create=True) as learner:
        for r in range(rounds):
            learner.begin_round(r, np.ones(DIM))
            payload = learner.finish_round().payload
    return decode(payload).prefix.astype(np.int64)


def test_each_client_adds_its_metrics_and_nobody_adds_nothing(tmp_path):
    plan = told_plan(metrics=METRICS)
    noise = noise_of(plan, tmp_path, 2)
    x = np.ones(DIM, np.float32)  # predicts +1 of every client below
    with NamedLearner(plan, tmp_path / "store.db", Plain(), create=True) as learner:
        learner.begin_round(0, x)
        learner.observe("right", record(0, 1.0))
        learner.observe("wrong", record(1, -1.0))
        learner.finish_round()
        learner.begin_round(1, x)
        learner.observe("right too", record(2, 1.0))
        message = decode(learner.finish_round().payload)
        width = learner.terms.telemetry.width
    told = (message.prefix - noise)[DIM:] * message.grid
    half = width / 2
    # No gradient of norm below one is clipped at 1; three of four steps had a client.
    np.testing.assert_allclose(told, [half, -3 * half, 3 * half], atol=4 * message.grid)


def test_accuracy_is_that_of_the_rounds_model_not_of_the_local_one(tmp_path):
    """Noise moves the local model far; the answer is about what was pinned."""
    plan = dataclasses.replace(
        told_plan(metrics=("accuracy",)),
        methods=(dataclasses.replace(plan_of().methods[0], step_size=1e3),),
        learning=dataclasses.replace(plan_of(rounds=4).learning, local_steps=20),
    )
    noise = noise_of(plan, tmp_path, 1)
    with NamedLearner(plan, tmp_path / "store.db", Plain(), create=True) as learner:
        learner.begin_round(0, np.ones(DIM))
        for i in range(20):
            learner.observe(f"{i}", record(i, 1.0))
        message = decode(learner.finish_round().payload)
        width = learner.terms.telemetry.width
    told = (message.prefix - noise)[DIM:] * message.grid
    np.testing.assert_allclose(told, [10 * width], atol=20 * message.grid)


@pytest.mark.parametrize("together", [False, True])
def test_a_restart_within_a_round_sends_the_same_bytes(tmp_path, together):
    plan = told_plan(metrics=METRICS)
    clients = [("a", record(0, 1.0)), ("b", record(1, -1.0))]
    payloads = []
    for restart in (False, True):
        store = tmp_path / f"{restart}.db"
        learner = NamedLearner(plan, store, Plain(), create=True)
        learner.begin_round(0, np.ones(DIM))
        if together:
            learner.observe_many(clients)
        else:
            learner.observe(*clients[0])
        if restart:
            learner.close()
            learner = NamedLearner(plan, store, Plain())
        if not together:
            learner.observe(*clients[1])
        payloads.append(learner.finish_round().payload)
        learner.begin_round(1, np.ones(DIM))
        payloads.append(learner.finish_round().payload)
        learner.close()
    assert payloads[:2] == payloads[2:]


def test_a_store_is_not_continued_with_other_telemetry(tmp_path):
    with Learner(told_plan(), tmp_path / "store.db", Plain(), create=True):
        pass
    with pytest.raises(InputError, match="what this store was begun with"):
        Learner(plan_of(rounds=4), tmp_path / "store.db", Plain())


LOSS = Telemetry(("accuracy", "loss", "clipped", "present"), 0.3, loss_cap=2.0)
SAMPLE, GRADIENT = record(0, 1.0), RawGradient(np.full(DIM, 9.0, np.float32))


class Failing(Plain):
    def predict(self, params, features):
        raise RuntimeError(f"saw {features}")

    def loss(self, params, sample):
        return np.float64(np.nan)


def test_a_task_that_fails_on_a_record_counts_as_wrong():
    metrics = ClientTelemetry(Failing(), LOSS, 1.0)
    values = metrics.values(Hidden(np.ones(DIM, np.float32)), SAMPLE, GRADIENT).reveal()
    assert values.tolist() == [0.0, 1.0, 1.0, 1.0]


def test_metrics_print_as_nothing():
    metrics = ClientTelemetry(Plain(), Telemetry(("present",), 0.3), 1.0)
    assert "1" not in repr(metrics.values(Hidden(np.ones(DIM, np.float32)), SAMPLE, GRADIENT))


def test_a_task_that_cannot_predict_is_refused_before_any_client():
    with pytest.raises(InputError, match="a task that can say it; Failing raised RuntimeError"):
        ClientTelemetry(Failing(), Telemetry(("accuracy",), 0.3), 1.0).check()


class WritesTheModel(Plain):
    def predict(self, params, features):
        params[0] = 9.0
        return super().predict(params, features)


def test_a_task_that_writes_to_the_model_is_refused_at_once():
    with pytest.raises(InputError, match="WritesTheModel raised ValueError"):
        ClientTelemetry(WritesTheModel(), Telemetry(("accuracy",), 0.3), 1.0).check()


class FailsLater(Plain):
    """Answers at the models of the checks, and fails at any that has learned something."""

    def predict(self, params, features):
        if np.abs(params).max() > 0.5:
            raise OverflowError(f"saw {features}")
        return super().predict(params, features)


def test_clients_on_whom_the_task_fails_are_counted_and_shown(tmp_path, caplog):
    plan = told_plan(metrics=("accuracy", "present"))
    path = tmp_path / "local.json"
    for life in (1, 2):
        with Learner(plan, tmp_path / "store.db", FailsLater(), create=True) as learner:
            account = LocalAccount(learner, AlwaysReady(), path=path)
            learner.begin_round(life - 1, np.ones(DIM))
            for k in range(2):
                answer = learner.observe(f"{life}/{k}", record(k, 1.0))
                account.observed(record(k, 1.0), answer, used=True)
            account.round_ends()
            learner.finish_round()
            assert learner.steps.metrics_failed == 2
            shown = account.as_dict()
            account.save()
    assert shown["metrics_failed"] == 4
    (notice,) = (text for text in shown["notices"] if text.startswith("telemetry"))
    assert "failed on 4 of 4 clients" in notice
    assert "telemetry failed on 4 clients" in account_line(shown)
    logged = [entry.getMessage() for entry in caplog.records if "client_steps" in entry.name]
    assert len(logged) == 2  # once a start
    assert all("OverflowError for the accuracy" in text for text in logged)
    assert not any("saw" in text for text in logged)


class Remembering(Plain):
    seen = 0.0

    def predict(self, params, features):
        self.seen += float(np.abs(features).sum())
        return np.full(len(features), 1.0 if self.seen < 5 else -1.0)


def test_a_task_whose_predictions_remember_is_refused(tmp_path):
    with (
        Learner(told_plan(), tmp_path / "store.db", Remembering(), create=True) as learner,
        pytest.raises(InputError, match="predictions and losses that are pure"),
    ):
        learner.begin_round(0, np.zeros(DIM))


class Number(Plain):
    classifies = False


def test_accuracy_of_a_task_that_predicts_numbers_is_refused(tmp_path):
    with pytest.raises(InputError, match="no accuracy where Number predicts a number"):
        Learner(told_plan(), tmp_path / "store.db", Number(), create=True)


class Unbounded(Telemetry):
    """The mutation: a metric outside its bound."""

    def coordinates(self, values):
        return 3.0 * (values - 0.5) * self.width


def test_a_metric_outside_its_bound_stops_the_learner(tmp_path):
    with Learner(told_plan(), tmp_path / "store.db", Plain(), create=True) as learner:
        told = learner.terms.telemetry
        broken = Unbounded(told.metrics, told.width)
        learner.local.terms = dataclasses.replace(learner.terms, telemetry=broken)
        learner.begin_round(0, np.ones(DIM))
        with pytest.raises(PrivacyError, match="exceeds its bound: nothing was released"):
            learner.observe("a", record(0, 1.0))
