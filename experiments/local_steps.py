"""How many local steps are too many: the paper's logistic regression with τ from 1 to 200.

    python experiments/local_steps.py --out docs/results/local_steps.csv

Every learner always has 4000 clients, so R = 4000/τ. The paper's remark on τ (after eq-27-11)
keeps η·η_g fixed: "same" keeps each method's step of τ = 1. "own" chooses η·η_g again for each τ,
in the same way for all: least average prequential loss on seeds 1000 to 1002. What is reported
comes from seeds 0 to 4. Two server steps: √n, as in our figure, and 1, where the same movement of
the released model needs local steps √n times as long, so that local models drift further. The
mini-batch averages the round's τ gradients at x^r and takes one step of η·η_g·τ: as few releases,
and no drift. Five minutes on two cores.
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path
from typing import Any

from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.simulation.engine import Simulation

STEPS, LEARNERS = 4000, 20
LOCAL_STEPS = (1, 2, 4, 8, 16, 40, 200)
GRID = {
    "noise-free": tuple(0.8 * 2**k for k in range(8)),
    "mini-batch": tuple(0.1 * 2**k for k in range(10)),
    "epsilon 2": tuple(0.1 * 2 ** (k / 2) for k in range(11)),
    "epsilon 0.5": tuple(0.025 * 2 ** (k / 2) for k in range(11)),
}
"""η·η_g: how far the released model moves along one step's gradients."""
SEARCH_SEEDS, SEEDS = (1000, 1001, 1002), (0, 1, 2, 3, 4)
SERVER_STEPS = {"sqrt(n)": math.sqrt(LEARNERS), "1": 1.0}
KINDS: dict[str, dict[str, Any]] = {
    "noise-free": {"kind": "noise-free"},
    "mini-batch": {"kind": "noise-free"},
    "epsilon 2": {"mechanism": "toeplitz_normalised", "epsilon": 2.0},
    "epsilon 0.5": {"mechanism": "toeplitz_normalised", "epsilon": 0.5},
}
PAIRS = [(kind, server) for kind in KINDS for server in SERVER_STEPS]
PAIRS.remove(("mini-batch", "1"))  # one step a round: only the product counts
Setting = tuple[str, str, float]
"""Kind, server step, η·η_g."""
Measured = dict[Setting, tuple[list[float], list[float]]]
"""Average prequential loss and accuracy of the last model, seed by seed."""


def measure(local_steps: int, settings: list[Setting], seeds: tuple[int, ...]) -> Measured:
    """Run all settings at this τ on the same clients and draws."""
    batches = [setting for setting in settings if setting[0] == "mini-batch"]
    others = [setting for setting in settings if setting[0] != "mini-batch"]
    found = _run(local_steps, 1, others, seeds)
    return found | _run(1, local_steps, batches, seeds)


def _run(steps: int, clients: int, settings: list[Setting], seeds: tuple[int, ...]) -> Measured:
    """Rounds of so many steps, each with the mean gradient of so many clients."""
    methods = [
        {
            "name": f"{kind}, server step {server}, step {step:g}",
            "step_size": step * clients / SERVER_STEPS[server],
            "server_step_size": SERVER_STEPS[server],
            **KINDS[kind],
        }
        for kind, server, step in settings
    ]
    rounds = STEPS // (steps * clients)
    plan = Plan(
        **{
            "learning": {"rounds": rounds, "local_steps": steps, "clients_per_step": clients, "learners": LEARNERS},
            "data": {"kind": "synthetic", "dim": 100, "clients": STEPS},
            "privacy": {"epsilon": 2.0, "delta": 1e-3},
            "methods": methods,
            "run": {"evaluate_every": rounds, "memory_mib": 1500},
        }
    )
    simulation = Simulation(plan, [prepare(plan, m) for m in plan.methods], seeds)
    while not simulation.done:
        simulation.advance()
    losses = simulation.history["loss"].mean(axis=2, dtype=float)
    last = simulation.held_out_accuracy[:, :, -1]
    return {
        setting: (loss.tolist(), accuracy.tolist())
        for setting, loss, accuracy in zip(settings, losses, last, strict=True)
    }


def search(local_steps: int) -> dict[tuple[str, str], float]:
    """The η·η_g of least loss for every kind and server step."""
    settings = [(kind, server, step) for kind, server in PAIRS for step in GRID[kind]]
    found = measure(local_steps, settings, SEARCH_SEEDS)
    best: dict[tuple[str, str], float] = {}
    for kind, server in PAIRS:
        of_step = {step: sum(found[kind, server, step][0]) for step in GRID[kind]}
        finite = {step: loss for step, loss in of_step.items() if math.isfinite(loss)}
        best[kind, server] = min(finite, key=finite.__getitem__)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("local_steps.csv"))
    out: Path = parser.parse_args().out
    rows: list[tuple[object, ...]] = []
    at_one = search(LOCAL_STEPS[0])
    for tau in LOCAL_STEPS:
        own = at_one if tau == 1 else search(tau)
        wanted = {(*key, step) for chosen in (own, at_one) for key, step in chosen.items()}
        found = measure(tau, sorted(wanted), SEEDS)
        for choice, chosen in (("own", own), ("same", at_one)):
            for (kind, server), step in chosen.items():
                losses, accuracies = found[kind, server, step]
                for seed, loss, accuracy in zip(SEEDS, losses, accuracies, strict=True):
                    rows.append((tau, kind, server, choice, step, seed, loss, accuracy))
                print(
                    f"tau {tau:3} {kind:12} server step {server:8} {choice:5} {step:6g} "
                    f"loss {sum(losses) / len(losses):.4f} "
                    f"accuracy {sum(accuracies) / len(accuracies):.4f}",
                    flush=True,
                )
        with out.open("w", newline="") as file:
            write = csv.writer(file, lineterminator="\n")
            header = "local_steps,method,server_step,choice,step,seed,loss,accuracy"
            write.writerow(header.split(","))
            write.writerows(rows)


if __name__ == "__main__":
    main()
