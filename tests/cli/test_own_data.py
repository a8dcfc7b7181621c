"""`veilstream new` and `veilstream data check`, as a newcomer uses them."""

from __future__ import annotations

import json
import re
import warnings

import pytest

from tests.cli.test_plan import veilstream as command
from veilstream.plans.plan import Plan


def veilstream(*arguments):
    done = command(*(str(a) for a in arguments))
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(says, *arguments):
    done = command(*(str(a) for a in arguments))
    assert done.returncode == 2
    assert re.search(says, done.stderr), done.stderr


@pytest.fixture
def project(tmp_path, monkeypatch):
    veilstream("new", tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    return tmp_path / "mine"


def test_a_new_project_checks_and_is_not_written_over(project):
    checked = json.loads(
        veilstream("data", "check", *sorted((project / "records").iterdir()), "--plan", "plan.toml", "--json")
    )
    assert checked["rows"] == checked["used"] == 9000
    assert checked["problems"] == []
    assert Plan.load("plan.toml").learning.rounds <= min(checked["rounds"].values())
    refused("new or empty", "new", project)


def test_a_new_project_calls_the_command_as_it_was_called(tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # typer's, about click
        from veilstream.cli.new import called_as

    monkeypatch.delenv("VEILSTREAM_RUN", raising=False)
    (script := tmp_path / "bin/veilstream").parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(script.parent))
    assert called_as(tmp_path / "mine") == "veilstream"
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sys.argv", ["bin/veilstream", "new", "mine"])
    assert called_as(tmp_path / "mine") == str(script)
    monkeypatch.setattr("sys.argv", ["/usr/lib/python3/veilstream/__main__.py", "new", "mine"])
    assert called_as(tmp_path / "mine").endswith(" -P -m veilstream")  # a module of the folder must not run instead


def test_a_check_says_what_would_be_refused_and_why(project):
    path = project / "records" / "north.csv"
    lines = path.read_text().splitlines()
    lines[1:11] = [line.replace("yes", "perhaps").replace("no", "perhaps") for line in lines[1:11]]
    lines[11] = lines[11].replace("north-0010", "north-0011")
    path.write_text("\n".join(lines))
    done = command("data", "check", str(path), "--plan", "plan.toml")
    assert done.returncode == 2
    shown = done.stdout
    assert "10 rows (0.3%) refused in answered: the label is none of the plan's" in shown
    assert "1 of them return" in shown
    assert "keep it on this screen" in shown
    assert re.search("`veilstream run` refuses these records: privacy.participations = 1", shown)
    assert "these are the records of 1 of the plan's 3 learners" in shown


def edited(path, change):
    path.write_text(change(path.read_text()))


def one_person(path, name):
    lines = path.read_text().splitlines(keepends=True)
    for i in range(1, 6):
        lines[i] = name + lines[i][lines[i].index(",") :]
    path.write_text("".join(lines))


@pytest.mark.parametrize("how", ["two learners", "returns", "header only", "learners"])
def test_a_check_says_what_a_run_says(project, how):
    """The same words, and the same exit code."""
    records = sorted((project / "records").iterdir())
    if how == "two learners":
        edited(records[1], lambda text: text.replace("south-", "north-"))
    elif how == "returns":
        one_person(records[0], "north-0007")
    elif how == "header only":
        for path in records:
            edited(path, lambda text: text.partition("\n")[0] + "\n")
    else:
        edited(project / "plan.toml", lambda text: text.replace("learners = 3", "learners = 2"))
    ran = command("run", "plan.toml", "--out", "run")
    assert ran.returncode == 2
    said = ran.stderr.partition("veilstream: ")[2].strip()
    checked = command("data", "check", *map(str, records), "--plan", "plan.toml")
    assert checked.returncode == 2
    assert said in checked.stdout
    assert "Every row" not in checked.stdout
    assert not (project / "run").exists()


def test_records_that_do_not_last_are_named_before_a_run_begins(project):
    edited(project / "plan.toml", lambda text: text.replace("rounds = 150", "rounds = 270"))
    records = sorted((project / "records").iterdir())
    shown = veilstream("data", "check", *records, "--plan", "plan.toml")
    says = r"270 rounds of 10 records, 2700 records at each learner, .*north: 2[34]\d\d.*rounds = 24\d"
    assert re.search(says, shown)
    done = command("run", "plan.toml", "--out", "run", "--set", "run.seeds=1")
    assert done.returncode == 0, done.stderr
    assert re.search(says, done.stderr)
    assert done.stderr.index("2700 records") < done.stderr.index("Simulation:")


def test_rows_out_of_order_are_counted(project):
    path = project / "records" / "north.csv"
    lines = path.read_text().splitlines()
    lines[1:4] = lines[1:4][::-1]
    path.write_text("\n".join(lines))
    shown = veilstream("data", "check", path, "--plan", "plan.toml")
    assert "2 rows lie behind a later minute: `veilstream run` sorts them" in shown


def test_all_files_are_looked_at_without_a_plan(project):
    records = sorted((project / "records").iterdir())
    edited(records[2], lambda text: text.replace("channel", "way", 1))
    shown = veilstream("data", "check", *records)
    assert "3 files: 9000 rows, 8 columns" in shown
    assert "west.csv lacks columns that other files have: channel" in shown
    assert "records/*.csv" in shown
    refused("one pattern names", "data", "check", *records[:2])


def test_a_proposal_goes_where_the_new_projects_sample_stood(project):
    path = project / "visits.csv"
    path.write_text(
        "patient,date,score,well\n"
        + "".join(f"p{i % 9},2026-01-{i + 1:02d},{i / 2},{'yn'[i % 2]}\n" for i in range(20))
    )
    veilstream("data", "check", path, "--write", "--plan", "plan.toml")
    written = (project / "plan.toml").read_text()
    assert written.count("[data]") == 1
    assert "temperature" not in written
    assert 'client = "patient"' in written
    refused(r"without \[data\]", "data", "check", path, "--write", "--plan", "plan.toml")


def test_a_record_in_the_headers_place_is_not_written_into_a_plan(project):
    path = project / "visits.csv"
    path.write_text("".join(f"p{i},{i / 2},yes\n" for i in range(20)))
    shown = veilstream("data", "check", path)
    assert "is that line a header?" in shown
    refused("a file with a header", "data", "check", path, "--write", "--plan", "new.toml")
    assert not (project / "new.toml").exists()


def test_a_file_with_other_columns_is_refused_by_name(project):
    path = project / "records" / "north.csv"
    path.write_text(path.read_text().replace("temperature", "temp", 1))
    refused("columns temperature.*it has .*temp,", "data", "check", path, "--plan", "plan.toml")


def test_a_proposal_holds_names_and_no_values(project):
    """Numbers and words of the records are on the screen, and none of them in the plan."""
    path = project / "records" / "north.csv"
    shown = veilstream("data", "check", path)
    assert "phone (" in shown
    veilstream("data", "check", path, "--write", "--plan", "new.toml")
    written = (project / "new.toml").read_text()
    for private in ("phone", "mail", "c1", "north-", "7.0", "21."):
        assert private not in written.replace(str(path), "")
    for name in ("hour", "temperature", "channel", "campaign", 'client = "person"', 'label = "answered"'):
        assert name in written
    refused(r"without \[data\]", "data", "check", path, "--write", "--plan", "new.toml")
