"""Every block of code in the documentation runs, or stands in one list with the reason.

Python runs page by page, in one namespace; shell runs as it stands, in a folder that looks like a
clone; TOML is taken by the plan's own schema. tests/docs/not_run.toml is the list.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.command_line import UsageError, options_of, parse
from tests.support.pages import PAGES, ROOT, Block, blocks, blocks_in, name_of, prose
from tests.support.visits import write_visits
from veilstream.errors import InputError
from veilstream.plans.plan import Plan

LIST: dict[str, dict[str, list[str]]] = tomllib.loads((ROOT / "tests/docs/not_run.toml").read_text("utf-8"))
"""By page and the start of a block's first line: why it does not run, and the tests that do instead."""

LANGUAGES = {"python", "py", "sh", "toml", "text"}
"""text is what a program prints, or a drawing; all others are code."""

PYTHON_HERE = ("in-python", "any-transport", "use-the-model", "new-mechanism", "workloads", "theory", "privacy")
PYTHON_ELSEWHERE = {
    "docs/your-model.md": "tests/conformance/test_own_models.py",
    "docs/tutorial.md": "tests/docs/test_code_blocks.py",
    "docs/training-loop.md": "tests/deployment/test_torch_training.py",
}
SHELL_HERE = ("README.md", "docs/planning.md", "docs/your-data.md")
SHELL_ELSEWHERE = {
    "docs/quickstart.md": "tests/cli/test_ten_minutes.py",
    "docs/tutorial.md": "tests/docs/test_code_blocks.py",
    "docs/streams.md": "tests/docs/test_code_blocks.py",
}

CODE = [block for page in PAGES for block in blocks(page)]


def is_listed(block: Block) -> bool:
    return any(block.first_line.startswith(start) for start in LIST.get(block.page, ()))


# --- nothing is left out -------------------------------------------------------------------------


def test_every_block_says_its_language():
    assert [(b.page, b.first_line) for b in CODE if b.language not in LANGUAGES] == []


def test_every_block_runs_or_is_listed_with_a_reason():
    run = {
        "python": {f"docs/{page}.md" for page in PYTHON_HERE} | PYTHON_ELSEWHERE.keys(),
        "sh": {*SHELL_HERE, *SHELL_ELSEWHERE},
    }
    run["py"] = run["python"]
    forgotten = [
        (block.page, block.first_line)
        for block in CODE
        if block.language in run and block.page not in run[block.language] and not is_listed(block)
    ]
    assert forgotten == []


def test_the_list_has_reasons_and_blocks_that_exist():
    for page, starts in LIST.items():
        for start, (why, *tests) in starts.items():
            assert len(why) > 5, (page, start)
            assert [b.page for b in CODE if b.page == page and b.first_line.startswith(start)], (page, start)
            assert all((ROOT / test).exists() for test in tests), (page, start)


@pytest.mark.parametrize(("page", "test"), [*PYTHON_ELSEWHERE.items(), *SHELL_ELSEWHERE.items()])
def test_what_runs_elsewhere_is_named_there(page, test):
    assert re.search(rf"\b{re.escape(page)}", (ROOT / test).read_text("utf-8"))


def test_commands_are_not_hidden_from_these_tests():
    """An indented block has no language; commands stand between fences."""
    for page in PAGES:
        lines = prose(page.read_text("utf-8"))
        assert re.findall(r"^    (?:veilstream|\.\.?/run|python|pip|curl) .*", lines, re.M) == []


# --- Python --------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PYTHON_HERE)
def test_python_runs(page, tmp_path, monkeypatch):
    code = blocks_in(f"docs/{page}.md", "python")
    assert code
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in code:
        exec(compile(block, page, "exec"), namespace)


def test_python_that_does_not_run_is_python():
    code = [b for b in CODE if b.language in ("python", "py") and is_listed(b)]
    assert code
    for block in code:
        ast.parse(block.text)


# --- TOML ----------------------------------------------------------------------------------------

BASE = """
learning = {rounds = 100, local_steps = 10}
data = {dim = 5}
privacy = {epsilon = 2.0, delta = 1e-6}
methods = [{name = "ours", mechanism = "buffered", step_size = 0.1}]
"""


def whole_plan(text: str) -> Plan:
    """A plan, or a part of one put into another."""
    given, base = tomllib.loads(text), tomllib.loads(BASE)
    for table, content in given.items():
        whole = table == "methods" or not isinstance(base.get(table), dict)
        fresh = whole or content.get("kind") == "table"
        base[table] = content if fresh else base[table] | content
    return Plan(**base)


@pytest.mark.parametrize(
    "block", [b for b in CODE if b.language == "toml"], ids=lambda b: f"{b.page}: {b.first_line}"[:60]
)
def test_toml_is_a_plan_or_a_part_of_one(block):
    whole_plan(block.text)
    # Keys that are commented out are taken as well, one at a time.
    for line in re.findall(r"^# ((\w+) = [^#\n]+)", block.text, re.MULTILINE):
        if "..." not in line[0]:
            without = re.sub(rf"^{line[1]} = .*$", "", block.text, flags=re.MULTILINE)
            tomllib.loads(without.replace(f"# {line[0]}", line[0]))


def test_a_key_that_does_not_exist_is_found():
    with pytest.raises(InputError, match="colour"):
        whole_plan("[learning]\ncolour = 3\n")


# --- shell ---------------------------------------------------------------------------------------


def executable(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def clone(folder: Path) -> Path:
    """A folder with a `run` in it, which starts this very package; `veilstream` is the same."""
    here = folder / "veilstream"
    (folder / "bin").mkdir()
    here.mkdir()
    # What is documented is the commands, not their length: few runs of an audit, few rounds.
    start = f"""case "$*" in audit*--draws*) ;; audit*) set -- "$@" --draws 1e5 --runs 2000 ;; esac
"{sys.executable}" -m veilstream "$@" || exit $?
case "$1" in new) sed -i.before "s/^rounds = 150/rounds = 6/" "$2/plan.toml" ;; esac"""
    executable(here / "run", start)
    executable(folder / "bin/veilstream", start)
    return here


def shell(script: str, where: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PATH": f"{where.parent / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
        **more,
    }
    return subprocess.run(
        ["bash", "-euc", script], cwd=where, env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.mark.process
@pytest.mark.parametrize("page", SHELL_HERE)
def test_shell_runs_as_it_stands(page, tmp_path):
    here = clone(tmp_path)
    run = [b.text for b in blocks(ROOT / page) if b.language == "sh" and not is_listed(b)]
    assert run
    write_visits(tmp_path / "visits.csv")  # which the page tells people to put beside their plan
    script = "\n".join(run).replace("check visits.csv", f"check {tmp_path}/visits.csv")
    done = shell(script, here)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


SMALL_DATA = "from tests.cli.test_streams import use_small_data; from veilstream.cli import main; "


def clone_with_small_data(folder: Path) -> Path:
    """The same, with the four real streams in small: made up, and nothing is fetched."""
    here = clone(folder)
    code = SMALL_DATA + f"use_small_data({str(folder)!r}); main()"
    executable(here / "run", f'exec "{sys.executable}" -c "{code}" "$@"')
    return here


@pytest.mark.process
def test_the_tutorial_runs_from_its_first_command_to_its_last(tmp_path, monkeypatch):
    """docs/tutorial.md, in order; its plan as it stands there."""
    here = clone_with_small_data(tmp_path)
    (plan,) = blocks_in("docs/tutorial.md", "toml")
    (here / "trees.toml").write_text(plan)
    script = "".join(blocks_in("docs/tutorial.md", "sh"))
    done = shell(script.replace("--out", "--set run.seeds=1 --out"), here)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (here / "trees/report.html").exists()
    assert (here / "strict/report.html").exists()
    monkeypatch.chdir(here)
    for code in blocks_in("docs/tutorial.md", "python"):
        exec(compile(code, "docs/tutorial.md", "exec"), {})


@pytest.mark.process
def test_people_who_come_back_are_refused_as_the_page_on_streams_says(tmp_path):
    """docs/streams.md, its last command."""
    here = clone_with_small_data(tmp_path)
    *_, command = blocks_in("docs/streams.md", "sh")
    done = shell(command, here)
    assert done.returncode == 2, done.stderr
    assert "participations" in done.stderr
    assert 'returning = "first"' in done.stderr


# --- commands that are only named ----------------------------------------------------------------


def commands(text: str) -> list[str]:
    """Lines of a block that start veilstream, joined where they go on."""
    joined = re.sub(r"\\\n\s*", " ", text)
    starts = r"(?:veilstream|(?:\./|\.\./)run|\S+/bin/veilstream) +([a-z][^\n]*)"
    return [
        command.strip()
        for line in joined.splitlines()
        if not line.lstrip().startswith("#")
        for part in line.split("&&")
        if (found := re.search(rf"(?:^|\s){starts}$", part.split("  #")[0].rstrip()))
        for command in [found[1]]
    ]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=name_of)
def test_commands_in_blocks_have_the_options_that_they_are_given(page):
    for text in blocks_in(name_of(page), "sh"):
        for command in commands(text):
            if command.startswith("docs") or command.endswith("..."):
                continue
            words = shlex.split(command.replace("*", "x"), comments=True)
            try:
                parse(words)
            except (UsageError, AssertionError) as error:
                raise AssertionError(f"{command}: {error}") from error


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_sentences_have_the_options_that_they_are_given(page):
    text = re.sub(r"``.*?``", "", prose(page.read_text("utf-8")))
    for command in re.findall(r"`(?:veilstream|\.\.?/run) ([a-z][^`]*)`", text):
        words = re.split(r"[\s=|]+", command)
        if words[0] == "docs" or not re.fullmatch(r"[a-z-]+", words[0]):
            continue
        named = [w for w in words if not w.startswith("-")]
        used = {w for w in words if re.fullmatch(r"--[a-z-]+", w)}
        depth = 2 if words[0] in ("data", "ledger", "federation", "keys", "model") else 1
        if len(named) >= depth:
            assert used <= options_of(named[:depth]), command


def test_the_check_of_sentences_finds_a_wrong_option():
    assert "--plan" in options_of(["server"])
    assert "--planet" not in options_of(["server"])
    assert "--new-store" in options_of(["learner"])
    with pytest.raises(AssertionError, match="no command"):
        options_of(["serve"])
    assert commands("veilstream run plan.toml --out x   # why\n../run new a && cd a\n") == [
        "run plan.toml --out x",
        "new a",
    ]
