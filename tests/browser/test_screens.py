"""Pages as people see them on a desk and on a phone, light and dark; also the pictures of the documentation.

VEILSTREAM_SCREENSHOTS=docs/images ./test tests/browser/test_screens.py      makes the pictures again
"""

from __future__ import annotations

import base64
import io
import json
import os
import time
import urllib.request
from pathlib import Path

import pytest

from tests.browser.scenes import NAMES, federation, simulated
from veilstream.federation.learner.access import page_link
from veilstream.reports.learner_page import status_html

WIDTHS = {1280: 900, 390: 844}
SCHEMES = ("light", "dark")
BROKEN = """
const found = [];
for (const node of document.querySelectorAll('dd.short, .number, td, .readout b, time')) {
  const range = document.createRange();
  range.selectNodeContents(node);
  const lines = new Set([...range.getClientRects()].filter(r => r.width).map(r => Math.round(r.bottom / 6)));
  if (lines.size > 1 && /[0-9]/.test(node.textContent)) found.push(node.textContent);
}
return found;
"""


def look(page, url: str, name: str) -> None:
    """Nothing is wider than the screen and no number is broken, at every size; keep pictures if they are wanted."""
    for width, height in WIDTHS.items():
        for scheme in SCHEMES:
            page.open_url(url() if callable(url) else url, scheme=scheme, width=width)
            time.sleep(0.3)
            assert page.run("return document.documentElement.scrollWidth") <= width
            assert page.run(BROKEN) == []
            assert page.errors() == []
            if folder := os.environ.get("VEILSTREAM_SCREENSHOTS"):
                keep(page, Path(folder) / f"page-{name}-{width}-{scheme}.png", width, height)


def keep(page, path: Path, width: int, height: int) -> None:
    """A picture of what is on the screen first, in few colours."""
    from PIL import Image

    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    shot = page.browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "clip": clip})["data"]
    image = Image.open(io.BytesIO(base64.b64decode(shot))).convert("RGB")
    image.quantize(96, dither=Image.Dither.NONE).save(path, optimize=True)


def test_a_learners_numbers_are_unbroken_on_a_phone(page, tmp_path):
    """Long counts beside long labels, as a learner of many years has them."""
    local = {
        "used": 1_234_567,
        "refused": {"age: not a number": 300, "pressure: outside the plan’s range": 1_000_000},
        "not_admitted": 0,
        "refused_steps": 0,
        "clamped": {"systolic_blood_pressure_in_the_morning": 123_456},
        "returning": 0,
        "other_learners": 0,
        "empty_steps": 0,
        "clipped_share": 0.123,
        "metrics_failed": 0,
        "score": {"kind": "accuracy", "records": 0},
        "rows_left_about": 1_000_000,
        "places_left": 1_000_000,
        "rounds_left": 300,
        "seconds_left": 360_000.0,
        "notices": [],
    }
    where = {"learner": "north", "state": "open", "epoch": 0, "round": 300, "rounds": 1_000_000, "refusals": {}}
    (tmp_path / "page.html").write_text(status_html(where | {"local": local}))
    look(page, (tmp_path / "page.html").as_uri(), "learner-of-many-years")


@pytest.mark.all
def test_the_report_opens_with_quality_beside_its_baseline(page, library, tmp_path):
    folder = simulated(tmp_path)
    look(page, (folder / "report.html").as_uri(), "report")
    told = json.loads((folder / "summary.json").read_text())
    assert page.find(".sentence").text == told["verdict"]["sentence"]
    assert "always “no”" in page.find(".figure.first .compared").text


@pytest.mark.all
def test_a_federation_with_a_learner_away_and_a_learners_own_page(page, library, tmp_path):
    with federation(tmp_path, rounds=1000) as (here, port):
        until = time.monotonic() + 200

        def rounds() -> int:
            with urllib.request.urlopen(f"http://127.0.0.1:{here.port}/status", timeout=10) as answer:
                return int(json.load(answer)["round"])

        while rounds() < 260:
            assert time.monotonic() < until
            time.sleep(0.5)
        here.kill(NAMES[-1])
        gone = rounds()
        while rounds() < gone + 40:
            assert time.monotonic() < until
            time.sleep(0.5)
        look(page, here.url, "live")
        assert page.find(".sentence").text.startswith("Accuracy ")
        assert page.find(".absent li").text.startswith("west has been away since ")
        token = (tmp_path / "north.token").read_text().strip()
        look(page, lambda: page_link(("127.0.0.1", port), token), "learner")
        assert "records" in page.find(".figure.first .what").text
