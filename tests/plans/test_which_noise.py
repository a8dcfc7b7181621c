"""One recommendation: `veilstream plan`, a run's main method, a new project's plan, the demonstrations and the docs."""

from __future__ import annotations

import re

import pytest

from tests.support.pages import ROOT
from veilstream.deployment.deployable import Deployable
from veilstream.federation.demo import demo_plan
from veilstream.plans.comparison import Setting, compare
from veilstream.plans.experiments import experiment_path
from veilstream.plans.new_project import new_project
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import main_method, prepare, recommended


def new_plan(folder) -> Plan:
    new_project(folder / "mine")
    return Plan.load(folder / "mine/plan.toml")


@pytest.mark.parametrize("which", ["new", "demo", "federation demo"])
def test_the_plans_that_come_with_it_have_the_recommended_noise(tmp_path, which):
    plan = {
        "new": lambda: new_plan(tmp_path),
        "demo": lambda: Plan.load(experiment_path("demo")),
        "federation demo": lambda: demo_plan(3, 30),
    }[which]()
    names = ["buffered", "toeplitz_normalised", "tree", "independent"]
    if which != "new":  # there the optimum takes seconds to solve
        names += ["optimal"]
    comparison = compare(Setting.of(plan), names)
    prepared = [prepare(plan, method) for method in plan.methods]
    main = prepared[main_method(prepared)].plan
    assert comparison.recommended.mechanism == main.mechanism_name == "buffered"
    assert comparison.recommended.objective is main.objective is None
    assert comparison.own_in_words() == f"{main.name} has the recommended noise."
    assert Deployable.of(plan).method == main.name


def test_the_documentations_table_begins_with_it():
    page = (ROOT / "docs/planning.md").read_text()
    (first,) = re.findall(r"^\| `(\w+)`[^|]*\(recommended\)", page, re.MULTILINE)
    changes = {"privacy.epsilon": 2.0, "privacy.delta": 1e-3, "learning.rounds": 1000, "data.dim": 100}
    comparison = compare(Setting.of(Plan.load(experiment_path("demo"), changes)), ["buffered", "tree", "independent"])
    assert comparison.recommended.mechanism == first
    assert f"| {comparison.recommended.error_round_ends:.3f} |" in page


def test_the_rule_prefers_what_is_ready_within_15_percent_and_never_more():
    found = {"solved": (1.0, (True, 9)), "ready": (1.14, (False, 5)), "small": (1.2, (False, 0))}

    def chosen(names):
        return recommended(names, lambda name: found[name][0], lambda name: found[name][1])

    assert chosen(["solved", "ready", "small"]) == "ready"
    assert chosen(["solved", "small"]) == "solved"
    assert chosen(["small", "ready"]) == "small"  # 1.2 is within 15% of 1.14


SECRET = """
[learning]
rounds = 12
learners = 2
[privacy]
epsilon = 2.5
delta = 1e-3
order = "secret"
[[methods]]
name = "small"
mechanism = "independent"
step_size = 0.1
[[methods]]
name = "made for it"
mechanism = "banded"
step_size = 0.1
"""


def test_under_a_secret_order_the_least_noise_is_recommended_by_plan_and_run():
    """Here a mechanism with less state is within the 15% that count as equal under a known order."""
    plan = Plan.parse(SECRET)
    comparison = compare(Setting.of(plan), ["independent", "banded", "buffered"])
    noise = {row.mechanism: row.error_published for row in comparison.rows}
    state = {row.mechanism: row.effort for row in comparison.rows}
    assert min(noise, key=noise.__getitem__) == "banded"
    assert noise["independent"] < 1.15 * noise["banded"]
    assert state["independent"] < state["banded"]
    assert comparison.recommended.mechanism == "banded"
    assert comparison.reason.startswith("least noise in what is published")
    prepared = [prepare(plan, method) for method in plan.methods]
    assert prepared[main_method(prepared)].plan.name == "made for it"


def test_a_plan_with_other_noise_is_told_by_how_much():
    text = """
        [learning]
        rounds = 100
        local_steps = 4
        [privacy]
        epsilon = 1.0
        delta = 1e-6
        [[methods]]
        name = "mine"
        mechanism = "tree"
        step_size = 0.1
    """
    comparison = compare(Setting.of(Plan.parse(text)))
    assert comparison.recommended.mechanism != "tree"
    own = next(row for row in comparison.rows if row.mechanism == "tree")
    more = 100 * (own.error_published / comparison.recommended.error_published - 1)
    assert comparison.own_in_words() == f"mine has tree: {more:.0f}% more noise in what is published than recommended."
