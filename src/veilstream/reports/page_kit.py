"""report.html: one file that opens from disk and fetches nothing.

The page's parts lie in page/: a template, its style, its scripts. The chart library is not ours; it
is fetched when the package is built (scripts/fetch_npm.py) into page/vendor, with its licence. A
page that is made without it draws plainer charts.
"""

from __future__ import annotations

import html
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from veilstream.files import write_file

REPORT = "report.html"
SCHEMA = 1
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "connect-src {connect}; base-uri 'none'; form-action 'none'"
)


def write_page(path: Path, state: dict[str, Any], *, shared: bool) -> Path:
    """Write a page, whole or not at all; if ``shared`` the umask decides who may read it, else only its owner."""
    write_file(path, page_html(state), shared=shared)
    return path


def page_html(state: dict[str, Any], *, extra_script: str = "", connect: str = "'none'") -> str:
    """A page that shows this state.

    Args:
        state: as `report_state` makes it.
        extra_script: what runs after the page is drawn, as a live page's updates.
        connect: where the page may connect to (a source of a content security policy).

    """
    page = files("veilstream.reports") / "page"

    def part(name: str) -> str:
        found = page / name
        return found.read_text(encoding="utf-8") if found.is_file() else ""

    # No text may end the script element that it stands in.
    embedded = json.dumps(state, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "policy": html.escape(_POLICY.format(connect=connect), quote=True),
        "title": html.escape(f"{state['title']} · veilstream"),
        "styles": part("vendor/uplot.css") + part("page.css"),
        "library": part("vendor/uplot.js"),
        "scripts": "\n".join([part("charts.js"), part("page.js"), extra_script]),
        "state": embedded,
    }
    # In one pass: what is put in is never searched for places, whatever it says.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], part("template.html"))
