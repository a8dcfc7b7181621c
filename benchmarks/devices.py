"""One plan, two devices, the same draws: how far apart they end.

    python benchmarks/devices.py --save gpu.npz        on the one
    python benchmarks/devices.py --compare gpu.npz     on the other

The paper's CNN, 10 learners, tau = 2, 60 rounds; noise made on the device (`run.noise = "device"`:
jax.random, addressed by seed, mechanism and step). Prints the largest distance between models,
relative to how far they moved, after every 20 rounds. A network with ReLU and max-pooling is not
continuous in its gradient, so the distance grows with the rounds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import numpy as np

from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.simulation.engine import Simulation

LOOK = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--compare", type=Path)
    given = parser.parse_args()
    step = {"step_size": 0.003, "server_step_size": 3.0}
    plan = Plan(
        learning={"rounds": 60, "local_steps": 2, "learners": 10, "task": "cnn"},
        data={"kind": "mnist", "held_out": 100},
        privacy={"epsilon": 2.0, "delta": 1e-3},
        run={"seeds": 1, "noise": "device", "evaluate_every": 60},
        methods=[
            {"name": "noise-free", "kind": "noise-free", **step},
            {"name": "toeplitz", "mechanism": "toeplitz", **step},
            {"name": "optimal", "mechanism": "optimal", **step},
        ],
    )
    prepared = [prepare(plan, m) for m in plan.methods]
    simulation = Simulation(plan, prepared, [0], block_rounds=LOOK)
    models = [simulation.models()]
    while not simulation.done:
        simulation.advance()
        models.append(simulation.models())
    found = np.stack(models)[:, :, 0]
    print(f"{jax.devices()[0].device_kind}: models after 0, 20, 40, 60 rounds")
    if given.save:
        np.savez(given.save, models=found)
    if given.compare:
        with np.load(given.compare) as stored:
            other = stored["models"]
        for i, method in enumerate(plan.methods):
            moved = np.linalg.norm(other[:, i] - other[0, i], axis=-1)[1:]
            apart = np.linalg.norm(found[:, i] - other[:, i], axis=-1)[1:]
            shown = ", ".join(f"{a / m:.2e}" for a, m in zip(apart, moved, strict=True))
            print(f"{method.name:12s} distance / distance moved: {shown}")


if __name__ == "__main__":
    main()
