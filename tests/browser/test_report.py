"""report.html in a real browser: what people do with it, and what it must not do."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import veilstream as vs
from tests.test_package import SMALL_PLAN
from veilstream.reports.comparison import compared_runs, comparison_state
from veilstream.reports.page_kit import page_html
from veilstream.reports.report import report_state, write_report

PLOT = "#chart-held-out .plot"


@pytest.fixture
def report(page, run):
    page.open(run.path / "report.html")
    return page


def chip(page, name):
    return page.find(f'.chip[data-method="{name}"]')


def shown(page) -> set[str]:
    """Methods in the read-out below the first chart."""
    return {node.get_attribute("data-name") for node in page.all("#chart-held-out .readout li[data-name]")}


@pytest.mark.quick
def test_the_page_is_drawn_by_the_library_without_a_complaint_or_a_foreign_request(report, run):
    assert report.find("h1").text == "run"
    assert report.run("return typeof uPlot") == "function"
    assert report.all(f"{PLOT} canvas")
    assert report.errors() == []
    asked = report.requests()
    assert asked[0] == (run.path / "report.html").absolute().as_uri()
    assert all(url.startswith(("file:", "data:")) for url in asked)
    assert [u for u in asked if u.startswith("file:")] == asked[:1]


def test_the_pages_own_policy_lets_nothing_out(report):
    """Even a script that tried could not: asked for another host, the browser refuses."""
    said = report.browser.execute_async_script(
        "const done = arguments[0];fetch('http://127.0.0.1:9/').then(() => done('sent'), () => done('refused'))"
    )
    assert said == "refused"
    assert any("Content Security Policy" in message for message in report.errors())


def test_sections_say_what_a_run_is_about(report, run):
    titles = report.texts("h2")
    assert titles == [
        "Learning",
        "Results",
        "Each label",
        "Each method beside its baseline",
        "The promise",
        "Private telemetry",
        "Noise against signal",
        "The last audit",
        "Repeat it",
    ]
    assert "ε = 2, δ = 10⁻³" in report.find("#promise").text
    assert "≥ ε = 1.830" in report.find("#audit").text
    assert "of buffered, ±" in report.find(".figure.first .what").text
    assert report.find("#opening .sentence").text == vs.Run(run.path).summary["verdict"]["sentence"]
    assert "always “" in report.find(".figure.first .compared").text
    bars = report.run("return [...document.querySelectorAll('.bars i')].map(b => b.style.width)")
    assert [round(float(b.rstrip("%"))) for b in bars] == [100, 93, 93, 57]


def test_the_legend_toggles_a_method_in_every_chart(report):
    assert shown(report) == {"free", "tree", "buffered"}
    before = report.run(f"return document.querySelector('{PLOT} canvas').toDataURL()")
    chip(report, "tree").click()
    assert chip(report, "tree").get_attribute("aria-pressed") == "false"
    assert shown(report) == {"free", "buffered"}
    assert report.run(f"return document.querySelector('{PLOT} canvas').toDataURL()") != before
    noise = report.all("#chart-noise .readout li[data-name]")
    assert [node.get_attribute("data-name") for node in noise] == ["buffered"]
    chip(report, "tree").send_keys("\ue007")  # the Enter key
    assert shown(report) == {"free", "tree", "buffered"}


def test_pointing_at_a_curve_shows_every_seeds_value(report, run, expected):
    """At the right edge: the last round looked at, whose accuracies stand in the table."""
    over = f"{PLOT} .u-over"
    top = report.run("const c = document.querySelector(arguments[0]).getBoundingClientRect().height; return c", over)
    assert top > 100
    text = report.nearest("#chart-held-out", "tree")
    assert report.find("#chart-held-out output").text == "round 12"
    found = [float(v) for v in re.findall(r"#\d+ ([\d.]+)", text)]
    # A curve has 65,534 levels, and four decimals are shown.
    np.testing.assert_allclose(found, expected["tree"], atol=1e-4)
    line = report.find('#chart-held-out .readout li[data-name="tree"] b').text
    mean, std = (float(v) for v in line.split(" ± "))
    assert mean == pytest.approx(expected["tree"].mean(), abs=1e-4)
    assert std == pytest.approx(expected["tree"].std(ddof=1), abs=2e-4)


def test_a_keyboard_reaches_every_value(report, expected):
    slider = report.find("#chart-held-out input[type=range]")
    slider.send_keys("\ue011")  # Home: round 0
    assert report.find("#chart-held-out output").text == "round 0"
    slider.send_keys("\ue010")  # End
    assert report.find("#chart-held-out output").text == "round 12"
    shown_mean = report.find('#chart-held-out .readout li[data-name="free"] b').text.split()[0]
    assert float(shown_mean) == pytest.approx(expected["free"].mean(), abs=1e-4)
    tab = report.find("#tab-held-out")
    tab.send_keys("\ue014")  # the right arrow
    assert report.find("#tab-prequential").get_attribute("aria-selected") == "true"
    assert report.find("#chart-prequential").is_displayed()
    assert not report.find("#chart-held-out").is_displayed()
    reached = report.run(
        "return [...document.querySelectorAll('button, input, a, [tabindex]')]"
        ".filter(n => n.tabIndex < 0 && n.getAttribute('role') !== 'tab' && n.id !== 'main')"
        ".map(n => n.outerHTML)"
    )
    assert reached == []


def test_the_command_that_repeats_it_is_copied(report, run):
    report.browser.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite"]})
    command = report.find("#command").text
    assert command == f"veilstream run {run.path.name}/plan.toml --out {run.path.name}-again"
    report.find("#copy").click()
    report.browser.execute_async_script("setTimeout(arguments[0], 100)")
    assert report.find("#copy").text == "Copied"
    area = report.run(
        "const a = document.createElement('textarea'); document.body.append(a); a.focus();a.id = 'pasted'; return a.id"
    )
    report.find(f"#{area}").send_keys("\ue009v")  # Ctrl+V
    assert report.run("return document.getElementById('pasted').value") == command


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_follow_the_system_and_the_button(page, run, scheme):
    page.open(run.path / "report.html", scheme=scheme)

    def theme():
        return page.run("return document.documentElement.dataset.theme")

    def paper():
        colour = page.run("return getComputedStyle(document.documentElement).backgroundColor")
        return sum(int(v) for v in re.findall(r"\d+", colour)[:3]) / 3

    assert theme() == scheme
    assert (paper() > 200) is (scheme == "light")
    button = page.find("#theme")
    assert button.text == "Theme: auto"
    button.click()
    assert (button.text, theme()) == ("Theme: light", "light")
    button.click()
    assert (button.text, theme()) == ("Theme: dark", "dark")
    assert paper() < 60
    button.click()
    assert theme() == scheme
    assert page.errors() == []


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_screen(page, run, width):
    page.open(run.path / "report.html", width=width)
    assert page.run("return document.documentElement.scrollWidth") <= width
    plot = page.run(f"return document.querySelector('{PLOT}').getBoundingClientRect().width")
    canvas = page.run(f"return document.querySelector('{PLOT} canvas').getBoundingClientRect().width")
    assert 0.9 * plot <= canvas <= plot
    tall = page.run("return [...document.querySelectorAll('.chip')].map(c => c.offsetHeight)")
    assert min(tall) >= 24  # a finger's width, by WCAG 2.2


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 360)])
def test_axe_finds_no_serious_violation(page, run, axe, scheme, width):
    page.open(run.path / "report.html", scheme=scheme, width=width)
    assert page.serious(axe, passes=15) == []


def test_on_paper_it_is_light_and_without_controls(page, run):
    page.open(run.path / "report.html", scheme="dark")
    page.run("window.dispatchEvent(new Event('beforeprint'))")
    assert page.run("return document.documentElement.dataset.theme") == "light"
    page.run("window.dispatchEvent(new Event('afterprint'))")
    assert page.run("return document.documentElement.dataset.theme") == "dark"
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert not page.find("#theme").is_displayed()
    assert not page.find(".tabs").is_displayed()
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_without_the_library_curves_are_plain_svg(page, run, tmp_path):
    html = (run.path / "report.html").read_text()
    bare = re.sub(r"<script>\s*/\*! https.*?</script>", "", html, count=1, flags=re.DOTALL)
    assert len(bare) < len(html) - 40_000
    (tmp_path / "bare.html").write_text(bare)
    page.open(tmp_path / "bare.html")
    assert page.run("return typeof uPlot") == "undefined"
    assert len(page.all(f"{PLOT} svg path[stroke-width='2']")) == 3
    assert "Charts are plain" in page.find("footer").text
    page.find("#chart-held-out input[type=range]").send_keys("\ue011")
    assert page.find("#chart-held-out output").text == "round 0"
    assert page.errors() == []


def test_state_and_drawing_are_apart_so_that_a_live_page_can_feed_it(report):
    """What is merged is drawn, and nothing else changes."""
    report.run("veilstream.update({headline: {figures: [{value: '12', label: 'rounds', compared: []}], beside: []}})")
    assert report.find("#headline").text == "12"
    assert report.run("return veilstream.state.headline.figures[0].value") == "12"
    report.run(
        "veilstream.update({append: {'held-out': {x: [24],"
        "series: {tree: [[0.25, 0.75]], free: [[1, 1]], buffered: [[0, 0]]}}}})"
    )
    slider = report.find("#chart-held-out input[type=range]")
    slider.send_keys("\ue010")
    assert report.find("#chart-held-out output").text == "round 24"
    line = report.find('#chart-held-out .readout li[data-name="tree"] b').text
    assert line == f"0.5000 ± {np.std([0.25, 0.75], ddof=1):.4f}"
    assert report.errors() == []


def test_names_that_look_like_markup_stay_text(page, run, tmp_path):
    state = report_state(vs.Run(run.path))
    state["title"] = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>"
    state["methods"][0]["label"] = "<b>bold</b>"
    (tmp_path / "odd.html").write_text(page_html(state))
    page.open(tmp_path / "odd.html")
    assert page.find("h1").text == state["title"]
    assert page.texts(".chip")[0] == "<b>bold</b>"
    assert page.all("h1 img") == []
    assert page.errors() == []


ODD = {
    "one seed, one round": {"run.seeds": 1, "learning.rounds": 1, "run.regret": False},
    "diverged": {"methods.tree.step_size": 1e20, "learning.ridge": 0.1},
    "no classes": {"learning.task": "least_squares"},
}


@pytest.mark.parametrize("name", ODD)
def test_odd_runs_have_a_page_without_a_complaint(page, library, tmp_path, name):
    run = vs.run(vs.Plan.parse(SMALL_PLAN, ODD[name]), tmp_path / "out")
    page.open(run.path / "report.html")
    assert page.find("#opening .sentence").text
    assert page.errors() == []
    if name == "diverged":
        assert "diverged from round" in page.find("#opening").text
    if name == "no classes":
        assert page.all("#chart-held-out") == []
        assert page.all("#chart-loss canvas")


def test_a_comparison_has_both_runs(page, run, tmp_path):
    import shutil

    shutil.copytree(run.path, tmp_path / "second")
    compared = compared_runs([vs.Run(run.path), vs.Run(tmp_path / "second")])
    (tmp_path / "compare.html").write_text(page_html(comparison_state(compared)))
    page.open(tmp_path / "compare.html")
    assert page.texts(".chip") == ["out", "second"]
    assert (
        len(page.all("#results tbody tr")) == 8
    )  # and three baselines of each: the commonest label, shares, a noisy count
    assert "always “" in page.find(".figure.first .compared").text
    assert page.errors() == []


def test_a_federations_report_shows_rounds_telemetry_and_learners(page, tmp_path):
    from tests.browser.samples import TELEMETRY
    from tests.support.run_folders import federation_folder

    folder = federation_folder(tmp_path / "run", rounds=6)
    (folder / "telemetry.csv").write_text(TELEMETRY)
    write_report(vs.Run(folder))
    page.open(folder / "report.html")
    assert page.texts("h2") == ["Private telemetry", "Learners", "The promise", "Rounds", "Repeat it"]
    assert page.find("#headline").text == "0.830 ± 0.050"
    assert "rounds done\n6 of 6" in page.find("dl.beside").text
    assert page.find("#chart-telemetry-accuracy .readout b").text == "0.8300 ± 0.0500"
    parts = page.texts("#promise summary")
    assert parts == ["What it rests on", "What leaves a learner", "What is not covered"]
    assert page.errors() == []


def test_a_simulations_telemetry_has_a_curve_a_method_and_every_seed(page, run, tmp_path):
    for path in run.path.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    methods = [name for name in run.summary["methods"] if name in ("tree", "buffered")]
    seeds = run.summary["seeds"]
    rows = ["method,seed,round,metric,estimate,low,high,window,steps,sampling,average"] + [
        f"{name},{seed},{r},accuracy,{0.5 + 0.2 * m + 0.1 * s},0.4,0.9,4,80,0.05,plain mean over steps"
        for m, name in enumerate(methods)
        for s, seed in enumerate(seeds)
        for r in (4, 8, 12)
    ]
    (tmp_path / "telemetry.csv").write_text("\n".join(rows) + "\n")
    write_report(vs.Run(tmp_path))
    page.open(tmp_path / "report.html")
    chart = "#chart-telemetry-accuracy"
    assert len(methods) == 2
    assert len(page.all(f"{chart} .readout li[data-name] b")) == 2
    page.run("document.querySelector(arguments[0]).scrollIntoView()", chart)
    text = page.nearest(chart, "tree")
    assert page.find(f"{chart} output").text == "round 12"
    found = [float(v) for v in re.findall(r"#\d+ ([\d.]+)", text)]
    base = 0.5 + 0.2 * methods.index("tree")
    np.testing.assert_allclose(found, [base + 0.1 * s for s in range(len(seeds))], atol=1e-3)
    assert page.errors() == []


@pytest.fixture(scope="session")
def large(tmp_path_factory, library):
    """10 seeds x 16 methods x 1,000 rounds."""
    from tests.support.run_folders import simulated_folder

    folder = simulated_folder(tmp_path_factory.mktemp("large") / "run", 16, 10, 1000)
    write_report(vs.Run(folder))
    return folder / "report.html"


def test_a_large_report_is_small_and_says_how_soon_it_is_there(page, large):
    """Below 5 MB. The time is printed (`-s`), not judged: tests share cores."""
    size = large.stat().st_size
    assert size < 5_000_000
    page.open(large)
    ready = page.run("return performance.getEntriesByName('veilstream-ready')[0].startTime")
    assert len(page.all(".chip")) == 16
    assert len(page.all("#chart-held-out .readout li[data-name]")) == 16
    toggled = page.run(
        "const t = performance.now(); document.querySelector('.chip').click();return performance.now() - t"
    )
    print(json.dumps({"bytes": size, "ready_ms": ready, "toggle_ms": toggled}))
    assert len(page.all("#chart-held-out .readout li[data-name]")) == 15
    assert page.errors() == []
