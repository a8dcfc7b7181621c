"""Tables of which nobody is held out: accuracy is that on arrival, and no other is shown."""

from __future__ import annotations

import csv
import json

import numpy as np

import veilstream as vs

PLAN = """
[learning]
task = "logistic"
rounds = 5
local_steps = 2
learners = 1
[data]
kind = "table"
source = "{source}"
client = "who"
label = "sick"
labels = ["no", "yes"]
held_out_share = {share}
[[data.features]]
name = "x"
low = 0.0
high = 1.0
[privacy]
epsilon = 4.0
delta = 1e-5
[[methods]]
name = "ours"
mechanism = "buffered"
step_size = 0.1
"""


def run(tmp_path, share):
    source = tmp_path / "people.csv"
    draws = np.random.default_rng(3).random(60)
    with source.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["who", "x", "sick"])
        writer.writerows([f"p{i}", f"{x:.3f}", "yes" if x > 0.5 else "no"] for i, x in enumerate(draws))
    plan = vs.Plan.parse(PLAN.format(source=source, share=share))
    return vs.run(plan, tmp_path / f"run-{share}")


def test_without_held_out_people_only_accuracy_on_arrival_is_told(tmp_path):
    """The last record stood in for them, so that all methods had 1.0000, or 0.0000."""
    finished = run(tmp_path, 0.0)
    final = finished.summary["methods"]["ours"]["final"]
    assert final["held_out_accuracy"] is None
    assert final["accuracy"] is None
    assert 0.0 <= final["prequential_accuracy"]["mean"] <= 1.0
    assert not (finished.path / "accuracy.csv").exists()
    assert finished.summary["records"]["held_out"] == 0
    json.dumps(finished.summary)


def test_with_held_out_people_both_are_told(tmp_path):
    final = run(tmp_path, 0.3).summary["methods"]["ours"]["final"]
    assert final["held_out_accuracy"] is not None
    assert final["prequential_accuracy"] is not None
