"""Choose clip norm, averaging and step for MNIST under a secret order, without the test images.

    python experiments/search_secret_order.py [EPSILON ...]        # for mnist_secret_order.toml
    python experiments/search_secret_order.py --sum [EPSILON ...]  # for mnist_only_sums.toml, under a secret order too

10,000 of the 60,000 training images are held out for this, the same for every setting; the others are the clients.
Every setting runs on seeds 100 and 101, and the best mean accuracy of the published model on the held-out images wins.
Those plans have what it chose; they run on other seeds, all training images and the test images, which no choice has
seen. Two minutes on a GPU, half an hour on two cores.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.simulation.engine import Simulation
from veilstream.streams.mnist import load_mnist
from veilstream.streams.pool import PoolStream
from veilstream.streams.splits import PaperSplit

SEEDS = (100, 101)
STEPS = 5000
SERVER = 10**0.5

CLIENTS = 60
CLIPS = (0.001, 0.003, 0.01, 0.03)
AVERAGING = (4.0, 8.0, 15.0)
STEPS_IN_CLIPS = (35.0, 50.0, 70.0, 100.0, 200.0, 400.0)  # how far a step goes, in clip norms
LESS_NOISE = {"clips": (0.01, 0.03, 0.06), "averaging": (8.0, 15.0), "steps": (70.0, 100.0, 150.0, 200.0, 300.0, 450.0)}


def plan_of(epsilon: float, only_sums: bool = False) -> Plan:
    clips, averages, steps = LESS_NOISE.values() if only_sums else (CLIPS, AVERAGING, STEPS_IN_CLIPS)
    trust: dict[str, Any] = {"trust": "sum", "honest": 10} if only_sums else {}
    methods = [
        {
            "name": f"clip {clip:g} averaging {averaging:g} step {far:g}",
            "mechanism": "banded",
            "clip_norm": clip,
            "averaging": averaging,
            "step_size": far / clip / SERVER,
            "server_step_size": SERVER,
        }
        for clip in clips
        for averaging in averages
        for far in steps
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
        privacy={"epsilon": epsilon, "delta": 1e-3, "order": "secret"} | trust,
        run={"evaluate_every": STEPS, "regret": False, "memory_mib": 60_000},
        methods=methods,
    )


def validation(plan: Plan) -> PoolStream:
    """Clients and held-out images, both from the training set."""
    mnist = load_mnist()
    mixed = np.random.default_rng(50_000).permutation(60_000)
    labels: Any = mnist.train_labels.astype(np.int32)
    clients, held = mixed[:50_000], mixed[50_000:]
    return PoolStream(
        learners=10,
        rounds=plan.learning.rounds,
        per_round=CLIENTS,
        features=mnist.train_images[clients],
        targets=labels[clients],
        held_features=mnist.train_images[held],
        held_targets=labels[held],
        split=PaperSplit(),
        provenance="MNIST training images, 10,000 of them held out",
    )


def final_accuracy(plan: Plan) -> dict[str, list[float]]:
    """Accuracy of every method's last model, seed by seed."""
    prepared = [prepare(plan, m) for m in plan.methods]
    simulation = Simulation(plan, prepared, SEEDS, stream=validation(plan))
    while not simulation.done:
        simulation.advance()
    last = simulation.held_out_accuracy[:, :, -1]
    return {p.plan.name: [float(a) for a in row] for p, row in zip(prepared, last, strict=True)}


def main() -> None:
    only_sums = "--sum" in sys.argv
    for epsilon in map(float, [word for word in sys.argv[1:] if word != "--sum"] or (0.5, 2.0)):
        found = final_accuracy(plan_of(epsilon, only_sums))
        ranked = sorted(found.items(), key=lambda pair: -float(np.mean(pair[1])))
        for name, accuracies in ranked[:8]:
            print(f"eps {epsilon:g}: {name}: {np.mean(accuracies):.4f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
