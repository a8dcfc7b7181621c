"""The page kit: one JSON form (`PageState`), one template, one script and one style for every page.

A page is one file that fetches nothing; a live page also reads events from where it came from. Without uPlot
(scripts/fetch_npm.py) charts are plain SVG. Text is never HTML: the state is embedded as JSON, and the script
sets text, not markup. The content security policy allows the page's own scripts and style by their hashes only.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from veilstream.files import write_file
from veilstream.reports.promise import Promise
from veilstream.runs.summary import Figure

REPORT = "report.html"
SCHEMA = 1


class Fact(TypedDict):
    """A label and its value."""

    label: str
    value: str


class Measure(TypedDict):
    """A figure, and the same figure of what it is compared with."""

    value: str
    label: str
    compared: list[Fact]


class Headline(TypedDict):
    """How good, compared with what: a sentence, and figures of which the first is drawn large."""

    sentence: str
    better: bool | None  # than what it is compared with; None: that is not known
    figures: list[Measure]
    beside: list[Fact]  # how far the run is


class Mark(TypedDict):
    """A state in a table: ``mark`` is good, bad or plain."""

    text: str
    mark: str


class Shade(TypedDict):
    """A count in a table, with its share of the row as the depth of its colour."""

    text: str
    share: float


class Absence(TypedDict):
    """Someone who takes no part now."""

    who: str
    now: str
    since: float | None  # Unix time; the page says it in its reader's zone
    why: str


class Method(TypedDict):
    """A line of the legend; ``colour`` numbers one where the mechanism does not decide it."""

    name: str
    label: str
    group: str | None
    mechanism: str | None
    private: bool
    colour: NotRequired[int]


class Table(TypedDict):
    """Rows of text; the row whose first cell is ``main`` stands out."""

    columns: list[str]
    rows: Sequence[Sequence[str | Mark | Shade]]
    note: str
    main: str | None


class Facts(TypedDict):
    """A titled list of labels and values."""

    title: str
    rows: list[Fact]


class Provenance(TypedDict):
    """Where a page comes from: facts, the command that repeats it, the plan as TOML."""

    facts: list[Fact]
    command: str
    plan: str


class Chart(TypedDict):
    """One chart; ``series`` holds arrays (seeds, points) as `charts.pack` makes them, by name."""

    id: str
    title: str
    about: str
    x_label: str
    y_label: str
    logarithmic: bool
    share: bool  # values lie between 0 and 1
    from_zero: bool
    whole: bool  # values are whole numbers
    x: list[int]
    series: dict[str, Any]
    lines: list[dict[str, Any]]  # levels to compare with: label and value


class PageState(TypedDict):
    """All that a page shows. Events of a live page replace some of its keys."""

    schema: int
    kind: str  # simulation, federation, comparison or learner
    title: str
    subtitle: str
    headline: Headline | None
    absent: list[Absence]
    notices: list[str]
    promise: Promise | None
    methods: list[Method]
    main: str | None
    seeds: list[int]
    charts: dict[str, list[Chart]]  # by section: learning, telemetry, rounds, noise
    results: Table | None
    labels: Table | None  # what became of the records of each label
    facts: list[Facts]
    audit: Mapping[str, Any] | None
    provenance: Provenance | None
    links: list[dict[str, str]]  # text and address, at the end of the page


def page_state(kind: str, title: str, headline: Headline | None, **given: Any) -> PageState:
    """A state with these keys, empty in all others."""
    state: PageState = {
        "schema": SCHEMA,
        "kind": kind,
        "title": title,
        "subtitle": "",
        "headline": headline,
        "absent": [],
        "notices": [],
        "promise": None,
        "methods": [],
        "main": None,
        "seeds": [],
        "charts": {},
        "results": None,
        "labels": None,
        "facts": [],
        "audit": None,
        "provenance": None,
        "links": [],
    }
    unknown = set(given) - set(state)
    assert not unknown, unknown
    state.update(given)  # type: ignore[typeddict-item]
    return state


def facts(pairs: Sequence[tuple[str, Any]]) -> list[Fact]:
    """Labels with their values as text."""
    return [{"label": label, "value": str(value)} for label, value in pairs]


def measure(value: str, label: str, compared: Sequence[tuple[str, str]] = ()) -> Measure:
    """A figure of the headline."""
    return {"value": value, "label": label, "compared": facts(compared)}


def percent(value: float) -> str:
    """A share as text."""
    return f"{100 * value:.1f} %"


def cell(figure: Figure | None) -> str:
    """A final figure in a table."""
    return "–" if figure is None else f"{figure.mean:.4f} ± {figure.std:.4f}"


def write_page(path: Path, state: PageState, *, shared: bool) -> Path:
    """Write a page, whole or not at all; if ``shared`` the umask decides who may read it, else only its owner."""
    write_file(path, page_html(state), shared=shared)
    return path


def page_html(state: PageState | Mapping[str, Any], *, live: bool = False, body: str = "", form: bool = False) -> str:
    """The page that shows a state; ``body`` is trusted HTML below it, ``form`` says that it has a form."""
    # No text may end the script element that holds it.
    embedded = json.dumps(state, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "policy": html.escape(page_policy(live=live, form=form), quote=True),
        "title": html.escape(f"{state['title']} · veilstream"),
        "styles": _styles(),
        "library": _part("vendor/uplot.js"),
        "scripts": _scripts(live),
        "state": embedded,
        "body": body,
    }
    # In one pass: what is put in is never searched for places, whatever it says.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _part("template.html"))


def page_policy(*, live: bool = False, form: bool = False) -> str:
    """The content security policy of a page."""
    scripts = " ".join(map(_hash, (_part("vendor/uplot.js"), _scripts(live))))
    return (
        f"default-src 'none'; style-src {_hash(_styles())}; script-src {scripts}; img-src data:; "
        f"connect-src {'self' if live else 'none'!r}; base-uri 'none'; form-action {'self' if form else 'none'!r}"
    )


@cache
def _part(name: str) -> str:
    found = files("veilstream.reports") / "page" / name
    return found.read_text(encoding="utf-8") if found.is_file() else ""


def _styles() -> str:
    return _part("vendor/uplot.css") + _part("page.css")


def _scripts(live: bool) -> str:
    return "\n".join([_part("charts.js"), _part("page.js"), _part("live.js") if live else ""])


def _hash(content: str) -> str:
    """A source of a policy: the hash of an element's whole text, line ends of the template included."""
    digest = hashlib.sha256(f"\n{content}\n".encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
