"""How the settings in experiments/streams_*.toml were chosen, and how their methods are written.

    .venv/bin/python experiments/search_streams.py [electricity ...] [--write]

Every method at every budget runs with every pair of step size and clip norm of one grid, on the
tuning part of the data set (other records, other people) and on seeds that the report does not use
(1000, 1001). It gets the pair with the least average prequential loss. Noise-free has the same
grid. Horizon, learners and clients of a step are those of the report. --write puts the methods into
the plan, behind its first [[methods]]. A quarter of an hour on two cores that others use too.
"""

from __future__ import annotations

import dataclasses
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from veilstream.plans.plan import MethodPlan, Plan
from veilstream.plans.prepare import Prepared, prepare
from veilstream.simulation.engine import Simulation

STEP_SIZES = (0.02, 0.05, 0.12, 0.3, 0.8, 2.0, 5.0, 12.0, 30.0)
CLIP_NORMS = (0.1, 0.3, 1.0)
SEEDS = (1000, 1001)
BUDGETS = (0.5, 2.0, 8.0)
MECHANISMS = ("independent", "tree", "toeplitz", "buffered", "optimal")
NAMES = ("electricity", "covertype", "flights", "health")
FOLDER = Path(__file__).parent


def candidates() -> list[dict[str, Any]]:
    kinds: list[dict[str, Any]] = [{"name": "noise-free", "kind": "noise-free"}]
    for epsilon in BUDGETS:
        for mechanism in MECHANISMS:
            kind = "independent" if mechanism == "independent" else "ours"
            entry = {"name": f"{mechanism} @ {epsilon:g}", "kind": kind, "epsilon": epsilon}
            kinds.append(entry | ({} if kind == "independent" else {"mechanism": mechanism}))
    return kinds


def search(name: str) -> list[dict[str, Any]]:
    head = (FOLDER / f"streams_{name}.toml").read_text().split("[[methods]]")[0]
    grid = [
        kind | {"name": f"{kind['name']}|{step}|{clip}", "step_size": step, "clip_norm": clip}
        for kind in candidates()
        for step in STEP_SIZES
        for clip in CLIP_NORMS
    ]
    plan = Plan(**tomllib.loads(head.replace(f"data:{name}", f"data:{name}/tuning")), methods=grid)
    began = time.monotonic()
    calibrated: dict[tuple[str, float | None], Prepared] = {}  # the noise knows no step size
    for m in plan.methods:
        if _noise_of(m) not in calibrated:
            calibrated[_noise_of(m)] = prepare(plan, m)
    prepared = [dataclasses.replace(calibrated[_noise_of(m)], plan=m) for m in plan.methods]
    print(f"{name}: noise calibrated after {time.monotonic() - began:.0f} s", flush=True)
    simulation = Simulation(plan, prepared, SEEDS)
    while not simulation.done:
        simulation.advance()
    losses = np.nanmean(simulation.history["loss"].astype(float), axis=(1, 2))
    losses[~np.isfinite(losses)] = np.inf
    best: dict[str, tuple[float, dict[str, Any]]] = {}
    for entry, loss in zip(grid, losses, strict=True):
        kind = entry["name"].partition("|")[0]
        if kind not in best or loss < best[kind][0]:
            best[kind] = (float(loss), entry | {"name": kind})
    print(f"{name}: {len(grid)} settings, {time.monotonic() - began:.0f} s")
    for kind, (loss, entry) in best.items():
        print(f"  {kind:18} loss {loss:.4f}  η {entry['step_size']:<5} B {entry['clip_norm']}")
    return [entry for _, entry in best.values()]


def _noise_of(method: MethodPlan) -> tuple[str, float | None]:
    return method.name.partition("|")[0], method.clip_norm


def write(name: str, methods: list[dict[str, Any]]) -> None:
    path = FOLDER / f"streams_{name}.toml"
    head = path.read_text().split("[[methods]]")[0].rstrip() + "\n"
    blocks = [
        "\n[[methods]]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in method.items()) for method in methods
    ]
    path.write_text(head + "".join(blocks))


def _toml(value: str | float) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(float(value))


if __name__ == "__main__":
    for chosen in [n for n in sys.argv[1:] if n in NAMES] or NAMES:
        found = search(chosen)
        if "--write" in sys.argv:
            write(chosen, found)
