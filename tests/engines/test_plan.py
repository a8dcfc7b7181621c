"""Plans: what loads can run; what cannot run is refused with its key and line."""

from __future__ import annotations

import pytest

from tests.test_package import SMALL_PLAN
from veilstream.engines.experiments import experiment_path
from veilstream.engines.plan import Plan, PlanError
from veilstream.errors import InputError, UnknownName


def test_plans_survive_a_round_trip():
    for text in (SMALL_PLAN, experiment_path("logistic").read_text()):
        plan = Plan.parse(text)
        assert Plan.parse(plan.to_toml()) == plan


def test_overrides_reach_tables_and_methods():
    plan = Plan.parse(SMALL_PLAN, {"learning.rounds": 5, "methods.tree.step_size": 0.7})
    assert plan.learning.rounds == 5
    assert plan.methods[1].step_size == 0.7


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rounds = 12", "ronds = 12", r"learning\.ronds \(line 3\) = 12.*did you mean 'rounds'"),
        ("dim = 5", "dims = 5", r"data\.dims \(line 7\).*did you mean 'dim'"),
        ("rounds = 12", "rounds = 0", r"learning\.rounds \(line 3\) = 0.*greater than or"),
        ("rounds = 12", "rounds = 2.5", r"learning\.rounds \(line 3\)"),
        ("epsilon = 2.0", "epsilon = -1", r"privacy\.epsilon \(line 10\) = -1"),
        ("delta = 1e-3", "delta = 1.5", r"privacy\.delta \(line 11\)"),
        ("epsilon = 2.0", "", r"privacy\.epsilon.*add epsilon"),
        ('mechanism = "tree"', 'mechanism = "treee"',
         r"methods\[1\]\.mechanism \(line 20\).*did you mean 'tree'"),
        ('kind = "noise-free"', 'kind = "noisefree"',
         r"methods\[0\]\.kind \(line 16\).*did you mean 'noise-free'"),
        ('kind = "noise-free"', 'kind = "noise-free"\nepsilon = 1.0',
         r"methods\[0\]\.epsilon \(line 17\).*adds no noise and protects no one"),
        ('kind = "noise-free"', 'kind = "gao"', r"methods\[0\]\.kind.*one machine"),
        ('kind = "noise-free"', 'kind = "dp-ftrl"', r"learners = 3"),
        ('name = "tree"', 'name = "free"', r"methods\.name.*a name of its own"),
        ("step_size = 0.1", "step_size = nan", r"methods\[0\]\.step_size"),
        ("[privacy]\nepsilon = 2.0\ndelta = 1e-3", "", r"methods\[1\]\.epsilon.*add \[privacy\]"),
        ('mechanism = "tree"', 'mechanism = "tree"\nobjective = "max"', r"only with mech"),
        ("rounds = 12", 'rounds = 12\ntask = "ripple"', r"data\.kind.*ripple"),
        ("[run]", "[run", r"plan = .*expected TOML"),
        ("epsilon = 2.0", "epsilon = true", r"privacy\.epsilon \(line 10\) = True"),
        ("epsilon = 2.0", 'epsilon = "2"', r"privacy\.epsilon \(line 10\) = '2'"),
        ("epsilon = 2.0", "epsilon = 1e9", r"privacy\.epsilon \(line 10\) = .*<= 1e6"),
        ("delta = 1e-3", "delta = 1e-320", r"privacy\.delta \(line 11\)"),
        ("learners = 3", "learners = 3\nclip_norm = 1e-200", r"learning\.clip_norm \(line 6\)"),
        ("dim = 5", "dim = 5\nclients = 23", r"learning\.rounds \(line 3\) = 12.*needs 24"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused(old, new, message):
    with pytest.raises(PlanError, match=message):
        Plan.parse(SMALL_PLAN.replace(old, new, 1))


def test_missing_file_and_unknown_experiment():
    with pytest.raises(PlanError, match="a file that can be read"):
        Plan.load("nowhere.toml")
    with pytest.raises(UnknownName, match="did you mean 'logistic'"):
        experiment_path("logistics")


@pytest.mark.parametrize("key", ["methods.oak.step_size", "learning.rounds.x.y", "methods.tree"])
def test_overrides_that_lead_nowhere_are_refused(key):
    with pytest.raises(InputError, match="--set"):
        Plan.parse(SMALL_PLAN, {key: 1.0})


def test_overrides_reach_names_with_dots_and_plans_that_have_odd_texts():
    text = SMALL_PLAN.replace('name = "tree"', 'name = "tree @ 0.5"')
    plan = Plan.parse(text, {"methods.tree @ 0.5.step_size": 2.0, "description": 'a\n"b" \x01'})
    assert plan.methods[1].step_size == 2.0
    assert Plan.parse(plan.to_toml()) == plan


def test_plans_made_in_python_raise_our_errors_too():
    with pytest.raises(PlanError, match="learning"):
        Plan(methods=[])


def test_methods_say_what_they_protect():
    plan = Plan.parse(SMALL_PLAN)
    assert plan.methods[0].method.protects == "nothing"
    assert "local differential privacy" in plan.methods[1].method.protects
