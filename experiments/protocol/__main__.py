"""Command line: search, then report."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from experiments.protocol import tables
from experiments.protocol.labels import LabelWorld
from experiments.protocol.measure import NO_NOISE, Bench, Figures, windows
from experiments.protocol.search import Arm, Walk, search
from experiments.protocol.settings import Point
from experiments.protocol.studies import STUDIES, Study
from numpy.typing import NDArray

from veilstream.simulation.label_rules import RulesFigures


def value_of(figures: Figures, measure: str) -> float:
    """What the search makes small: mean loss, or mean error on held-out clients."""
    if measure == "loss":
        return float(figures.loss.mean())
    return 1.0 - float(figures.held_out.mean())


def run(name: str, study: Study, out: Path, seconds: float, *, unsettled: bool = False) -> None:
    """Search a study, report it, and store what was found."""
    began = time.monotonic()
    tell = partial(_tell, name, began)
    world = study.searched()
    bench = Bench(world, study.limits.total, study.mechanisms, study.places)
    known = tables.tried(tables.stored(out, "search", name))

    def measure(asked: Sequence[tuple[Arm, Point]]) -> Iterable[float]:
        return [value_of(figures, study.measure) for figures in bench(asked)]

    def step(walks: dict[Arm, Walk], text: str) -> None:
        tell(text)
        tables.store(out, "search", name, tables.tried_rows(walks))

    walks = search(
        study.arms(),
        study.coarse,
        study.limits,
        measure,
        deadline=began + seconds,
        step=step,
        known=known,
        gain=study.gain,
    )
    log = tables.log_rows(walks, len(world.seeds), world.learners)
    counts = noisy_counts(study, LabelWorld(world))
    tables.store(out, "log", name, [*log, *counts])
    settled = sum(not walk.unsettled for walk in walks.values())
    tell(f"{sum(len(w.found) for w in walks.values())} settings, {settled} of {len(walks)} arms settled")
    bench.close()
    if settled < len(walks) and not unsettled:
        return
    rows, curves = report(study, walks, {float(row["epsilon"]): int(row["clients"]) for row in counts})
    tables.store(out, "", name, rows)
    tables.store(out, "curves", name, curves)
    tell("reported")


def noisy_counts(study: Study, labels: LabelWorld) -> list[tables.Row]:
    """The best number of releases of the noisy count at each budget, with its part of the log."""
    found = []
    for epsilon in study.epsilons:
        sizes = {
            clients: float(np.mean([labels.noisy(seed, clients, epsilon).loss.mean() for seed in labels.world.seeds]))
            for clients in labels.sizes()
        }
        best = min(sizes, key=sizes.__getitem__)
        found.append(
            {
                "mechanism": "noisy count",
                "epsilon": f"{epsilon:g}",
                "held": "",
                "settings": len(sizes),
                "runs": len(sizes) * len(labels.world.seeds),
                "edges": "none",
                "found": f"{sizes[best]:.6g}",
                "releases": labels.world.total // best,
                "clients": best,
            }
        )
    return found


def report(study: Study, walks: dict[Arm, Walk], counts: dict[float, int]) -> tuple[list[tables.Row], list[tables.Row]]:
    """Every method at its best on the reported clients and seeds, and labels alone beside them; rows and curves."""
    whole = study.reported()
    total = study.limits.total
    rows: list[tables.Row] = []
    curves: dict[tuple[str, str, str], list[NDArray[np.float64]]] = {}

    def take(row: tables.Row, curve: NDArray[np.float64]) -> None:
        rows.append(row)
        curves.setdefault((row["method"], row["epsilon"], row["held"]), []).append(curve)

    chosen = [(arm, walk.best) for arm, walk in walks.items()]
    for first in range(0, len(whole.seeds), study.seeds_together):
        world = replace(whole, seeds=whole.seeds[first : first + study.seeds_together])
        places = max(sum((p.shape, a.mechanism) == (q.shape, b.mechanism) for b, q in chosen) for a, p in chosen)
        bench = Bench(world, total, study.mechanisms, places)
        for (arm, point), figures in zip(chosen, bench(chosen), strict=True):
            releases = point.releases(world.total)
            about = tables.setting(point, world.learners, total, releases)
            for row, curve in zip(_rows(arm, figures, world.seeds, about), figures.curve, strict=True):
                take(row, curve)
        bench.close()
        labels = LabelWorld(world)
        for seed in world.seeds:
            for rule, found in labels.without_noise(seed).items():
                constant = labels.held_out(seed) if rule == "majority" else math.nan
                take(_label_row(rule, 0.0, seed, found, constant), windows(found.accuracy))
            for epsilon, clients in counts.items():
                found = labels.noisy(seed, clients, epsilon)
                about = {"releases": world.total // clients, "clients": clients}
                take(_label_row("noisy count", epsilon, seed, found) | about, windows(found.accuracy))
    return rows, [row for name, each in curves.items() for row in _curve_rows(name, np.stack(each))]


def _curve_rows(name: tuple[str, str, str], each: NDArray[np.float64]) -> list[tables.Row]:
    mean, std, parts = each.mean(axis=0), each.std(axis=0, ddof=1), each.shape[1]
    return [
        dict(zip(("method", "epsilon", "held"), name, strict=True))
        | {"share": f"{(k + 1) / parts:.4f}", "accuracy": f"{mean[k]:.5f}", "std": f"{std[k]:.5f}"}
        for k in range(parts)
    ]


def _rows(arm: Arm, figures: Figures, seeds: Sequence[int], about: tables.Row) -> list[tables.Row]:
    method = "noise-free" if arm.mechanism == NO_NOISE else arm.mechanism
    return [
        {
            "method": method,
            "epsilon": f"{arm.epsilon:g}" if arm.epsilon else "",
            "held": tables.held_text(arm),
            "seed": seed,
            "loss": f"{figures.loss[place]:.5f}",
            "accuracy": f"{figures.accuracy[place]:.5f}",
            "held_out": "" if math.isnan(figures.held_out[place]) else f"{figures.held_out[place]:.5f}",
        }
        | about
        for place, seed in enumerate(seeds)
    ]


def _label_row(rule: str, epsilon: float, seed: int, found: RulesFigures, held_out: float = math.nan) -> tables.Row:
    return {
        "method": rule,
        "epsilon": f"{epsilon:g}" if epsilon else "",
        "held": "",
        "seed": seed,
        "loss": f"{float(np.nanmean(found.loss)):.5f}",
        "accuracy": f"{float(np.nanmean(found.accuracy)):.5f}",
        "held_out": "" if math.isnan(held_out) else f"{held_out:.5f}",
    }


def _tell(name: str, began: float, text: str) -> None:
    print(f"{name:22} {time.monotonic() - began:6.0f} s  {text}", flush=True)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Search every method with the same effort, then report")
    parser.add_argument("study", choices=STUDIES, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="a study's files; a stopped search goes on from them")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for each study's search")
    parser.add_argument("--unsettled", action="store_true", help="report even where the search has not ended")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.study:
        run(name, STUDIES[name], arguments.out, arguments.seconds, unsettled=arguments.unsettled)


if __name__ == "__main__":
    main()
