"""Run folders with damage in them: an error that names the file and the way out, or no error."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.browser.samples import TELEMETRY
from tests.support.run_folders import federation_folder, simulated_folder
from veilstream.errors import InputError
from veilstream.federation.keys.identity import PrivateKey, ServerKeys
from veilstream.reports.comparison import compared_runs, comparison_state
from veilstream.reports.export import tracked_runs
from veilstream.reports.page_kit import page_html
from veilstream.reports.report import write_report
from veilstream.reports.statement import make_statement
from veilstream.research.learning_figure import draw_panel, draw_run
from veilstream.runs.folder import Run

KEYS = ServerKeys(
    Path("keys/server"),
    PrivateKey(bytes(range(32))),
    {name: PrivateKey(bytes([i] * 32)).public for i, name in enumerate(("east", "north", "west"))},
)
NOISE = "method,round,std\nmethod 0,0,0.5\nmethod 0,1,0.6\n"


@pytest.fixture(scope="module")
def simulation(tmp_path_factory):
    folder = simulated_folder(tmp_path_factory.mktemp("simulation") / "run", 2, 2, 12)
    assert {"history.csv", "accuracy.csv"} <= {path.name for path in folder.iterdir()}
    return folder


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    folder = federation_folder(tmp_path_factory.mktemp("federation") / "run")
    (folder / "telemetry.csv").write_text(TELEMETRY)
    return folder


@contextmanager
def restored(path):
    """The file's content; it is put back afterwards."""
    before = path.read_bytes()
    try:
        yield before
    finally:
        path.write_bytes(before)


def damages(content: bytes, table: bool) -> dict[str, bytes]:
    """The same file, damaged in ways that disks, kills and editors know."""
    size = len(content)
    found = {f"cut at {part}": content[: int(part * size)] for part in (0.0, 0.2, 0.5, 0.83, 0.97)}
    found["no UTF-8"] = content[: size // 2] + b"\xff\xfe\n" + content[size // 2 :]
    if table:
        lines = content.splitlines(keepends=True)
        found["header only"] = lines[0]
        found["rows missing"] = b"".join(lines[:-3])
        found["no header"] = b"".join(lines[1:])
        found["column missing"] = b"".join(line.partition(b",")[2] for line in lines)
        found["last column missing"] = b"".join(x.rpartition(b",")[0] + b"\n" for x in lines)
        found["words"] = content.replace(b"0.", b"x")
    else:
        found["a list"] = b"[]"
        found["nothing in it"] = b"{}"
        for key in json.loads(content):
            found[f"without {key}"] = json.dumps({k: v for k, v in json.loads(content).items() if k != key}).encode()
    return found


def refusal(use, folder) -> str | None:
    """What an InputError says; None where there is none. Any other error is a defect."""
    try:
        use(Run(folder))
    except InputError as error:
        return str(error)
    return None


def try_all(folder, uses) -> int:
    """Every damage of every table and JSON file; how many were refused."""
    refused = 0
    for path in sorted([*folder.glob("*.csv"), *folder.glob("*.json")]):
        with restored(path) as before:
            for damage, content in damages(before, path.suffix == ".csv").items():
                path.write_bytes(content)
                for name, use in uses.items():
                    case = f"{path.name}, {damage}, {name}"
                    try:
                        said = refusal(use, folder)
                    except Exception as error:
                        raise AssertionError(case) from error
                    if said is not None:
                        refused += 1
                        assert path.name in said, case
                        assert re.search(r"restore|again|remove", said), case
    for use in uses.values():
        use(Run(folder))
    return refused


def test_no_damage_of_a_simulations_folder_ends_in_a_traceback(simulation, tmp_path):
    (simulation / "noise.csv").write_text(NOISE)
    other = simulated_folder(tmp_path / "other", 2, 2, 12)
    uses = {
        "report": write_report,
        "compare": lambda run: page_html(comparison_state(compared_runs([run, Run(other)]))),
        "export": tracked_runs,
    }
    assert try_all(simulation, uses) > 50


def test_no_damage_of_a_federations_folder_ends_in_a_traceback(federation):
    uses = {"report": write_report, "export": tracked_runs, "statement": lambda run: make_statement(run, KEYS)}
    assert try_all(federation, uses) > 30


def test_a_history_that_was_cut_is_named_with_its_line(simulation):
    path = simulation / "history.csv"
    with restored(path) as before:
        lines = before.decode().splitlines(keepends=True)
        path.write_text("".join(lines[:7]) + lines[7][: lines[7].rindex(",")])
        for use in (write_report, tracked_runs):
            with pytest.raises(InputError, match=r"history\.csv, line 8.*restore the file"):
                use(Run(simulation))
        path.write_text("".join(lines[:-3]))
        with pytest.raises(InputError, match="rows for every seed"):
            write_report(Run(simulation))


@pytest.mark.parametrize("name", ["history.csv", "accuracy.csv"])
def test_figures_of_a_damaged_folder_are_refused_alike(simulation, tmp_path, name):
    pytest.importorskip("matplotlib")
    with restored(simulation / name) as before:
        (simulation / name).write_bytes(before[: len(before) // 2])
        with pytest.raises(InputError, match=re.escape(name)):
            draw_run(Run(simulation), name="figure")
        if name == "accuracy.csv":
            with pytest.raises(InputError, match=re.escape(name)):
                draw_panel(Run(simulation), tmp_path / "panel.svg")


@pytest.mark.parametrize("end", [-2, -20, -60])
def test_no_statement_is_signed_over_half_a_hash(federation, end):
    path = federation / "releases.csv"
    with restored(path) as before:
        path.write_bytes(before[:end])
        with pytest.raises(InputError, match=r"releases\.csv, line"):
            make_statement(Run(federation), KEYS)
