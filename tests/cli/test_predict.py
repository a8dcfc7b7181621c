"""`veilstream predict`: the CSV, what could not be used, quality by an outside computation, and bad input."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from tests.support.models import complete, model_of, records


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """The command in this process, in a folder with a model and a file; exit code, stdout and stderr."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # typer's, about click
        from veilstream.cli.app import main

    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["veilstream", *arguments])
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out, said.err

    return call


def write(path, rows) -> None:
    with Path(path).open("w", newline="") as file:
        out = csv.DictWriter(file, list(rows[0]))
        out.writeheader()
        out.writerows(rows)


def labelled(model, rows, wrong=5):
    """Rows with a label: the model's own prediction, but for every fifth."""
    said = model.predict(rows)
    classes = list(model.classes or ())
    for i, (row, label) in enumerate(zip(rows, said, strict=True)):
        if classes:
            row["outcome"] = classes[(classes.index(label) + (i % wrong == 0)) % len(classes)]
        else:
            row["outcome"] = label + 3.0 * (-1) ** i
    return rows


@pytest.mark.parametrize("task", ["logistic", "softmax"])
def test_labels_and_probabilities_for_every_row(task, run):
    model, rows = model_of(task), records()
    model.save("model.npz")
    write("new.csv", rows)
    code, said, _ = run("predict", "model.npz", "new.csv", "--out", "out.csv")
    assert code == 0
    assert "60 predictions" in said
    assert "Quality" not in said
    assert "age" in said.partition("Clamped")[2]
    found = list(csv.DictReader(io.StringIO(Path("out.csv").read_text())))
    assert list(found[0]) == ["row", "person", "prediction", *(f"probability {c}" for c in model.classes), "unusable"]
    assert [row["person"] for row in found] == [row["person"] for row in rows]
    assert [row["row"] for row in found] == [str(i + 1) for i in range(60)]
    assert [row["prediction"] for row in found] == list(model.predict(rows))
    shares = np.array([[float(row[f"probability {c}"]) for c in model.classes] for row in found])
    np.testing.assert_allclose(shares, model.predict_proba(rows), atol=1e-8)


def test_rows_that_cannot_be_used_are_there_counted_and_explained(run):
    model, rows = model_of("logistic", missing="refuse"), records()
    model.save("model.npz")
    write("new.csv", rows)
    code, out, err = run("predict", "model.npz", "new.csv")  # to stdout; what was done goes to stderr
    found = list(csv.DictReader(io.StringIO(out)))
    empty = [row for row in found if row["prediction"] == ""]
    assert code == 0
    assert len(empty) == len(rows) - len(complete(rows)) == 12
    assert {row["unusable"] for row in empty} == {
        "age: the cell is empty; expected a number from 0 to 100",
        "ward: the cell is empty; expected a text",
    }
    assert all(row["unusable"] == "" for row in found if row["prediction"])
    assert "48 predictions" in err
    assert "12 rows without a prediction. row 4: age: the cell is empty" in err
    code, out, _ = run("predict", "model.npz", "new.csv", "--json")
    told = json.loads(out)
    assert (told["rows"], len(told["unusable"]), len(told["predictions"])) == (60, 12, 60)
    assert told["predictions"][3]["prediction"] is None


def test_quality_is_that_of_an_outside_computation(run):
    metrics = pytest.importorskip("sklearn.metrics")
    model = model_of("logistic")
    model.save("model.npz")
    rows = labelled(model, records())
    rows[7]["outcome"] = ""  # without a label: predicted, not measured
    write("new.csv", rows)
    code, out, _ = run("predict", "model.npz", "new.csv", "--json")
    quality = json.loads(out)["quality"]
    kept = [row for row in rows if row["outcome"]]
    truth, said = [row["outcome"] for row in kept], model.predict(kept)
    assert (code, quality["rows"]) == (0, 59)
    assert quality["accuracy"] == pytest.approx(metrics.accuracy_score(truth, said))
    assert quality["balanced_accuracy"] == pytest.approx(metrics.balanced_accuracy_score(truth, said))
    shares = model.predict_proba(kept)[:, 1]
    assert quality["auc"] == pytest.approx(metrics.roc_auc_score([t == "yes" for t in truth], shares))
    recall = metrics.recall_score(truth, said, labels=["no", "yes"], average=None)
    assert list(quality["recall"].values()) == pytest.approx(recall.tolist())
    assert quality["confusion"]["counts"] == metrics.confusion_matrix(truth, said, labels=["no", "yes"]).tolist()
    assert quality["baseline"]["accuracy"] == max(truth.count("no"), truth.count("yes")) / 59
    _, out, _ = run("predict", "model.npz", "new.csv", "--out", "out.csv")
    assert f"accuracy {quality['accuracy']:.4f}" in out
    assert f"Baseline   always {quality['baseline']['label']!r}" in out


def test_numbers_are_measured_in_the_labels_units(run):
    metrics = pytest.importorskip("sklearn.metrics")
    model = model_of("least_squares", spread=0.3)
    model.save("model.npz")
    rows = labelled(model, records())
    write("new.csv", rows)
    _, out, _ = run("predict", "model.npz", "new.csv", "--json")
    quality, truth = json.loads(out)["quality"], [row["outcome"] for row in rows]
    assert quality["rmse"] == pytest.approx(metrics.root_mean_squared_error(truth, model.predict(rows)), rel=1e-5)
    assert quality["r2"] == pytest.approx(metrics.r2_score(truth, model.predict(rows)), rel=1e-5)
    assert quality["baseline"]["rmse"] == pytest.approx(np.std(truth), rel=1e-5)


def test_a_pipe_gives_what_a_file_gives(tmp_path):
    model, rows = model_of("logistic"), records()
    model.save(tmp_path / "model.npz")
    write(tmp_path / "new.csv", rows)
    command = [sys.executable, "-m", "veilstream", "predict", "model.npz"]
    text = (tmp_path / "new.csv").read_bytes()
    piped = subprocess.run([*command, "-"], input=text, capture_output=True, cwd=tmp_path)
    assert piped.returncode == 0, piped.stderr
    filed = subprocess.run([*command, "new.csv"], capture_output=True, cwd=tmp_path)
    assert piped.stdout == filed.stdout


BAD = {
    "columns.csv": ("person,years\na,3\n", "columns age, ward, wait"),
    "empty.csv": ("", "the file is empty"),
    "header.csv": ("person,age,ward,wait\n", "at least one row below its header"),
    "numbers.csv": ("1,2,3\n4,5,6\n", "its first line holds numbers only"),
    "quote.csv": ('person,age,ward,wait\na,"3,north,1\nb,3,north,1\nc,3,north,1\n', "one that opens in line 2"),
    "kind.xls": ("no", "name the file by its kind"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_predicted_is_refused_by_name(name, run):
    model_of("logistic").save("model.npz")
    content, part = BAD[name]
    Path(name).write_text(content)
    code, out, err = run("predict", "model.npz", name, "--out", "out.csv")
    assert (code, out) == (2, "")
    assert name in err
    assert part in err


def test_a_model_or_a_file_that_is_not_there_is_refused_by_name(run):
    model_of("logistic").save("model.npz")
    for arguments, part in (
        (("none.npz", "new.csv"), "model = 'none.npz'"),
        (("model.npz", "none.csv"), "none.csv"),
        (("model.npz", "model.npz"), "model.npz"),
        (("model.npz", "new.csv", "--method", "ours"), "method = 'ours'"),
    ):
        code, _, err = run("predict", *arguments)
        assert code in (1, 2)
        assert part in err
        assert "Traceback" not in err


@pytest.mark.parametrize("to", ["json", "safetensors", "onnx", "npz"])
def test_a_model_is_exported(to, run):
    pytest.importorskip("onnx")
    pytest.importorskip("safetensors")
    model_of("logistic").save("kept.npz")
    code, out, _ = run("model", "export", "kept.npz", "--to", to, "--json")
    told = json.loads(out)
    assert (code, told["out"], told["sha256"]) == (0, f"model.{to}", model_of("logistic").sha256)
    assert Path(f"model.{to}").stat().st_size > 100
    code, _, err = run("model", "export", "kept.npz", "--to", "pickle")
    assert code == 2
    assert "pickle" in err


def test_show_prints_what_a_model_is(run):
    model_of("least_squares").save("model.npz")
    code, out, _ = run("model", "show", "model.npz")
    assert code == 0
    for part in ("after 8 of 8 rounds", "outcome, a number from 50 to 350", "epsilon 1.0", "ward = north", "intercept"):
        assert part in out
    told = json.loads(run("model", "show", "model.npz", "--json")[1])
    assert told["coefficients"]["bias"] == pytest.approx(float(model_of("least_squares").parameters[-1]))
