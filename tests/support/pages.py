"""What tests read of the documentation: pages, their blocks of code, headings, links."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
"""What people read first."""

_FENCE = re.compile(r"^(\s*)```([^\n`]*)\n(.*?)^\1```\s*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    language: str
    text: str

    @property
    def first_line(self) -> str:
        """By which the list of blocks that do not run names it."""
        return self.text.strip().splitlines()[0].strip()


def name_of(page: Path) -> str:
    """A page by its path in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """All fenced blocks but Sphinx's own directives, in order."""
    found = _FENCE.findall(page.read_text(encoding="utf-8"))
    return [Block(name_of(page), lang.strip(), text) for _, lang, text in found if "{" not in lang]


def blocks_in(page: str, *languages: str) -> list[str]:
    """The text of a page's blocks in these languages."""
    return [block.text for block in blocks(ROOT / page) if block.language in languages]


def prose(text: str) -> str:
    """A page without its blocks of code."""
    return _FENCE.sub("", text)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as code hosts make them.

    Lower case; letters, digits, hyphens and underscores stay, spaces become hyphens, all else goes;
    a heading that comes again gets a number.
    """
    found: dict[str, int] = {}
    made = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", prose(text), re.MULTILINE):
        shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        count = found.get(slug, 0)
        made.add(slug if count == 0 else f"{slug}-{count}")
        found[slug] = count + 1
    return made


def links(text: str) -> list[str]:
    """Where a page's links and pictures lead."""
    without_code = re.sub(r"`[^`\n]*`", "", prose(text))
    return re.findall(r"\]\(<?([^()\s>]+(?:\([^()\s]*\))?)>?(?: \"[^\"]*\")?\)", without_code)


def load(path: Path) -> ModuleType:
    """A script of docs/, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # as when it is run
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module
