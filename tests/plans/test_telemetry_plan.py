"""The table [telemetry]: what it may say, and what a plan without it stays."""

from __future__ import annotations

import pytest

from veilstream.deployment.terms import Terms
from veilstream.plans.plan import Plan
from veilstream.plans.schema import PlanError

TEXT = """
[learning]
rounds = 30
local_steps = 4
clip_norm = 0.5
task = "{task}"
[data]
dim = 5
[privacy]
epsilon = 4.0
delta = 1e-5
[[methods]]
name = "a"
kind = "{kind}"
mechanism = "buffered"
{step}
"""


def text_of(telemetry="", task="logistic", kind="ours"):
    step = "" if kind == "auto" else "step_size = 0.2"
    return TEXT.format(task=task, kind=kind, step=step) + telemetry


def test_an_empty_table_is_accuracy_at_three_tenths_of_the_clip_norm():
    plan = Plan.parse(text_of("[telemetry]"))
    telemetry = plan.telemetry_of(plan.methods[0])
    assert telemetry.metrics == ("accuracy",)
    assert telemetry.width == pytest.approx(0.15)
    assert plan.telemetry_window == 30  # 1000 steps are more than there are


def test_a_plan_without_the_table_says_nothing_of_telemetry():
    plan = Plan.parse(text_of())
    assert plan.telemetry_of(plan.methods[0]) is None
    assert "telemetry" not in plan.to_toml()
    settings = Terms.of(plan, 5).settings
    assert not any(key.startswith("telemetry") for key in settings)
    assert "telemetry" not in settings["guarantee"]


def test_a_plan_with_it_is_written_and_read_again():
    plan = Plan.parse(text_of('[telemetry]\nmetrics = ["loss", "present"]\nloss_cap = 2.5'))
    assert Plan.parse(plan.to_toml()) == plan


@pytest.mark.parametrize(
    ("table", "task", "kind", "error"),
    [
        ("metrics = []", "logistic", "ours", r"telemetry\.metrics .*leave the table out"),
        ('metrics = ["speed"]', "logistic", "ours", r"telemetry\.metrics\[0\].*speed"),
        ('metrics = ["loss", "loss"]', "logistic", "ours", "each metric once"),
        ("", "least_squares", "ours", r'no accuracy where least_squares.*metrics = \["loss"\]'),
        ('metrics = ["clipped"]', "logistic", "auto", "none is ever clipped"),
        ("scale = 0.0", "logistic", "ours", r"telemetry\.scale .*> 0"),
        ('loss_cap = -1.0\nmetrics = ["loss"]', "logistic", "ours", r"telemetry\.loss_cap"),
        ("window = 0", "logistic", "ours", r"telemetry\.window"),
    ],
)
def test_what_it_may_not_say(table, task, kind, error):
    with pytest.raises(PlanError, match=error):
        Plan.parse(text_of(f"[telemetry]\n{table}", task, kind))
