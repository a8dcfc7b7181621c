"""`veilstream new` and `veilstream data check`, as a newcomer uses them."""

from __future__ import annotations

import json
import re

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
        veilstream("data", "check", *sorted((project / "records").iterdir()), "--plan",
                   "plan.toml", "--json")
    )  # fmt: skip
    assert checked["rows"] == checked["used"] == 9000
    assert checked["problems"] == []
    assert Plan.load("plan.toml").learning.rounds <= min(checked["rounds"].values())
    refused("new or empty", "new", project)


def test_a_check_says_what_would_be_refused_and_why(project):
    path = project / "records" / "north.csv"
    lines = path.read_text().splitlines()
    lines[1:11] = [line.replace("yes", "perhaps").replace("no", "perhaps") for line in lines[1:11]]
    lines[11] = lines[11].replace("north-0010", "north-0011")
    path.write_text("\n".join(lines))
    shown = veilstream("data", "check", path, "--plan", "plan.toml")
    assert "10 rows (0.3%) refused in answered: the label is none of the plan's" in shown
    assert "1 of them return" in shown
    assert "keep it on this screen" in shown


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
    for name in ("hour", "temperature", "channel", "campaign", 'client = "person"',
                 'label = "answered"'):  # fmt: skip
        assert name in written
    refused(r"without \[data\]", "data", "check", path, "--write", "--plan", "new.toml")
