"""Majority, no change and a frozen model, against counts by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from veilstream.errors import InputError
from veilstream.learning.tasks import Logistic
from veilstream.plans.plan import Plan
from veilstream.simulation.baselines import frozen_rounds, prequential_baselines
from veilstream.streams.pool import PoolStream
from veilstream.streams.table_stream import FixedOrder


def plan(rounds, learners=1, clients=1, kind="noise-free"):
    method = {"name": "one", "kind": kind, "step_size": 0.5}
    if kind != "noise-free":
        method |= {"epsilon": 1.0, "delta": 1e-5}
    return Plan(
        learning={"rounds": rounds, "learners": learners, "clients_per_step": clients},
        data={"kind": "custom"},
        methods=[method],
        run={"seeds": 1},
    )


def stream(labels_of_learners, rounds, per_round=1):
    """Features are 1 and the label's index among all: a model can be told from its products."""
    targets = np.concatenate([np.array(own, np.float32) for own in labels_of_learners])
    orders, at = [], 0
    for own in labels_of_learners:
        orders.append(np.arange(at, at + len(own), dtype=np.int32))
        at += len(own)
    features = np.stack([np.ones_like(targets), targets * 0.5], axis=1) / 2
    return PoolStream(
        learners=len(orders),
        rounds=rounds,
        per_round=per_round,
        features=features,
        targets=targets,
        held_features=features[:1],
        held_targets=targets[:1],
        split=FixedOrder(tuple(orders)),
        provenance="made up",
    )


def test_majority_and_no_change_know_only_what_came_before():
    labels = [1, 1, -1, 1, -1, -1]
    found = prequential_baselines(plan(6), Logistic(2), stream([labels], 6))
    # Both classes begin with one imagined record; a tie goes to -1.
    assert found["majority"]["accuracy"].tolist() == [0, 1, 0, 1, 0, 0]
    shares = [1 / 2, 2 / 3, 1 / 4, 3 / 5, 2 / 6, 3 / 7]
    assert found["majority"]["loss"] == pytest.approx([-math.log(s) for s in shares])
    # The first is compared with -1.
    assert found["no change"]["accuracy"].tolist() == [0, 1, 0, 0, 0, 1]
    repeats = [1 - 1 / 2, 1 / 3, 1 - 2 / 4, 1 - 2 / 5, 1 - 2 / 6, 2 / 7]
    assert found["no change"]["loss"] == pytest.approx([-math.log(s) for s in repeats])


def test_every_learner_counts_for_itself_and_the_absent_do_not():
    found = prequential_baselines(plan(4, 2), Logistic(2), stream([[1, 1, 1, 1], [-1, -1]], 4))
    assert found["majority"]["accuracy"].tolist() == [0.5, 1, 1, 1]
    assert found["no change"]["accuracy"].tolist() == [0.5, 1, 1, 1]


def test_the_frozen_model_learns_a_twentieth_and_then_stands_still():
    """Against gradient descent by hand: one record a step, labels of one kind, then the other."""
    rounds, task = 40, Logistic(2)
    clients = stream([[1.0] * 20 + [-1.0] * 20], rounds)
    assert frozen_rounds(rounds) == 2
    found = prequential_baselines(plan(rounds), task, clients)["frozen"]
    model = np.zeros(2)
    expected = []
    for r in range(rounds):
        features, target = clients.features[r].astype(float), float(clients.targets[r])
        margin = target * features @ model
        expected.append(math.log1p(math.exp(-margin)))
        if r < 2:
            model += 0.5 * target * features / (1 + math.exp(margin))
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    assert found["accuracy"][2:20].tolist() == [1.0] * 18
    assert found["accuracy"][20:].mean() < 1


def test_a_plan_without_a_noise_free_method_has_nothing_to_freeze():
    with pytest.raises(InputError, match="noise-free"):
        prequential_baselines(plan(4, kind="independent"), Logistic(2), stream([[1, -1, 1, 1]], 4))
