"""Choose clip norm, averaging and step for MNIST under a secret order, without the test images.

    python experiments/search_secret_order.py [EPSILON ...]

As `search_mnist.py` does: 10,000 of the training images are held out for this, seeds 100 and 101, and the best mean
accuracy of the published model wins. `mnist_secret_order.toml` has what it chose. Some minutes on two cores.
"""

from __future__ import annotations

import sys

import numpy as np
from search_mnist import STEPS, final_accuracy, method

from veilstream.plans.plan import Plan

CLIENTS = 60
CLIPS = (0.001, 0.003, 0.01, 0.03)
AVERAGING = (4.0, 8.0, 15.0)
STEPS_IN_CLIPS = (35.0, 50.0, 70.0, 100.0, 200.0, 400.0)  # how far a step goes, in clip norms


def plan_of(epsilon: float) -> Plan:
    methods = [
        method(
            f"clip {clip:g} averaging {averaging:g} step {far:g}",
            far / clip,
            mechanism="banded",
            clip_norm=clip,
            averaging=averaging,
        )
        for clip in CLIPS
        for averaging in AVERAGING
        for far in STEPS_IN_CLIPS
    ]
    return Plan(
        learning={
            "rounds": STEPS // CLIENTS,
            "local_steps": 1,
            "clients_per_step": CLIENTS,
            "learners": 10,
            "task": "edge_features",
        },
        data={"kind": "mnist", "held_out": 10_000},
        privacy={"epsilon": epsilon, "delta": 1e-3, "order": "secret"},
        run={"evaluate_every": STEPS, "regret": False, "memory_mib": 60_000},
        methods=methods,
    )


def main() -> None:
    for epsilon in map(float, sys.argv[1:] or (0.5, 2.0)):
        found = final_accuracy(plan_of(epsilon))
        ranked = sorted(found.items(), key=lambda pair: -float(np.mean(pair[1])))
        for name, accuracies in ranked[:8]:
            print(f"eps {epsilon:g}: {name}: {np.mean(accuracies):.4f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
