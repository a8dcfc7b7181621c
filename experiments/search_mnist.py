"""Choose step sizes (and what else is tuned) for the MNIST plans, on seeds that no figure uses.

    python experiments/search_mnist.py --study steps --out steps.json

Every setting runs with a grid of effective steps on seeds 100 and 101; the best by mean accuracy of
the published model is printed. With the edges of the grid among the best, widen it. Needs a GPU:
one study has hundreds of runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from veilstream.engines.build import prepare
from veilstream.engines.plan import Plan
from veilstream.engines.simulation import Simulation

SEEDS = (100, 101)
STEPS = 6000
SERVER = 10**0.5  # sqrt(n), for every method


def method(name: str, per_step: float, **more: Any) -> dict[str, Any]:
    """A method that moves x by ``per_step`` times the mean gradient for every step of a learner."""
    return {"name": name, "step_size": per_step / SERVER, "server_step_size": SERVER, **more}


def plan_of(
    methods: list[dict[str, Any]], *, tau: int = 1, clients: int = 1, task: str = "cnn"
) -> Plan:
    return Plan(
        learning={
            "rounds": STEPS // (tau * clients), "local_steps": tau, "clients_per_step": clients,
            "learners": 10, "task": task,
        },
        data={"kind": "mnist", "held_out": 10_000},
        privacy={"epsilon": 2.0, "delta": 1e-3},
        run={"evaluate_every": STEPS, "memory_mib": 60_000, "noise": "device"},
        methods=methods,
    )  # fmt: skip


def final_accuracy(plan: Plan) -> dict[str, list[float]]:
    """Accuracy of every method's last model, seed by seed."""
    began = time.monotonic()
    prepared = [prepare(plan, m) for m in plan.methods]
    simulation = Simulation(plan, prepared, SEEDS)
    while not simulation.done:
        simulation.advance()
    took = time.monotonic() - began
    print(
        f"# {len(plan.methods)} methods, blocks of {simulation.block_rounds}: {took:.1f} s",
        flush=True,
    )
    last = simulation.held_out_accuracy[:, :, -1]
    return {p.plan.name: [float(a) for a in row] for p, row in zip(prepared, last, strict=True)}


def grid(kinds: dict[str, dict[str, Any]], steps: list[float]) -> list[dict[str, Any]]:
    """Every kind with every step; steps of kinds with an own clip norm are in units of it."""
    return [
        method(f"{name} : {step:g}", step / more.get("clip_norm", 1.0), **more)
        for name, more in kinds.items()
        for step in steps
    ]


def noises(accounting: str, **more: Any) -> dict[str, dict[str, Any]]:
    return {
        f"{m} {accounting}": {"mechanism": m, "accounting": accounting, **more}
        for m in ("independent", "toeplitz", "optimal")
    }


Parts = Iterator[tuple[str, dict[str, list[float]]]]


def study_steps() -> Parts:
    """The figure: every method's own step, at each τ."""
    kinds: dict[str, dict[str, Any]] = {"noise-free": {"kind": "noise-free"}}
    kinds |= noises("zcdp") | noises("exact")
    steps = [0.003, 0.01, 0.03, 0.1, 0.3]
    for tau in (1, 2, 4):
        yield f"tau {tau}", final_accuracy(plan_of(grid(kinds, steps), tau=tau))


def study_clip() -> Parts:
    """Clip norms, noise calibrated to each; and the variant that protects nothing."""
    kinds: dict[str, dict[str, Any]] = {}
    for clip in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0):
        own = {"clip_norm": clip}
        kinds[f"free {clip:g}"] = {"kind": "noise-free", **own}
        kinds[f"toeplitz {clip:g}"] = {"mechanism": "toeplitz", "accounting": "zcdp", **own}
    yield "clipped", final_accuracy(plan_of(grid(kinds, [0.003, 0.01, 0.03, 0.1, 0.3])))
    loose: dict[str, dict[str, Any]] = {
        "free, not clipped": {"kind": "noise-free", "clip_norm": 1e15}
    }
    for m in ("independent", "toeplitz", "optimal"):
        loose[f"undeclared {m}"] = {"kind": "undeclared", "mechanism": m, "accounting": "zcdp"}
    steps = [0.003, 0.01, 0.03, 0.1, 0.3]
    methods = [
        method(f"{name} : {step:g}", step, **more) for name, more in loose.items() for step in steps
    ]
    yield "not clipped", final_accuracy(plan_of(methods))


def study_beyond() -> Parts:
    """What keeps the promise and comes near 0.9."""
    for task in ("cnn", "random_features", "edge_features"):
        steps = [0.001, 0.003, 0.01, 0.03, 0.1] if task == "cnn" else [0.1, 0.3, 1.0, 3.0, 10.0]
        for clients in (1, 10):
            kinds = {}
            for epsilon in (2.0, 8.0):
                for mechanism in ("toeplitz_normalised", "optimal"):
                    for clip in (0.5, 1.0) if task != "cnn" else (0.1, 0.3, 1.0):
                        for averaging in (None, 3.0):
                            name = f"eps {epsilon:g} {mechanism} clip {clip:g} avg {averaging}"
                            kinds[name] = {
                                "mechanism": mechanism, "epsilon": epsilon, "clip_norm": clip,
                                "averaging": averaging,
                            }  # fmt: skip
            many = [s * clients**0.5 for s in steps]
            key = f"{task}, {clients} clients a step"
            yield key, final_accuracy(plan_of(grid(kinds, many), clients=clients, task=task))


def study_wider() -> Parts:
    """Where the studies above found their best at an edge of the grid, or might have more."""
    kinds: dict[str, dict[str, Any]] = {"noise-free": {"kind": "noise-free"}}
    kinds |= noises("zcdp") | noises("exact")
    steps = [0.0003, 0.001, 0.002, 0.005, 0.02, 1.0]
    yield "tau 1, finer", final_accuracy(plan_of(grid(kinds, steps)))
    kinds = {}
    for clip in (30.0, 100.0, 1000.0):
        kinds[f"free {clip:g}"] = {"kind": "noise-free", "clip_norm": clip}
        toeplitz = {"mechanism": "toeplitz", "accounting": "zcdp", "clip_norm": clip}
        kinds[f"toeplitz {clip:g}"] = toeplitz
    yield "large clip norms", final_accuracy(plan_of(grid(kinds, [0.001, 0.003, 0.01, 0.1, 1.0])))
    for task, clips, clients, steps in (
        ("cnn", (1.0, 3.0, 10.0), 1, [0.01, 0.03, 0.1]),
        ("cnn", (1.0, 3.0, 10.0), 3, [0.03, 0.1, 0.3]),
        ("cnn", (1.0, 3.0, 10.0), 10, [0.3, 1.0, 3.0]),
        ("cnn", (1.0, 3.0), 30, [0.3, 1.0, 3.0]),
        ("edge_features", (0.3, 0.5), 3, [1.0, 3.0, 10.0]),
        ("edge_features", (0.3, 0.5), 10, [3.0, 10.0, 30.0, 100.0]),
        ("edge_features", (0.3, 0.5), 30, [10.0, 30.0, 100.0]),
    ):
        kinds = {
            f"eps {epsilon:g} {mechanism} clip {clip:g}": {
                "mechanism": mechanism, "epsilon": epsilon, "clip_norm": clip, "averaging": 3.0
            }
            for epsilon in (2.0, 8.0)
            for mechanism in ("toeplitz_normalised", "optimal")
            for clip in clips
        }  # fmt: skip
        plan = plan_of(grid(kinds, steps), clients=clients, task=task)
        yield f"{task}, {clients} clients a step", final_accuracy(plan)


STUDIES = {"wider": study_wider, "steps": study_steps, "clip": study_clip, "beyond": study_beyond}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study", choices=STUDIES, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS, help="a shorter horizon, to try it")
    arguments = parser.parse_args()
    globals()["STEPS"] = arguments.steps
    arguments.out.mkdir(parents=True, exist_ok=True)
    for study in arguments.study:
        found = {}
        for part, accuracies in STUDIES[study]():
            found[part] = accuracies
            (arguments.out / f"{study}.json").write_text(json.dumps(found, indent=1))
            print(f"== {study}, {part}")
            for kind, (mean, step, values) in best_of(accuracies).items():
                print(f"{kind:48s} {mean:.4f} at {step:8s} {np.round(values, 4)}", flush=True)


def best_of(accuracies: dict[str, list[float]]) -> dict[str, tuple[float, str, list[float]]]:
    """Each kind's best mean accuracy, with its step."""
    best: dict[str, tuple[float, str, list[float]]] = {}
    for name, values in accuracies.items():
        kind, step = name.split(" : ")
        here = (float(np.mean(values)), step, values)
        best[kind] = max(best.get(kind, here), here)
    return best


if __name__ == "__main__":
    main()
