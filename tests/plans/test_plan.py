"""Plans: what loads can run; what cannot run is refused with its key and line."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, is_dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_package import SMALL_PLAN
from veilstream.errors import InputError, UnknownName
from veilstream.plans.experiments import experiment_path
from veilstream.plans.plan import LearningPlan, MethodPlan, Plan, PlanError

FREE = {"kind": "noise-free", "step_size": 0.5}


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
        ("rounds = 12", "rounds = 0", r"learning\.rounds \(line 3\) = 0.*whole number >= 1 "),
        ("rounds = 12", "rounds = 2.5", r"learning\.rounds \(line 3\) = 2\.5.*try 1000"),
        ("rounds = 12", "rounds = true", r"learning\.rounds \(line 3\) = True"),
        ("rounds = 12\nlocal_steps = 2\nlearners = 3\n[data]\ndim", "[data]\ndims", r"(?m)^data\.dims"),
        ("[learning]", "[lerning]", r"^lerning \(line 2\) = '<table>'.*did you mean 'learning'"),
        ("rounds = 12\n", "", r"learning\.rounds \(line 2\) = None.*whole number >= 1 \(add rounds"),
        ("rounds = 12", "rounds = 0x1" + 5000 * "0", r"rounds \(line 3\) = '<whole number beyond"),
        ("rounds = 12", "rounds = " + 5000 * "1", r"expected TOML"),
        (
            "epsilon = 2.0",
            "epsilon = -1",
            r"privacy\.epsilon \(line 10\) = -1: expected a number "
            r"> 0 and <= 1e6 \(lower means more private; try 1\)",
        ),
        ("epsilon = 2.0", 'epsilon = 2.0\naccounting = "zcpd"', r"did you mean 'zcdp'"),
        ("dim = 5", "dim = []", r"data\.dim \(line 7\) = '<array>': expected a whole number"),
        ("seeds = 2", "seeds = 2\nregret = 1", r"run\.regret.*true or false \(try true\)"),
        ('name = "tree"', 'name = "a/b"', r"methods\[1\]\.name.*without slashes"),
        ('name = "tree"', 'name = ""', r"methods\[1\]\.name"),
        ("delta = 1e-3", "delta = 1.5", r"privacy\.delta \(line 11\)"),
        ("epsilon = 2.0", "", r"privacy\.epsilon.*add epsilon"),
        ('mechanism = "tree"', 'mechanism = "treee"', r"methods\[1\]\.mechanism \(line 20\).*did you mean 'tree'"),
        ('kind = "noise-free"', 'kind = "noisefree"', r"methods\[0\]\.kind \(line 16\).*did you mean 'noise-free'"),
        (
            'kind = "noise-free"',
            'kind = "noise-free"\nepsilon = 1.0',
            r"methods\[0\]\.epsilon \(line 17\).*adds no noise and protects no one",
        ),
        ('kind = "noise-free"', 'kind = "gao"', r"methods\[0\]\.kind.*one machine"),
        ('kind = "noise-free"', 'kind = "dp-ftrl"', r"learners = 3"),
        ('name = "tree"', 'name = "free"', r"methods\.name.*a name of its own"),
        ("step_size = 0.1", "step_size = nan", r"methods\[0\]\.step_size"),
        ("step_size = 0.1", "step_size = inf", r"methods\[0\]\.step_size.*a finite number > 0"),
        ("[privacy]\nepsilon = 2.0\ndelta = 1e-3", "", r"methods\[1\]\.epsilon.*add \[privacy\]"),
        ('mechanism = "tree"', 'mechanism = "tree"\nobjective = "max"', r"only with mech"),
        (
            'mechanism = "tree"',
            'mechanism = "tree"\nobjective = "published"',
            r"methods\[1\]\.objective \(line 21\).*only with mechanism = optimal, toeplitz",
        ),
        (
            'mechanism = "tree"',
            'mechanism = "tree"\nforgetting = 1.5',
            r"methods\[1\]\.forgetting \(line 21\) = 1\.5: expected a number > 0 and <= 1 ",
        ),
        ('mechanism = "tree"', 'mechanism = "tree"\nforgetting = 0.0', r"forgetting.*try 0\.999"),
        ("rounds = 12", 'rounds = 12\ntask = "ripple"', r"data\.kind.*ripple"),
        ("[run]", "[run", r"^plan \(line 12\) = '\[run': expected TOML.*a bracket is missing"),
        ("epsilon = 2.0", "epsilon = true", r"privacy\.epsilon \(line 10\) = True"),
        ("epsilon = 2.0", 'epsilon = "2"', r"privacy\.epsilon \(line 10\) = '2'"),
        ("epsilon = 2.0", "epsilon = 1e9", r"privacy\.epsilon \(line 10\) = .*<= 1e6"),
        ("delta = 1e-3", "delta = 1e-320", r"privacy\.delta \(line 11\)"),
        ("learners = 3", "learners = 3\nclip_norm = 1e-200", r"learning\.clip_norm \(line 6\)"),
    ],
)
def test_what_cannot_run_is_refused(old, new, message):
    with pytest.raises(PlanError, match=message):
        Plan.parse(SMALL_PLAN.replace(old, new, 1))


def test_an_objective_beside_unbounded_rounds_is_refused():
    text = SMALL_PLAN.replace("rounds = 12", "rounds = 12\nunbounded = true")
    text = text.replace('mechanism = "tree"', 'mechanism = "buffered"')
    assert Plan.parse(text).learning.unbounded
    with pytest.raises(PlanError, match=r"methods\[1\]\.objective.*beside unbounded rounds"):
        Plan.parse(text, {"methods.tree.objective": "published"})


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


def test_overridden_values_do_not_claim_a_line_of_the_file():
    with pytest.raises(PlanError, match=r"learning\.rounds = 0:"):
        Plan.parse(SMALL_PLAN, {"learning.rounds": 0})
    with pytest.raises(PlanError, match=r"methods\[1\]\.step_size = -1:"):
        Plan.parse(SMALL_PLAN, {"methods.tree.step_size": -1})


@pytest.mark.parametrize("name", ["[1]", "3", "{}"])
def test_overrides_of_a_plan_whose_names_are_no_text_are_refused(name):
    with pytest.raises(PlanError, match="--set"):
        Plan.parse(SMALL_PLAN.replace('"tree"', name, 1), {f"methods.{name}.step_size": 1.0})


def test_plans_made_in_python_raise_our_errors_too():
    with pytest.raises(PlanError, match=r"learning = None: expected a table \(add \[learning\]"):
        Plan(methods=[])
    with pytest.raises(PlanError, match=r"methods = '<array>'.*not empty.*\[\[methods\]\]"):
        Plan(learning={"rounds": 1}, methods=[])
    with pytest.raises(PlanError, match=r"^rounds = 0"):
        LearningPlan(rounds=0)


def test_parts_may_be_given_as_tables_or_as_themselves():
    plan = Plan(
        learning=LearningPlan(rounds=3),
        methods=[MethodPlan(name="a", kind="noise-free", step_size=1), {"name": "b"} | FREE],
    )
    assert plan == Plan(learning={"rounds": 3}, methods=plan.methods)
    assert isinstance(plan.methods[0].step_size, float)
    assert Plan.parse(plan.to_toml()) == plan


def test_a_changed_copy_is_checked_again():
    plan = Plan.parse(SMALL_PLAN)
    assert replace(plan, name="other").name == "other"
    with pytest.raises(PlanError, match=r"methods\[1\]\.epsilon.*a budget"):
        replace(plan, privacy=None)
    with pytest.raises(PlanError, match=r"learning\.rounds"):
        replace(plan, learning={"rounds": -1})
    with pytest.raises(FrozenInstanceError):
        plan.name = "other"


def test_methods_say_what_they_protect():
    plan = Plan.parse(SMALL_PLAN)
    assert plan.methods[0].method.protects == "nothing"
    assert "local differential privacy" in plan.methods[1].method.protects


def every_key() -> list[str]:
    plan = Plan.parse(SMALL_PLAN)
    keys = [field.name for field in fields(plan)]
    for table in keys[:]:
        part = getattr(plan, table)
        if is_dataclass(part):
            keys += [f"{table}.{field.name}" for field in fields(part)]
    return keys + [f"methods.tree.{field.name}" for field in fields(plan.methods[1])]


garbage = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(),
        st.binary(),
        st.dates(),
        st.times(),
        st.datetimes(),
        st.sampled_from([10**400, -(2**63), 2**63, "", "ripple"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner)),
    max_leaves=5,
)


@settings(max_examples=1000, deadline=None)
@given(st.dictionaries(st.sampled_from(every_key()), garbage, min_size=1, max_size=3))
def test_a_plan_takes_any_value_of_any_key_or_refuses_it_as_a_plan(overrides):
    try:
        plan = Plan.parse(SMALL_PLAN, overrides)
    except PlanError:
        return
    assert Plan.parse(plan.to_toml()) == plan


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.text(), garbage))
def test_anything_that_is_no_plan_is_refused_as_one(parts):
    with pytest.raises(PlanError):
        Plan(**parts)
