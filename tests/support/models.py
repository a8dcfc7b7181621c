"""Released models with made-up parameters, one for each kind of task, and records that they predict."""

from __future__ import annotations

import numpy as np

from veilstream.plans.plan import Plan
from veilstream.plans.tasks import task_of
from veilstream.privacy.calibration import calibrate
from veilstream.privacy.guarantee import Budget
from veilstream.runs.model import Model
from veilstream.runs.released_model import ReleasedModel

PLAN = """
name = "ward"
[learning]
rounds = 8
task = "{task}"
[data]
kind = "table"
client = "person"
label = "outcome"
{label}
{more}
[[data.features]]
name = "age"
low = 0.0
high = 100.0
missing = "{missing}"
[[data.features]]
name = "ward"
kind = "categorical"
vocabulary = ["north", "south"]
unknown = "{unknown}"
missing = "{missing}"
[[data.features]]
name = "wait"
center = 30.0
scale = 10.0
[privacy]
epsilon = 1.0
delta = 1e-6
[[methods]]
name = "ours"
mechanism = "independent"
step_size = 0.1
"""
LABELS = {
    "logistic": 'labels = ["no", "yes"]',
    "softmax": 'labels = ["low", "middle", "high"]',
    "least_squares": "label_range = [50.0, 350.0]",
    "huber": "label_range = [-5.0, 5.0]",
    "poisson": "label_range = [0.0, 40.0]",
}


def plan_of(task: str, missing: str = "flag", unknown: str = "other", more: str = "") -> Plan:
    return Plan.parse(PLAN.format(task=task, label=LABELS[task], missing=missing, unknown=unknown, more=more))


def released(plan: Plan, spread: float = 1.5) -> ReleasedModel:
    from veilstream.mechanisms import independent

    _, promise = calibrate(Budget(1.0, 1e-6), independent(8), clip_norm=1.0)
    numbers = np.random.default_rng(3).normal(0.0, spread, task_of(plan).dim).astype(np.float32)
    return ReleasedModel(numbers, 8, 8, "ward-1", plan.to_toml(), promise.as_dict())


def model_of(task: str, missing: str = "flag", unknown: str = "other", more: str = "", spread: float = 1.5) -> Model:
    return Model(released(plan_of(task, missing, unknown, more), spread))


def records(count: int = 60) -> list[dict[str, object]]:
    """Numbers in and out of range, known and unknown texts; empty cells where a plan may take them."""
    rng = np.random.default_rng(5)
    return [
        {
            "person": f"p{i}",
            "age": None if i % 10 == 3 else round(float(rng.uniform(-20, 130)), 2),
            "ward": None if i % 10 == 6 else ("north", "south", "attic")[i % 3],
            "wait": round(float(rng.uniform(-10, 70)), 2),
        }
        for i in range(count)
    ]


def complete(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    return [row for row in rows if None not in row.values()]
