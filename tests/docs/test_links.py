"""Links of the documentation lead somewhere: files, headings, and pages that the code names."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.pages import ROOT, anchors, links, name_of

SKIPPED = {".venv", ".git", "node_modules", "build", "dist", "runs"}


def files_of_the_repository(*suffixes: str) -> list[Path]:
    """Those that git knows or would know, else all; never an environment's."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    listed = done.stdout.splitlines() if done.returncode == 0 else []
    found = [ROOT / name for name in listed] or list(ROOT.rglob("*"))
    return sorted(
        path
        for path in found
        if path.suffix in suffixes and path.is_file() and not SKIPPED & set(path.relative_to(ROOT).parts)
    )


MARKDOWN = files_of_the_repository(".md")
NOTEBOOKS = files_of_the_repository(".ipynb")


def text_of(path: Path) -> str:
    """A page's Markdown; a notebook's is in its cells."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def broken(page: Path, text: str) -> list[str]:
    """Links of a page that lead nowhere; those to other hosts are not asked."""
    found = []
    for link in links(text):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z][a-z+.-]*:", target):
            continue
        where = (page.parent / target) if target else page
        if not where.exists():
            found.append(f"{link}: no such file")
        elif anchor and where.suffix in (".md", ".ipynb"):
            own = text if where == page else text_of(where)
            if anchor not in anchors(own):
                found.append(f"{link}: no such heading")
    return found


@pytest.mark.parametrize("page", [*MARKDOWN, *NOTEBOOKS], ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading(page):
    assert broken(page, text_of(page)) == []


def test_the_check_finds_a_file_and_a_heading_that_are_not_there():
    page = ROOT / "docs/glossary.md"
    text = "# Words that are ours\n[a](none.md) [b](#words-that-are-ours) [c](#none) "
    text += "[d](privacy.md#none) [e](privacy.md#noise-by-itself) [f](https://host.example/x)"
    assert [each.partition(":")[0] for each in broken(page, text)] == ["none.md", "#none", "privacy.md#none"]


def test_anchors_are_those_of_code_hosts():
    """Examples as GitHub renders them."""
    made = anchors("# A: b, c\n## `x` and [y](z)\n## ε = 2 on\n## Again\n## Again\n```\n# no\n```\n")
    assert made == {"a-b-c", "x-and-y", "ε--2-on", "again", "again-1"}


@pytest.mark.parametrize("folder", ["src", "tests", "studies", "experiments", "deploy", "scripts"])
def test_pages_that_code_and_errors_name_exist(folder):
    missing = {}
    for path in files_of_the_repository(".py", ".toml", ".yaml", ".service", ".sh", ""):
        if path.relative_to(ROOT).parts[0] != folder:
            continue
        named = re.findall(r"\bdocs/[\w./-]+\.(?:md|png|svg|ipynb)\b", path.read_text("utf-8", "replace"))
        gone = [name for name in named if not (ROOT / name).exists()]
        if gone:
            missing[name_of(path)] = gone
    assert missing == {}


def test_there_are_pages_to_look_at():
    assert {"README.md", "docs/index.md", "CONTRIBUTING.md"} <= {name_of(p) for p in MARKDOWN}
    assert len(NOTEBOOKS) >= 2
