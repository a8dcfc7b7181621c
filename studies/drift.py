"""A world that drifts: dynamic regret of a constant step, of forgetting and of restarts.

    python -m studies.drift --out FOLDER

Synthetic clients (d = 20, 20 learners, 1680 rounds of 4 steps) whose labels change abruptly
half-way, gradually, or with the seasons. Four ways to go along with them:

* *constant step*: `buffered` noise for the whole horizon;
* *forgetting*: the server draws the model to where it began, noise is `stationary`;
* *new noise*: epochs with a fresh mechanism each, the model goes on;
* *from the start*: epochs with a fresh mechanism each, and the model begins anew.

Epochs are a third of the horizon, so that none begins where the abrupt drift is.
Every way has the best step of one grid, found in hindsight on the same seeds: a little optimistic,
for all alike. Regret is the mean prequential loss above the least loss of each round.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.files import write_file
from veilstream.learning.tasks import Sample
from veilstream.mechanisms import doubling
from veilstream.plans.clients import stream_of
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import Prepared, prepare
from veilstream.privacy import calibrate
from veilstream.simulation.comparators import comparators
from veilstream.simulation.engine import Simulation
from veilstream.streams.stream import Stream

DRIFTS = ("abrupt", "gradual", "seasonal")
SEEDS = (0, 1, 2)
BUDGETS = (2.0, 0.5)
STEPS = tuple(0.1 * 2.0**k for k in range(1, 9))
"""Effective step sizes η·η_g·τ."""
FORGETTING = (0.98, 0.995, 0.999)
EPOCHS = (3,)
TAU, SERVER_STEP = 4, 4.47214

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Window:
    """A stream from one of its rounds on."""

    inner: Stream
    first: int

    @property
    def provenance(self) -> str:
        """Where the data come from."""
        return f"{self.inner.provenance}, from round {self.first}"

    def round(self, seed: int, round_: int) -> Sample:
        """The round's clients."""
        return self.inner.round(seed, self.first + round_)

    def held_out(self, seed: int, count: int, round_: int) -> Sample:
        """Other clients, as of that round."""
        return self.inner.held_out(seed, count, self.first + round_)


def plan_of(drift: str, rounds: int, learners: int, rho: float = 1.0) -> Plan:
    """Every budget and none, with every step."""
    kinds: list[dict[str, Any]] = [
        {"name": "noise-free", "kind": "noise-free"},
        *({"name": f"{eps:g}", "epsilon": eps} for eps in BUDGETS),
    ]
    if rho == 1.0:
        kinds[1:] = [kind | {"mechanism": "buffered"} for kind in kinds[1:]]
    return Plan(
        name="drift",
        learning={
            "rounds": rounds, "local_steps": TAU, "learners": learners, "unbounded": rho < 1.0
        },
        data={"dim": 20, "drift": drift, "held_out": learners},
        privacy={"epsilon": BUDGETS[0], "delta": 1e-3},
        run={"evaluate_every": rounds},
        methods=[
            kind | {"name": f"{kind['name']} @ {step:g}", "step_size": step / (SERVER_STEP * TAU),
                    "server_step_size": SERVER_STEP, "forgetting": rho}
            for kind in kinds for step in STEPS
        ],
    )  # fmt: skip


def losses(plan: Plan, prepared: list[Prepared], stream: Stream | None = None) -> Floats:
    """Prequential loss, (methods, seeds, rounds)."""
    simulation = Simulation(plan, prepared, SEEDS, stream=stream)
    try:
        while not simulation.done:
            simulation.advance()
    finally:
        simulation.close()
    return simulation.history["loss"].astype(np.float64)


def with_new_noise(plan: Plan, prepared: Prepared, epochs: int) -> Prepared:
    """The same method with a fresh mechanism in every epoch, the noise measured out for that."""
    if prepared.factorization is None:
        return prepared
    horizon = plan.learning.rounds * prepared.steps
    fresh = doubling(horizon, first=horizon // epochs, growth=1)
    std, guarantee = calibrate(
        plan.budget_of(prepared.plan), fresh, plan.clip_norm_of(prepared.plan)
    )
    return dataclasses.replace(prepared, factorization=fresh, noise_std=std, guarantee=guarantee)


def ways(drift: str, rounds: int, learners: int) -> dict[str, Callable[[], Floats]]:
    """By name, what computes the losses."""
    plan = plan_of(drift, rounds, learners)

    def constant() -> Floats:
        return losses(plan, [prepare(plan, m) for m in plan.methods])

    def forgetting(rho: float) -> Floats:
        forgetful = plan_of(drift, rounds, learners, rho)
        return losses(forgetful, [prepare(forgetful, m) for m in forgetful.methods])

    def new_noise(epochs: int) -> Floats:
        return losses(plan, [with_new_noise(plan, prepare(plan, m), epochs) for m in plan.methods])

    def from_the_start(epochs: int) -> Floats:
        short, stream = plan_of(drift, rounds // epochs, learners), stream_of(plan)
        prepared = [prepare(short, m) for m in short.methods]
        firsts = range(0, rounds, rounds // epochs)
        return np.concatenate(
            [losses(short, prepared, Window(stream, first)) for first in firsts], axis=-1
        )

    return (
        {"constant step": constant}
        | {f"forgetting {rho:g}": lambda rho=rho: forgetting(rho) for rho in FORGETTING}
        | {f"new noise, {k} epochs": lambda k=k: new_noise(k) for k in EPOCHS}
        | {f"from the start, {k} epochs": lambda k=k: from_the_start(k) for k in EPOCHS}
    )


def study(
    drifts: tuple[str, ...] = DRIFTS, *, rounds: int = 1680, learners: int = 20
) -> dict[str, Any]:
    """By drift, way and budget: dynamic regret of every seed at the best step, and that step."""
    found: dict[str, Any] = {}
    for drift in drifts:
        plan = plan_of(drift, rounds, learners)
        least = np.array([comparators(plan, seed).round_values.mean() for seed in SEEDS])
        found[drift] = {"least loss": least.tolist()}
        for way, run in ways(drift, rounds, learners).items():
            seen = run().mean(axis=-1).reshape(-1, len(STEPS), len(SEEDS)) - least
            best = seen.mean(axis=-1).argmin(axis=1)
            found[drift][way] = {
                name: {"regret": seen[i, best[i]].tolist(), "step": STEPS[best[i]]}
                for i, name in enumerate(("noise-free", *(f"{eps:g}" for eps in BUDGETS)))
            }
    return found


def table(found: dict[str, Any]) -> str:
    """Markdown: a row a way, a column a drift and budget; mean regret over seeds, and the step."""
    names = ("noise-free", *(f"{eps:g}" for eps in BUDGETS))
    head = "| way | " + " | ".join(f"{drift}, {name}" for drift in found for name in names) + " |"
    lines = [head, "| --- |" + " ---: |" * (len(found) * len(names))]
    for way in list(next(iter(found.values())))[1:]:
        at = [found[drift][way][name] for drift in found for name in names]
        cells = [f"{np.mean(each['regret']):.3f} ({each['step']:g})" for each in at]
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder for the numbers")
    options = parser.parse_args()
    began = time.perf_counter()
    found = study()
    options.out.mkdir(parents=True, exist_ok=True)
    write_file(options.out / "drift.json", json.dumps(found, indent=1) + "\n")
    print(table(found))
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
