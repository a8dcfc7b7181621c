"""Does the time of a step tell a client's label? A server that chooses the model tries to read it.

    python -m studies.label_times --pairs 2000

The model has all its weight on the bias, so a record of one label has a tiny gradient and one of the other
is clipped. A learner takes clients of both labels in random order, and the CPU time of every step is
recorded: more than the server sees, whose replies leave in slots. Printed is the area under the curve of
the test "slower means label +1" (0.5: nothing is learned; its standard deviation for n of each label is
about 0.41/√n), for several weights on the bias, one of them where the gradient of one label is denormal.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from scipy.stats import rankdata

from veilstream.deployment.learner import Learner
from veilstream.learning.tasks import Logistic, Sample
from veilstream.plans.plan import Plan
from veilstream.progress import progress

DIM = 61_482
WEIGHTS = (4.0, 20.0, 88.0)


def plan_of(dim: int, steps: int, clients_per_step: int = 1) -> Plan:
    """One round of so many steps."""
    return Plan(
        learning={
            "rounds": 1,
            "local_steps": steps,
            "clients_per_step": clients_per_step,
            "clip_norm": 0.5,
            "model_norm_cap": 1e3,
        },
        data={"dim": dim},
        privacy={"epsilon": 4.0, "delta": 1e-3},
        methods=[{"name": "ours", "mechanism": "buffered", "step_size": 1e-6}],
    )


def record(dim: int, label: float, rng: np.random.Generator) -> Sample:
    """Features of norm one behind a bias of one."""
    features = rng.standard_normal(dim).astype(np.float32)
    features /= np.linalg.norm(features)
    features[0] = 1.0
    return Sample(features, label)


def attacked_model(dim: int, weight: float) -> np.ndarray:
    """All weight on the bias."""
    x = np.zeros(dim, np.float32)
    x[0] = weight
    return x


def area_under_curve(slower: np.ndarray, label: np.ndarray) -> float:
    """Chance that a step with label +1 is slower than one with label -1."""
    ranks = rankdata(slower)
    positive = int((label > 0).sum())
    return float((ranks[label > 0].sum() - positive * (positive + 1) / 2) / (positive * (len(label) - positive)))


def attack(weight: float, pairs: int, dim: int = DIM, seed: int = 0) -> float:
    """The area under the curve for this weight on the bias."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat([-1.0, 1.0], pairs))
    took = np.zeros(len(labels))
    with (
        tempfile.TemporaryDirectory() as folder,
        Learner(plan_of(dim, len(labels) + 20), Path(folder) / "s.db", Logistic(dim), create=True) as learner,
        progress(f"steps at weight {weight:g}", len(labels)) as tick,
    ):
        learner.begin_round(0, attacked_model(dim, weight))
        for i in range(20):  # caches
            learner.observe(f"warm {i}", record(dim, 1.0, rng))
        for i, label in enumerate(labels):
            client = record(dim, label, rng)
            began = time.thread_time_ns()
            learner.observe(f"client {i}", client)
            took[i] = time.thread_time_ns() - began
            tick(1)
    return area_under_curve(took, labels)


def main() -> None:
    """Print one line a weight."""
    parser = argparse.ArgumentParser(prog="studies.label_times", description=__doc__)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--dim", type=int, default=DIM)
    asked = parser.parse_args()
    deviation = (1.0 / (6.0 * asked.pairs)) ** 0.5
    for weight in WEIGHTS:
        print(f"weight {weight:g}: AUC {attack(weight, asked.pairs, asked.dim):.3f} (chance: 0.5 +- {deviation:.3f})")


if __name__ == "__main__":
    main()
