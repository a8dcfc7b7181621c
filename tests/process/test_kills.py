"""A learner that is killed anywhere, at any time, keeps its promises; a sabotaged one is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from veilstream.deployment.ledger.store import CRASH_POINTS

ROOT = Path(__file__).parents[2]


def study(kills: int, *options: str) -> dict[str, Any]:
    """Never in this process: it may have JAX and threads, which a fork does not survive."""
    command = [sys.executable, "-m", "studies.kills", "--json", "--kills", str(kills)]
    done = subprocess.run([*command, *options], check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def assert_nothing_was_broken(report: dict[str, Any], kills: int) -> None:
    assert report["failures"] == []
    assert not any(report["violations"].values()), report["violations"]
    assert report["kills"] == kills == sum(report["kills_at"].values())
    assert all(report["kills_at"].values()), report["kills_at"]
    assert set(CRASH_POINTS) <= set(report["kills_at"])
    # The study looked at something: no count is zero because there was nothing to count.
    totals = report["totals"]
    steps, pairings = totals["steps stored"], totals["pairings of noise and gradient"]
    assert steps > kills
    assert totals["records: steps"] > kills / 2  # groups of several
    # Noise that met a gradient and was never stored: the step that came instead had its own.
    assert pairings - steps >= report["kills_at"]["step-computed"]
    for what in ("messages received", "models refused", "acknowledgements confirmed"):
        assert totals[what] > kills / 4, what


def test_100_kills_break_no_promise():
    assert_nothing_was_broken(study(100), 100)


@pytest.mark.slow
def test_2000_kills_break_no_promise():
    assert_nothing_was_broken(study(2000, "--seed", "1"), 2000)


@pytest.mark.parametrize(
    ("sabotage", "violation"),
    [
        ("same-secrets", "noise rows with two gradients"),
        ("answer-first", "lost acknowledgements"),
        ("send-first", "rounds with two payloads"),
        ("forget-clients", "clients used twice"),
    ],
)
def test_a_broken_promise_is_found(sabotage: str, violation: str):
    """Some 18 kills hit where it hurts, and about half of them show: not one does once in 1e5."""
    assert study(40, "--sabotage", sabotage)["violations"][violation] > 0
