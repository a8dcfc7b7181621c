"""A budget that protects little is remarked upon wherever a plan is read, in the same words."""

from __future__ import annotations

import math
import re

import pytest

from tests.cli.test_plan import veilstream
from veilstream.plans.new_project import new_project
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.privacy.guarantee import Budget, budget_remarks


@pytest.fixture
def project(tmp_path, monkeypatch):
    new_project(tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    text = (tmp_path / "mine/plan.toml").read_text()
    for old, new in (
        ("epsilon = 4.0", "epsilon = 9.0"),
        ("delta = 1e-5", "delta = 1e-3"),
        ("rounds = 150", "rounds = 20"),
    ):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "mine/plan.toml").write_text(text)
    return tmp_path / "mine"


@pytest.mark.parametrize(("epsilon", "weak"), [(0.1, False), (8.0, False), (8.01, True), (1000.0, True)])
def test_epsilon_above_eight_is_remarked_upon(epsilon, weak):
    assert any("epsilon" in remark for remark in budget_remarks(Budget(epsilon, 1e-9), 10)) is weak


@pytest.mark.parametrize("people", [10, 2000])
def test_delta_above_one_in_the_people_is_remarked_upon(people):
    assert budget_remarks(Budget(1.0, 1.01 / people), people)
    assert not budget_remarks(Budget(1.0, 0.01 / people), people)


def test_the_odds_are_those_of_the_definition():
    """(ε, 0): the likelihood ratio of any message is at most e^ε."""
    (remark,) = budget_remarks(Budget(9.0, 1e-9), 10)
    said = float(re.search(r"may rise ([\d.e+]+)-fold", remark)[1])
    assert said == pytest.approx(math.exp(9.0), rel=0.05)


def test_plan_guarantee_run_check_and_audit_say_the_same(project, capsys):
    plan = Plan.load("plan.toml")
    said = plan.remarks()
    assert [remark.split(" = ")[0] for remark in said] == ["epsilon", "delta"]
    guarantee = prepare(plan, plan.methods[0]).guarantee
    assert list(guarantee.remarks) == said
    commands = [
        ("plan", "plan.toml"),
        ("data", "check", "records/north.csv", "--plan", "plan.toml"),
        ("run", "plan.toml", "--out", "run", "--set", "run.seeds=1"),
    ]
    for command in commands:
        done = veilstream(*command)
        for remark in said:
            assert remark in " ".join((done.stdout + done.stderr).split()), (command, done.stdout, done.stderr)


def test_server_learners_and_the_demonstration_say_it_when_they_start(tmp_path):
    changes = ["--set", "privacy.epsilon=9", "--learners", "1", "--rounds", "2"]
    done = veilstream("federation", "demo", "--out", str(tmp_path / "fed"), *changes)
    assert done.returncode == 0, done.stderr
    (said,) = budget_remarks(Budget(9.0, 1e-5), 8)
    logs = list((tmp_path / "fed/logs").glob("*.log"))
    assert len(logs) == 2
    for text in (done.stdout, *(log.read_text() for log in logs)):
        assert said in text
