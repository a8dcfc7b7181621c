"""A learner with a secret order that is killed anywhere uses every record in one step; a sabotaged one is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def study(kills: int, *options: str) -> dict[str, Any]:
    """Never in this process: it may have JAX and threads, which a fork does not survive."""
    command = [sys.executable, "-m", "studies.order_kills", "--json", "--kills", str(kills)]
    done = subprocess.run([*command, *options], check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def assert_nothing_was_broken(report: dict[str, Any], kills: int) -> None:
    assert report["failures"] == []
    assert not any(report["violations"].values()), report["violations"]
    assert report["kills"] >= kills
    totals = report["totals"]
    assert totals["ledgers verified"] == totals["histories"] > 0
    assert totals["steps computed"] >= 24 * totals["histories"]


def test_40_kills_leave_every_record_in_its_one_step():
    assert_nothing_was_broken(study(40), 40)


def test_30_kills_while_records_arrive_leave_each_in_one_step_of_the_next_window():
    assert_nothing_was_broken(study(30, "--window"), 30)


@pytest.mark.parametrize("sabotage", ["known-records-twice", "same-secrets"])
@pytest.mark.all
def test_a_sabotaged_learner_of_arrivals_is_found(sabotage):
    assert any(study(30, "--window", "--sabotage", sabotage)["violations"].values())


@pytest.mark.slow
def test_600_kills_at_every_place_leave_every_record_in_its_one_step():
    report = study(600, "--seed", "1")
    assert_nothing_was_broken(report, 600)
    assert all(report["kills_at"].values()), report["kills_at"]


@pytest.mark.parametrize(
    ("sabotage", "violation"),
    [
        ("redrawn", "steps made of other records after a crash"),
        ("known-records-twice", "records in two steps"),
        ("same-secrets", "noise rows with two gradients"),
    ],
)
@pytest.mark.all
def test_a_sabotaged_learner_is_found(sabotage, violation):
    assert study(40, "--sabotage", sabotage)["violations"][violation] > 0
