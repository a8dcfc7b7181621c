"""The first ten minutes: docs/quickstart.md and a new project's README, command after command."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
from studies.ten_minutes import walk as walk_of_a_stranger

import veilstream as vs
from tests.cli.test_plan import veilstream
from tests.support.pages import ROOT, blocks_in
from tests.support.visits import write_visits
from veilstream.plans.plan import Plan
from veilstream.plans.records import schema_of
from veilstream.records.schema import Refusal
from veilstream.runs.released_model import ReleasedModel
from veilstream.streams.tables import open_table

pytestmark = pytest.mark.process


def documented_commands(readme: str) -> list[list[str]]:
    lines = re.findall(r"^    (?:veilstream|\S+ -P -m veilstream|\S+/run) (.*)$", readme, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def walk(folder, monkeypatch, *, rounds=None) -> dict[str, str]:
    """All commands of the README in a new project; what each printed, by its first two words."""
    monkeypatch.chdir(folder)
    done = veilstream("new", "mine")
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(folder / "mine")
    if rounds is not None:
        text = (folder / "mine/plan.toml").read_text().replace("rounds = 150", f"rounds = {rounds}")
        (folder / "mine/plan.toml").write_text(text)
    said = {}
    for command in documented_commands((folder / "mine/README.md").read_text()):
        done = veilstream(*command)
        assert done.returncode == 0, (command, done.stderr)
        said[" ".join(command[:2])] = done.stdout
    return said


def last_fifth(folder) -> list[dict[str, str]]:
    """The rows that are measured on, of each file: the last by time."""
    found = []
    for path in sorted((folder / "records").glob("*.csv")):
        rows = sorted((row for _, row in open_table(path).rows()), key=lambda row: float(row["minute"]))
        found += rows[len(rows) - round(0.2 * len(rows)) :]
    return found


def held_out_accuracy(folder) -> tuple[float, float]:
    """Of the model that came out, and of the commonest label, on the rows of held-out people."""
    plan, released = (Plan.load(folder / "plan.toml"), ReleasedModel.load(folder / "federation/model.npz"))
    schema, right, labels = schema_of(plan), [], []
    for row in last_fifth(folder):
        features = schema.features_of(row)
        assert not isinstance(features, Refusal)
        labels.append(row["answered"])
        right.append(("yes" if features @ released.model >= 0 else "no") == labels[-1])
    share = labels.count("yes") / len(labels)
    return float(np.mean(right)), max(share, 1 - share)


def test_the_readmes_commands_run_one_after_the_other(tmp_path, monkeypatch):
    said = walk(tmp_path, monkeypatch, rounds=6)
    assert list(said) == [
        "data check",
        "run plan.toml",
        "plan plan.toml",
        "federation demo",
        "model show",
        "predict federation/model.npz",
    ]
    assert "3 learners, 6 rounds" in said["federation demo"]
    assert "3 verified: 180 clients" in said["federation demo"]
    assert "after 6 of 6 rounds" in said["model show"]
    folder = tmp_path / "mine"
    predicted = list(csv.DictReader((folder / "predicted.csv").read_text().splitlines()))
    model = vs.load(folder / "federation")  # the folder's model and its server's run are one
    assert model.sha256 == vs.load(folder / "federation/run").sha256
    assert [row["prediction"] for row in predicted] == list(model.predict(folder / "records/north.csv"))
    assert json.loads((folder / "run/summary.json").read_text())["rounds"] == 6
    accuracy, common = held_out_accuracy(folder)
    shown = re.search(r"([\d.]+) before, ([\d.]+) after.*always \"yes\": ([\d.]+)", said["federation demo"])
    assert [float(shown[2]), float(shown[3])] == pytest.approx([accuracy, common], abs=6e-4)
    # Nobody who is measured on was handed to a learner.
    learned = {
        json.loads(line)["person"]
        for path in (folder / "federation/learners").glob("*/records.jsonl")
        for line in path.read_text().splitlines()
    }
    people = {row["person"] for path in (folder / "records").glob("*.csv") for _, row in open_table(path).rows()}
    held = {row["person"] for row in last_fifth(folder)}
    assert len(held) > 1000
    assert learned == people - held


@pytest.mark.parametrize("how", ["a clone", "installed", "a module"])
def test_a_new_project_calls_the_command_as_it_was_called(tmp_path, how):
    """Its first printed command runs as it stands, in a shell in the folder where `new` was called."""
    there = tmp_path / "bin"
    there.mkdir()
    for name in ("veilstream", "run"):
        (there / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m veilstream "$@"\n')
        (there / name).chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key != "VEILSTREAM_RUN"} | {
        "PATH": "/usr/bin:/bin"
    }
    if how == "a clone":
        environment["VEILSTREAM_RUN"] = str(there / "run")
    if how == "installed":
        environment["PATH"] += f":{there}"

    def run(command):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = run([sys.executable, "-m", "veilstream", "new", "my project"]).splitlines()[-1]
    assert {"a clone": " ../bin/run ", "installed": " veilstream ", "a module": " -m veilstream "}[how] in said
    assert "All rows are usable" in run(["sh", "-c", said])


@pytest.mark.slow
def test_the_model_of_a_new_project_is_worth_its_budget(tmp_path, monkeypatch):
    walk(tmp_path, monkeypatch)
    accuracy, common = held_out_accuracy(tmp_path / "mine")
    assert accuracy > common + 0.1


@pytest.mark.all
def test_from_a_strangers_table_to_a_private_federation_with_one_refusal_at_most(tmp_path):
    """The one is asked for: a run before anybody has said what everyone knows."""
    done = walk_of_a_stranger(tmp_path, 3000, ("run.seeds=1", "run.regret=false"), hasty=True)
    assert done.refusals == 1, done.said
    assert done.said[0].count("fill it in") == 5
    assert done.accuracy > done.majority + 0.05


QUICKSTART = "docs/quickstart.md"

ENVIRONMENT = """
mkdir -p .venv/bin
printf '#!/bin/sh\\nexec "%s" "$@"\\n' "$INTERPRETER" >.venv/bin/python
chmod +x .venv/bin/python
. scripts/environment.sh
wanted requirements/test.lock >.venv/veilstream.stamp
"""
"""What `./run` would install is there already: the interpreter and the packages of this suite."""


def quickstart_commands() -> list[str]:
    lines = "".join(blocks_in(QUICKSTART, "sh")).splitlines()
    return [re.sub(r"\s{2,}#.*", "", line) for line in lines if line]


def filled_in(proposed: str) -> str:
    """The plan after the page's edit: its tables in the place of those that were there."""
    (edit,) = blocks_in(QUICKSTART, "toml")
    learning, data = edit[: edit.index("[data]")], edit[edit.index("[data]") :]
    rest = proposed[: proposed.index("# Roles of columns are guesses")]
    return re.sub(r"\[learning\].*?(?=^\[)", learning, rest, flags=re.DOTALL | re.MULTILINE) + data


def test_from_a_clone_to_a_report_on_ones_own_file_takes_ten_commands(tmp_path):
    """Every command of docs/quickstart.md as it stands; only the clone's address is this one's."""
    commands = quickstart_commands()
    assert len(commands) <= 10
    assert commands[0].startswith("git clone https://")
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is no clone, or git is not here: nothing to clone")
    write_visits(tmp_path / "visits.csv")
    commands[0] = f"git clone --quiet --depth 1 file://{ROOT} veilstream"
    commands.insert(2, ENVIRONMENT)  # after the change into the clone
    edit = next(i for i, command in enumerate(commands) if "--write" in command) + 1
    environment = os.environ | {
        "INTERPRETER": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path]),
    }

    def run(lines: list[str], where: object) -> str:
        done = subprocess.run(
            ["bash", "-euc", "\n".join(lines)],
            cwd=str(where),
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    shown = run(commands[:edit], tmp_path)
    assert "came_back" in shown
    project = tmp_path / "veilstream/my-project"
    plan = project / "plan.toml"
    plan.write_text(filled_in(plan.read_text()))
    shown = run(commands[edit:], project)
    assert "All rows are usable" in shown
    assert "Report: run/report.html" in shown
    assert (project / "run/report.html").exists()
    assert json.loads((project / "run/summary.json").read_text())["rounds"] == 100
