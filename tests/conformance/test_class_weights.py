"""Labels that count differently: the same gradient in simulation and deployed, never longer, and what it is for."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tests.conformance.test_absent_parity import OwnDraws, deployed_models, plan_of, simulated_models
from veilstream.learning.algorithm import StepRule, local_step
from veilstream.learning.class_weights import ClassWeights
from veilstream.learning.tasks import Logistic, Sample
from veilstream.plans.plan import Plan
from veilstream.plans.schema import PlanError
from veilstream.privacy.gradient_types import RawGradient, clip_onto_grid
from veilstream.privacy.grid import Grid

WEIGHTS = (0.2, 1.0)


def weighted(plan: Plan, weights=WEIGHTS) -> Plan:
    return dataclasses.replace(plan, learning=dataclasses.replace(plan.learning, class_weights=weights))


@pytest.mark.parametrize("kind", ["ours", "auto"])
def test_deployed_learners_and_the_simulation_have_the_same_models(kind, tmp_path):
    plan = plan_of({})
    if kind == "auto":
        plan = dataclasses.replace(plan, methods=({"name": "ours", "kind": "auto", "averaging": 3.0},))
    plain, plan = plan, weighted(plan)
    expected, found = simulated_models(plan), deployed_models(plan, tmp_path, OwnDraws)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, atol=2e-5 * scale)
    assert np.abs(simulated_models(plain) - expected).max() > 1e-2 * scale  # the weights are in it


@pytest.mark.parametrize("gamma", [None, 0.3])
def test_a_gradient_is_weighted_then_clipped_in_both_arithmetics(gamma):
    rng = np.random.default_rng(3)
    features, target = rng.normal(size=(7, 4)).astype(np.float32), np.array([-1, 1, -1, -1, 1, 1, -1], np.float32)
    weights, clip = ClassWeights(WEIGHTS, True), 0.4
    slopes = -target / (1 + np.exp(target * (features @ np.full(4, 0.1))))
    raw = slopes[:, None] * features.astype(np.float64)
    w = np.where(target > 0, 1.0, 0.2)[:, None]
    length = np.linalg.norm(raw, axis=1, keepdims=True)
    shorter = w * (raw if gamma is None else raw / (length + gamma))
    by_hand = shorter * np.minimum(1.0, clip / np.linalg.norm(shorter, axis=1, keepdims=True))
    rule = StepRule(clip, gamma=gamma, weights=weights)
    _, noisy = local_step(
        Logistic(4), rule, jnp.full(4, 0.1), Sample(jnp.asarray(features), jnp.asarray(target)), jnp.zeros(4), 1.0
    )
    np.testing.assert_allclose(noisy, by_hand.mean(axis=0), atol=1e-5)
    grid = Grid(step=2.0**-30, clip_norm=clip)
    told, after = raw.astype(np.float32), None
    if gamma is None:
        told = told * weights.of(target)[:, None]
    else:
        after = weights.of(target)
    units = clip_onto_grid(RawGradient(told), grid, gamma, 7, after).reveal()
    np.testing.assert_allclose(np.asarray(units) * grid.step, by_hand.mean(axis=0), atol=1e-5)


def test_weights_of_targets_and_of_shares():
    found = ClassWeights.of_shares([0.5, 0.4, 0.1], signed=False)
    np.testing.assert_allclose(found.of(np.array([0.0, 1.0, 2.0, 2.0])), [0.2, 0.25, 1.0, 1.0])
    np.testing.assert_allclose(found.of(jnp.array([0.0, 1.0, 2.0, 2.0])), [0.2, 0.25, 1.0, 1.0])
    signed = ClassWeights((0.3, 1.0), True)
    np.testing.assert_allclose(signed.of(np.array([-1.0, 1.0, 0.0])), [0.3, 1.0, 0.3])
    assert np.isfinite(found.of(np.array([np.nan, 9.0, -4.0]))).all()


TABLE = """
[learning]
task = "logistic"
rounds = 2
{weights}
[data]
kind = "table"
source = "t.csv"
client = "#row"
label = "y"
labels = ["no", "yes"]
{shares}
[[data.features]]
name = "x"
low = 0.0
high = 1.0
[privacy]
epsilon = 2.0
delta = 1e-5
[[methods]]
name = "ours"
step_size = 0.1
"""


@pytest.mark.parametrize(
    ("weights", "shares", "error"),
    [
        ("class_weights = [1.0]", "", "2 numbers, one for each label"),
        ("class_weights = [0.5, 0.5]", "", "1 as the largest"),
        ("class_weights = [0.5, 2.0]", "", "class_weights"),
        ("", "label_shares = [0.9, 0.2]", "come to 1"),
        ("", "label_shares = [0.9996, 0.0004]", "thousandth"),
        ("", "label_shares = [0.3, 0.3, 0.4]", "2 numbers, one for each label"),
        ("class_weights = [0.5, 1.0]", "label_shares = [0.7, 0.3]", "nothing beside learning.class_weights"),
    ],
)
def test_weights_and_shares_that_cannot_be_are_refused(weights, shares, error):
    with pytest.raises(PlanError, match=error):
        Plan.parse(TABLE.format(weights=weights, shares=shares))


def test_a_number_has_no_class_weights():
    text = TABLE.format(weights="class_weights = [0.5, 1.0]", shares="").replace("logistic", "least_squares")
    with pytest.raises(PlanError, match="tells no labels apart"):
        Plan.parse(text.replace('labels = ["no", "yes"]', "label_range = [0.0, 1.0]"))


def test_a_learner_and_a_server_with_other_shares_do_not_agree():
    from veilstream.deployment.terms import Terms

    plans = [Plan.parse(TABLE.format(weights="", shares=f"label_shares = {s}")) for s in ([0.7, 0.3], [0.8, 0.2])]
    plans += [Plan.parse(TABLE.format(weights=w, shares="")) for w in ("", "class_weights = [0.5, 1.0]")]
    digests = {Terms.of(plan, 2).settings["digest"] for plan in plans}
    assert len(digests) == 4
    assert len({Terms.of(plan, 2).noise_std for plan in plans}) == 1  # and the promise is the same
