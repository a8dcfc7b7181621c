"""Records in a plan: keys that fit each other, terms that all sides compare, own functions."""

from __future__ import annotations

import numpy as np
import pytest

from veilstream.deployment.terms import Terms, differences
from veilstream.errors import InputError
from veilstream.plans.own_code import code_hash
from veilstream.plans.plan import Plan, PlanError
from veilstream.plans.records import schema_of
from veilstream.plans.tasks import task_of
from veilstream.records.schema import REASONS

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


def test_three_labels_in_logistic_regression_name_the_task_that_takes_them():
    three = PLAN.replace('labels = ["0", "1"]', 'labels = ["0", "1", "2"]')
    with pytest.raises(PlanError, match='task = "softmax"'):
        Plan.parse(three)
    Plan.parse(three.replace("rounds = 4", 'rounds = 4\ntask = "softmax"'))


@pytest.mark.parametrize(
    ("task", "label", "dim"),
    [
        ("softmax", 'labels = ["a", "b", "c"]', 18),
        ("huber", "label_range = [0.0, 9.0]", 6),
        ("poisson", "label_range = [0.0, 9.0]", 6),
        ("least_squares", "label_range = [0.0, 9.0]", 6),
    ],
)
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
    [
        ("no_such_module_here:make", "can be imported"),
        ("{}:nobody", "it has .*make_task"),
        ("{}:broken", "ValueError: no"),
        ("{}:nothing", "a task with dim"),
    ],
)
def test_functions_that_cannot_be_used(module, name, says):
    with pytest.raises(InputError, match=says):
        task_of(own(name.format(module)))


def test_code_is_part_of_the_terms(module, tmp_path):
    plan = own(f"{module}:make_task")
    before = Terms.of(plan, 3).settings
    (tmp_path / "own_task_for_test.py").write_text(MODULE + "# another\n")
    assert list(differences(before, Terms.of(plan, 3).settings)) == ["records"]


ENCODER = """
import random
import numpy as np
COUNT = [0]
def encode(row):
    assert "who" not in row
    return [float(row["x"]) / 10.0, float(row["z"]), 1.0], 1.0 if row.get("y") == "1" else -1.0
def long(row):
    return [30.0, 40.0, 0.0], 1
def wide(row):
    return [1.0] * 4, 1
def words(row):
    return ["a", "b", "c"], 1
def endless(row):
    return [float("inf"), 0.0, 0.0], 1
def third(row):
    return [0.0, 0.0, 1.0], 3.0
def counts(row):
    COUNT[0] += 1
    return [COUNT[0] / 1e3, 0.0, 0.0], 1.0
def target_alone(row):
    return 1.0
"""


@pytest.fixture
def encoder(module, tmp_path):
    import sys

    (tmp_path / "own_encoder_for_test.py").write_text(ENCODER)
    yield "own_encoder_for_test"
    sys.modules.pop("own_encoder_for_test", None)


def encoding(module, function, more=""):
    features = PLAN.index("[[data.features]]")
    text = PLAN[:features] + PLAN[PLAN.index("[privacy]") :]
    text = text.replace('labels = ["0", "1"]', f'encode = "{function}"\n{more}')
    return Plan.parse(text.replace("rounds = 4", f'rounds = 4\ntask = "{module}:make_task"'))


def test_an_encoder_of_ones_own_makes_records(module, encoder):
    schema = schema_of(encoding(module, f"{encoder}:encode"))
    made = schema.encode({"who": "ann", "x": "3,5", "z": 0.1, "y": "1"}, decimal_comma=True)
    assert (made.client, float(made.sample.target)) == ("ann", 1.0)
    assert made.sample.features.dtype == np.float32
    np.testing.assert_allclose(
        made.sample.features, np.array([0.35, 0.1, 1.0]) / np.linalg.norm([0.35, 0.1, 1.0]), 1e-6
    )
    found = schema.features_of({"x": "3.5", "z": 0.1})
    np.testing.assert_array_equal(found, made.sample.features)
    assert (schema.width, schema.columns) == (3, ("who",))
    assert schema.label.in_units(0.25) == 0.25
    named = schema_of(encoding(module, f"{encoder}:encode", 'labels = ["no", "yes"]'))
    assert (named.label.in_units(1.0), named.label.in_units(-1.0)) == ("yes", "no")


def test_encoded_features_are_cut_to_the_plans_norm(module, encoder):
    for norm in (0.7, 5.0):
        plan = encoding(module, f"{encoder}:long", f"feature_norm = {norm}")
        features = schema_of(plan).encode({"who": "ann"}).sample.features
        assert 0.999 * norm < np.linalg.norm(features.astype(np.float64)) <= norm
        assert features[0] == pytest.approx(0.6 * norm)


@pytest.mark.parametrize(
    ("function", "row", "reason"),
    [
        ("encode", {"who": "ann", "x": "no number"}, "not readable"),
        ("encode", {"who": "ann"}, "not readable"),
        ("encode", {"x": "1", "z": "1", "y": "1"}, "no column"),
        ("encode", {"who": " ", "x": "1", "z": "1", "y": "1"}, "no client"),
        ("wide", {"who": "ann"}, "other features"),
        ("words", {"who": "ann"}, "other features"),
        ("endless", {"who": "ann"}, "not a number"),
        ("third", {"who": "ann"}, "unknown label"),
        ("counts", {"who": "ann"}, "not repeatable"),
        ("target_alone", {"who": "ann"}, "not readable"),
    ],
)
def test_what_an_encoder_cannot_use_is_refused_by_reason(module, encoder, function, row, reason):
    assert schema_of(encoding(module, f"{encoder}:{function}")).encode(row).reason == reason
    assert reason in REASONS


def test_keys_that_an_encoder_stands_in_for_are_refused(module, encoder):
    with pytest.raises(PlanError, match=r"data.label_range.*beside data.encode"):
        encoding(module, f"{encoder}:encode", "label_range = [0.0, 1.0]")
    with pytest.raises(PlanError, match=r"learning.task.*a task by name"):
        Plan.parse(encoding(module, f"{encoder}:encode").to_toml(), {"learning.task": "custom"})


def test_an_encoder_is_part_of_the_terms_and_is_not_run_for_them(module, encoder, tmp_path):
    import sys

    plan = encoding(module, f"{encoder}:encode")
    before = Terms.of(plan, 3).settings
    assert encoder not in sys.modules
    (tmp_path / f"{encoder}.py").write_text(ENCODER.replace("10.0", "9.0"))
    assert list(differences(before, Terms.of(plan, 3).settings)) == ["records"]


def test_a_package_counts_with_all_its_modules(module, tmp_path):
    import sys

    package = tmp_path / "own_package_for_test"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('not to be run')\n")
    (package / "inner" / "task.py").write_text(MODULE)
    (package / "helper.py").write_text("A = 1\n")
    (package / "notes.txt").write_text("one\n")
    name = "own_package_for_test.inner.task:make_task"
    try:
        before = code_hash("learning.task", name)
        (package / "notes.txt").write_text("two\n")
        assert code_hash("learning.task", name) == before
        (package / "helper.py").write_text("A = 2\n")
        after = code_hash("learning.task", name)
        assert after != before
        (package / "helper.py").rename(package / "other.py")
        assert code_hash("learning.task", name) not in (before, after)
        for missing in ("own_package_for_test.nobody:f", "no_such_module_here:f", "sys:exit"):
            with pytest.raises(InputError, match=r"in a file|can be imported"):
                code_hash("learning.task", missing)
        assert "own_package_for_test" not in sys.modules
    finally:
        sys.modules.pop("own_package_for_test", None)
