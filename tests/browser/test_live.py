"""Live pages in a real browser: a federation's, a simulation's and a learner's."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from urllib.parse import urlsplit

import pytest

from tests.browser.conftest import PLAN
from tests.browser.federation_processes import Federation, small_plan
from tests.federation.test_learner_api import TOKEN, served
from veilstream.federation.learner.access import page_link


@pytest.fixture(scope="module")
def federation(tmp_path_factory, library):
    here = Federation(tmp_path_factory.mktemp("federation"), small_plan(rounds=4000))
    try:
        here.start_server()
        for name in ("north", "south"):
            here.start_learner(name)
        yield here
    finally:
        here.close()


def until(condition, seconds: float = 40.0, message: str = "it took too long"):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, message
        time.sleep(0.1)
    return found


def text(page, css: str) -> str:
    """Read at one moment: parts of the page are replaced as rounds are closed."""
    return page.run("return document.querySelector(arguments[0]).innerText", css)


def round_of(page) -> int:
    found = re.search(r"rounds done\n([\d,]+) of", text(page, "dl.beside"))
    assert found is not None
    return int(found[1].replace(",", ""))


def state_of(page) -> str:
    return page.run("return document.getElementById('live').dataset.state")


def cells(page, name: str) -> list[str]:
    """A learner's row."""
    found = page.run(
        "return [...document.querySelectorAll('#results tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    return next(row for row in found if row[0] == name)


def complaints(page) -> list[str]:
    """The console's, but for a server of ours that could not be reached while it was dead."""
    return [m for m in page.errors() if not ("/live/events" in m and "net::ERR_" in m)]


def test_rounds_tick_in_without_a_reload_or_a_foreign_request(page, federation):
    page.open_url(federation.url)
    page.run("window.sameDocument = true")
    until(lambda: round_of(page) >= 3)
    first = round_of(page)
    until(lambda: round_of(page) > first + 2)
    until(lambda: page.run("return veilstream.state.charts.rounds[0].x.length") >= first + 2)
    assert page.run("return window.sameDocument")
    assert state_of(page) == "open"
    assert [h for h in page.texts("h2") if h in ("Learners", "Rounds", "The promise")]
    assert cells(page, "north")[1] in ("asked", "answered")
    assert "is not measured" in text(page, ".sentence")
    assert page.all(".absent") == []
    beside = text(page, "dl.beside")
    for words in ("learners present\n2 of 2", "received", "sent"):
        assert words in beside
    found = re.search(r"rounds done\n([\d,]+) of 4,000\nrounds left\n([\d,]+)", beside)
    assert found is not None
    assert sum(int(v.replace(",", "")) for v in found.groups()) == 4000
    drawn = page.run("return [...document.querySelectorAll('#rounds canvas')].length")
    assert drawn == 3
    assert {urlsplit(url).netloc for url in page.requests() if not url.startswith("data:")} == {
        f"127.0.0.1:{federation.port}"
    }
    assert page.errors() == []


def test_a_value_that_is_read_stays_until_one_looks_away(page, federation):
    page.open_url(federation.url)
    until(lambda: round_of(page) >= 3)
    page.run("document.querySelector('#chart-seconds input').focus()")
    page.find("#chart-seconds input").send_keys("\ue011")  # Home
    shown = text(page, "#chart-seconds output")
    time.sleep(2.5)
    assert text(page, "#chart-seconds output") == shown
    until(lambda: state_of(page) == "held")
    held = round_of(page)
    page.run("document.activeElement.blur()")
    until(lambda: round_of(page) > held)
    until(lambda: state_of(page) == "open")
    assert page.errors() == []


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("dark", 360)])
def test_axe_themes_and_phones(page, federation, axe, scheme, width):
    page.open_url(federation.url, scheme=scheme, width=width)
    until(lambda: round_of(page) >= 2)
    assert page.run("return document.documentElement.dataset.theme") == scheme
    assert page.run("return document.documentElement.scrollWidth") <= width
    assert page.serious(axe) == []
    assert page.errors() == []


def test_the_keyboards_place_is_kept_while_things_change(page, federation):
    page.open_url(federation.url)
    until(lambda: round_of(page) >= 3)
    page.run("document.querySelector('#results .wide').focus()")
    before = round_of(page)
    until(lambda: round_of(page) > before + 1)
    assert page.run("return document.activeElement.className") == "wide"


def test_a_learner_that_is_gone_is_shown_and_comes_back(page, federation):
    page.open_url(federation.url)
    until(lambda: round_of(page) >= 2)
    federation.kill("south")
    until(lambda: cells(page, "south")[1] == "away")
    until(lambda: "1 of 2" in text(page, "dl.beside"))
    assert re.fullmatch(
        r"south has been away since [^()]+ \(just now\): its connection ended", text(page, ".absent li")
    )
    federation.start_learner("south")
    until(lambda: cells(page, "south")[1] in ("asked", "answered"))
    until(lambda: page.all(".absent") == [])
    assert page.errors() == []


def test_a_server_that_was_killed_is_found_again(page, federation):
    page.open_url(federation.url)
    page.run("window.sameDocument = true")
    until(lambda: round_of(page) >= 2)
    federation.kill("server")
    until(lambda: state_of(page) == "lost")
    assert "No connection" in text(page, "#live")
    before = round_of(page)
    time.sleep(1)
    assert round_of(page) == before
    federation.start_server()
    until(lambda: state_of(page) == "open")
    until(lambda: round_of(page) > before + 2)
    assert page.run("return window.sameDocument")
    x = page.run("return veilstream.state.charts.rounds[0].x")
    assert x == sorted(set(x))
    assert x[0] == 1  # rounds before the kill are there too
    until(lambda: "2 of 2" in text(page, "dl.beside"))
    assert complaints(page) == []


def test_a_simulation_is_drawn_while_it_runs_and_ends_as_its_report(page, library, tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN)
    changes = ("learning.rounds=12000", "run.regret=false", "run.evaluate_every=50")
    words = ["run", "plan.toml", "--live", "--out", "out"]
    words += [word for change in changes for word in ("--set", change)]
    process = subprocess.Popen(
        [sys.executable, "-m", "veilstream", *words],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        first = process.stderr.readline()
        assert first.startswith("Live page: http://127.0.0.1:"), first
        url = first.split()[-1]
        page.open_url(url)
        seen = set()

        def over() -> bool:
            seen.add(text(page, ".hero"))
            return state_of(page) == "over"

        until(over, 90)
        assert len(seen) > 2  # it was seen on its way
        assert any("Held-out accuracy" in text and "so far; always “" in text for text in seen)
        process.stderr.read()
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)
        process.stderr.close()
    titles = page.texts("h2")
    assert titles[:3] == ["Learning", "Results", "Each label"]
    assert text(page, "#chart-held-out output") == "round 12000"
    assert "Noise against signal" in titles
    assert page.errors() == []  # nobody asks a server that is gone


def test_a_learners_page_and_its_question_about_a_person(page, axe, tmp_path):
    with served(tmp_path) as here:
        here.fill_round("Ann", "Bob")
        page.open_url(page_link(("127.0.0.1", here.port), TOKEN))
        assert "Ledger" in page.texts("h2")
        assert page.serious(axe) == []
        page.leave_by("#links a")
        assert page.find("h1").text == "Was this person used?"
        assert page.serious(axe) == []

        def ask(client: str, token: str) -> str:
            page.find("#client").send_keys(client)
            page.find("#token").send_keys(token)
            page.leave_by("form button")
            return page.find(".notice").text

        assert "not the learner's access token" in ask("Ann", "wrong")
        assert ask("Ann", TOKEN).startswith("Yes: this person took one place in steps of this learner")
        assert ask("Eve", TOKEN).startswith("No:")
        assert page.find("#client").get_attribute("value") == ""
        assert not [url for url in page.requests() if "Ann" in url or TOKEN in url]
        assert page.run("return document.documentElement.scrollWidth") <= 1280
        page.width(360)
        assert page.run("return document.documentElement.scrollWidth") <= 360
        page.find("#links a").click()
        assert page.run("return document.documentElement.scrollWidth") <= 360
        # The browser names every answer above 399 an error; ours was meant.
        assert [m for m in page.errors() if "401" not in m] == []
