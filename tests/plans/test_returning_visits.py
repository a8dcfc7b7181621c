"""People who return: their visits are kept apart in the steps that the noise is calibrated for."""

from __future__ import annotations

import numpy as np
import pytest

import veilstream as vs
from veilstream.plans.plan import MethodPlan, Plan, PlanError
from veilstream.plans.prepare import prepare

PLAN = """
[learning]
rounds = 20
local_steps = 4
[privacy]
epsilon = 1.0
delta = 1e-5
participations = 4
[data]
dim = 3
[run]
seeds = 1
regret = false
[[methods]]
name = "m"
step_size = 0.1
"""

OWN_STEPS = {
    "kind": ('step_size = 0.1\nkind = "liu"', r"methods\[0\]\.kind \(line 17\) = 'liu'.* 1 x 4 "),
    "clients": (
        "step_size = 0.1\nclients_per_step = 2",
        r"methods\[0\]\.clients_per_step \(line 17\) = 2.*participations = 4.* 2 x 2 ",
    ),
}


@pytest.mark.parametrize(("method", "message"), OWN_STEPS.values(), ids=OWN_STEPS)
def test_a_method_with_other_steps_than_the_plan_takes_nobody_twice(method, message, tmp_path):
    text = PLAN.replace("step_size = 0.1", method)
    with pytest.raises(PlanError, match=message):
        Plan.parse(text)
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(PlanError, match="in which visits are kept apart"):
        vs.run(tmp_path / "plan.toml", out=tmp_path / "run")
    assert Plan.parse(text.replace("participations = 4", "participations = 1"))


def test_preparing_a_method_of_another_plan_is_held_to_the_same_rule():
    plan = Plan.parse(PLAN.replace("step_size", 'mechanism = "independent"\nstep_size'))
    other = MethodPlan(name="o", mechanism="independent", step_size=0.1, clients_per_step=4)
    with pytest.raises(PlanError, match=r"methods\.clients_per_step = 4"):
        prepare(plan, other)
    # Four visits in the four steps of a round are four columns of C = I, not four times one.
    kept = prepare(plan, plan.methods[0]).guarantee
    assert kept is not None
    assert kept.sensitivity == pytest.approx(2.0 * np.sqrt(4.0), rel=1e-6)


def test_methods_that_promise_nothing_may_have_steps_of_their_own():
    free = 'step_size = 0.1\nkind = "noise-free"\nclients_per_step = 4'
    assert Plan.parse(PLAN.replace("step_size = 0.1", free))


@pytest.mark.parametrize("absence", ["missing = 0.3", "late = 0.5", "leaving = 0.5"])
def test_absences_would_shorten_the_separation_and_are_refused_beside_one(absence):
    apart = PLAN.replace("participations = 4", "participations = 4\nmin_separation = 20")
    assert Plan.parse(apart)
    with pytest.raises(PlanError, match=r"privacy\.min_separation \(line 9\) = 20.*miss rounds"):
        Plan.parse(apart.replace("dim = 3", f"dim = 3\n{absence}"))
    assert Plan.parse(PLAN.replace("dim = 3", f"dim = 3\n{absence}"))  # any steps, as promised
    once = apart.replace("participations = 4\n", "")
    assert Plan.parse(once.replace("dim = 3", f"dim = 3\n{absence}"))
