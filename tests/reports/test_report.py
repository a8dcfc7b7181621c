"""What a report says, without a browser: the state, the file, the commands."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

import veilstream as vs
from tests.browser.samples import AUDIT, TELEMETRY
from tests.cli.test_plan import veilstream
from tests.support.run_folders import federation_folder, simulated_folder
from tests.test_package import SMALL_PLAN
from veilstream.errors import InputError, UnknownName
from veilstream.federation.keys.identity import PrivateKey, ServerKeys
from veilstream.privacy.telemetry import Telemetry
from veilstream.reports.charts import unpack
from veilstream.reports.comparison import compared_runs, comparison_state
from veilstream.reports.page_kit import page_html
from veilstream.reports.promise import promise_of
from veilstream.reports.quality import label_table
from veilstream.reports.report import _results, report_state, write_report
from veilstream.reports.simulation_charts import printed_bound
from veilstream.reports.statement import make_statement
from veilstream.runs.summary import Confusion, Figure, MethodSummary


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return vs.run(vs.Plan.parse(SMALL_PLAN), tmp_path_factory.mktemp("run") / "out")


def embedded(html: str) -> dict:
    return json.loads(re.search(r'id="state">(.*?)</script>', html, re.DOTALL)[1])


def test_a_report_is_made_from_the_folder_alone(run):
    before = (run.path / "report.html").read_text()
    (run.path / "report.html").unlink()
    assert write_report(vs.Run(run.path)).read_text() == before


def test_a_report_names_no_path_above_its_folder(run, monkeypatch):
    """Whoever gets the page learns nothing of the machine that it was made on."""
    assert str(run.path.parent) not in (run.path / "report.html").read_text()
    command = report_state(run)["provenance"]["command"]
    assert command == "veilstream run out/plan.toml --out out-again"
    monkeypatch.chdir(run.path)
    assert report_state(vs.Run("."))["provenance"]["command"] == command


def test_a_report_names_no_other_host(run):
    html = (run.path / "report.html").read_text()
    # The library's banner and SVG's own namespace are names, not addresses that are asked for.
    found = set(re.findall(r"https?://[^\s\"'<>)]+", html))
    assert all("uPlot" in url or "w3.org" in url for url in found), found
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="(?!data:|#)', html)


def test_the_table_explains_regret_only_where_it_shows_it(run):
    shown = report_state(vs.Run(run.path))["results"]
    assert "dynamic regret" in shown["columns"]
    assert "regret is per step" in shown["note"]
    summary = vs.Run(run.path).simulation
    methods = {
        name: replace(m, final={k: v for k, v in m.final.items() if "regret" not in k})
        for name, m in summary.methods.items()
    }
    without = _results(replace(summary, methods=methods))
    assert not any("regret" in column for column in without["columns"])
    assert "regret" not in without["note"]


def test_curves_are_the_tables(run):
    state = embedded((run.path / "report.html").read_text())
    charts = {c["id"]: c for c in state["charts"]["learning"] + state["charts"]["noise"]}
    assert list(charts) == ["held-out", "prequential", "loss", "regret", "noise", "distance", "error"]
    rounds, held = run.held_out_accuracy()
    assert charts["held-out"]["x"] == rounds
    for name in ("free", "tree"):
        np.testing.assert_allclose(unpack(charts["held-out"]["series"][name]), held[name], atol=1e-4)
    loss, best = run.history("loss")["tree"], run.history("optimum")["tree"]
    per_step = np.cumsum(loss - best, axis=1) / np.arange(1, 13)
    np.testing.assert_allclose(unpack(charts["regret"]["series"]["tree"]), per_step, atol=1e-4)
    last = [values[-1] for values in unpack(charts["regret"]["series"]["tree"])]
    told = run.summary["methods"]["tree"]["final"]["dynamic_regret"]["seeds"]
    np.testing.assert_allclose(last, told, atol=1e-4)
    assert "free" not in charts["noise"]["series"]


def test_the_papers_bound_is_above_the_tree_at_a_power_of_two():
    """At T = 16: ‖c‖² = 5, ‖b‖² = 4 as printed, and the tree's largest sums have 4 nodes."""
    f = vs.mechanisms.tree(16)
    std, guarantee = vs.calibrate(vs.Budget(1.0, 1e-5), f, clip_norm=0.5)
    largest = std * np.linalg.norm(f.decoder_matrix(), axis=1).max() / math.sqrt(9)
    assert printed_bound(guarantee, 9) == pytest.approx(largest)


def test_the_headline_is_the_recommended_methods_beside_its_baseline(run):
    headline, told = report_state(run)["headline"], run.summary
    final, majority = told["methods"]["tree"]["final"], told["baselines"]["majority"]
    names = [figure["label"].split(" of ")[0] for figure in headline["figures"]]
    assert names == ["AUC", "balanced accuracy", "accuracy"]
    values = [figure["value"] for figure in headline["figures"]]
    assert values == [f"{final[key]['mean']:.3f}" for key in ("auc", "balanced_accuracy", "held_out_accuracy")]
    always = f"always “{majority['label']}”"
    for figure, value in zip(headline["figures"], (0.5, 0.5, majority["accuracy"]), strict=True):
        compared = {each["label"]: each["value"] for each in figure["compared"]}
        assert compared[always] == f"{value:.3f}"
        assert set(compared) == ({always, "free"} if figure is headline["figures"][0] else {always})
    assert headline["sentence"] == told["verdict"]["sentence"]
    assert headline["better"] is told["verdict"]["better"]
    assert headline["beside"][0]["value"].startswith(f"{told['held_out']['rows']:,} records")


def test_charts_and_tables_have_the_baseline_and_every_label(run):
    state, told = report_state(run), run.summary
    majority, final = told["baselines"]["majority"], told["methods"]["tree"]["final"]
    confusion = final["confusion"]
    always = f"always “{majority['label']}”"
    charts = {chart["id"]: chart["lines"] for chart in state["charts"]["learning"]}
    assert charts["held-out"] == [{"label": always, "value": majority["accuracy"]}]
    assert charts["loss"] == [{"label": "always the labels’ shares, held out", "value": majority["log_loss"]}]
    rows = {row[0]: dict(zip(state["results"]["columns"], row, strict=True)) for row in state["results"]["rows"]}
    assert rows[always]["accuracy"] == f"{majority['accuracy']:.4f}"
    assert rows[always]["AUC"] == "0.5000"
    for row, label, counts in zip(state["labels"]["rows"], confusion["labels"], confusion["counts"], strict=True):
        assert row[:2] == [label, f"{sum(counts):,.0f}"]
        assert [each["text"] for each in row[3:]] == [f"{count:,.0f}" for count in counts]
        assert row[2] == f"{final['recall'][label]['mean']:.3f}"


def test_numbers_are_shown_in_their_unit_beside_the_mean(tmp_path):
    plan = vs.Plan.parse(SMALL_PLAN, {"learning.task": "least_squares", "run.regret": False})
    told = json.loads((vs.run(plan, tmp_path / "out").path / "summary.json").read_text())
    told["unit"] = "minutes"
    (tmp_path / "out/summary.json").write_text(json.dumps(told))
    state = report_state(vs.Run(tmp_path / "out"))
    error, explained = state["headline"]["figures"]
    mean = told["baselines"]["mean"]
    assert error["label"].startswith("RMSE (minutes) of tree")
    assert error["value"] == f"{told['methods']['tree']['final']['rmse']['mean']:.4g}"
    assert error["compared"][0] == {"label": "always the mean", "value": f"{mean['rmse']:.4g}"}
    assert (explained["label"], explained["compared"][0]["value"]) == ("R²", f"{mean['r2']:.4g}")
    assert state["labels"] is None
    loss = next(chart for chart in state["charts"]["learning"] if chart["id"] == "loss")
    assert [line["value"] for line in loss["lines"]] == [pytest.approx(0.5 * mean["rmse"] ** 2)]


def test_very_many_labels_say_what_each_is_taken_for():
    labels = [f"k{i}" for i in range(20)]
    counts = [[5.0 if i == j else 2.0 if j == (i + 1) % 20 else 0.0 for j in range(20)] for i in range(20)]
    recall = dict.fromkeys(labels, Figure(5 / 7, 0.0))
    method = MethodSummary("ours", None, None, 0.0, {}, "", recall, Confusion(labels, counts))
    table = label_table(method)
    assert table["rows"][0] == ["k0", "7", "0.714", "k1, 2"]


def test_the_promise_says_its_numbers():
    _, guarantee = vs.calibrate(vs.Budget(1.0, 3e-6), vs.mechanisms.tree(64), clip_norm=1.0)
    said = promise_of(guarantee, simulated=True)
    assert said["symbols"] == "ε = 1, δ = 3·10⁻⁶"
    assert "all 64 steps" in said["words"]
    assert "2.72 times" in said["words"]  # e
    assert any("seeds made the noise" in line for line in said["rests"])
    deployed = promise_of(guarantee, simulated=False)
    assert not any("seeds made the noise" in line for line in deployed["rests"])
    assert promise_of(None, simulated=True)["symbols"] == "no promise"


def test_telemetry_stands_in_the_promise_with_its_width_and_its_norm():
    """R by hand: clip norm 0.5, two coordinates of width 0.3: sqrt(0.25 + 2·0.0225)."""
    f, told = vs.mechanisms.tree(64), Telemetry(("accuracy", "clipped"), 0.3)
    budget = vs.Budget(1.0, 1e-6)
    _, guarantee = vs.calibrate(budget, f, clip_norm=0.5, telemetry=told)
    said = promise_of(guarantee, simulated=False)
    rests, leaves = " ".join(said["rests"]), " ".join(said["leaves"])
    assert "telemetry (accuracy, clipped)" in rests
    assert "width w = 0.3" in rests
    assert "R = √(clip norm² + 2 · (w/2)²) = 0.543139" in rests
    assert "Δ = 2 · R · ‖C‖ = 2.87402" in rests  # 2·0.543139·√7: seven nodes hold a step of 64
    assert "clip norm · ‖C‖" not in rests
    assert "accuracy (whether the prediction for a client was right), clipped (" in leaves
    _, plain = vs.calibrate(budget, f, clip_norm=0.5)
    said = promise_of(plain, simulated=False)
    assert "Δ = 2 · clip norm · ‖C‖ = 2.64575" in " ".join(said["rests"])
    assert "telemetry" not in " ".join(said["rests"] + said["leaves"])
    assert "√m" in " ".join(said["uncovered"])


def test_an_incomplete_run_says_so(run, tmp_path):
    shutil.copytree(run.path, tmp_path, dirs_exist_ok=True)
    summary = json.loads((tmp_path / "summary.json").read_text()) | {"complete": False}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert any("Not complete" in text for text in report_state(vs.Run(tmp_path))["notices"])


def test_telemetry_and_audit_are_shown_where_they_are(run, tmp_path):
    shutil.copytree(run.path, tmp_path, dirs_exist_ok=True)
    assert report_state(run)["audit"] is None
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit/audit.json").write_text(AUDIT)
    (tmp_path / "telemetry.csv").write_text(TELEMETRY)
    state = report_state(vs.Run(tmp_path))
    assert state["audit"]["claimed"]["mu"] == 0.7
    (chart,) = state["charts"]["telemetry"]
    low, high = (unpack(chart["series"]["accuracy"][k]) for k in ("low", "high"))
    np.testing.assert_allclose(high - low, 0.1, atol=1e-3)
    (tmp_path / "audit/audit.json").write_text("{}")
    with pytest.raises(InputError, match="a file that `veilstream audit --out` wrote"):
        report_state(vs.Run(tmp_path))


def test_a_simulations_telemetry_keeps_methods_and_seeds_apart(run, tmp_path):
    """Two methods, two seeds, of which one has no estimate in the first window."""
    shutil.copytree(run.path, tmp_path, dirs_exist_ok=True)
    rows = [
        "method,seed,round,metric,estimate,low,high,window,steps,sampling,average",
        *(
            f"{method},{seed},{r},accuracy,{base + 0.1 * seed + 0.01 * r},0,1,4,80,0.05,plain mean over steps"
            for method, base in (("private", 0.5), ("noise-free", 0.7))
            for seed in (3, 5)
            for r in (4, 8, 12)
            if (method, seed, r) != ("private", 5, 4)
        ),
    ]
    (tmp_path / "telemetry.csv").write_text("\n".join(rows) + "\n")
    (chart,) = report_state(vs.Run(tmp_path))["charts"]["telemetry"]
    assert chart["x"] == [4, 8, 12]
    expected = {
        "private": [[0.84, 0.88, 0.92], [np.nan, 1.08, 1.12]],
        "noise-free": [[1.04, 1.08, 1.12], [1.24, 1.28, 1.32]],
    }
    assert list(chart["series"]) == list(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(unpack(chart["series"][name]), values, atol=1e-4)
    assert "counts as half." in chart["about"]


def test_a_federations_headline_says_what_its_estimate_averages_over(tmp_path):
    folder = federation_folder(tmp_path / "run")
    for said, words in (("", "empty steps count as half"), ("clients", "a mean over people")):
        head, *rows = TELEMETRY.splitlines()
        table = [head + ",average", *(f"{row},plain mean over {said or 'steps'}" for row in rows)]
        (folder / "telemetry.csv").write_text("\n".join(table) + "\n")
        (figure,) = report_state(vs.Run(folder))["headline"]["figures"]
        assert figure["value"] == "0.830 ± 0.050"
        assert figure["label"].endswith(words)


def test_a_federations_state_has_what_its_server_knows(tmp_path):
    state = report_state(vs.Run(federation_folder(tmp_path / "run")))
    assert state["kind"] == "federation"
    assert {"label": "rounds done", "value": "6 of 6"} in state["headline"]["beside"]
    assert "is not measured" in state["headline"]["sentence"]
    answered = next(c for c in state["charts"]["rounds"] if c["id"] == "answered")
    assert unpack(answered["series"]["Learners that answered"])[0].tolist() == [3, 3, 2, 3, 3, 3]
    assert ["west", "0", "5"] in state["results"]["rows"]
    assert not any("seeds made" in line for line in state["promise"]["rests"])
    command = state["provenance"]["command"]
    assert command == ("veilstream server --plan run/plan.toml --keys keys/server --out run-again")
    path = write_report(vs.Run(tmp_path / "run"))
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_method_may_have_any_name(tmp_path):
    """ "epsilon" is a key of a federation's guarantee.json; as a method's name it is a name."""
    plan = vs.Plan.parse(SMALL_PLAN.replace('name = "tree"', 'name = "epsilon"'))
    run = vs.run(plan, tmp_path / "out")
    assert not run.is_federation
    state = report_state(run)
    assert state["kind"] == "simulation"
    assert state["main"] == "epsilon"
    assert "veilstream run " in state["provenance"]["command"]
    with pytest.raises(InputError, match="protects no one"):
        make_statement(run, ServerKeys(tmp_path, PrivateKey(bytes(32)), {}))


def test_a_large_report_is_below_five_megabytes(tmp_path):
    folder = simulated_folder(tmp_path / "run", 16, 10, 1000)
    assert write_report(vs.Run(folder)).stat().st_size < 5_000_000


def test_text_cannot_end_the_script_that_carries_it(run):
    state = report_state(run) | {"title": "</script><b>{{library}}"}
    html = page_html(state)
    assert embedded(html)["title"] == state["title"]
    assert "</script><b>" not in html.split('id="state"')[1].split("</script>")[0]


@pytest.mark.parametrize("place", ["state", "library", "scripts", "policy", "unknown"])
def test_a_name_that_looks_like_a_place_of_the_template_stays_a_name(run, place):
    name = "{{" + place + "}}"
    html = page_html(report_state(run) | {"title": name})
    assert f"<title>{name} · veilstream</title>" in html
    assert embedded(html)["title"] == name


def test_runs_side_by_side(run, tmp_path):
    folder = tmp_path / "out"
    shutil.copytree(run.path, folder)
    compared = compared_runs([run, vs.Run(folder)])
    assert len({each.name for each in compared}) == 2  # told apart by the folders above
    state = comparison_state(compared)
    mean = run.summary["final"]["held_out_accuracy"]["mean"]
    accuracy = [row[state["results"]["columns"].index("accuracy")] for row in state["results"]["rows"]]
    assert accuracy[0].startswith(f"{mean:.4f} ± ")
    majority = run.summary["baselines"]["majority"]
    assert accuracy[1] == f"{majority['accuracy']:.4f}"
    always = f"always “{majority['label']}”"
    budgets = [name.partition(" @ ")[2] for name in run.summary["baselines"] if " @ " in name]
    labels = ["each learner's label share", *(f"noisy label count, ε = {epsilon}" for epsilon in budgets)]
    assert len(budgets) >= 1
    assert [row[1] for row in state["results"]["rows"]] == ["tree", always, *labels] * 2
    assert state["headline"]["figures"][0]["compared"][0] == {"label": always, "value": "0.500"}
    assert state["charts"]["learning"][0]["lines"] == [{"label": always, "value": round(majority["accuracy"], 4)}]
    assert [fact["value"] for fact in state["facts"][0]["rows"]] == [run.summary["methods"]["tree"]["verdict"]] * 2
    with pytest.raises(InputError, match="at least two"):
        compared_runs([run])
    with pytest.raises(InputError, match="folders that differ"):
        compared_runs([run, vs.Run(run.path)])
    with pytest.raises(UnknownName, match="did you mean 'tree'"):
        compared_runs([run, vs.Run(folder)], "three")
    with pytest.raises(InputError, match="a simulation's folder"):
        compared_runs([run, vs.Run(federation_folder(tmp_path / "federation"))])


def test_the_commands_write_pages_and_figures(run, tmp_path):
    pdf, svg = tmp_path / "f.pdf", tmp_path / "f.svg"
    done = veilstream("report", str(run.path), "--pdf", str(pdf), "--svg", str(svg), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"] == [str(run.path / "report.html"), str(pdf), str(svg)]
    assert pdf.read_bytes().startswith(b"%PDF")
    assert "<svg" in svg.read_text()
    refused = veilstream("report", str(run.path), "--pdf", str(tmp_path / "f.png"))
    assert refused.returncode == 2
    assert "ending in .pdf" in refused.stderr
    nowhere = veilstream("report", str(tmp_path))
    assert nowhere.returncode == 2
    assert "a folder with a plan.toml" in nowhere.stderr
    alone = veilstream("compare", str(run.path))
    assert alone.returncode == 2
