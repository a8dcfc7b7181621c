"""The site: built without a warning, complete, and loading nothing from another host."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.support.pages import ROOT, load

pytestmark = pytest.mark.process

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `./run docs --build DIR` makes it; its notebooks run in real kernels."""
    out = tmp_path_factory.mktemp("site")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs/build_site.py"), "--build", str(out)],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return out


class Loaded(HTMLParser):
    """What a browser fetches to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed"):
            self.found.append(given.get("src") or "")
        elif tag == "link" and given.get("rel") not in ("canonical", "index", "search", "next", "prev"):
            self.found.append(given.get("href") or "")
        elif tag == "object":
            self.found.append(given.get("data") or "")


def loaded_from_elsewhere(html: str) -> list[str]:
    parser = Loaded()
    parser.feed(html)
    return [address for address in parser.found if re.match(r"(?:[a-z]+:)?//", address)]


def test_every_page_and_notebook_is_on_the_site(site):
    for page in [*(ROOT / "docs").glob("*.md"), *NOTEBOOKS]:
        built = (site / page.relative_to(ROOT / "docs")).with_suffix(".html")
        assert built.exists(), page


def test_nothing_is_loaded_from_another_host(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        assert loaded_from_elsewhere(page.read_text(encoding="utf-8")) == [], page
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text("utf-8"))


def test_the_check_finds_what_comes_from_elsewhere():
    page = '<script src="https://cdn.example/x.js"></script><img src="a.svg"><a href="https://x.example">'
    page += '<link rel="stylesheet" href="//fonts.example/f.css">'
    assert loaded_from_elsewhere(page) == ["https://cdn.example/x.js", "//fonts.example/f.css"]


def test_names_of_the_design_have_their_docstrings_on_the_site(site):
    api = (site / "api.html").read_text(encoding="utf-8")
    names = [
        "Budget",
        "calibrate",
        "decode",
        "Learner",
        "Learner.begin_round",
        "PrivateSum",
        "Run",
        "run",
        "mechanisms.toeplitz",
        "mechanisms.optimal",
        "mechanisms.Workload",
        "mechanisms.Factorization.max_error",
        "tasks.Logistic",
        "models.PytreeTask",
        "streams.TableSource",
        "theory.dynamic_regret_bound",
        "audit.audit",
    ]
    for name in names:
        assert f'id="veilstream.{name}"' in api, name


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_ran_when_the_site_was_built(site, notebook):
    content = json.loads(notebook.read_text(encoding="utf-8"))
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells), (
        "keep notebooks without results: the site runs them"
    )
    built = (site / "notebooks" / notebook.name).with_suffix(".html").read_text(encoding="utf-8")
    printing = sum("print(" in "".join(cell["source"]) for cell in cells)
    assert built.count("cell_output") >= printing > 0
    assert re.search(r'<img[^>]+src="\.\./_images/\w+\.png"', built)  # its figures


def test_the_site_is_served_to_this_machine_alone(tmp_path):
    (tmp_path / "index.html").write_text("here")
    build_site = load(ROOT / "docs/build_site.py")
    with build_site.server_of(tmp_path, 0) as server:
        assert server.server_address[0] == "127.0.0.1"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/") as answer:
            assert answer.read() == b"here"
        server.shutdown()


def test_there_are_two_notebooks():
    assert len(NOTEBOOKS) >= 2
