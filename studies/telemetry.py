"""Private telemetry: does it tell the truth, what does it cost, and does acting on it help.

    python -m studies.telemetry --out FOLDER

Synthetic clients (d = 20, 20 learners, rounds of 4 steps), budgets (2, 1e-3) and (0.5, 1e-3).

* *Coverage*: every window of 25 rounds has a 95% interval for the accuracy that its clients met,
  which the simulation's oracle knows. How often is it inside? Windows share no round. The same for
  the loss and for the share of gradients that were clipped.
* *Price*: the same plan with and without telemetry of accuracy, seed by seed.
* *Acting*: the labels change abruptly half-way. A server with one step, one with four times that
  step, and one that chooses between the two by what telemetry tells it; also one that reduces its
  step, and one that stops. Mean prequential accuracy of all clients.

What acting buys is shown on seeds that nothing was chosen on; the step is that of `studies.drift`.
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
MECHANISMS = ("buffered", "tree", "independent")
METRICS = ("accuracy", "loss", "clipped")
WINDOW = 25
STEP, FACTOR, ACT_WINDOW = 0.4, 4.0, 60
"""Effective step η·η_g·τ of the server that acts, the other one's multiple, rounds of a look."""

Floats = NDArray[np.float64]


def plan_of(
    rounds: int,
    methods: Sequence[dict[str, Any]],
    telemetry: dict[str, Any] | None,
    drift: str = "none",
) -> Plan:
    """Methods with one step each; ``step`` is the effective one."""
    made = [
        {k: v for k, v in m.items() if k != "step"}
        | {"step_size": m["step"] / (SERVER_STEP * TAU), "server_step_size": SERVER_STEP}
        for m in methods
    ]
    return Plan(
        name="telemetry",
        learning={"rounds": rounds, "local_steps": TAU, "learners": LEARNERS, "clip_norm": 0.4},
        data={"dim": DIM, "drift": drift},
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

    method: str
    metric: str
    windows: int
    covered: float
    bias: float
    """Mean of estimate less truth."""
    half_width: float
    """Of an interval, mean."""


def coverage(rounds: int, seeds: Sequence[int]) -> list[Coverage]:
    """Every mechanism and budget, windows that share no round."""
    methods = [
        {"name": f"{name} {eps:g}", "mechanism": name, "epsilon": eps, "step": STEP}
        for name in MECHANISMS for eps in BUDGETS
    ]  # fmt: skip
    told = {"metrics": METRICS, "loss_cap": 50.0, "window": WINDOW}
    found = simulated(plan_of(rounds, methods, told), seeds)
    # Whether a gradient is clipped depends on noise at the local model: only a run knows it. The
    # oracle's numbers are loss and accuracy.
    assert found.telemetry is not None
    result = []
    for m, method in enumerate(found.plan.methods):
        for metric in ("accuracy", "loss"):
            errors, halves = [], []
            for s in range(len(seeds)):
                sums = found.telemetry.sums(m, s, rounds)
                for end in range(WINDOW, rounds + 1, WINDOW):
                    (e,) = [e for e in sums.estimates(WINDOW, end) if e.metric == metric]
                    truth = found.history[metric][m, s, end - WINDOW : end].mean()
                    errors.append(e.estimate - float(truth))
                    halves.append(e.high - e.estimate)
            apart, bars = np.array(errors), np.array(halves)
            inside = float((np.abs(apart) <= bars).mean())
            result.append(
                Coverage(
                    method.name,
                    metric,
                    len(apart),
                    inside,
                    float(apart.mean()),
                    float(bars.mean()),
                )  # fmt: skip
            )
    return result


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
    methods = [
        {"name": f"{eps:g}", "mechanism": "buffered", "epsilon": eps, "step": STEP}
        for eps in BUDGETS
    ]
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


# --- does acting help ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Acting:
    """Prequential accuracy of one way to go along with a change, and its gain over one step."""

    budget: float
    way: str
    accuracy: float
    gain: tuple[float, float]
    after: float
    """Accuracy in the second half, after the change."""


def acting(rounds: int, seeds: Sequence[int], drift: str = "abrupt") -> list[Acting]:
    """One step, the larger one, and servers that act."""
    result = []
    for eps in BUDGETS:

        def method(step: float, eps: float = eps) -> dict[str, Any]:
            return {"name": f"{step:g}", "mechanism": "buffered", "epsilon": eps, "step": step}

        told = {"window": ACT_WINDOW}
        ways: dict[str, Plan] = {
            "one step": plan_of(rounds, [method(STEP)], told, drift),
            f"{FACTOR:g} times the step": plan_of(rounds, [method(FACTOR * STEP)], told, drift),
        }
        for act in ("choose_step", "reduce_step", "stop"):
            factor = {"factor": FACTOR} if act == "choose_step" else {}
            step = FACTOR * STEP if act == "reduce_step" else STEP
            ways[act] = plan_of(rounds, [method(step)], told | {"act": act} | factor, drift)
        histories = {
            way: simulated(plan, seeds).history["accuracy"][0].astype(np.float64)
            for way, plan in ways.items()
        }
        base = histories["one step"].mean(axis=1)
        for way, history in histories.items():
            result.append(
                Acting(
                    eps,
                    way,
                    float(history.mean()),
                    _mean(history.mean(axis=1) - base),
                    float(history[:, rounds // 2 :].mean()),
                )  # fmt: skip
            )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Private telemetry, measured.")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began, seeds = time.monotonic(), range(options.seeds)
    covered = coverage(options.rounds, seeds)
    print("| method | metric | windows | covered | bias | 95% half width |\n" + "| --- " * 6 + "|")
    for c in covered:
        print(f"| {c.method} | {c.metric} | {c.windows} | {c.covered:.1%} | {c.bias:+.4f} | "
              f"{c.half_width:.4f} |")  # fmt: skip
    shares = [c for c in covered if c.metric == "accuracy"]
    print(f"accuracy, all windows: {np.mean([c.covered for c in shares]):.2%} covered\n")
    priced = price(options.rounds, seeds)
    for p in priced:
        print(f"epsilon {p.budget:g}: {p.noise:.2%} more noise; held-out accuracy "
              f"{p.held_out[0]:+.4f} +- {p.held_out[1]:.4f}, prequential "
              f"{p.prequential[0]:+.4f} +- {p.prequential[1]:.4f}")  # fmt: skip
    acted = acting(options.rounds, seeds)
    print("\n| epsilon | way | accuracy | gain | after the change |\n" + "| --- " * 5 + "|")
    for a in acted:
        print(f"| {a.budget:g} | {a.way} | {a.accuracy:.4f} | {a.gain[0]:+.4f} +- {a.gain[1]:.4f} "
              f"| {a.after:.4f} |")  # fmt: skip
    print(f"{options.seeds} seeds, {options.rounds} rounds, {time.monotonic() - began:.0f} s")
    if options.out is not None:
        found = {
            "coverage": [asdict(c) for c in covered], "price": [asdict(p) for p in priced],
            "acting": [asdict(a) for a in acted],
        }  # fmt: skip
        options.out.mkdir(parents=True, exist_ok=True)
        write_file(options.out / "telemetry.json", json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
