"""Two real streams as stored data at ε = 1: what a secret order is worth beside a known one, and beside no model.

    python experiments/secret_order_streams.py FILE

100 releases of each learner's records (145 or 85 a step), a fifth of people held out. Every method gets the step size
and clip norm with the best held-out accuracy on the tuning part of the data set (other records, seed 1000); the figures
are of the reported part, five seeds. Data: `veilstream data get covertype flights`.
"""

from __future__ import annotations

import csv
import dataclasses
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import veilstream as vs
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.simulation.engine import Simulation

MANY = {"covertype": 116, "flights": 68}  # of 14,500 and 8,500 records a learner, less a fifth, in 100 steps
STEPS, CLIPS = (0.3, 1.0, 3.0, 10.0, 30.0), (0.3, 1.0)
KNOWN = ("noise-free", "independent", "tree", "toeplitz", "buffered")
SECRET = ("independent", "banded")
FOLDER = Path(__file__).parent


def plan_of(name: str, order: str, methods: list[dict[str, Any]], *, tuning: bool) -> Plan:
    content = tomllib.loads((FOLDER / f"streams_{name}.toml").read_text().split("[[methods]]")[0])
    content["data"] |= {"source": f"data:{name}/tuning" if tuning else f"data:{name}", "held_out_share": 0.2}
    content["learning"] |= {"rounds": 100, "clients_per_step": MANY[name]}
    content["privacy"] = {"epsilon": 1.0, "delta": 1e-5, "order": order}
    content["run"] = {"seeds": 5, "evaluate_every": 100, "regret": False}
    return Plan(**content, methods=methods)


def method(kind: str, step: float, clip: float) -> dict[str, Any]:
    own = kind in ("noise-free", "independent")
    entry = {"name": f"{kind}|{step:g}|{clip:g}", "kind": kind if own else "ours", "step_size": step, "clip_norm": clip}
    return entry if own else entry | {"mechanism": kind}


def tuned(name: str, order: str, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    grid = [method(kind, step, clip) for kind in kinds for step in STEPS for clip in CLIPS]
    plan = plan_of(name, order, grid, tuning=True)
    of_kind = {}
    for m in plan.methods:
        key = m.name.partition("|")[0], m.clip_norm
        if key not in of_kind:
            of_kind[key] = prepare(plan, m)
    prepared = [
        dataclasses.replace(
            made := of_kind[m.name.partition("|")[0], m.clip_norm], plan=dataclasses.replace(made.plan, **_own(m))
        )
        for m in plan.methods
    ]
    simulation = Simulation(plan, prepared, (1000,))
    while not simulation.done:
        simulation.advance()
    accuracy = simulation.held_out_accuracy[:, 0, -1]
    best = []
    for kind in kinds:
        places = [i for i, entry in enumerate(grid) if entry["name"].startswith(f"{kind}|")]
        best.append(grid[max(places, key=lambda i: accuracy[i])] | {"name": kind})
    return best


def _own(m: Any) -> dict[str, Any]:
    return {"name": m.name, "step_size": m.step_size, "clip_norm": m.clip_norm}


def main(path: str) -> None:
    with Path(path).open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["stream", "order", "method", "step_size", "clip_norm", "accuracy", "accuracy_std"])
        for name in MANY:
            for order, kinds in (("known", KNOWN), ("secret", SECRET)):
                chosen = tuned(name, order, kinds)
                with TemporaryDirectory() as folder:
                    run = vs.run(plan_of(name, order, chosen, tuning=False), out=Path(folder) / "run")
                    summary = run.summary
                for entry in chosen:
                    found = summary["methods"][entry["name"]]["final"]["held_out_accuracy"]["seeds"]
                    figures = f"{np.mean(found):.4f}", f"{np.std(found):.4f}"
                    rows.writerow([name, order, entry["name"], entry["step_size"], entry["clip_norm"], *figures])
                if order == "known":
                    for label, figures in summary["baselines"].items():
                        if isinstance(figures, dict) and "accuracy" in figures:
                            rows.writerow([name, "", label, "", "", f"{figures['accuracy']:.4f}", ""])
                file.flush()


if __name__ == "__main__":
    main(sys.argv[1])
