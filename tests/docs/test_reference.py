"""Pages and pictures that are made from the program are current, and say what the program does."""

from __future__ import annotations

import re
import sys
import tomllib

import pytest

from tests.support.pages import ROOT, load
from veilstream.errors import InputError
from veilstream.federation.learner.local_page import PERSON_PATH, LocalPage
from veilstream.federation.server.process import LIVE
from veilstream.plans.plan import Plan
from veilstream.plans.schema import Table

DOCS = ROOT / "docs"


MADE = {"docs/reference_pages.py": ("PAGES", "DOCS"), "docs/draw_pictures.py": ("PICTURES", "HERE")}


@pytest.mark.parametrize("script", MADE)
def test_what_is_made_from_the_program_is_current(script, tmp_path, monkeypatch, capsys):
    module = load(ROOT / script)
    names, folder = MADE[script]
    monkeypatch.setattr(sys, "argv", [script, "--check"])
    assert module.main() == 0, capsys.readouterr().err
    monkeypatch.setattr(module, folder, tmp_path)  # nothing is there, then something else
    assert module.main() == 1
    for name in getattr(module, names):
        (tmp_path / name).write_text("old")
    assert module.main() == 1
    assert all(name in capsys.readouterr().err for name in list(getattr(module, names))[:1])


# --- plan keys -----------------------------------------------------------------------------------


def keys_of(table: type[Table], path: str = "") -> dict[str, type[Table]]:
    """Every key of a plan, with the table that holds it."""
    found: dict[str, type[Table]] = {}
    for name, entry in table._entries.items():
        if entry.table is None:
            found[f"{path}{name}"] = table
        else:
            found |= keys_of(entry.table, f"{path}{name}.")
    return found


def documented_keys() -> dict[str, str]:
    """Every key of the page, with its example."""
    found, where = {}, ""
    for line in (DOCS / "plan-keys.md").read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"## (?:At the top|`\[{1,2}([\w.]+)\]{1,2}`)$", line):
            where = f"{heading[1]}." if heading[1] else ""
        elif row := re.match(r"\| `(\w+)` \|.* Example: `(.*)` \|$", line):
            found[where + row[1]] = row[2]
    return found


def test_every_key_of_a_plan_stands_on_its_page_and_no_other():
    assert set(documented_keys()) == set(keys_of(Plan))


@pytest.mark.parametrize("key", documented_keys())
def test_an_example_of_a_key_is_toml_that_its_rule_accepts(key):
    ((name, given),) = tomllib.loads(documented_keys()[key]).items()
    assert key.rpartition(".")[2] == name
    keys_of(Plan)[key]._entries[name].accepted(given)


def test_the_check_of_examples_finds_a_wrong_one():
    with pytest.raises(InputError):
        keys_of(Plan)["learning.rounds"]._entries["rounds"].accepted(0)


def test_a_key_without_a_word_or_an_example_is_refused():
    module = load(DOCS / "reference_pages.py")
    entry = keys_of(Plan)["learning.ridge"]._entries["ridge"]
    with pytest.raises(LookupError, match="what it is for"):
        module.meaning(keys_of(Plan)["data.bias"]._entries["bias"], "", "data.bias")
    assert module.meaning(entry, "of the loss", "learning.ridge") == "Of the loss."
    source = keys_of(Plan)["data.source"]._entries["source"]
    with pytest.raises(LookupError, match="EXAMPLES"):
        module.example(source, "data.another")


# --- exit codes, HTTP ----------------------------------------------------------------------------


def test_exit_codes_are_those_of_the_command_line():
    """As the help of the command lists them."""
    helped = (ROOT / "src/veilstream/cli/app.py").read_text(encoding="utf-8")
    listed = re.search(r"Exit codes: (.*?)\"\"\"", helped, re.DOTALL)
    assert listed is not None
    codes = set(re.findall(r"(?:^|· ?|·\s+)(\d+) ", listed[1]))
    page = (DOCS / "exit-codes.md").read_text(encoding="utf-8")
    assert codes == set(re.findall(r"^\| (\d+) \|", page, re.MULTILINE))
    assert {"0", "4", "130"} <= codes


PATHS = {"PERSON_PATH": PERSON_PATH, "path": LIVE, "f\"{path.rstrip('/')}/events\"": f"{LIVE}/events"}
"""Routes whose path is no literal."""


def test_every_http_path_stands_on_its_page_and_no_other():
    served = set()
    for path in (ROOT / "src/veilstream").rglob("*.py"):
        for given in re.findall(r"\bRoute\(\s*([^,\s]+)\s*,", path.read_text(encoding="utf-8")):
            inside = given.removeprefix("LocalPage.")
            plain = PATHS.get(given, given.strip("\"'"))
            served.add(plain if given == inside else getattr(LocalPage, inside))
    page = (DOCS / "http.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| (?:\w+) \| (?:GET|POST) \| `(\S+)` \|", page, re.MULTILINE))
    assert {"/observe", "/page/link", "/model/{name}"} <= served
    assert listed == served
