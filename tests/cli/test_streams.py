"""`veilstream reproduce streams` in its short form, on small made-up files. No network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.streams.test_datasets import FLIGHTS, elec, flight, known_small, plots, rand_hie, text
from veilstream.runs.folder import Run
from veilstream.streams import dataset_tables, datasets
from veilstream.streams.dataset_tables import covertype_tables, electricity_tables, flights_tables, health_tables

CARRIERS = ("UA", "B6", "EV", "DL", "AA", "MQ", "US", "9E")


def use_small_data(folder):
    """In a process of its own: all four data sets in small, already in the user's directory."""
    os.environ["VEILSTREAM_DATA"] = str(Path(folder) / "home")
    dataset_tables._BALANCED_RECORDS = 0
    flights = [flight(1 + i // 40, 20 * (i % 4 == 0), carrier, i) for carrier in CARRIERS for i in range(960)]
    contents = {
        "electricity": elec(1920),
        "covertype": plots(4 * 960),
        "flights": text(FLIGHTS, flights),
        "health": rand_hie(people=160),
    }
    makes = {
        "electricity": electricity_tables,
        "covertype": covertype_tables,
        "flights": flights_tables,
        "health": lambda c: health_tables(c, people=80),
    }
    datasets.DATASETS = known_small(contents, makes)
    for name, content in contents.items():
        (Path(folder) / f"{name}-original.csv").write_bytes(content)
        datasets.get_dataset(name, from_=Path(folder))


def reproduce(folder, *arguments):
    code = "from tests.cli.test_streams import use_small_data; from veilstream.cli import main; "
    code += f"use_small_data({str(folder)!r}); main()"
    return subprocess.run(
        [sys.executable, "-c", code, "reproduce", "streams", "--smoke", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        cwd=Path(__file__).parents[2],
    ).stdout


def test_streams_in_small_show_every_method_beside_what_needs_no_learning(tmp_path):
    out = tmp_path / "out"
    shown = json.loads(reproduce(tmp_path, "--set", "run.seeds=1", "--out", str(out), "--json"))
    rows = shown["rows"]
    streams = ["electricity", "covertype", "flights", "health"]
    assert list(dict.fromkeys(row["stream"] for row in rows)) == streams
    beside = {"majority", "learner's share", "last label", "noise-free"}
    noisy = {"noisy count", "independent", "tree", "buffered", "optimal"}
    for stream in streams:
        own = {(row["method"], row["epsilon"]) for row in rows if row["stream"] == stream}
        assert own == {(name, None) for name in beside} | {
            (name, epsilon) for name in noisy for epsilon in (0.5, 2.0, 8.0)
        }
    for row in rows:
        assert 0 <= row["accuracy"] <= 1
        assert row["loss"] > 0
    # One flight late, then three on time, in each of eight rounds: what is told beside the methods is what was counted.
    # The majority is wrong about each late one; the last label about each late one and the next.
    flights = {row["method"]: row for row in rows if row["stream"] == "flights"}
    assert flights["majority"]["accuracy"] == pytest.approx(3 / 4)
    assert flights["last label"]["accuracy"] == pytest.approx(2 / 4)
    assert "CC0" in shown["data"]["flights"]
    assert all("CC0" in Run(each).summary["data"] for each in (out / "flights").iterdir())
    assert "| majority |" in (out / "streams.md").read_text()
    assert (out / "streams.png").read_bytes().startswith(b"\x89PNG")
    again = reproduce(tmp_path, "--set", "run.seeds=1", "--out", str(out), "--resume")
    assert "prequential accuracy" in again
    assert "protects no one" in again
