"""Records in a plan: keys that fit each other, terms that all sides compare, own functions."""

from __future__ import annotations

import pytest

from veilstream.deployment.terms import Terms, differences
from veilstream.errors import InputError
from veilstream.plans.plan import Plan, PlanError
from veilstream.plans.records import schema_of
from veilstream.plans.tasks import task_of

PLAN = """
[learning]
rounds = 4
[data]
kind = "table"
client = "who"
label = "y"
labels = ["0", "1"]
[[data.features]]
name = "x"
low = 0.0
high = 10.0
[[data.features]]
name = "word"
kind = "hashed"
width = 4
[privacy]
epsilon = 1.0
delta = 1e-5
[[methods]]
name = "ours"
mechanism = "buffered"
step_size = 0.1
"""


def test_a_plan_says_what_a_record_is():
    plan = Plan.parse(PLAN)
    assert schema_of(plan).columns == ("who", "y", "x", "word")
    assert task_of(plan).dim == schema_of(plan).width == 6
    assert Plan.parse(plan.to_toml()) == plan


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("high = 10.0", "", "data.features[0].low"),
        ("high = 10.0", "high = -1.0", "data.features[0]"),
        ("width = 4", "", "data.features[1].width"),
        ("width = 4", "width = 4\nlow = 1.0", "data.features[1].low"),
        ('labels = ["0", "1"]', "", "data.labels"),
        ('labels = ["0", "1"]', 'labels = ["0", "1", "2"]', "data.labels"),
        ('client = "who"', "", "data.client"),
        ('label = "y"', "", "data.label"),
        ('label = "y"', 'label = "x"', "data.features"),
        ('kind = "table"', "", "data.client"),
        ('kind = "table"', 'kind = "table"\ninteractions = ["x"]', "data.interactions"),
        ("rounds = 4", 'rounds = 4\ntask = "huber"', "data.labels"),
        ("rounds = 4", 'rounds = 4\ntask = "nobody"', "learning.task"),
    ],
)
def test_keys_that_do_not_fit_are_named(old, new, field):
    with pytest.raises(PlanError) as raised:
        Plan.parse(PLAN.replace(old, new, 1))
    assert raised.value.field.startswith(field)


@pytest.mark.parametrize(
    ("task", "label", "dim"),
    [("softmax", 'labels = ["a", "b", "c"]', 18), ("huber", "label_range = [0.0, 9.0]", 6),
     ("poisson", "label_range = [0.0, 9.0]", 6), ("least_squares", "label_range = [0.0, 9.0]", 6)],
)  # fmt: skip
def test_tasks_of_tables(task, label, dim):
    text = PLAN.replace("rounds = 4", f'rounds = 4\ntask = "{task}"')
    assert task_of(Plan.parse(text.replace('labels = ["0", "1"]', label))).dim == dim


def test_two_sides_with_other_columns_do_not_agree():
    ours, theirs = Plan.parse(PLAN), Plan.parse(PLAN.replace('name = "x"', 'name = "z"'))
    unlike = differences(Terms.of(ours, 6).settings, Terms.of(theirs, 6).settings)
    assert list(unlike) == ["records"]
    moved = Plan.parse(PLAN.replace('client = "who"', 'client = "who"\nlearner = "at"'))
    assert not differences(Terms.of(ours, 6).settings, Terms.of(moved, 6).settings)


MODULE = """
from veilstream.learning.tasks import Logistic
def make_task(plan):
    return Logistic(3)
def broken(plan):
    raise ValueError("no")
def nothing(plan):
    return 7
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    import sys

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_task_for_test.py").write_text(MODULE)
    yield "own_task_for_test"
    sys.modules.pop("own_task_for_test", None)


def own(function):
    text = PLAN.replace("rounds = 4", f'rounds = 4\ntask = "{function}"')
    return Plan.parse(text)


def test_a_task_of_ones_own(module):
    assert task_of(own(f"{module}:make_task")).dim == 3


@pytest.mark.parametrize(
    ("name", "says"),
    [("no_such_module_here:make", "can be imported"), ("{}:nobody", "it has .*make_task"),
     ("{}:broken", "ValueError: no"), ("{}:nothing", "a task with dim")],
)  # fmt: skip
def test_functions_that_cannot_be_used(module, name, says):
    with pytest.raises(InputError, match=says):
        task_of(own(name.format(module)))


def test_code_is_part_of_the_terms(module, tmp_path):
    plan = own(f"{module}:make_task")
    before = Terms.of(plan, 3).settings
    (tmp_path / "own_task_for_test.py").write_text(MODULE + "# another\n")
    assert list(differences(before, Terms.of(plan, 3).settings)) == ["records"]
