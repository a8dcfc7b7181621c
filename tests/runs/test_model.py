"""A loaded model: predictions by hand, its coefficients, data frames, and rows that cannot be used."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

import veilstream as vs
from tests.support.models import LABELS, complete, model_of, plan_of, records, released
from veilstream.errors import InputError
from veilstream.runs.model import Model

CLASSIFIES = ("logistic", "softmax")


def by_hand(model: Model, row: dict) -> np.ndarray:
    """Scores of one record, from the plan's text alone: age 0 to 100, ward north or south, wait 0 to 60."""
    flag = model.plan.data.features[0].missing == "flag"
    age, ward, wait = row["age"], row["ward"], row["wait"]
    encoded = [0.0 if age is None else 2 * min(max(age, 0), 100) / 100 - 1]
    encoded += [float(age is None)] if flag else []
    encoded += [float(ward == "north"), float(ward == "south"), float(ward not in ("north", "south", None))]
    encoded += [float(ward is None)] if flag else []
    encoded += [2 * min(max(wait, 0), 60) / 60 - 1, 1.0]
    features = np.array(encoded) / math.sqrt(4)  # three columns and a bias
    return model.parameters.astype(np.float64).reshape(-1, len(features)) @ features


@pytest.mark.parametrize("task", LABELS)
def test_predictions_are_those_that_the_plan_and_the_numbers_give(task):
    model, rows = model_of(task), records()
    said = model.predict(rows)
    for row, one in zip(rows, said, strict=True):
        scores = by_hand(model, row)
        if task == "logistic":
            assert one == ("yes" if scores[0] >= 0 else "no")
            share = 1 / (1 + math.exp(-scores[0]))
            np.testing.assert_allclose(model.predict_proba(row), [1 - share, share], atol=1e-6)
        elif task == "softmax":
            assert one == ("low", "middle", "high")[int(scores.argmax())]
            np.testing.assert_allclose(model.predict_proba(row), np.exp(scores) / np.exp(scores).sum(), atol=1e-6)
        elif task == "poisson":
            assert one == pytest.approx(min(math.exp(scores[0]), 40.0), abs=1e-5)
        else:
            low, high = model.plan.data.label_range
            whole = low + (scores[0] + 1) * 0.5 * (high - low)
            assert one == pytest.approx(min(max(whole, low), high), abs=1e-4)


def test_numbers_stay_in_the_labels_range():
    model = model_of("least_squares", spread=20.0)
    said = model.predict(records())
    assert said.min() == 50.0
    assert said.max() == 350.0


@pytest.mark.parametrize("task", LABELS)
def test_one_record_gives_one_value_and_a_list_an_array(task):
    model, rows = model_of(task), records(7)
    each = [model.predict(row) for row in rows]
    assert list(model.predict(rows)) == each
    assert model.predict([]).shape == (0,)
    assert type(each[0]) is (str if task in CLASSIFIES else np.float64)
    if task in CLASSIFIES:
        assert model.predict_proba(rows).shape == (7, len(model.classes))
        np.testing.assert_allclose(model.predict_proba(rows).sum(axis=1), 1.0)
        assert model.predict_proba([]).shape == (0, len(model.classes))
    else:
        assert model.classes is None
        with pytest.raises(InputError, match=r"predict_proba = .*tells labels apart"):
            model.predict_proba(rows)


def test_data_frames_and_files_give_what_dictionaries_give(tmp_path):
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    model, rows = model_of("logistic"), records()
    expected = model.predict_proba(rows)
    frame = pandas.DataFrame(rows)
    np.testing.assert_array_equal(model.predict_proba(frame), expected)
    np.testing.assert_array_equal(model.predict_proba(pyarrow.Table.from_pylist(rows)), expected)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    frame.to_csv(tmp_path / "german.csv", index=False, sep=";", decimal=",")
    frame.to_parquet(tmp_path / "rows.parquet")
    for name in ("rows.csv", "german.csv", "rows.parquet"):
        np.testing.assert_array_equal(model.predict_proba(tmp_path / name), expected, err_msg=name)
    with pytest.raises(InputError, match=r"columns wait \(it has age, person, ward"):
        model.predict(frame.drop(columns="wait")[["age", "person", "ward"]])


def test_encoded_numbers_are_taken_as_they_are():
    model, rows = model_of("softmax"), records()
    features = np.stack([model.schema.features_of(row) for row in rows])
    np.testing.assert_array_equal(model.predict_proba(features), model.predict_proba(rows))
    assert model.predict(features[0]) == model.predict(rows[0])
    with pytest.raises(InputError, match=r"array of shape \(rows, 8\)"):
        model.predict(features[:, 1:])


def test_rows_that_cannot_be_used_are_named_or_left_empty():
    model = model_of("logistic", missing="refuse", unknown="refuse")
    rows = [
        {"age": 3, "ward": "north", "wait": 3},
        {"age": "", "ward": "north", "wait": 3},
        {"age": 3, "ward": "attic", "wait": 3},
        {"age": 3, "ward": "north"},
        {"age": "old", "ward": "north", "wait": 3},
        "no row",
    ]
    with pytest.raises(InputError) as refused:
        model.predict(rows)
    for part in (
        "5 of 6",
        "row 2: age: the cell is empty; expected a number from 0 to 100",
        "row 3: ward: the text is not in the plan's vocabulary; expected one of north, south",
        "row 4: wait: the column is not there",
        "row 5: age: the cell is no finite number",
        "row 6: the row cannot be read",
        'unusable="missing"',
    ):
        assert part in str(refused.value)
    said = model.predict(rows, unusable="missing")
    assert said[0] in ("no", "yes")
    assert list(said[1:]) == [None] * 5
    shares = model.predict_proba(rows, unusable="missing")
    assert np.isnan(shares[1:]).all()
    assert np.isfinite(shares[0]).all()
    numbers = model_of("huber", missing="refuse", unknown="refuse")
    assert np.isnan(numbers.predict(rows, unusable="missing")[1:]).all()
    with pytest.raises(InputError, match="unusable"):
        model.predict(rows, unusable="drop")
    with pytest.raises(InputError, match="rows = 'int'"):
        model.predict(3)


def test_what_was_clamped_is_counted():
    model = model_of("logistic")
    found = model.predictions([{"age": 300, "ward": "attic", "wait": 3}, {"age": 3, "ward": "north", "wait": -9}])
    assert dict(found.clamped) == {"age": 1, "ward": 1, "wait": 1}


@pytest.mark.parametrize("task", LABELS)
@pytest.mark.parametrize("missing", ["flag", "zero", "refuse"])
def test_coefficients_per_unit_add_up_to_the_prediction(task, missing):
    model = model_of(task, missing=missing, spread=0.2)
    rows = records() if missing != "refuse" else complete(records())
    own = model.coefficients_per_unit
    by_label = own if task == "softmax" else {None: own}
    for row in rows:
        age, wait = row["age"], min(max(row["wait"], 0), 60)
        sums = []
        for c in by_label.values():
            total = c["intercept"] + c["wait"] * wait
            total += c["age"] * min(max(age, 0), 100) if age is not None else c["age is missing"]
            if row["ward"] is None:
                total += c.get("ward is missing", 0.0)
            else:
                total += c.get(f"ward = {row['ward']}", c["ward is another"] if row["ward"] == "attic" else 0.0)
            sums.append(total)
        if task == "softmax":
            np.testing.assert_allclose(model.predict_proba(row), np.exp(sums) / np.exp(sums).sum(), atol=1e-6)
        elif task == "logistic":
            assert model.predict_proba(row)[1] == pytest.approx(1 / (1 + math.exp(-sums[0])), abs=1e-6)
        elif task == "poisson":
            assert model.predict(row) == pytest.approx(min(math.exp(sums[0]), 40.0), abs=1e-5)
        else:
            low, high = model.plan.data.label_range
            assert model.predict(row) == pytest.approx(min(max(sums[0], low), high), abs=1e-4)


def test_every_parameter_has_a_name_of_its_own():
    model = model_of("logistic", more='interactions = ["age * ward"]')
    names = model.feature_names
    assert names[:6] == ("age", "age is missing", "ward = north", "ward = south", "ward is another", "ward is missing")
    assert names[7] == "age * ward = north"
    assert names[-1] == "bias"
    assert list(model.coefficients) == list(names)
    np.testing.assert_array_equal(np.float32(list(model.coefficients.values())), model.parameters)
    assert model.coefficients_per_unit is None  # products are no list by column
    clash = plan_of("logistic").to_toml().replace('name = "wait"', 'name = "bias"')
    named = Model(released(vs.Plan.parse(clash))).coefficients
    assert len(named) == 8  # a column called bias hides nothing


def test_a_model_says_what_it_is():
    model = model_of("softmax")
    assert (model.round, model.rounds, model.run) == (8, 8, "ward-1")
    assert model.classes == ("low", "middle", "high")
    assert isinstance(model.guarantee, vs.Guarantee)
    assert model.guarantee.epsilon == 1.0
    assert model.plan.name == "ward"
    assert model.sha256[:12] in repr(model)


def test_a_linear_model_predicts_without_jax(tmp_path):
    model_of("logistic").save(tmp_path / "model.npz")
    program = (
        "import sys, veilstream as vs; assert 'numpy' not in sys.modules\n"
        f"model = vs.load({str(tmp_path / 'model.npz')!r})\n"
        "model.predict({'age': 41, 'ward': 'north', 'wait': 3})\n"
        "unwanted = ('jax', 'pandas', 'sklearn', 'onnx', 'grpc', 'veilstream.deployment', 'veilstream.federation')\n"
        "print([m for m in unwanted if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_function_that_a_models_file_names_runs_only_for_a_plan_that_was_given(tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text(
        "from pathlib import Path\nPath('ran').touch()\ndef encode(row):\n    return [row['age'] / 100, 1.0], 1.0\n"
    )
    monkeypatch.chdir(tmp_path)
    text = """
name = "own"
[learning]
rounds = 2
task = "logistic"
[data]
kind = "table"
client = "person"
dim = 2
encode = "stranger:encode"
labels = ["no", "yes"]
[[methods]]
name = "free"
kind = "noise-free"
step_size = 0.1
"""
    plan = vs.Plan.parse(text)
    from veilstream.runs.released_model import ReleasedModel

    ReleasedModel(np.array([2.0, -1.0], np.float32), 2, 2, "own-1", plan.to_toml(), {}).save("model.npz")
    model = vs.load("model.npz")
    assert model.guarantee is None
    with pytest.raises(InputError, match="a plan that you trust"):
        model.predict({"age": 80})
    assert not (tmp_path / "ran").exists()
    trusted = vs.load("model.npz", plan=plan)
    assert trusted.predict({"age": 80}) == "yes"
    assert trusted.predict({"age": 20}) == "no"
    with pytest.raises(InputError, match="plan = 'other'"):
        vs.load("model.npz", plan=vs.Plan.parse(text.replace('"own"', '"other"')))
