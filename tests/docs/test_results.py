"""Measured numbers of the pages are those of stored files, and each file names the command that makes it."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.support.pages import PAGES, ROOT, load, name_of
from veilstream.plans.experiments import FIGURES

RESULTS = ROOT / "docs/results"
TUTORIAL = (ROOT / "docs/tutorial.md").read_text("utf-8")
MADE = {"docs/plan-keys.md", "docs/commands.md", "docs/exit-codes.md"}
"""Pages that docs/reference_pages.py makes from the program."""

NO_RESULTS: dict[str, dict[str, str]] = tomllib.loads((ROOT / "tests/docs/no_results.toml").read_text("utf-8"))
"""By page and the start of a table's header: why its numbers are no results."""


@pytest.fixture(scope="module")
def tied():
    return load(ROOT / "docs/result_tables.py")


def listed() -> dict[str, str]:
    """Files by the index of docs/results, with their commands."""
    rows = re.findall(r"^\| ([\w.-]+\.(?:csv|json|txt)) \| (.*?) \|", (RESULTS / "README.md").read_text("utf-8"), re.M)
    return dict(rows)


# --- the pages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_number_is_that_of_its_file(page, tied):
    assert tied.faults(page.read_text("utf-8")) == []


@pytest.mark.parametrize("page", [p for p in PAGES if name_of(p) not in MADE], ids=name_of)
def test_no_table_of_numbers_is_without_a_file(page, tied):
    excused = NO_RESULTS.get(name_of(page), {})
    headers = tied.untied_tables(page.read_text("utf-8"))
    assert [each for each in headers if not each.startswith(tuple(excused) or "none")] == []


def test_excused_tables_exist_and_have_reasons(tied):
    for page, starts in NO_RESULTS.items():
        headers = tied.untied_tables((ROOT / page).read_text("utf-8"))
        for start, why in starts.items():
            assert len(why) > 10, (page, start)
            assert any(each.startswith(start) for each in headers), (page, start)


# --- the files -----------------------------------------------------------------------------------


def test_the_index_lists_every_file_and_no_other():
    assert set(listed()) == {path.name for path in RESULTS.iterdir()} - {"README.md"}


def exists(command: str) -> bool:
    """Whether a command of the index can be given: its script, module, figure or plan is in the repository."""
    if script := re.search(r"python ([\w/]+\.py)", command):
        return (ROOT / script[1]).exists()
    if module := re.search(r"python -m ([\w.]+)", command):
        place = ROOT / module[1].replace(".", "/")
        return place.with_suffix(".py").exists() or (place / "__main__.py").exists()
    if figure := re.search(r"\./run reproduce (\w+)", command):
        return figure[1] in FIGURES
    if preset := re.search(r"\./run (?:run|plan|federation demo --plan) ([\w/.]+)", command):
        plans = (preset[1], f"experiments/{preset[1]}.toml")
        return any((ROOT / path).exists() for path in plans) or f"`{preset[1]}`" in TUTORIAL
    return False


@pytest.mark.parametrize(("file", "commands"), listed().items())
def test_a_file_is_made_by_commands_that_exist(file, commands):
    given = re.findall(r"`([^`]+)`", commands)
    assert given
    assert [each for each in given if not exists(each)] == []


def test_the_check_of_commands_finds_what_is_not_there():
    wrong = ("python none.py", "python -m studies.none", "./run reproduce none", "./run run none", "ls")
    assert not any(exists(each) for each in wrong)


def test_every_file_is_behind_some_page(tied):
    """By a comment, by a function that makes a table, or by a link."""
    text = "".join(page.read_text("utf-8") for page in PAGES)
    text += "".join(path.read_text("utf-8") for path in (ROOT / "docs/tables").glob("*.py"))
    assert [name for name in listed() if name not in text] == []


# --- the checks can fail -------------------------------------------------------------------------


def test_another_digit_in_a_table_is_found(tied):
    page = (ROOT / "docs/workloads.md").read_text("utf-8")
    changed = page.replace("54.94", "54.93", 1)
    assert changed != page
    assert tied.faults(changed) == ["table workloads.returning is not current"]
    assert tied.with_tables(changed) == page


@pytest.fixture
def stored(tied, tmp_path, monkeypatch):
    """A folder of results with one small file and one that is too large to find a number by chance."""
    (tmp_path / "small.json").write_text('{"accuracy": 0.57349, "seconds": -1.25, "share": 0.124, "runs": 2000}')
    (tmp_path / "large.json").write_text(str(list(range(tied.MOST + 1))))
    monkeypatch.setattr(tied, "RESULTS", tmp_path)


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("accuracy 0.573 and 0.5735, lost 1.25 or -1.2 s, 12.4% or 12%, 2,000 runs", []),
        ("accuracy 0.574", ["0.574"]),
        ("accuracy 0.5734", ["0.5734"]),
        ("gained +1.25", ["+1.25"]),
        ("12.5%, and 1,999 runs", ["12.5%", "1,999"]),
        ("`0.3` of [there](results/7.csv), 16 records", []),
        ("17 records", ["17"]),
    ],
)
def test_a_number_is_compared_to_the_digits_that_are_shown(text, wrong, tied):
    page = f"Before 99.\n\n<!-- numbers: small.json, not: 16 -->\n{text}\n\nAfter 98.\n"
    assert [fault.split(" is not in")[0] for fault in tied.faults(page)] == wrong


@pytest.mark.usefixtures("stored")
def test_a_file_with_too_many_numbers_proves_nothing(tied):
    with pytest.raises(ValueError, match="make a table"):
        tied.faults("<!-- numbers: large.json -->\n5\n")


def test_a_table_without_a_file_is_found(tied):
    table = "| a | b |\n| --- | --- |\n| x | 0.5 |\n"
    assert tied.untied_tables(f"text\n\n{table}\ntext") == ["| a | b |"]
    assert tied.untied_tables(f"<!-- numbers: some.json -->\n{table}") == []
    assert tied.untied_tables(f"```text\n{table}```\n") == []
    assert tied.untied_tables(table.replace("0.5", "`0.5`")) == []
