"""What the documentation's pictures show: clinics whose patients are ill in 27 of 100 cases, made by these commands.

The table is made here from a seed: five columns, a label that follows three of them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tests.browser.federation_processes import Federation
from veilstream.federation.addresses import free_port

NAMES = ("north", "south", "west")
PLAN = """
name = "Ill within a year"
description = "Three clinics, one model; 27 of 100 patients become ill."

[learning]
rounds = {rounds}
local_steps = 4
learners = 3
clip_norm = 1.0

[data]
kind = "table"
{source}
client = "patient"
label = "ill"
labels = ["no", "yes"]
features = [
  {{ name = "age", low = 18, high = 95 }},
  {{ name = "pressure", low = 80, high = 200 }},
  {{ name = "bmi", low = 15, high = 45 }},
  {{ name = "smokes", kind = "categorical", vocabulary = ["no", "yes"] }},
]

[privacy]
epsilon = 2.0
delta = 1e-5

[telemetry]
metrics = ["accuracy"]
scale = 1.0
{more}
"""
SIMULATED = """
[[methods]]
name = "noise-free"
kind = "noise-free"
step_size = 0.3

[[methods]]
name = "buffered"
mechanism = "buffered"
step_size = 0.3

[[methods]]
name = "independent"
mechanism = "independent"
step_size = 0.1

[run]
seeds = 4
"""


def patients(count: int, seed: int) -> str:
    """Rows of a table, header first."""
    rng = np.random.default_rng(seed)
    age = rng.uniform(18, 95, count)
    pressure = np.clip(rng.normal(100 + 0.5 * age, 14), 80, 200)
    bmi = np.clip(rng.normal(27, 5, count), 15, 45)
    smokes = rng.random(count) < 0.25
    odds = -1.42 + 0.035 * (age - 56) + 0.03 * (pressure - 128) + 0.9 * smokes + 0.05 * (bmi - 27)
    ill = rng.random(count) < 1 / (1 + np.exp(-1.4 * odds))
    rows = ["patient,age,pressure,bmi,smokes,ill"]
    for i in range(count):
        words = ["no", "yes"]
        rows.append(
            f"{seed}-{i},{age[i]:.0f},{pressure[i]:.0f},{bmi[i]:.1f},{words[int(smokes[i])]},{words[int(ill[i])]}"
        )
    return "\n".join(rows) + "\n"


DEPLOYED = """
[federation]
quorum = 0.6
deadline_s = 5.0

[[methods]]
name = "buffered"
mechanism = "buffered"
step_size = 0.3
"""


def files(root: Path, count: int) -> None:
    """A file for each clinic."""
    for seed, name in enumerate(NAMES):
        (root / f"{name}.csv").write_text(patients(count, seed))


def simulated(root: Path) -> Path:
    """The folder of `veilstream run` on a table of all clinics."""
    files(root, 6000)
    plan = PLAN.format(rounds=1000, source=f'source = "{root}/*.csv"', more=SIMULATED)
    (root / "plan.toml").write_text(plan)
    words = ["run", "plan.toml", "--out", "run"]
    subprocess.run([sys.executable, "-m", "veilstream", *words], cwd=root, check=True, capture_output=True)
    return root / "run"


@contextmanager
def federation(root: Path, rounds: int) -> Iterator[tuple[Federation, int]]:
    """A server with its live page and three learners beside their files; the port of one learner's own page."""
    files(root, 4 * rounds + 100)
    plan = PLAN.format(rounds=rounds, source="", more=DEPLOYED)
    here, port = Federation(root, plan, NAMES), free_port()
    try:
        here.start_server()
        for name in NAMES:
            page = ("--learner-api", f"127.0.0.1:{port}") if name == NAMES[0] else ("--log-level", "info")
            here.start_learner(name, f"{name}.csv", *page)
        yield here, port
    finally:
        here.close()
