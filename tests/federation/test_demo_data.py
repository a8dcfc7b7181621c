"""A demo's data: what each learner of a plan's files is handed, and how models are scored."""

from __future__ import annotations

import json
import sqlite3
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from veilstream.errors import InputError
from veilstream.federation.demo_data import DemoData
from veilstream.learning.tasks import Sample
from veilstream.plans.plan import Plan
from veilstream.plans.tasks import task_of
from veilstream.records.admission import Answer
from veilstream.streams.table_stream import is_held_out

PLAN = """
[learning]
task = "least_squares"
rounds = 2
local_steps = 3
learners = 2
[data]
kind = "table"
source = "all.csv"
learner = "site"
client = "who"
time = "day"
label = "y"
label_range = [0.0, 200.0]
held_out_share = 0.3
[[data.features]]
name = "x"
low = 0.0
high = 10.0
[privacy]
epsilon = 4.0
delta = 1e-5
[[methods]]
name = "ours"
mechanism = "buffered"
step_size = 0.1
"""
LABELLED = PLAN.replace("least_squares", "logistic").replace("label_range = [0.0, 200.0]", 'labels = ["no", "yes"]')
LABELLED = (
    LABELLED.replace('time = "day"\n', "")
    .replace("all.csv", "labels.csv")
    .replace("low = 0.0\nhigh = 10.0", "low = -1.0\nhigh = 1.0")
)
SITES = ("North Side", "south")


def rows(count=40):
    """Two sites, latest day first; one row that cannot be used."""
    made = [{"site": SITES[i % 2], "who": f"p{i}", "day": count - i, "x": i / 8, "y": 3.5 * i} for i in range(count)]
    made[7]["y"] = None
    return made


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = ["site;who;day;x;y"]
    for row in rows():
        x, y = (("" if row[k] is None else str(row[k]).replace(".", ",")) for k in ("x", "y"))
        lines.append(f"{row['site']};{row['who']};{row['day']};{x};{y}")
    (tmp_path / "all.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def dealt(plan, folder):
    data = DemoData.of(plan)
    paths = data.deal(folder)
    return data, [[json.loads(line) for line in Path(p).read_text().splitlines()] for p in paths]


def test_learners_get_their_rows_in_order_without_those_held_out(here):
    data, files = dealt(Plan.parse(PLAN), here / "learners")
    assert data.names == ("North-Side", "south")
    assert [list(file[0]) for file in files] == [["who", "day", "x", "y"]] * 2
    days = [[int(row["day"]) for row in file] for file in files]
    assert days == [sorted(own) for own in days]
    people = [row["who"] for file in files for row in file]
    assert len(people) == len(set(people)) == data.stream.report.used + data.stream.report.refused_steps
    held = {f"p{i}" for i in range(40)} - set(people)
    assert len(held) - 1 == data.stream.report.held_out > 3  # the refused one is among them
    assert {int(who[1:]) for who in held} == set(range(len(held)))  # of the last days
    assert all(int(row["who"][1:]) % 2 == place for place, file in enumerate(files) for row in file)
    assert {row["x"] for row in files[0]} <= {str(i / 8) for i in range(40)}  # a point, not a comma
    assert "40 rows" in data.text()
    assert "1 refused (y: missing: 1)" in data.text()


def test_a_learner_reads_back_what_the_simulation_has(here):
    from veilstream.plans.data_source import open_source

    plan = Plan.parse(PLAN)
    data = DemoData.of(plan)
    for place, path in enumerate(data.deal(here / "learners")):
        taken: list[Sample] = []
        open_source(path, plan, data.names[place]).serve(
            0,
            lambda clients, into=taken: [
                into.append(offered.sample) or Answer.TAKEN for offered in islice(clients, 6 - len(into))
            ],
            lambda of=taken: 6 - len(of),
        )
        batch = [data.stream.round(0, r) for r in (0, 1)]
        expected = np.concatenate([b.features[place] for b in batch])
        np.testing.assert_array_equal([s.features for s in taken], expected)


def test_a_database_is_dealt_as_files(here):
    with sqlite3.connect(here / "all.sqlite") as base:
        base.execute("CREATE TABLE visits (site, who, day, x, y)")
        base.executemany("INSERT INTO visits VALUES (:site, :who, :day, :x, :y)", rows())
    base.close()
    text = PLAN.replace('source = "all.csv"', 'source = "all.sqlite"\nquery = "SELECT * FROM visits"')
    _, files = dealt(Plan.parse(text), here / "b")
    _, expected = dealt(Plan.parse(PLAN), here / "a")
    assert [[row["who"] for row in file] for file in files] == [[row["who"] for row in file] for file in expected]
    assert files[0][0]["x"] == float(expected[0][0]["x"])


def test_records_that_do_not_last_are_refused_before_anything_is_written(here):
    plan = Plan.parse(PLAN, {"learning.rounds": 9})
    with pytest.raises(InputError, match=r"learning.rounds = 9.*North Side: \d.*--rounds \d"):
        DemoData.of(plan).deal(here / "learners")
    assert not (here / "learners").exists()


def test_regression_is_scored_in_the_labels_units(here):
    plan = Plan.parse(PLAN)
    data, task = DemoData.of(plan), task_of(plan)
    zero = np.zeros(task.dim, np.float32)
    scores = data.scores(task, zero, zero)
    told = 100.0 * data.stream.held_targets  # zero is the middle of 0 to 200
    assert scores.metric == "rmse"
    assert scores.before == scores.after == pytest.approx(np.sqrt(np.mean(told**2)), rel=1e-6)
    learned = 100.0 * data.stream.targets[data.stream.indices(0, 0, plan.learning.rounds).ravel()]
    assert scores.constant == pytest.approx(np.sqrt(np.mean((told - learned.mean()) ** 2)), rel=1e-6)
    far = np.full(task.dim, 50.0, np.float32)  # predicts beyond the label's range, to which predictions are cut
    assert data.scores(task, zero, far).after <= 200.0


def labelled(folder, rows=600, rare=0.1):
    """Rows of which the label is read off one column, and a tenth is yes."""
    rng = np.random.default_rng(3)
    x = rng.uniform(-1, 1, rows)
    lines = [
        f"{'north' if i % 2 else 'south'},p{i},{x[i]:.6f},{'yes' if x[i] > 1 - 2 * rare else 'no'}" for i in range(rows)
    ]
    (folder / "labels.csv").write_text("\n".join(["site,who,x,y", *lines]) + "\n")


def test_labels_are_scored_as_a_simulation_scores_them_and_the_verdict_is_said(here):
    """Accuracy, baseline and recall are computed again from the rows; a model that only ranks is told so."""
    plan = Plan.parse(LABELLED, {"data.held_out_share": 0.2})
    labelled(here)
    data, task = DemoData.of(plan), task_of(plan)
    held = [(line.split(",")[2], line.split(",")[3]) for line in (here / "labels.csv").read_text().splitlines()[1:]]
    x, y = zip(
        *[(float(a), b) for (a, b), who in zip(held, range(600), strict=True) if is_held_out(f"p{who}", 0.2)],
        strict=True,
    )
    x, y = np.array(x), np.array(y)
    for slope, bias in ((10.0, -8.1), (1.0, -9.0)):
        model = np.array([slope, bias], np.float32)
        said = np.where(slope * x + bias >= 0, "yes", "no")
        scores = data.scores(task, np.zeros(2, np.float32), model)
        assert scores.rows == len(y)
        assert scores.after == pytest.approx(np.mean(said == y))
        assert (scores.guess, scores.constant) == ('"no"', pytest.approx(np.mean(y == "no")))
        recall = scores.figures["recall"]["yes"]["mean"]
        assert recall == pytest.approx(np.mean(said[y == "yes"] == "yes"))
        assert scores.figures["auc"]["mean"] == 1.0
        assert scores.verdict.better == (recall > 0.5)
        assert bool(scores.verdict.advice) == (recall < 0.1)
    assert scores.verdict.sentence.startswith('No better than always "no": accuracy')
    assert 'hardly ever says "yes"' in scores.verdict.advice[0]


def test_labels_that_are_as_frequent_as_others_are_not_said_to_need_shares(here):
    """Shares of one half each would change nothing."""
    labelled(here, rare=0.5)
    data, task = DemoData.of(plan := Plan.parse(LABELLED, {"data.held_out_share": 0.2})), task_of(plan)
    scores = data.scores(task, np.zeros(2, np.float32), np.array([1.0, -9.0], np.float32))
    assert scores.figures["recall"]["yes"]["mean"] == 0.0
    assert scores.figures["auc"]["mean"] == 1.0
    assert not scores.verdict.better
    assert scores.verdict.advice == ()
