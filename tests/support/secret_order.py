"""Plans and records for learners whose order is secret."""

from __future__ import annotations

import numpy as np

from veilstream.learning.tasks import Sample
from veilstream.plans.plan import Plan

D = 3


def plan_of(
    rounds: int = 6, local_steps: int = 2, clients_per_step: int = 60, mechanism: str = "independent", **privacy
) -> Plan:
    return Plan(
        learning={
            "rounds": rounds,
            "local_steps": local_steps,
            "clients_per_step": clients_per_step,
            "clip_norm": 0.3,
            "learners": 1,
        },
        data={"dim": D},
        privacy={"epsilon": 2.0, "delta": 1e-3, "order": "secret", **privacy},
        methods=[{"name": "ours", "mechanism": mechanism, "step_size": 0.1}],
    )


def sample(i: int) -> Sample:
    return Sample(np.random.default_rng(i).normal(size=D), float((-1) ** i))


def people(first: int, count: int) -> list[tuple[str, Sample]]:
    return [(f"p{i}", sample(i)) for i in range(first, first + count)]


def model(r: int) -> np.ndarray:
    return np.full(D, 0.1 * r, np.float32)
