"""docs/runs-and-reports.md lists what is really there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import veilstream as vs
from tests.cli.test_plan import veilstream
from tests.test_package import SMALL_PLAN

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/runs-and-reports.md").read_text()


def listed(section: str) -> dict[str, list[str]]:
    """Files of a section's table, and their columns where it gives them."""
    found: dict[str, list[str]] = {}
    table = PAGE.split(f"## {section}")[1].split("\n## ")[0].split("### Its files")[-1]
    for line in table.splitlines():
        if line.startswith("| `"):
            names, what = line.strip("| ").split(" | ", 1)
            columns = re.match(r"`([\w, ]+)`:", what)
            for name in re.findall(r"`([^`]+)`", names):
                found[name] = columns[1].split(", ") if columns else []
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    (place / "plan.toml").write_text(SMALL_PLAN)
    done = veilstream("run", str(place / "plan.toml"), "--out", str(place / "out"))
    assert done.returncode == 0, done.stderr
    return vs.Run(place / "out").path


def test_every_file_of_a_simulation_is_on_the_page_with_its_columns(folder):
    page = listed("A simulation")
    there = {path.name for path in folder.iterdir()}
    assert there <= set(page)
    optional = {
        "baselines.csv",
        "learning.png",
        "learning.svg",
        "start.json",
        "start.f32",
        "checkpoint.npz",
        "seed_batches.json",
        "regret-SEED.npz",
        "telemetry.csv",
    }
    assert set(page) - there == optional
    for name in ("history.csv", "accuracy.csv", "noise.csv"):
        assert page[name] == (folder / name).read_text().splitlines()[0].split(",")


def test_columns_of_a_federations_tables_are_those_that_the_server_writes():
    source = (ROOT / "src/veilstream/federation/server/run_files.py").read_text()
    page = listed("A federation")
    for name in ("rounds.csv", "releases.csv"):
        assert f'"{",".join(page[name])}\\n"' in source
    assert str(page["operations.csv"]).replace("'", '"') in source


def test_the_report_page_names_commands_that_there_are():
    text = (ROOT / "docs/runs-and-reports.md").read_text()
    for command in ("report", "compare"):
        known = veilstream(command, "--help").stdout
        block = "".join(line for line in text.splitlines() if line.startswith(f"veilstream {command}"))
        for option in re.findall(r"--[a-z-]+", block):
            assert option in known, (command, option)
