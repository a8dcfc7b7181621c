"""Private telemetry: does it tell the truth, and what does it cost.

    python -m studies.telemetry --out FOLDER

Synthetic clients (d = 20, 20 learners, rounds of 4 steps, clip norm 0.4), at δ = 1e-3.

* *Coverage*: every window has a 95% interval for the accuracy that its clients met, which the
  simulation's oracle knows. How often is it inside? Windows share no round; mechanisms share no
  draw. The same for the loss.
* *Price*: the same plan with and without telemetry of accuracy, seed by seed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.files import write_file
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.simulation.engine import Simulation

LEARNERS, TAU, DIM = 20, 4, 20
SERVER_STEP = 4.47214
BUDGETS = (2.0, 0.5)
MECHANISMS = ("buffered", "toeplitz", "tree", "independent")
METRICS = ("accuracy", "loss")
WINDOWS = (25, 250)
STEPS = {2.0: 1.6, 0.5: 0.8}
"""Effective steps η·η_g·τ, by budget."""
Floats = NDArray[np.float64]


def plan_of(rounds: int, methods: Sequence[dict[str, Any]], telemetry: dict[str, Any] | None) -> Plan:
    """Methods with one step each; ``step`` is the effective one."""
    made = [
        {k: v for k, v in m.items() if k != "step"}
        | {"step_size": m["step"] / (SERVER_STEP * TAU), "server_step_size": SERVER_STEP}
        for m in methods
    ]
    return Plan(
        name="telemetry",
        learning={"rounds": rounds, "local_steps": TAU, "learners": LEARNERS, "clip_norm": 0.4},
        data={"dim": DIM},
        privacy={"epsilon": BUDGETS[0], "delta": 1e-3},
        telemetry=telemetry,
        run={"evaluate_every": rounds},
        methods=made,
    )


def simulated(plan: Plan, seeds: Sequence[int]) -> Simulation:
    """Run to its end."""
    simulation = Simulation(plan, [prepare(plan, method) for method in plan.methods], seeds)
    try:
        while not simulation.done:
            simulation.advance()
    finally:
        simulation.close()
    return simulation


# --- does it tell the truth ----------------------------------------------------------------------


@dataclass(frozen=True)
class Coverage:
    """Of all windows of some seeds."""

    mechanism: str
    metric: str
    window: int
    windows: int
    covered: float
    bias: float
    """Mean of estimate less truth."""
    half_width: float
    """Of an interval, mean."""


def coverage(rounds: int, seeds: Sequence[int]) -> list[Coverage]:
    """Every mechanism, at the larger budget; windows that share no round."""
    methods = [{"name": name, "mechanism": name, "step": STEPS[2.0]} for name in MECHANISMS]
    told = {"metrics": METRICS, "loss_cap": 20.0}
    found = simulated(plan_of(rounds, methods, told), seeds)
    return [
        _covered(found, m, metric, window)
        for metric in METRICS
        for window in WINDOWS
        if window <= rounds
        for m in range(len(MECHANISMS))
    ]


def _covered(found: Simulation, method: int, metric: str, window: int) -> Coverage:
    assert found.telemetry is not None
    rounds, errors, halves = found.plan.learning.rounds, [], []
    for s in range(len(found.seeds)):
        sums = found.telemetry.sums(method, s, rounds)
        for end in range(window, rounds + 1, window):
            (e,) = [e for e in sums.estimates(window, end) if e.metric == metric]
            truth = found.history[metric][method, s, end - window : end].mean()
            errors.append(e.estimate - float(truth))
            halves.append(e.high - e.estimate)
    apart, bars = np.array(errors), np.array(halves)
    inside = float((np.abs(apart) <= bars).mean())
    name, bias = MECHANISMS[method], float(apart.mean())
    return Coverage(name, metric, window, len(apart), inside, bias, float(bars.mean()))


# --- what it costs -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Price:
    """Accuracy with telemetry less accuracy without, mean over seeds and its standard error."""

    budget: float
    noise: float
    """How much more of it."""
    held_out: tuple[float, float]
    prequential: tuple[float, float]


def price(rounds: int, seeds: Sequence[int]) -> list[Price]:
    """The same plan twice."""
    methods = [{"name": f"{eps:g}", "mechanism": "buffered", "epsilon": eps, "step": STEPS[eps]} for eps in BUDGETS]
    without = simulated(plan_of(rounds, methods, None), seeds)
    told = simulated(plan_of(rounds, methods, {}), seeds)
    result = []
    for m, eps in enumerate(BUDGETS):
        stds = [prepare(s.plan, s.plan.methods[m]).noise_std for s in (told, without)]
        held = (told.held_out_accuracy - without.held_out_accuracy)[m, :, -1]
        preq = (told.history["accuracy"] - without.history["accuracy"])[m].mean(axis=1)
        result.append(Price(eps, stds[0] / stds[1] - 1.0, _mean(held), _mean(preq)))
    return result


def _mean(values: NDArray[Any]) -> tuple[float, float]:
    each = np.asarray(values, np.float64)
    return float(each.mean()), float(each.std(ddof=1) / np.sqrt(len(each)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Private telemetry, measured.")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began, seeds = time.monotonic(), range(options.seeds)
    covered = coverage(options.rounds, seeds)
    print("| mechanism | metric | rounds | windows | covered | bias | half width |")
    print("| --- " * 7 + "|")
    for c in covered:
        print(
            f"| {c.mechanism} | {c.metric} | {c.window} | {c.windows} | {c.covered:.1%} | "
            f"{c.bias:+.4f} | {c.half_width:.4f} |"
        )
    for metric in METRICS:
        own = [c for c in covered if c.metric == metric]
        all_of_them = sum(c.windows for c in own)
        share = sum(c.covered * c.windows for c in own) / all_of_them
        print(f"{metric}: {share:.2%} of {all_of_them} windows covered")
    priced = price(options.rounds, seeds)
    for p in priced:
        print(
            f"epsilon {p.budget:g}: {p.noise:.2%} more noise; held-out accuracy "
            f"{p.held_out[0]:+.4f} +- {p.held_out[1]:.4f}, prequential "
            f"{p.prequential[0]:+.4f} +- {p.prequential[1]:.4f}"
        )
    print(f"{options.seeds} seeds, {options.rounds} rounds, {time.monotonic() - began:.0f} s")
    if options.out is not None:
        found = {"coverage": [asdict(c) for c in covered], "price": [asdict(p) for p in priced]}
        options.out.mkdir(parents=True, exist_ok=True)
        write_file(options.out / "telemetry.json", json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
