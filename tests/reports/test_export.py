"""`veilstream report --export`, read back by the viewers' own packages."""

from __future__ import annotations

import csv
import importlib.util
import json
import subprocess
import sys

import pytest

from tests.browser.samples import TELEMETRY
from tests.cli.test_plan import veilstream
from tests.support.run_folders import federation_folder, simulated_folder
from veilstream.errors import MissingExtra
from veilstream.reports import export
from veilstream.reports.export import to_mlflow, to_tensorboard, tracked_runs
from veilstream.runs.folder import Run


def needs(*packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    extra = {"mlflow": "mlflow", "sqlalchemy": "mlflow", "tensorboardX": "tensorboard"}
    why = f"{', '.join(missing)} not installed (pip install {'veilstream[mlflow,tensorboard]'})"
    assert set(packages) <= set(extra) | {"tensorboard"}
    return pytest.mark.skipif(bool(missing), reason=why)


@pytest.fixture(scope="module")
def simulation(tmp_path_factory):
    return simulated_folder(tmp_path_factory.mktemp("simulation") / "run", 2, 2, 40)


def written(folder, table: str, column: str, method: str, seed: int) -> dict[int, float]:
    """Straight from the run's table, by round."""
    with (folder / table).open(newline="") as file:
        return {
            int(row["round"]): float(row[column])
            for row in csv.DictReader(file)
            if (row["method"], row["seed"]) == (method, str(seed))
        }


def test_curves_are_the_tables_thinned_to_their_ends(simulation, monkeypatch):
    monkeypatch.setattr(export, "MOST_POINTS", 10)
    runs = {run.name: run for run in tracked_runs(Run(simulation))}
    assert set(runs) == {f"method {m}, seed {s}" for m in (0, 1) for s in (0, 1)}
    curves = {curve.metric: curve for curve in runs["method 1, seed 0"].curves}
    assert set(curves) == {"loss", "prequential_accuracy", "held_out_accuracy"}
    loss, table = curves["loss"], written(simulation, "history.csv", "loss", "method 1", 0)
    assert len(loss.rounds) == 10
    assert (loss.rounds[0], loss.rounds[-1]) == (1, 40)  # after the round of index 0
    for round_, value in zip(loss.rounds, loss.values, strict=True):
        assert value == pytest.approx(table[round_ - 1], rel=1e-6)
    settings = runs["method 1, seed 0"].settings
    assert settings["promise.epsilon"] == "1.0"
    assert settings["learning.learners"] == "3"


@needs("tensorboardX", "tensorboard")
def test_tensorboard_reads_what_the_run_measured(simulation, tmp_path):
    out = tmp_path / "board"
    done = veilstream("report", str(simulation), "--export", "tensorboard", "--to", str(out), "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)["exported"]
    assert len(made) == 4
    code = (
        "import json, sys, warnings\nwarnings.simplefilter('ignore')\n"
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "a = EventAccumulator(sys.argv[1], size_guidance={'scalars': 0}); a.Reload()\n"
        "print(json.dumps({t: [(e.step, e.value) for e in a.Scalars(t)]"
        " for t in a.Tags()['scalars']}))"
    )
    where = str(out / "method_1_seed_0")
    read = subprocess.run([sys.executable, "-c", code, where], capture_output=True, text=True)
    assert read.returncode == 0, read.stderr
    found = json.loads(read.stdout.splitlines()[-1])
    expected = written(simulation, "history.csv", "loss", "method 1", 0)
    assert dict(found["loss"]) == pytest.approx({r + 1: v for r, v in expected.items()}, rel=1e-6)
    held = written(simulation, "accuracy.csv", "held_out_accuracy", "method 1", 0)
    assert dict(found["held_out_accuracy"]) == pytest.approx(held, rel=1e-6)
    again = veilstream("report", str(simulation), "--export", "tensorboard", "--to", str(out))
    assert again.returncode == 2
    assert "a new or empty folder" in again.stderr


@needs("mlflow", "sqlalchemy")
def test_mlflow_reads_what_the_run_measured(tmp_path):
    folder = federation_folder(tmp_path / "run", rounds=6)
    (folder / "telemetry.csv").write_text(TELEMETRY)
    store = f"sqlite:///{tmp_path}/mlflow.db"
    command = ["report", str(folder), "--export", "mlflow", "--to", store]
    done = veilstream(*command, "--json")
    assert done.returncode == 0, done.stderr
    (id_,) = json.loads(done.stdout)["exported"]
    code = (
        "import json, os, sys, warnings\nwarnings.simplefilter('ignore')\n"
        "os.environ['MLFLOW_DISABLE_TELEMETRY'] = 'true'\n"
        "from mlflow.tracking import MlflowClient\n"
        "c = MlflowClient(tracking_uri=sys.argv[1]); r = c.get_run(sys.argv[2])\n"
        "h = {k: [(m.step, m.value) for m in c.get_metric_history(sys.argv[2], k)]"
        " for k in r.data.metrics}\n"
        "print(json.dumps({'history': h, 'params': r.data.params, 'tags': r.data.tags,"
        " 'status': r.info.status}))"
    )
    read = subprocess.run([sys.executable, "-c", code, store, id_], capture_output=True, text=True)
    assert read.returncode == 0, read.stderr
    found = json.loads(read.stdout.splitlines()[-1])
    assert found["status"] == "FINISHED"
    assert found["params"]["promise.epsilon"] == "1.0"
    assert found["tags"]["veilstream.simulated"] == "false"
    answered = [[r + 1, 2.0 if r == 2 else 3.0] for r in range(6)]  # one missed round 2
    assert sorted(found["history"]["learners_answered"]) == answered
    estimates = dict(found["history"]["telemetry/accuracy/estimate"])
    assert estimates == pytest.approx({r: 0.5 + 0.03 * r for r in range(12)})
    assert "west" not in read.stdout  # who was missing stays in the folder
    again = veilstream(*command)
    assert again.returncode == 2
    assert "does not have yet" in again.stderr


def test_a_missing_package_is_named_with_the_way_to_install_it(simulation, tmp_path, monkeypatch):
    for name in ("tensorboardX", "mlflow", "mlflow.entities", "sqlalchemy"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=r"veilstream\[tensorboard\]"):
        to_tensorboard(Run(simulation), tmp_path / "board")
    with pytest.raises(MissingExtra, match=r"veilstream\[mlflow\]"):
        to_mlflow(Run(simulation), "sqlite:///none.db")


def test_another_target_is_refused(simulation):
    done = veilstream("report", str(simulation), "--export", "wandb")
    assert done.returncode == 2
    assert "mlflow" in done.stderr
    alone = veilstream("report", str(simulation), "--to", "board")
    assert alone.returncode == 2
    assert "--export" in alone.stderr
