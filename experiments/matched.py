"""Noise made for what is published against noise made for running sums, in pairs.

    python experiments/matched.py --out docs/results

For every task and both mechanisms that can be made for a workload (`optimal`, `buffered`) two
methods differ in nothing but `objective = "published"`. Each runs through one grid of steps on
other data (synthetic: seeds from 1000; streams: the tuning half). Then, on the reported data and
ten seeds, both run at the best step of the one, at that of the other, and each at its own. A
difference is matched minus prefix, seed by seed; its standard error is over the ten seeds.

`OUT/matched.csv` has every seed, `OUT/matched-search.csv` the grid.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import time
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from veilstream.plans.plan import Plan
from veilstream.plans.prepare import Prepared, prepare
from veilstream.simulation.engine import Simulation

MECHANISMS = ("optimal", "buffered")
SEARCH_SEEDS = tuple(range(1000, 1005))
SEEDS = tuple(range(10))
MEASURES = ("loss", "accuracy", "late loss", "late accuracy")
"""Of the published model, prequential: over all rounds, and over the last tenth of them."""
FOLDER = Path(__file__).parent


class Arm(NamedTuple):
    """One of the methods that are compared."""

    mechanism: str
    interior_weight: float
    """What noise in unpublished models counts for; 0 stands for noise made for running sums."""

    @property
    def made_for(self) -> str:
        """For tables."""
        if not self.interior_weight:
            return "running sums"
        return f"published, interior {self.interior_weight:g}"

    @property
    def setting(self) -> dict[str, Any]:
        """What it has of its own in a plan."""
        own: dict[str, Any] = {"mechanism": self.mechanism}
        if self.interior_weight:
            own["objective"] = "published"
        return own


INTERIOR_WEIGHTS = (0.0, 0.1)
ARMS = tuple(Arm(*pair) for pair in itertools.product(MECHANISMS, INTERIOR_WEIGHTS))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A task, what its server publishes, and the grid of steps."""

    tables: dict[str, Any]
    published: dict[str, Any]
    clip_norm: float
    steps: tuple[float, ...]
    """Of the server and its learners together: x moves by this much times the mean gradient."""

    def plan(self, entries: Iterable[tuple[Arm, float]], *, search: bool) -> Plan:
        """Arms at steps as the methods of one plan."""
        tables = dict(self.tables)
        source = tables["data"].get("source")
        if search and source:
            tables["data"] = tables["data"] | {"source": f"{source}/tuning"}
        rounds = tables["learning"]["rounds"]
        return Plan(
            **tables | {"run": {"evaluate_every": rounds, "regret": False}},
            methods=[
                {
                    "name": f"{arm.mechanism} for {arm.made_for} @ {step:g}",
                    "step_size": step,
                    "clip_norm": self.clip_norm,
                    **self.published,
                    **arm.setting,
                }
                for arm, step in entries
            ],
        )


def _stream(name: str) -> dict[str, Any]:
    """A plan of a real stream, without its methods."""
    head = (FOLDER / f"streams_{name}.toml").read_text().split("[[methods]]")[0]
    return tomllib.loads(head)


def _synthetic(epsilon: float, learning: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """Tables of a plan on made-up clients, 20 learners, 4 clients a step."""
    shared = {"rounds": 1000, "clients_per_step": 4, "learners": 20}
    return {"learning": shared | learning, "data": data, "privacy": {"epsilon": epsilon, "delta": 1e-3}}


_DOUBLING = tuple(0.1 * 2.0**k for k in range(9))
COMPARISONS = {
    "logistic": Comparison(_synthetic(0.5, {}, {"dim": 100}), {"averaging": 3.0}, 0.2, _DOUBLING),
    "covertype": Comparison(_stream("covertype"), {"newest_weight": 0.05}, 0.3, tuple(0.5 * 2.0**k for k in range(7))),
    "electricity": Comparison(
        _stream("electricity"), {"newest_weight": 0.05}, 0.3, tuple(0.5 * 2.0**k for k in range(7))
    ),
    "least squares": Comparison(
        _synthetic(2.0, {"task": "least_squares"}, {"dim": 20, "drift": "seasonal"}),
        {"forgetting": 0.99},
        1.0,
        _DOUBLING,
    ),
    "logistic, forgetting": Comparison(
        _synthetic(2.0, {}, {"dim": 20, "drift": "seasonal"}), {"forgetting": 0.99}, 0.2, _DOUBLING
    ),
}
"""On real streams and under drift a server publishes what follows: an exponential average, or a
model that forgets. (0.5, 1e-3), (2, 1e-5), (2, 1e-5), (2, 1e-3), (2, 1e-3)."""

Figures = dict[str, NDArray[np.float64]]


def measured(
    comparison: Comparison, entries: Sequence[tuple[Arm, float]], seeds: Sequence[int], *, search: bool
) -> list[Figures]:
    """Every measure of every entry, (seeds,) each."""
    plan = comparison.plan(entries, search=search)
    noise: dict[Arm, Prepared] = {}  # which knows no step size
    prepared = []
    for (arm, _), method in zip(entries, plan.methods, strict=True):
        if arm not in noise:
            noise[arm] = prepare(plan, method)
        prepared.append(dataclasses.replace(noise[arm], plan=method))
    simulation = Simulation(plan, prepared, seeds)
    try:
        while not simulation.done:
            simulation.advance()
    finally:
        simulation.close()
    seen = {name: simulation.history[name].astype(np.float64) for name in ("loss", "accuracy")}
    late = plan.learning.rounds - plan.learning.rounds // 10
    return [
        {name: seen[name][i].mean(axis=1) for name in seen}
        | {f"late {name}": seen[name][i][:, late:].mean(axis=1) for name in seen}
        for i in range(len(entries))
    ]


def searched(comparison: Comparison) -> dict[Arm, dict[float, float]]:
    """Mean published loss of every arm at every step, on other data; infinite if it diverged."""
    entries = list(itertools.product(ARMS, comparison.steps))
    figures = measured(comparison, entries, SEARCH_SEEDS, search=True)
    found: dict[Arm, dict[float, float]] = {arm: {} for arm in ARMS}
    for (arm, step), each in zip(entries, figures, strict=True):
        mean = float(each["loss"].mean())
        found[arm][step] = mean if np.isfinite(mean) else np.inf
    return found


Row = dict[str, Any]


def rows_of(name: str, comparison: Comparison, grid: dict[Arm, dict[float, float]]) -> list[Row]:
    """Both arms of a mechanism at the steps that either found best, every seed."""
    best = {arm: min(steps, key=steps.__getitem__) for arm, steps in grid.items()}
    entries = sorted({(arm, best[other]) for arm in ARMS for other in ARMS if other.mechanism == arm.mechanism})
    rows = []
    for (arm, step), each in zip(entries, measured(comparison, entries, SEEDS, search=False), strict=True):
        for i, seed in enumerate(SEEDS):
            rows.append(
                {
                    "task": name,
                    "mechanism": arm.mechanism,
                    "noise for": arm.made_for,
                    "step": step,
                    "own best step": step == best[arm],
                    "seed": seed,
                    **{m: round(float(each[m][i]), 6) for m in MEASURES},
                }
            )
    return rows


def paired(rows: Iterable[Row], measure: str) -> dict[tuple[str, ...], tuple[float, ...]]:
    """Prefix, matched, mean difference and its standard error of one measure.

    By task, mechanism, what noise was made for and whose step: "one" is the best of noise for
    running sums, "other" that of the matched noise, and "own" gives each its best.
    """
    cells: dict[tuple[str, str, str], dict[float, dict[int, float]]] = {}
    own: dict[tuple[str, str, str], float] = {}
    for row in rows:
        key = row["task"], row["mechanism"], row["noise for"]
        cells.setdefault(key, {}).setdefault(row["step"], {})[row["seed"]] = row[measure]
        if row["own best step"]:
            own[key] = row["step"]
    found: dict[tuple[str, ...], tuple[float, ...]] = {}
    for made in cells:
        if made[2] == "running sums":
            continue
        prefix = (*made[:2], "running sums")
        for label, steps in {
            "one": (own[prefix], own[prefix]),
            "other": (own[made], own[made]),
            "own": (own[prefix], own[made]),
        }.items():
            usual, other = (
                np.array([cells[key][step][s] for s in SEEDS]) for key, step in zip((prefix, made), steps, strict=True)
            )
            apart = other - usual
            error = apart.std(ddof=1) / np.sqrt(len(apart))
            found[*made, label] = (float(usual.mean()), float(other.mean()), float(apart.mean()), float(error))
    return found


def table(rows: list[Row]) -> str:
    """Markdown: loss of both, and the paired differences of the measures."""
    lines = [
        "| task | mechanism | noise made for | step | loss | difference of loss "
        "| in the last tenth | of accuracy, points |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    seen = {measure: paired(rows, measure) for measure in MEASURES}
    for key, (prefix, matched, apart, error) in seen["loss"].items():
        late, right = seen["late loss"][key], seen["accuracy"][key]
        points = f"{100 * right[2]:+.2f} ± {100 * right[3]:.2f}" if np.isfinite(right[2]) else ""
        lines.append(
            f"| {' | '.join(key)} | {prefix:.4f}, {matched:.4f} | {apart:+.4f} ± {error:.4f} "
            f"| {late[2]:+.4f} ± {late[3]:.4f} | {points} |"
        )
    return "\n".join(lines)


def _write(path: Path, rows: list[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--task", choices=COMPARISONS, action="append", help="default: all")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    tried: list[Row] = []
    for name in options.task or COMPARISONS:
        began = time.monotonic()
        comparison = COMPARISONS[name]
        grid = searched(comparison)
        tried += [
            {"task": name, "mechanism": arm.mechanism, "noise for": arm.made_for, "step": step, "loss": loss}
            for arm, steps in grid.items()
            for step, loss in steps.items()
        ]
        _write(options.out / "matched-search.csv", tried)
        rows += rows_of(name, comparison, grid)
        _write(options.out / "matched.csv", rows)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
