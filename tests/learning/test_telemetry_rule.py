"""What a server does with two windows of estimates, by hand."""

from __future__ import annotations

import itertools

import pytest

from veilstream.learning.telemetry_estimates import Estimate
from veilstream.learning.telemetry_rule import StepControl


def window(value, half=0.05, metric="accuracy", sampling=0.0):
    return [Estimate(10, metric, value, value - half, value + half, 5, 100, sampling)]


def steps(act, values, factor=None, **options):
    control = StepControl(act, factor)
    pairs = itertools.pairwise(values)
    return [control.look(window(a, **options), window(b, **options)) for a, b in pairs]


def test_stop_is_for_good_and_waits_for_more_than_both_bars():
    assert steps("stop", [0.8, 0.71, 0.85, 0.74, 0.9]) == [1.0, 1.0, 0.0, 0.0]


def test_reduce_multiplies_when_the_metric_has_fallen_beyond_both_bars():
    assert steps("reduce_step", [0.8, 0.7, 0.71, 0.6, 0.49]) == [1.0, 1.0, 0.5, 0.25]
    assert steps("reduce_step", [0.6, 0.49], factor=0.1) == [pytest.approx(0.1)]


@pytest.mark.parametrize("act", ["stop", "reduce_step", "choose_step"])
def test_a_fall_that_drawing_other_clients_explains_is_no_reason(act):
    """A bar of 0.04 of noise and 1.96·0.0153 of sampling is 0.05: 3, 4, 5."""
    drawn = {"half": 0.04, "sampling": 0.03 / 1.959963984540054}
    assert steps(act, [0.8, 0.701], **drawn) == [1.0]
    assert steps(act, [0.8, 0.699], **drawn) != [1.0]
    assert steps(act, [0.8, 0.701], half=0.04) != [1.0]


def test_choose_takes_the_larger_step_after_a_fall_and_until_it_no_longer_helps():
    values = [0.8, 0.79, 0.5, 0.55, 0.7, 0.69, 0.72]
    assert steps("choose_step", values) == [1.0, 4.0, 4.0, 4.0, 1.0, 1.0]
    assert steps("choose_step", [0.8, 0.5], factor=2.5) == [2.5]


def test_a_loss_is_better_when_it_falls():
    assert steps("stop", [0.5, 0.3, 0.45], metric="loss") == [1.0, 0.0]
    assert steps("reduce_step", [0.5, 0.3], metric="loss") == [1.0]


def test_without_an_estimate_nothing_changes():
    control = StepControl("reduce_step", None, 0.25)
    assert control.look([], window(0.5)) == control.look(window(0.5), []) == 0.25
