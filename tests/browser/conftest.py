"""One browser for all tests of a session, and pages that commands made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.browser.chromium import cannot, chromium
from tests.test_package import SMALL_PLAN

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("chromium")) as running:
        yield running


@pytest.fixture
def page(browser):
    """Opens a file as a desktop of 1,280 pixels sees it, with an empty log and a new theme."""
    from tests.browser.page import Page

    return Page(browser)


@pytest.fixture(scope="session")
def library() -> Path:
    """Where the chart library is; fetched if it can be."""
    return fetched("uplot")


@pytest.fixture(scope="session")
def axe() -> str:
    """The rules of axe-core, as a script."""
    return (fetched("axe-core") / "axe.js").read_text()


def fetched(name: str) -> Path:
    done = subprocess.run([sys.executable, str(ROOT / "scripts/fetch_npm.py"), name], capture_output=True, text=True)
    if done.returncode:
        cannot(done.stderr.strip())
    folders = {"uplot": "src/veilstream/reports/page/vendor", "axe-core": "tests/browser/vendor"}
    return ROOT / folders[name]


PLAN = (
    SMALL_PLAN
    + """
[[methods]]
name = "buffered"
mechanism = "buffered"
step_size = 0.1
"""
)


@pytest.fixture(scope="session")
def run(tmp_path_factory, library):
    """A small simulation, with an audit and private telemetry in its folder."""
    import veilstream as vs
    from tests.browser.samples import AUDIT, TELEMETRY
    from veilstream.reports.report import write_report

    finished = vs.run(vs.Plan.parse(PLAN), tmp_path_factory.mktemp("run") / "out")
    (finished.path / "audit.json").write_text(AUDIT)
    (finished.path / "telemetry.csv").write_text(TELEMETRY)
    write_report(finished)
    return finished


@pytest.fixture(scope="session")
def expected(run):
    """The last held-out accuracies of a method, straight from the table."""
    rows = [
        line.split(",") for line in (run.path / "accuracy.csv").read_text().splitlines()[1:]
    ]  # method, seed, round, held_out_accuracy
    last = max(int(row[2]) for row in rows)
    return {
        name: np.array([float(r[3]) for r in rows if r[0] == name and int(r[2]) == last])
        for name in {row[0] for row in rows}
    }
