"""What `veilstream run` prints: a share of right labels never stands alone."""

from __future__ import annotations

import csv

import numpy as np

from tests.cli.test_plan import veilstream

PLAN = """
[learning]
task = "logistic"
rounds = 60
local_steps = 4
learners = 1
[data]
kind = "table"
source = "rare.csv"
client = "#row"
label = "sick"
labels = ["no", "yes"]
[[data.features]]
name = "x"
low = 0.0
high = 1.0
[run]
seeds = 1
[[methods]]
name = "free"
kind = "noise-free"
step_size = 0.1
"""


def test_a_model_that_says_no_to_all_of_a_27_percent_file_is_exposed(tmp_path):
    rng = np.random.default_rng(5)
    with (tmp_path / "rare.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["x", "sick"])
        writer.writerows([f"{x:.3f}", "yes" if u < 0.27 else "no"] for x, u in rng.random((400, 2)))
    (tmp_path / "plan.toml").write_text(PLAN)
    done = veilstream("run", "plan.toml", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = done.stdout
    assert 'No better than always "no"' in told
    assert "no 1.00, yes 0.00" in told
    rows = [line.split() for line in told.splitlines()]
    model, always = (next(row for row in rows if row and row[0] == name) for name in ("free", "always"))
    assert model[3] == always[4]  # the same accuracy, one below the other
    assert "try: free " in told  # the method without noise is the evidence
    assert "held-out rows" in told
