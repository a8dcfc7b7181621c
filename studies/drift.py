"""Worlds that drift: a constant step, forgetting and restarts, on made-up and on real streams.

    python -m studies.drift --out FOLDER

Three synthetic worlds (d = 20, 20 learners, 1680 rounds of 4 steps) whose labels change abruptly
half-way, gradually, or with the seasons, and three public streams in their own order, with clients
of a step and clip norms as in experiments/streams_*.toml. Four ways to go along with them:

* *constant step*: `buffered` noise for the whole horizon;
* *forgetting*: the server draws the model to where it began, noise is `stationary`;
* *new noise*: epochs with a fresh mechanism each, the model goes on;
* *from the start*: epochs with a fresh mechanism each, and the model begins anew.

Epochs are a third of the horizon, so that none begins where the abrupt drift is. Every way has, for
every budget, the best step of one grid, found on other data: other seeds, or the tuning half of a
stream. Figures are mean prequential losses over ten seeds, less the least loss of each round in
the synthetic worlds (dynamic regret); of a stream seeds differ in noise alone. Ways are compared
seed by seed with the constant step.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from studies.drift_figure import draw
from veilstream.files import write_file
from veilstream.learning.tasks import Sample
from veilstream.mechanisms import doubling
from veilstream.plans.clients import stream_of
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import Prepared, prepare
from veilstream.privacy import calibrate
from veilstream.research.comparators import comparators
from veilstream.simulation.engine import Simulation
from veilstream.streams.pool import Stream

DRIFTS = ("abrupt", "gradual", "seasonal")
CLIP_NORMS = {"electricity": (1.0, 0.3), "covertype": (1.0, 0.3), "flights": (1.0, 1.0)}
"""Of the streams: what a grid of steps and clip norms chose without noise, and for `buffered` at
epsilon 2."""
SEEDS = tuple(range(10))
SEARCH_SEEDS = (1000, 1001, 1002)
BUDGETS: tuple[float | None, ...] = (None, 2.0, 0.5)
"""Epsilon; None is no noise."""
STEPS = tuple(0.1 * 2.0**k for k in range(1, 9))
"""Effective step sizes η·η_g·τ."""
FORGETTING = (0.999, 0.995, 0.98)
EPOCHS = 3
EXPERIMENTS = Path(__file__).parent.parent / "experiments"

Floats = NDArray[np.float64]
Cells = Sequence[tuple[float | None, float]]
"""What runs together: budget and effective step of each method."""


# --- worlds --------------------------------------------------------------------------------------


class World(Protocol):
    """Clients who change."""

    @property
    def rounds(self) -> int:
        """How long it is looked at."""
        ...

    def plan(self, cells: Cells, *, rho: float = 1.0, rounds: int = 0, search: bool = False) -> Plan:
        """The cells as methods; for as many rounds as there are, unless it says fewer."""
        ...

    def least(self, seeds: Sequence[int]) -> Floats:
        """What is taken off the mean loss of each seed."""
        ...


def _methods(cells: Cells, rho: float, tau: int, server: float) -> list[dict[str, Any]]:
    """Entries of a plan, `buffered` or, where the server forgets, stationary."""
    noisy = {"mechanism": "buffered"} if rho == 1.0 else {}
    return [
        {
            "name": f"{epsilon} @ {step:g}",
            "step_size": step / (server * tau),
            "server_step_size": server,
            "forgetting": rho,
        }
        | ({"kind": "noise-free"} if epsilon is None else {"epsilon": epsilon, **noisy})
        for epsilon, step in cells
    ]


@dataclass(frozen=True)
class Synthetic:
    """Labels that turn from one model to another."""

    drift: str
    rounds: int = 1680
    learners: int = 20
    local_steps: int = 4

    def plan(self, cells: Cells, *, rho: float = 1.0, rounds: int = 0, search: bool = False) -> Plan:
        """The cells as methods; the search has other seeds and the same plan."""
        server = float(self.learners) ** 0.5
        return Plan(
            name="drift",
            learning={
                "rounds": rounds or self.rounds,
                "local_steps": self.local_steps,
                "learners": self.learners,
                "unbounded": rho < 1.0,
            },
            data={"dim": 20, "drift": self.drift, "held_out": self.learners},
            privacy={"epsilon": 1.0, "delta": 1e-3},
            run={"evaluate_every": rounds or self.rounds},
            methods=_methods(cells, rho, self.local_steps, server),
        )

    def least(self, seeds: Sequence[int]) -> Floats:
        """The mean of the least losses of all rounds: what is left is dynamic regret."""
        plan = self.plan([(None, 1.0)])
        return np.array([comparators(plan, seed).round_values.mean() for seed in seeds])


@dataclass(frozen=True)
class Recorded:
    """A public stream in its own order."""

    name: str

    @property
    def _tables(self) -> dict[str, Any]:
        text = (EXPERIMENTS / f"streams_{self.name}.toml").read_text()
        return tomllib.loads(text.split("[[methods]]")[0])

    @property
    def rounds(self) -> int:
        """As reported."""
        return int(self._tables["learning"]["rounds"])

    def plan(self, cells: Cells, *, rho: float = 1.0, rounds: int = 0, search: bool = False) -> Plan:
        """The cells as methods; the search is on the tuning half."""
        tables = self._tables
        tables["learning"] |= {"rounds": rounds or self.rounds, "unbounded": rho < 1.0}
        tables["data"]["source"] += "/tuning" if search else ""
        tables["run"] = {"evaluate_every": rounds or self.rounds, "regret": False}
        free, noisy = CLIP_NORMS[self.name]
        methods = [
            entry | {"clip_norm": free if budget is None else noisy}
            for entry, (budget, _) in zip(_methods(cells, rho, 1, 1.0), cells, strict=True)
        ]
        return Plan(**tables, methods=methods)

    def least(self, seeds: Sequence[int]) -> Floats:
        """Nothing: a round has too few records for a least loss that says anything."""
        return np.zeros(len(seeds))


WORLDS: dict[str, World] = {
    **{drift: Synthetic(drift) for drift in DRIFTS},
    **{name: Recorded(name) for name in CLIP_NORMS},
}


# --- ways ----------------------------------------------------------------------------------------


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


def losses(plan: Plan, prepared: list[Prepared], seeds: Sequence[int], stream: Stream | None = None) -> Floats:
    """Prequential loss, (methods, seeds, rounds)."""
    simulation = Simulation(plan, prepared, seeds, stream=stream)
    try:
        while not simulation.done:
            simulation.advance()
    finally:
        simulation.close()
    return simulation.history["loss"].astype(np.float64)


def calibrated(plan: Plan) -> list[Prepared]:
    """The plan's methods; those that differ in their step alone share their noise."""
    known: dict[float | None, Prepared] = {}
    found = []
    for method in plan.methods:
        if method.epsilon not in known:
            known[method.epsilon] = prepare(plan, method)
        found.append(dataclasses.replace(known[method.epsilon], plan=method))
    return found


def with_new_noise(plan: Plan, prepared: Prepared, epochs: int) -> Prepared:
    """The same method with a fresh mechanism in every epoch, the noise measured out for that."""
    if prepared.factorization is None:
        return prepared
    horizon = plan.learning.rounds * prepared.steps
    fresh = doubling(horizon, first=horizon // epochs, growth=1)
    std, guarantee = calibrate(
        plan.budget_of(prepared.plan), fresh, plan.clip_norm_of(prepared.plan), clients_per_step=prepared.clients
    )
    return dataclasses.replace(prepared, factorization=fresh, noise_std=std, guarantee=guarantee)


Way = Callable[[World, Cells, Sequence[int], bool], Floats]
"""Losses of cells in a world for some seeds, in the search or not."""


def constant_step(world: World, cells: Cells, seeds: Sequence[int], search: bool) -> Floats:
    """One mechanism for the whole horizon."""
    plan = world.plan(cells, search=search)
    return losses(plan, calibrated(plan), seeds)


def forgetting(rho: float) -> Way:
    """A server that forgets, with noise without an end."""

    def way(world: World, cells: Cells, seeds: Sequence[int], search: bool) -> Floats:
        plan = world.plan(cells, rho=rho, search=search)
        return losses(plan, calibrated(plan), seeds)

    return way


def new_noise(world: World, cells: Cells, seeds: Sequence[int], search: bool) -> Floats:
    """A fresh mechanism in each epoch; the model goes on."""
    plan = world.plan(cells, search=search)
    fresh = {p.plan.epsilon: with_new_noise(plan, p, EPOCHS) for p in calibrated(plan)}
    prepared = [dataclasses.replace(fresh[m.epsilon], plan=m) for m in plan.methods]
    return losses(plan, prepared, seeds)


def from_the_start(world: World, cells: Cells, seeds: Sequence[int], search: bool) -> Floats:
    """A fresh mechanism and a fresh model in each epoch."""
    stream = stream_of(world.plan(cells, search=search))
    short = world.plan(cells, rounds=world.rounds // EPOCHS, search=search)
    prepared = calibrated(short)
    firsts = range(0, world.rounds, world.rounds // EPOCHS)
    return np.concatenate([losses(short, prepared, seeds, Window(stream, first)) for first in firsts], axis=-1)


def ways() -> dict[str, Way]:
    """By name."""
    return {
        "constant step": constant_step,
        f"new noise, {EPOCHS} epochs": new_noise,
        f"from the start, {EPOCHS} epochs": from_the_start,
        **{f"forgetting {rho:g}": forgetting(rho) for rho in FORGETTING},
    }


# --- the study -----------------------------------------------------------------------------------


def study(worlds: dict[str, World]) -> dict[str, Any]:
    """By world, way and budget: the step that the search chose, and every seed's figure with it."""
    found: dict[str, Any] = {}
    for name, world in worlds.items():
        least = world.least(SEEDS)
        found[name] = {}
        for label, way in ways().items():
            grid = [(budget, step) for budget in BUDGETS for step in STEPS]
            tried = way(world, grid, SEARCH_SEEDS, True).mean(axis=(1, 2))
            tried = np.where(np.isfinite(tried), tried, np.inf).reshape(len(BUDGETS), len(STEPS))
            cells = [(b, STEPS[i]) for b, i in zip(BUDGETS, tried.argmin(axis=1), strict=True)]
            seen = way(world, cells, SEEDS, False).mean(axis=-1) - least
            found[name][label] = {
                budget_name(budget): {"figures": figures.tolist(), "step": step}
                for (budget, step), figures in zip(cells, seen, strict=True)
            }
    return found


def budget_name(budget: float | None) -> str:
    """For tables."""
    return "no noise" if budget is None else f"ε = {budget:g}"


def compared(found: dict[str, Any], world: str, way: str, budget: str) -> tuple[float, float]:
    """Mean difference to the constant step, seed by seed, and its standard error."""
    own, usual = (np.array(found[world][w][budget]["figures"]) for w in (way, "constant step"))
    apart = own - usual
    return float(apart.mean()), float(apart.std(ddof=1) / np.sqrt(len(apart)))


def table(found: dict[str, Any]) -> str:
    """Markdown: of the constant step the figure, of the others the difference; the step behind."""
    budgets = [budget_name(budget) for budget in BUDGETS]
    others = [way for way in ways() if way != "constant step"]
    lines = [
        "| world | budget | constant step | " + " | ".join(others) + " |",
        "| --- | --- |" + " ---: |" * (len(others) + 1),
    ]
    for world, by_way in found.items():
        for budget in budgets:
            usual = by_way["constant step"][budget]
            cells = [f"{np.mean(usual['figures']):.3f} ({usual['step']:g})"]
            for way in others:
                apart, error = compared(found, world, way, budget)
                cells.append(f"{apart:+.4f} ± {error:.4f} ({by_way[way][budget]['step']:g})")
            lines.append(f"| {world} | {budget} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def every_seed(found: dict[str, Any]) -> str:
    """CSV: a line a world, way, budget and seed."""
    lines = ["world,way,budget,step,seed,figure"]
    for world, by_way in found.items():
        for way, by_budget in by_way.items():
            for budget, each in by_budget.items():
                head = f'{world},"{way}",{budget},{each["step"]:g}'
                lines += [f"{head},{seed},{x:.6f}" for seed, x in enumerate(each["figures"])]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder for numbers and figure")
    parser.add_argument("--world", choices=WORLDS, action="append", help="default: all")
    options = parser.parse_args()
    began = time.perf_counter()
    found: dict[str, Any] = {}
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.world or WORLDS:
        found |= study({name: WORLDS[name]})
        write_file(options.out / "drift.csv", every_seed(found))
        print(f"{name}: after {time.perf_counter() - began:.0f} s", flush=True)
    print(table(found))
    differences = {
        world: {budget_name(b): {way: compared(found, world, way, budget_name(b)) for way in ways()} for b in BUDGETS}
        for world in found
    }
    draw(differences, options.out / "drift.png")


if __name__ == "__main__":
    main()
