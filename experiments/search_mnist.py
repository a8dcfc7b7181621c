"""Choose step sizes, and what else is tuned, for the MNIST plans, without the test images.

    python experiments/search_mnist.py --study figure clip beyond --out FOLDER

10,000 of the 60,000 training images are held out for this, the same for every setting; the other
50,000 are the clients, for 5000 steps. Every setting runs with a grid of effective steps on seeds
100 and 101, and the best mean accuracy of the published model on the held-out images wins. The
figures then use all 60,000 and 6000 steps, and the test images, which no choice has seen. (The
clients are the same people, though: a real deployment would have to pay for such a search, or make
it on public data.) Needs a GPU: one study has hundreds of runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
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
SERVER = 10**0.5  # sqrt(n), for every method


def method(name: str, per_step: float, **more: Any) -> dict[str, Any]:
    """A method that moves x by ``per_step`` times the mean gradient for every step of a learner."""
    return {"name": name, "step_size": per_step / SERVER, "server_step_size": SERVER, **more}


def plan_of(methods: list[dict[str, Any]], *, tau: int = 1, clients: int = 1, task: str = "cnn") -> Plan:
    return Plan(
        learning={
            "rounds": STEPS // (tau * clients),
            "local_steps": tau,
            "clients_per_step": clients,
            "learners": 10,
            "task": task,
        },
        data={"kind": "mnist", "held_out": 10_000},
        privacy={"epsilon": 2.0, "delta": 1e-3},
        run={"evaluate_every": STEPS, "memory_mib": 60_000, "noise": "device"},
        methods=methods,
    )


@cache
def _images() -> tuple[Any, ...]:
    """Clients and held-out images, both from the training set."""
    mnist = load_mnist()
    mixed = np.random.default_rng(50_000).permutation(60_000)
    labels = mnist.train_labels.astype(np.int32)
    clients, held = mixed[:50_000], mixed[50_000:]
    return mnist.train_images[clients], labels[clients], mnist.train_images[held], labels[held]


def validation(plan: Plan) -> PoolStream:
    features, targets, held_features, held_targets = _images()
    return PoolStream(
        learners=10,
        rounds=plan.learning.rounds,
        per_round=plan.learning.local_steps * plan.learning.clients_per_step,
        features=features,
        targets=targets,
        held_features=held_features,
        held_targets=held_targets,
        split=PaperSplit(),
        provenance="MNIST training images, 10,000 of them held out",
    )


def final_accuracy(plan: Plan) -> dict[str, list[float]]:
    """Accuracy of every method's last model, seed by seed."""
    began = time.monotonic()
    prepared = [prepare(plan, m) for m in plan.methods]
    simulation = Simulation(plan, prepared, SEEDS, stream=validation(plan))
    while not simulation.done:
        simulation.advance()
    took = time.monotonic() - began
    print(f"# {len(plan.methods)} methods, blocks of {simulation.block_rounds}: {took:.1f} s", flush=True)
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


def study_figure() -> Parts:
    """Steps of cnn.toml."""
    kinds: dict[str, dict[str, Any]] = {"noise-free": {"kind": "noise-free"}}
    kinds |= noises("zcdp") | noises("exact")
    steps = [0.0003, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.3, 1.0]
    yield "tau 1", final_accuracy(plan_of(grid(kinds, steps)))


def study_clip() -> Parts:
    """Steps of clip.toml: every clip norm has its own, with and without noise."""
    kinds: dict[str, dict[str, Any]] = {}
    for clip in (0.01, 0.1, 1.0, 3.0, 10.0, 30.0, 100.0):
        toeplitz = {"mechanism": "toeplitz", "accounting": "zcdp", "clip_norm": clip}
        kinds[f"toeplitz, clip {clip:g}"] = toeplitz
    yield "noise", final_accuracy(plan_of(grid(kinds, [0.001, 0.002, 0.005, 0.01, 0.02])))
    loose: dict[str, dict[str, Any]] = {"noise-free, not clipped": {"kind": "noise-free", "clip_norm": 1e15}}
    for m in ("independent", "toeplitz", "optimal"):
        loose[f"{m}, NOT PRIVATE"] = {"kind": "undeclared", "mechanism": m, "accounting": "zcdp"}
    methods = [
        method(f"{name} : {step:g}", step, **more)
        for name, more in loose.items()
        for step in (0.001, 0.003, 0.01, 0.03)
    ]
    yield "not clipped", final_accuracy(plan_of(methods))


def study_beyond() -> Parts:
    """Steps, clip norms and clients a step of the plans that keep the promise."""
    for task, clips, clients, steps in (
        ("cnn", (1.0,), 1, [0.005, 0.01, 0.03, 0.1]),
        ("cnn", (1.0,), 10, [0.1, 0.3, 1.0]),
        ("cnn", (1.0,), 30, [0.3, 1.0, 3.0]),
        ("random_features", (1.0,), 1, [0.3, 1.0, 3.0, 10.0]),
        ("edge_features", (1.0,), 1, [0.1, 0.3, 1.0, 3.0]),
        ("edge_features", (0.3, 1.0), 10, [3.0, 10.0, 30.0, 100.0]),
    ):
        kinds: dict[str, dict[str, Any]] = {}
        for epsilon in (2.0, 8.0):
            for clip in clips:
                for mechanism in ("toeplitz_normalised", "optimal"):
                    for averaging in (None, 3.0):
                        name = f"eps {epsilon:g} {mechanism} clip {clip:g} avg {averaging}"
                        kinds[name] = {
                            "mechanism": mechanism,
                            "epsilon": epsilon,
                            "clip_norm": clip,
                            "averaging": averaging,
                        }
        plan = plan_of(grid(kinds, steps), clients=clients, task=task)
        yield f"{task}, {clients} clients a step", final_accuracy(plan)
    for clients, steps in ((1, [0.003, 0.01, 0.03]), (10, [0.3, 1.0, 3.0])):
        own = {"clip_norm": 1.0 if clients == 1 else 0.3, "averaging": 3.0}
        kinds = {"independent": {"kind": "independent", **own}}
        plan = plan_of(grid(kinds, steps), clients=clients, task="edge_features")
        yield f"independent, {clients} clients a step", final_accuracy(plan)


STUDIES = {"figure": study_figure, "clip": study_clip, "beyond": study_beyond}


def apply_choices(found: dict[str, dict[str, dict[str, list[float]]]], folder: Path) -> None:
    """Write the best steps into the plans."""

    def best(study: str, part: str, kind: str) -> float:
        return float(best_of(found[study][part])[kind][1])

    def shared(study: str, part: str, kinds: tuple[str, ...]) -> float:
        steps: dict[str, list[float]] = {}
        for name, values in found[study][part].items():
            kind, step = name.split(" : ")
            if kind in kinds:
                steps.setdefault(step, []).append(float(np.mean(values)))
        return float(max(steps, key=lambda step: np.mean(steps[step])))

    def write(plan: str, name: str, per_step: float) -> None:
        path = folder / f"{plan}.toml"
        text = path.read_text()
        start = text.index("step_size = ", text.index(f'name = "{name}"\n'))
        end = text.index("\n", start)
        path.write_text(f"{text[:start]}step_size = {per_step / SERVER:.6g}{text[end:]}")
        print(f"{plan}: {name}: {per_step:g}")

    part = "tau 1"
    common = shared("figure", part, ("toeplitz zcdp", "optimal zcdp"))
    for name in ("noise-free", "independent", "toeplitz", "optimal"):
        write("cnn", name, common)
        own = name if name == "noise-free" else f"{name} zcdp"
        write("cnn", f"{name} @ own step", best("figure", part, own))
        if name != "noise-free":
            write("cnn", f"{name} @ own step, exact", best("figure", part, f"{name} exact"))
    for kind in best_of(found["clip"]["noise"]):
        clip = float(kind.rpartition(" ")[2])
        write("clip", kind, best("clip", "noise", kind) / clip)
    loose = tuple(best_of(found["clip"]["not clipped"]))
    step = shared("clip", "not clipped", ("toeplitz, NOT PRIVATE", "optimal, NOT PRIVATE"))
    for kind in loose:
        write("clip", kind, step)
    write("beyond_cnn", "toeplitz @ 2", best("figure", part, "toeplitz zcdp"))
    for plan, task, clients, clip in (
        ("beyond_cnn", "cnn", 1, 1.0),
        ("beyond_cnn_30", "cnn", 30, 1.0),
        ("beyond_random", "random_features", 1, 1.0),
        ("beyond_edge", "edge_features", 1, 1.0),
        ("mnist_private", "edge_features", 10, 0.3),
    ):
        text = (folder / f"{plan}.toml").read_text()
        for epsilon in (2, 8):
            for mechanism in ("toeplitz_normalised", "optimal"):
                for averaging in (None, 3.0):
                    plain = plan != "mnist_private"
                    label = ", averaged" if averaging and plain else ""
                    name = f"{mechanism}{label} @ {epsilon}"
                    if f'"{name}"' not in text or (not plain and averaging is None):
                        continue
                    kind = f"eps {epsilon} {mechanism} clip {clip:g} avg {averaging}"
                    part = f"{task}, {clients} clients a step"
                    write(plan, name, best("beyond", part, kind) / clip)
    for plan, clients, clip in (("beyond_edge", 1, 1.0), ("mnist_private", 10, 0.3)):
        part = f"independent, {clients} clients a step"
        write(plan, "independent @ 2", best("beyond", part, "independent") / clip)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study", choices=STUDIES, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS, help="a shorter horizon, to try it")
    parser.add_argument("--apply", type=Path, help="the folder of plans to write the choices into")
    arguments = parser.parse_args()
    globals()["STEPS"] = arguments.steps
    arguments.out.mkdir(parents=True, exist_ok=True)
    whole: dict[str, dict[str, dict[str, list[float]]]] = {}
    for study in arguments.study:
        found = whole.setdefault(study, {})
        for part, accuracies in STUDIES[study]():
            found[part] = accuracies
            (arguments.out / f"{study}.json").write_text(json.dumps(found, indent=1))
            print(f"== {study}, {part}")
            for kind, (mean, step, values) in best_of(accuracies).items():
                print(f"{kind:48s} {mean:.4f} at {step:8s} {np.round(values, 4)}", flush=True)
    if arguments.apply:
        apply_choices(whole, arguments.apply)


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
