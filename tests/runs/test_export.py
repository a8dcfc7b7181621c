"""Models elsewhere: ONNX by onnxruntime, scikit-learn, plain JSON and safetensors by hand; all agree to 1e-6."""

from __future__ import annotations

import json
import math
import pickle
import warnings

import numpy as np
import pytest

import veilstream as vs
from tests.support.models import LABELS, complete, model_of, records
from veilstream.errors import InputError
from veilstream.runs.model import Model
from veilstream.runs.model_export import export
from veilstream.runs.released_model import ReleasedModel

AGREE = 1e-6
VARIANTS = {
    "usual": {},
    "zeros": {"missing": "zero", "unknown": "zero"},
    "refusing": {"missing": "refuse", "unknown": "refuse"},
    "products": {"more": 'interactions = ["age * ward", "ward * wait"]'},
    "cut": {"more": 'fit = "clip"\nfeature_norm = 0.9'},
    "no bias": {"more": "bias = false"},
}


def expected(model: Model, rows) -> tuple[list, np.ndarray]:
    """Our own predictions; None and nan for rows that cannot be used."""
    said = model.predict(rows, unusable="missing")
    return list(said), said if model.classes is None else model.predict_proba(rows, unusable="missing")


def onnx_inputs(rows) -> dict[str, np.ndarray]:
    def column(name):
        return [row[name] for row in rows]

    age = [math.nan if value is None else value for value in column("age")]
    return {
        "age": np.array(age, np.float64)[:, None],
        "ward": np.array(["" if value is None else value for value in column("ward")], object)[:, None],
        "wait": np.array(column("wait"), np.float64)[:, None],
    }


def run_onnx(path, inputs):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return dict(zip([each.name for each in session.get_outputs()], session.run(None, inputs), strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("task", LABELS)
def test_onnx_predicts_from_the_columns_what_we_predict(task, variant, tmp_path):
    model, rows = model_of(task, **VARIANTS[variant]), records()
    export(model, "onnx", tmp_path / "model.onnx")
    found = run_onnx(tmp_path / "model.onnx", onnx_inputs(rows))
    labels, numbers = expected(model, rows)
    if model.classes is not None:
        assert [label or None for label in found["label"].tolist()] == labels
        np.testing.assert_allclose(found["probabilities"], numbers, atol=AGREE)
    else:
        scale = model.schema.label.high - model.schema.label.low
        np.testing.assert_allclose(found["prediction"] / scale, numbers / scale, atol=AGREE)
    if variant == "refusing":
        assert 0 < np.isnan(numbers.reshape(len(rows), -1)[:, 0]).sum() < len(rows)


def test_onnx_refuses_numbers_outside_their_range_where_the_plan_does(tmp_path):
    text = model_of("logistic").plan.to_toml().replace('name = "age"', 'name = "age"\noutside = "refuse"', 1)
    text = text.replace('outside = "clamp"\n', "", 1)
    plan = vs.Plan.parse(text)
    assert plan.data.features[0].outside == "refuse"
    model, rows = Model(ReleasedModel(model_of("logistic").parameters, 1, 8, "r", plan.to_toml(), {})), records()
    export(model, "onnx", tmp_path / "model.onnx")
    found = run_onnx(tmp_path / "model.onnx", onnx_inputs(rows))
    labels, numbers = expected(model, rows)
    assert labels.count(None) > 5
    assert [label or None for label in found["label"].tolist()] == labels
    np.testing.assert_allclose(found["probabilities"], numbers, atol=AGREE)


def test_hashed_texts_are_encoded_before_onnx(tmp_path):
    text = model_of("logistic").plan.to_toml()
    start = text.index('name = "ward"')
    end = text.index("[[data.features]]", start) if "[[data.features]]" in text[start:] else None
    assert end is None or end > start
    data = vs.Plan.parse(text)
    from veilstream.plans.tasks import task_of

    features = [{"name": "age", "low": 0.0, "high": 100.0}, {"name": "ward", "kind": "hashed", "width": 8}]
    plan = vs.Plan(
        name=data.name,
        learning=data.learning,
        data={"kind": "table", "client": "person", "label": "outcome", "labels": ("no", "yes"), "features": features},
        privacy=data.privacy,
        methods=data.methods,
    )
    numbers = np.random.default_rng(2).normal(size=task_of(plan).dim).astype(np.float32)
    model = Model(ReleasedModel(numbers, 1, 8, "r", plan.to_toml(), {}))
    export(model, "onnx", tmp_path / "model.onnx")
    rows = complete(records())
    encoded = np.stack([model.schema.features_of(row) for row in rows])
    found = run_onnx(tmp_path / "model.onnx", {"features": encoded})
    np.testing.assert_allclose(found["probabilities"], model.predict_proba(rows), atol=AGREE)
    assert model.coefficients_per_unit is None


def test_the_papers_network_is_a_graph_too(tmp_path):
    pytest.importorskip("jax")
    plan = vs.Plan.parse(
        'name = "m"\n[learning]\nrounds = 2\nlearners = 10\ntask = "cnn"\n[data]\nkind = "mnist"\n'
        '[[methods]]\nname = "free"\nkind = "noise-free"\nstep_size = 0.1\n'
    )
    from veilstream.plans.tasks import task_of

    model = Model(ReleasedModel(np.asarray(task_of(plan).init(1)), 1, 2, "m", plan.to_toml(), {}))
    export(model, "onnx", tmp_path / "model.onnx")
    images = np.random.default_rng(0).integers(0, 256, (9, 784)).astype(np.float32)
    found = run_onnx(tmp_path / "model.onnx", {"features": images})
    assert found["label"].tolist() == list(model.predict(images))
    np.testing.assert_allclose(found["probabilities"], model.predict_proba(images), atol=1e-5)  # in float32


def by_json(told, row) -> np.ndarray | None:
    """Scores from the JSON alone, as its documentation says."""
    encoding, encoded = told["encoding"], {}
    for column in encoding["columns"]:
        cell, names = row[column["name"]], column["names"]
        values = [0.0] * len(names)
        if cell is None:
            if column["missing"] == "refuse":
                return None
            if column["missing"] == "flag":
                values[-1] = 1.0
        elif column["kind"] == "numeric":
            inside = min(max(cell, column["low"]), column["high"])
            values[0] = 2 * (inside - column["low"]) / (column["high"] - column["low"]) - 1
        elif cell in column["vocabulary"]:
            values[column["vocabulary"].index(cell)] = 1.0
        elif column["unknown"] == "other":
            values[len(column["vocabulary"])] = 1.0
        elif column["unknown"] == "refuse":
            return None
        encoded[column["name"]] = values
    whole = [value for values in encoded.values() for value in values]
    for a, b in encoding["interactions"]:
        whole += [one * other for one in encoded[a] for other in encoded[b]]
    whole += [1.0] if encoding["bias"] else []
    features = np.array(whole)
    scale = encoding["scale"] or min(1.0, encoding["norm"] / np.linalg.norm(features))
    labels = told["predicts"].get("labels", ())
    rows = [told["coefficients"][label] for label in labels] if len(labels) > 2 else [told["coefficients"]]
    return np.array([list(row.values()) for row in rows]) @ features * scale


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("task", LABELS)
def test_the_json_is_enough_to_predict_by_hand(task, variant, tmp_path):
    model, rows = model_of(task, **VARIANTS[variant]), records()
    export(model, "json", tmp_path / "model.json")
    told = json.loads((tmp_path / "model.json").read_text())
    predicts = told["predicts"]
    for row, label, number in zip(rows, *expected(model, rows), strict=True):
        scores = by_json(told, row)
        if scores is None:
            assert label is None or math.isnan(label)
        elif predicts["link"] == "logistic":
            share = 1 / (1 + math.exp(-scores[0]))
            np.testing.assert_allclose(number, [1 - share, share], atol=AGREE)
            assert label == predicts["labels"][int(scores[0] >= 0)]
        elif predicts["link"] == "softmax":
            np.testing.assert_allclose(number, np.exp(scores) / np.exp(scores).sum(), atol=AGREE)
        else:
            low, high = predicts["low"], predicts["high"]
            said = math.exp(scores[0]) if predicts["link"] == "exp" else low + (scores[0] + 1) / 2 * (high - low)
            assert number / (high - low) == pytest.approx(min(max(said, low), high) / (high - low), abs=AGREE)
    assert told["sha256"] == model.sha256
    assert told["guarantee"]["epsilon"] == 1.0


def test_safetensors_hold_numbers_names_and_the_plan(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    model = model_of("softmax")
    export(model, "safetensors", tmp_path / "model.safetensors")
    with safetensors.safe_open(tmp_path / "model.safetensors", "np") as file:
        about, weights = file.metadata(), file.get_tensor("weights")
        np.testing.assert_array_equal(file.get_tensor("parameters"), model.parameters)
    assert weights.shape == (3, 8)
    names = json.loads(about["feature_names"])
    assert dict(zip(names, weights[1].tolist(), strict=True)) == model.coefficients["middle"]
    assert json.loads(about["classes"]) == ["low", "middle", "high"]
    assert vs.Plan.parse(about["plan"]) == model.plan
    assert "epsilon = 1" in about["promise"] or "(1" in about["promise"]


def test_an_exported_file_is_a_model_again(tmp_path):
    model = model_of("huber")
    export(model, "npz", tmp_path / "model.npz")
    assert vs.load(tmp_path / "model.npz").sha256 == model.sha256
    with pytest.raises(InputError, match="--to = 'pickle'"):
        export(model, "pickle", tmp_path / "x")


# Checks of scikit-learn that do not apply: they fit data of other columns, or want `fit` to learn or to refuse.
_OTHER_DATA = "its data have other columns than the model"
_FROZEN = "fit changes nothing and looks at nothing"
DOES_NOT_APPLY = {
    **dict.fromkeys(
        (
            "check_estimators_dtypes",
            "check_dtype_object",
            "check_classifier_data_not_an_array",
            "check_regressor_data_not_an_array",
            "check_classifiers_classes",
            "check_regressors_int",
            "check_estimators_pickle",  # with empty cells, which this plan refuses in `wait`; pickled below
            "check_n_features_in",
            "check_dict_unchanged",
            "check_fit_idempotent",
            "check_fit_check_is_fitted",
            "check_fit2d_predict1d",
        ),
        _OTHER_DATA,
    ),
    **dict.fromkeys(
        (
            "check_fit_score_takes_y",
            "check_n_features_in_after_fitting",
            "check_complex_data",
            "check_estimators_empty_data_messages",
            "check_pipeline_consistency",
            "check_estimator_sparse_tag",
            "check_classifiers_one_label",
            "check_classifiers_one_label_sample_weights",
            "check_classifiers_train",
            "check_regressors_train",
            "check_classifiers_regression_target",
            "check_supervised_y_no_nan",
            "check_supervised_y_2d",
            "check_methods_sample_order_invariance",  # texts
            "check_methods_subset_invariance",
            "check_fit1d",
            "check_requires_y_none",
        ),
        _FROZEN,
    ),
}


@pytest.mark.parametrize("task", ["logistic", "huber"])
def test_scikit_learns_own_checks_pass_as_far_as_they_apply_to_what_is_frozen(task):
    checks = pytest.importorskip("sklearn.utils.estimator_checks")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = checks.check_estimator(
            model_of(task).as_sklearn(), expected_failed_checks=DOES_NOT_APPLY, on_fail="raise", on_skip=None
        )
    passed = {each["check_name"] for each in found if each["status"] == "passed"}
    assert len(passed) >= 20
    assert passed >= {
        "check_estimator_cloneable",
        "check_get_params_invariance",
        "check_set_params",
        "check_mixin_order",
    }


@pytest.mark.parametrize("task", LABELS)
def test_scikit_learn_predicts_what_we_predict(task):
    pytest.importorskip("sklearn")
    pandas = pytest.importorskip("pandas")
    from sklearn.base import clone, is_classifier
    from sklearn.metrics import accuracy_score, r2_score
    from sklearn.model_selection import cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.utils.validation import check_is_fitted

    model, rows = model_of(task), records()
    frame, estimator = pandas.DataFrame(rows), model.as_sklearn()
    check_is_fitted(estimator)
    assert is_classifier(estimator) == (model.classes is not None)
    assert list(estimator.feature_names_in_) == ["age", "ward", "wait"]
    labels, numbers = expected(model, rows)
    array = frame[list(estimator.feature_names_in_)].to_numpy()
    copied = pickle.loads(pickle.dumps(estimator))
    for each in (estimator, clone(estimator), copied, make_pipeline(estimator).fit(frame, labels)):
        assert list(each.predict(frame)) == labels
    assert list(estimator.predict(array)) == labels
    if model.classes is not None:
        np.testing.assert_array_equal(estimator.predict_proba(frame), numbers)
        truth = [list(model.classes)[i % len(model.classes)] for i in range(len(rows))]
        assert estimator.score(frame, truth) == accuracy_score(truth, labels)
    else:
        truth = np.linspace(*model.plan.data.label_range, len(rows))
        assert estimator.score(frame, truth) == pytest.approx(r2_score(truth, labels))
    scores = cross_val_score(estimator, frame, truth, cv=3)
    assert np.isfinite(scores).all()
    with pytest.raises(InputError, match="X = '2 columns'"):
        estimator.predict(array[:, :2])


def test_what_cannot_be_exported_is_refused(tmp_path):
    pytest.importorskip("onnx")
    plan = vs.Plan.parse(
        'name = "m"\n[learning]\nrounds = 2\nlearners = 10\ntask = "edge_features"\n[data]\nkind = "mnist"\n'
        '[[methods]]\nname = "free"\nkind = "noise-free"\nstep_size = 0.1\n'
    )
    from veilstream.plans.tasks import task_of

    model = Model(ReleasedModel(np.zeros(task_of(plan).dim, np.float32), 1, 2, "m", plan.to_toml(), {}))
    with pytest.raises(InputError, match="a linear model, or the task cnn"):
        export(model, "onnx", tmp_path / "model.onnx")
    with pytest.raises(InputError, match="coefficients"):
        _ = model.coefficients
    assert not (tmp_path / "model.onnx").exists()


def test_a_registry_serves_the_model_as_a_pyfunc(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)
    import mlflow

    from veilstream.runs.mlflow_model import to_registry

    model, rows = model_of("logistic", missing="refuse"), records()
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert to_registry(model, uri) == ("ward", "1")
        assert to_registry(model, uri) == ("ward", "2")
        loaded = mlflow.pyfunc.load_model("models:/ward/2")
        found = loaded.predict(pandas.DataFrame(rows))
    labels, shares = expected(model, rows)
    assert [None if pandas.isna(label) else label for label in found["prediction"]] == labels
    np.testing.assert_allclose(found[["probability no", "probability yes"]].to_numpy(), shares, atol=AGREE)
