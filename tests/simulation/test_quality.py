"""What summary.json says of a run's models, computed again outside from models.npz and the table."""

from __future__ import annotations

import csv
import json
import math

import numpy as np
import pytest

import veilstream as vs
from veilstream.runs.summary import SimulationSummary
from veilstream.streams.table_stream import is_held_out

PLAN = """
[learning]
task = "{task}"
rounds = 40
local_steps = 4
learners = 2
[data]
kind = "table"
source = "{source}"
learner = "site"
client = "who"
label = "y"
{label}
[[data.features]]
name = "a"
low = -3.0
high = 3.0
[[data.features]]
name = "b"
low = -3.0
high = 3.0
[privacy]
epsilon = 100.0
delta = 1e-5
[run]
seeds = 2
[[methods]]
name = "ours"
mechanism = "buffered"
step_size = 0.3
[[methods]]
name = "free"
kind = "noise-free"
step_size = 0.3
"""
LABELS = {
    "logistic": 'labels = ["no", "yes"]',
    "softmax": 'labels = ["oak", "pine", "fir"]',
    "least_squares": "label_range = [0.0, 50.0]",
}


def table(path, task):
    rng = np.random.default_rng(8)
    numbers = rng.normal(size=(500, 2)).clip(-3, 3)
    score = numbers @ [1.0, -0.5]
    if task == "logistic":
        told = np.where(score + 0.4 * rng.normal(size=500) > 0.0, "yes", "no")
    elif task == "softmax":
        told = np.array(["oak", "pine", "fir"])[np.digitize(score + 0.4 * rng.normal(size=500), [0.0, 1.0])]
    else:
        told = (25 + 6 * score + rng.normal(size=500)).clip(0, 50).round(3)
    rows = [
        {"who": f"p{i}", "site": f"s{i % 2}", "a": f"{a:.5f}", "b": f"{b:.5f}", "y": str(y)}
        for i, ((a, b), y) in enumerate(zip(numbers, told, strict=True))
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return rows


@pytest.fixture(scope="module", params=sorted(LABELS))
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    rows = table(folder / "t.csv", request.param)
    plan = vs.Plan.parse(PLAN.format(task=request.param, source=folder / "t.csv", label=LABELS[request.param]))
    return request.param, rows, vs.run(plan, folder / "out")


def encoded(rows):
    """Features as the documentation says: to -1..1, a constant, divided by the largest norm."""
    numbers = np.array([[float(r["a"]) / 3, float(r["b"]) / 3, 1.0] for r in rows])
    return numbers / math.sqrt(3)


def held_out_rows(rows):
    return [r for r in rows if is_held_out(r["who"], 0.2)], [r for r in rows if not is_held_out(r["who"], 0.2)]


def test_figures_are_those_of_an_outside_computation(made):
    task, rows, run = made
    held, _ = held_out_rows(rows)
    assert run.simulation.held_out.rows == run.simulation.held_out.used == len(held)
    features = encoded(held)
    for name in ("ours", "free"):
        for seed in (0, 1):
            model = run.model(name, seed).astype(float)
            final = run.summary["methods"][name]["final"]
            if task == "least_squares":
                truth = np.array([float(r["y"]) for r in held])
                said = (25 + 25 * (features @ model)).clip(0, 50)
                rmse = math.sqrt(((said - truth) ** 2).mean())
                assert final["rmse"]["seeds"][seed] == pytest.approx(rmse, rel=1e-4)
                r2 = 1 - rmse**2 / truth.var()
                assert final["r2"]["seeds"][seed] == pytest.approx(r2, abs=1e-4)
                continue
            labels = ["no", "yes"] if task == "logistic" else ["oak", "pine", "fir"]
            truth = np.array([r["y"] for r in held])
            scores = features @ model.reshape(len(labels) if task == "softmax" else 1, -1).T
            place = (scores[:, 0] >= 0).astype(int) if task == "logistic" else scores.argmax(axis=1)
            said = np.array(labels)[place]
            assert final["held_out_accuracy"]["seeds"][seed] == pytest.approx((said == truth).mean())
            recall = {k: (said[truth == k] == k).mean() for k in labels}
            for k in labels:
                assert final["recall"][k]["seeds"][seed] == pytest.approx(recall[k])
            assert final["balanced_accuracy"]["seeds"][seed] == pytest.approx(np.mean(list(recall.values())))
            if task == "logistic":
                yes, no = scores[truth == "yes", 0], scores[truth == "no", 0]
                pairs = (yes[:, None] > no).mean() + 0.5 * (yes[:, None] == no).mean()
                assert final["auc"]["seeds"][seed] == pytest.approx(pairs, abs=1e-4)


def test_baselines_are_fitted_to_learned_records_and_judged_on_held_out_ones(made):
    task, rows, run = made
    held, learned = held_out_rows(rows)
    # 40 rounds of 4 steps: the first 160 records of each learner.
    met = [r for site in ("s0", "s1") for r in [r for r in learned if r["site"] == site][:160]]
    found = run.simulation.baselines
    if task == "least_squares":
        truth, known = (np.array([float(r["y"]) for r in part]) for part in (held, met))
        assert found["mean"]["rmse"] == pytest.approx(math.sqrt(((known.mean() - truth) ** 2).mean()), rel=1e-5)
        assert run.simulation.unit == "y"
        return
    counts = {k: sum(r["y"] == k for r in met) for k in {r["y"] for r in met}}
    most = max(counts, key=counts.get)
    assert found["majority"]["label"] == most
    assert found["majority"]["accuracy"] == pytest.approx(np.mean([r["y"] == most for r in held]))
    shares = {k: (n + 1) / (len(met) + len(counts)) for k, n in counts.items()}
    loss = np.mean([-math.log(shares[r["y"]]) for r in held])
    assert found["majority"]["log_loss"] == pytest.approx(loss)
    assert found["majority"]["balanced_accuracy"] == pytest.approx(1 / len(counts))


def test_the_summary_reads_back_typed(made):
    task, _, run = made
    summary = run.simulation
    assert summary.verdict.better is True
    assert summary.verdict.sentence == summary.methods["ours"].verdict
    assert summary.held_out.split == "people"
    assert 0 < summary.held_out.sampling_error < (5 if task == "least_squares" else 0.2)
    if task != "least_squares":
        method = summary.methods["free"]
        assert list(method.recall) == list(method.confusion.labels)
        counts = np.array(method.confusion.counts)
        assert counts.sum() == pytest.approx(summary.held_out.used)
        share = np.diag(counts) / counts.sum(axis=1)
        np.testing.assert_allclose([f.mean for f in method.recall.values()], share, atol=1e-4)


def test_the_last_point_of_the_curve_is_the_final_figure(made):
    task, _, run = made
    if task == "least_squares":
        return
    looked, curves = run.held_out_accuracy()
    assert looked[-1] == 40
    for name, method in run.summary["methods"].items():
        np.testing.assert_allclose(curves[name][:, -1], method["final"]["held_out_accuracy"]["seeds"], rtol=1e-5)


def test_a_summary_of_before_reads_without_them(made):
    _, _, run = made
    content = json.loads((run.path / "summary.json").read_text())
    for key in ("baselines", "held_out", "verdict", "unit"):
        content.pop(key, None)
    for method in content["methods"].values():
        method.pop("verdict")
        method["final"].pop("recall", None)
        method["final"].pop("confusion", None)
    summary = SimulationSummary.of(content)
    assert summary.verdict is summary.held_out is None
    assert summary.baselines == summary.main.recall == {}


DRIFTING = PLAN.replace('client = "who"', 'client = "who"\ntime = "day"')


def test_records_with_a_time_are_held_out_at_the_end_and_no_change_is_a_baseline(tmp_path):
    """The label turns round at 80% of the days: on the last fifth the model is worse than repeating a label."""
    rng = np.random.default_rng(4)
    rows = []
    for i in range(600):
        a, late = rng.normal(), i >= 480
        yes = (a > 0) != late
        if late and i % 30 < 26:  # long stretches of one label
            yes = (i // 30) % 2 == 0
            a = abs(a) * (-1 if yes else 1)
        rows.append(
            {"who": f"p{i}", "site": f"s{i % 2}", "day": i, "a": f"{a:.5f}", "b": "0", "y": "yes" if yes else "no"}
        )
    order = rng.permutation(600)  # in the file they are mixed: the column of times orders them
    with (tmp_path / "t.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows[i] for i in order)
    text = DRIFTING.format(task="logistic", source=tmp_path / "t.csv", label=LABELS["logistic"])
    run = vs.run(vs.Plan.parse(text), tmp_path / "out")
    held = [[r for r in rows[480:] if r["site"] == site] for site in ("s0", "s1")]
    assert run.simulation.held_out.split == "time"
    assert run.simulation.held_out.rows == 120
    before = {site: next(r for r in rows[479::-1] if r["site"] == site) for site in ("s0", "s1")}
    same = [
        r["y"] == last["y"]
        for own, site in zip(held, before, strict=True)
        for last, r in zip([before[site], *own[:-1]], own, strict=True)
    ]
    assert run.simulation.baselines["no_change"]["accuracy"] == pytest.approx(np.mean(same))
    said = encoded([r for own in held for r in own]) @ run.model("free", 0).astype(float) >= 0
    truth = np.array([r["y"] == "yes" for own in held for r in own])
    accuracy = run.summary["methods"]["free"]["final"]["held_out_accuracy"]["seeds"][0]
    assert accuracy == pytest.approx((said == truth).mean())
    assert accuracy < 0.5 < np.mean(same)
    assert run.simulation.verdict.better is False
    by_people = vs.run(vs.Plan.parse(text, {"data.held_out_by": "people"}), tmp_path / "people")
    assert by_people.simulation.held_out.split == "people"
    assert by_people.summary["methods"]["free"]["final"]["held_out_accuracy"]["mean"] > accuracy
