"""The paper's CNN on this machine: ours without noise, ours with noise, a PyTorch loop, in turns.

    python benchmarks/simulation.py            ratios, in one run (a minute)
    python benchmarks/simulation.py --full     10 learners x 6000 steps with buffered noise, once

All three take one clipped gradient from each of 10 learners a step (tau = 1) and average them. The
PyTorch loop uses torch.func (vmap of grad) and adds independent noise from torch.randn, which is
less than what ours adds; it is left out where torch is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from veilstream.learning.cnn import Cnn
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.simulation.engine import Simulation
from veilstream.streams.mnist import load_mnist

LEARNERS, TURNS, STEPS = 10, 3, 100


def plan_of(kind: str, rounds: int) -> Plan:
    method = {"kind": "noise-free"} if kind == "noise-free" else {"mechanism": kind}
    return Plan(
        learning={"rounds": rounds, "learners": LEARNERS, "task": "cnn"},
        data={"kind": "mnist", "held_out": 10_000},
        privacy={"epsilon": 2.0, "delta": 1e-3},
        run={"seeds": 1, "evaluate_every": rounds},
        methods=[{"name": kind, "step_size": 0.01, **method}],
    )


def ours(kind: str) -> Callable[[], float]:
    """Seconds a step; each call goes on where the last one stopped."""
    plan = plan_of(kind, rounds=6000)
    prepared = [prepare(plan, m) for m in plan.methods]
    simulation = Simulation(plan, prepared, [0], block_rounds=25)
    for _ in range(3):
        simulation.advance()

    def turn() -> float:
        simulation.state()  # wait for what is under way
        began, first = time.perf_counter(), simulation.round
        while simulation.round < first + STEPS:
            simulation.advance()
        simulation.state()
        return (time.perf_counter() - began) / STEPS

    return turn


def torch_loop() -> Callable[[], float]:
    import torch
    from torch import nn
    from torch.func import functional_call, grad, vmap

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(0),
        nn.Linear(800, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    params = {name: p.detach() for name, p in net.named_parameters()}
    assert sum(p.numel() for p in params.values()) == Cnn.dim
    mnist = load_mnist()
    images = torch.from_numpy(mnist.train_images.reshape(-1, 1, 28, 28).copy())
    labels = torch.from_numpy(mnist.train_labels.astype(np.int64))

    def loss(params: Any, image: Any, label: Any) -> Any:
        return nn.functional.cross_entropy(functional_call(net, params, (image,)), label)

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))
    position = 0

    def step() -> None:
        nonlocal position
        chosen = slice(position, position + LEARNERS)
        position = (position + LEARNERS) % 50_000
        found = gradients(params, images[chosen].float() / 255.0, labels[chosen])
        flat = torch.cat([g.reshape(LEARNERS, -1) for g in found.values()], dim=1)
        flat = flat * torch.clamp(1.0 / flat.norm(dim=1, keepdim=True), max=1.0)
        mean = (flat + 3.0 * torch.randn_like(flat)).mean(dim=0)
        first = 0
        for p in params.values():
            p.sub_(0.01 * mean[first : first + p.numel()].reshape(p.shape))
            first += p.numel()

    for _ in range(10):
        step()

    def turn() -> float:
        began = time.perf_counter()
        for _ in range(STEPS):
            step()
        return (time.perf_counter() - began) / STEPS

    return turn


def ratios() -> None:
    contestants = {"ours, noise-free": ours("noise-free"), "ours, buffered": ours("buffered")}
    if importlib.util.find_spec("torch"):
        contestants["PyTorch loop, independent"] = torch_loop()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(TURNS):
        for name, turn in contestants.items():
            times[name].append(turn())
    best = {name: min(values) for name, values in times.items()}
    private = best["ours, buffered"]
    for name, seconds in best.items():
        each = ", ".join(f"{1e3 * t:.1f}" for t in times[name])
        print(f"{name:28s} {1e3 * seconds:6.2f} ms a step (turns: {each}); {seconds / private:.2f} of ours, buffered")
    extra = private / best["ours, noise-free"] - 1.0
    print(f"noise costs {extra:.2f}x the gradients")


def full() -> None:
    began = time.perf_counter()
    plan = plan_of("buffered", rounds=6000)
    simulation = Simulation(plan, [prepare(plan, m) for m in plan.methods], [0])
    while not simulation.done:
        simulation.advance()
    took = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"10 learners x 6000 steps, buffered noise: {took:.1f} s, peak {peak:.2f} GiB, "
        f"blocks of {simulation.block_rounds} rounds, "
        f"accuracy {simulation.held_out_accuracy[0, 0, -1]:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="the whole run instead of ratios")
    full() if parser.parse_args().full else ratios()


if __name__ == "__main__":
    main()
