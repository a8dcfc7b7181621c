"""Text from plans, tables and learners is shown as text, whatever it looks like.

Every page is a file here. A script that ran would set a flag, and an image that was made would be
asked for: there must be neither.
"""

from __future__ import annotations

import json

import pytest

import veilstream as vs
from tests.browser.samples import AUDIT
from tests.support.run_folders import SERVER_KEY, federation_folder, learner_key, simulated_folder
from veilstream.federation.keys.identity import ServerKeys
from veilstream.reports.comparison import compared_runs, comparison_state
from veilstream.reports.learner_page import status_html
from veilstream.reports.live_state import LiveState
from veilstream.reports.page_kit import page_html
from veilstream.reports.report import report_state, write_report
from veilstream.reports.statement import write_statement

HOSTILE = [
    "<img src=x onerror=window.ran=1>",
    "</script><script>window.ran=1</script>",
    "{{state}}{{scripts}}",
    "<!--<script>",
    "&lt;b&gt;<svg onload=window.ran=1>",
]


def rewrite(folder, old: str, new: str) -> None:
    """In every table and JSON file; what is hostile here has neither quotes nor commas."""
    for path in [*folder.glob("*.csv"), *folder.glob("*.json")]:
        path.write_text(path.read_text().replace(old, new))


def described(folder, text: str) -> None:
    plan = folder / "plan.toml"
    before = plan.read_text()
    plan.write_text(before.replace('"three clinics"', json.dumps(text)))
    assert plan.read_text() != before


def visible(page) -> str:
    """All text of the page but that of scripts, which hold the page's state."""
    return page.run(
        "const body = document.body.cloneNode(true);"
        "body.querySelectorAll('script, noscript').forEach(node => node.remove());"
        "return body.textContent"
    )


def check(page, path, shown: list[str], *, live: bool = False) -> None:
    """Nothing ran, nothing was asked for, and every text stands there as it is."""
    page.open(path)
    assert page.run("return window.ran === undefined")
    assert page.run("return document.querySelectorAll('img, svg[onload]').length") == 0
    asked = [url for url in page.requests() if not url.startswith(("data:", path.as_uri()))]
    assert [url for url in asked if not (live and "/live/events" in url)] == []
    text = visible(page)
    for each in shown:
        assert each in text, each
    if not live:  # a file has no events to connect to
        assert page.errors() == []


@pytest.fixture(params=HOSTILE)
def simulation(request, tmp_path, library):
    folder = simulated_folder(tmp_path / "run", 2, 2, 12)
    rewrite(folder, "method 0", request.param)
    summary = json.loads((folder / "summary.json").read_text())
    named = summary | {"name": f"name {request.param}"}
    (folder / "summary.json").write_text(json.dumps(named))
    described(folder, f"about {request.param}")
    (folder / "audit.json").write_text(AUDIT.replace("KEPT, as far as messages tell", f"KEPT {request.param}"))
    return folder, request.param


def test_in_a_report_a_comparison_and_a_live_page(page, simulation, tmp_path):
    folder, text = simulation
    check(page, write_report(vs.Run(folder)), [text, f"name {text}", f"about {text}", f"KEPT {text}"])
    assert page.run("return document.title") == f"name {text} · veilstream"
    other = simulated_folder(tmp_path / "other", 2, 2, 12)
    pair = compared_runs([vs.Run(folder), vs.Run(other)])
    (tmp_path / "compare.html").write_text(page_html(comparison_state(pair)))
    check(page, tmp_path / "compare.html", [text])
    live = LiveState(report_state(vs.Run(folder)), "/live")
    (tmp_path / "live.html").write_bytes(live.html()[1])
    check(page, tmp_path / "live.html", [text, f"name {text}"], live=True)
    table = {"columns": ["learner"], "rows": [[f"row {text}"]], "note": f"note {text}", "main": None}
    page.run(
        "veilstream.update(arguments[0])", {"title": f"new {text}", "notices": [f"notice {text}"], "results": table}
    )
    shown = visible(page)
    for word in ("new", "notice", "row", "note"):
        assert f"{word} {text}" in shown
    assert page.run("return window.ran === undefined && !document.querySelector('img')")


@pytest.mark.parametrize("text", HOSTILE)
def test_in_a_federations_report_and_its_statement(page, library, tmp_path, text):
    folder = federation_folder(tmp_path / "run", third=text)
    described(folder, f"about {text}")
    check(page, write_report(vs.Run(folder)), [text, f"about {text}"])
    learners = {name: learner_key(i).public for i, name in enumerate(("east", "north", text))}
    made = write_statement(vs.Run(folder), ServerKeys(tmp_path, SERVER_KEY, learners))
    (statement,) = [path for path in made if path.suffix == ".html"]
    check(page, statement, [text])


@pytest.mark.parametrize("text", HOSTILE)
def test_in_a_learners_own_page(page, tmp_path, text):
    status = {
        "learner": f"clinic {text}",
        "state": "waiting",
        "epoch": 0,
        "round": 0,
        "rounds": 6,
        "refusals": {f"reason {text}": 2},
        "local": None,
    }
    (tmp_path / "learner.html").write_text(status_html(status))
    check(page, tmp_path / "learner.html", [f"clinic {text}", f"reason {text}"])
