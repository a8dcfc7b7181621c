"""How the step sizes in experiments/logistic.toml were chosen.

    .venv/bin/python experiments/search_logistic.py

On seeds that the figure does not use (1000 and 1001), every method runs with every effective step
size of the grid (η_g = sqrt(n), η = η̃/(η_g·τ)). As in the paper, noise-free and the correlated
methods share one: the η̃ with the least average prequential loss, averaged over tree, optimal and
Toeplitz noise and both budgets. Independent noise gets the best of its own for each budget and
accounting. The second half of the figure keeps the shared one.
"""

from __future__ import annotations

import math

import numpy as np

from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.simulation.engine import Simulation

GRID = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
SEEDS = (1000, 1001)
LEARNERS, LOCAL_STEPS = 20, 4
VARIANTS = (
    ("independent", "zcdp"),
    ("tree", "zcdp"),
    ("optimal", "zcdp"),
    ("toeplitz", "zcdp"),
    ("independent", "exact"),
    ("optimal", "exact"),
    ("toeplitz_normalised", "exact"),
)


def main() -> None:
    server = math.sqrt(LEARNERS)
    entries = []
    for eta in GRID:
        step = eta / (server * LOCAL_STEPS)
        entries.append({"name": f"noise-free|{eta}", "kind": "noise-free", "step_size": step})
        for epsilon in (2.0, 0.5):
            for mechanism, accounting in VARIANTS:
                entry = {"name": f"{mechanism} {accounting} @ {epsilon}|{eta}", "kind": "ours"}
                entry |= {"mechanism": mechanism, "accounting": accounting, "epsilon": epsilon}
                entries.append(entry | {"step_size": step})
    methods = [entry | {"server_step_size": server} for entry in entries]
    plan = Plan(
        **{
            "learning": {"rounds": 1000, "local_steps": LOCAL_STEPS, "learners": LEARNERS},
            "privacy": {"epsilon": 2.0, "delta": 1e-3},
            "methods": methods,
            "run": {"evaluate_every": 1000},
        }
    )
    simulation = Simulation(plan, [prepare(plan, m) for m in plan.methods], SEEDS)
    while not simulation.done:
        print(f"round {simulation.advance().round}", flush=True)
    losses = simulation.history["loss"].mean(axis=(1, 2))
    table: dict[str, dict[float, float]] = {}
    for method, loss in zip(plan.methods, losses, strict=True):
        name, _, eta = method.name.rpartition("|")
        table.setdefault(name, {})[float(eta)] = float(loss)
    print("average prequential loss by effective step size\n" + " " * 34 + "".join(f"{e:>9}" for e in GRID))
    for name, row in table.items():
        best = min(row, key=row.__getitem__)
        print(f"{name:34}" + "".join(f"{row[e]:9.4f}" for e in GRID) + f"   best {best}")
    shared = [f"{m} zcdp @ {e}" for m in ("tree", "optimal", "toeplitz") for e in (2.0, 0.5)]
    means = {e: np.mean([table[name][e] for name in shared]) for e in GRID}
    print("shared by the correlated methods:", min(means, key=means.__getitem__))


if __name__ == "__main__":
    main()
