"""Figures of `veilstream reproduce`: several runs side by side, drawn from their folders alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from veilstream.colours import colour_of
from veilstream.research.error_figure import save_figure
from veilstream.research.learning_figure import draw_curves, draw_run, legend_below, new_figure, plain_numbers
from veilstream.research.streams_report import by_stream, draw_streams
from veilstream.runs.folder import Run

_CNN_ROWS = {
    "": "one step size for all, the paper's accounting",
    "own step": "each with its own step size",
    "own step, exact": "own step size, exact accounting",
}


def draw_experiment(name: str, runs_by_folder: Mapping[str, Run], folder: Path) -> list[Path]:
    """Draw an experiment's runs into its folder; returns the files."""
    runs = list(runs_by_folder.values())
    if name == "logistic":
        return draw_run(runs[0])
    if name == "streams":
        return draw_streams(by_stream(runs_by_folder), folder)
    figure = {"cnn": _cnn, "clip": _clip, "beyond": _beyond, "fair": _fair}[name](runs)
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    for path in paths:
        save_figure(figure, path, dpi=100)
    return paths


def _cnn(runs: Sequence[Run]) -> Any:
    """A column per τ, a row per choice of step sizes and accounting."""
    summaries = [run.summary for run in runs]
    kinds: dict[str, list[str]] = {}
    for name in summaries[0]["methods"]:
        kinds.setdefault(name.partition(" @ ")[2], []).append(name)
    free = "noise-free @ own step"
    if "own step, exact" in kinds:
        kinds["own step, exact"].insert(0, free)
    figure = new_figure(4.6 * len(runs) + 0.4, 3.3 * len(kinds) + 0.3)
    axes = figure.subplots(len(kinds), len(runs), squeeze=False, sharey=True)
    for column, (run, summary) in enumerate(zip(runs, summaries, strict=True)):
        rounds, accuracy = run.held_out_accuracy()
        for row, (kind, names) in enumerate(kinds.items()):
            panel = axes[row][column]
            draw_curves(panel, np.array(rounds), accuracy, names, summary)
            tau = run.plan.learning.local_steps
            panel.set_title(f"τ = {tau}: {_CNN_ROWS.get(kind, kind)}", fontsize="small")
            panel.set_ylim(0, 1)
        axes[-1][column].set_xlabel("round r")
    for row in axes:
        row[0].set_ylabel("test accuracy of x^r")
    legend_below(figure, axes.flat)
    return figure


def _clip(runs: Sequence[Run]) -> Any:
    (run,) = runs
    summary = run.summary
    figure = new_figure(11.0, 4.2)
    left, right = figure.subplots(1, 2, sharey=True)
    lines: dict[str, list[tuple[float, list[float]]]] = {}
    loose = []
    for name, method in summary["methods"].items():
        kind, _, clip = name.partition(", clip ")
        if clip and method["final"]["accuracy"]:
            found = (float(clip), method["final"]["accuracy"]["seeds"])
            lines.setdefault(kind, []).append(found)
        elif not clip:
            loose.append(name)
    for kind, points in lines.items():
        at = [clip for clip, _ in points]
        mean = [float(np.mean(seeds)) for _, seeds in points]
        colour = "black" if kind == "noise-free" else colour_of(kind)
        left.plot(at, mean, color=colour, label=kind)
        for clip, seeds in points:
            left.plot([clip] * len(seeds), seeds, ".", color=colour, alpha=0.4, markersize=4)
    left.set_xscale("log")
    left.set_xlabel("clip norm B_g, enforced, with noise calibrated to it")
    left.set_ylabel("test accuracy of x^R")
    left.set_title("the promise kept: (2, 1e-3), the paper's accounting", fontsize="small")
    rounds, accuracy = run.held_out_accuracy()
    draw_curves(right, np.array(rounds), accuracy, loose, summary)
    right.set_xlabel("round r")
    right.set_title("NOT PRIVATE: noise calibrated for B_g = 1, gradients not clipped", fontsize="small")
    plain_numbers(left.xaxis)
    for panel in (left, right):
        panel.grid(visible=True, alpha=0.2)
    legend_below(figure, (left, right), columns=5)
    return figure


def _beyond(runs: Sequence[Run]) -> Any:
    """One line per method, grouped by run, every seed a dot."""
    rows: list[tuple[str, dict[str, Any]]] = []
    for run in runs:
        summary = run.summary
        rows += [
            (f"{run.plan.description}: {name}", method)
            for name, method in summary["methods"].items()
            if method["final"]["accuracy"]
        ]
    figure = new_figure(11.0, 0.3 * len(rows) + 1.2)
    axes = figure.subplots()
    for place, (_, method) in enumerate(rows):
        seeds = method["final"]["accuracy"]["seeds"]
        free = method["mechanism"] is None
        colour = "black" if free else colour_of(method["mechanism"])
        axes.plot(seeds, [-place] * len(seeds), "o", color=colour, alpha=0.5, markersize=4)
    axes.set_yticks([-i for i in range(len(rows))], [label for label, _ in rows], fontsize="small")
    axes.axvline(0.9, color="0.6", linewidth=1, linestyle=":")
    axes.set_xlabel("test accuracy of the last published model, every seed")
    axes.grid(visible=True, axis="x", alpha=0.2)
    return figure


def _fair(runs: Sequence[Run]) -> Any:
    """A panel per budget, one line per method and number of releases, every seed a dot."""
    rows: dict[float, list[tuple[str, str | None, list[float]]]] = {}
    budgets = {m["guarantee"]["epsilon"] for run in runs for m in run.summary["methods"].values() if m["guarantee"]}
    for run in runs:
        for name, method in run.summary["methods"].items():
            if method["mechanism"] is None:
                continue
            kind, given = name.partition(" @ ")[0], name.partition(", ")[2]
            label = f"{kind}, {run.plan.learning.rounds:,} {given or 'releases, its choice'}"
            row = (label, method["mechanism"], method["final"]["average_loss"]["seeds"])
            rows.setdefault(method["guarantee"]["epsilon"], []).append(row)
        for name, values in run.baselines("loss").items():
            kind, _, budget = name.partition(" @ ")
            label = f"{kind}, {run.plan.learning.rounds:,} releases" if budget else kind
            for place in [float(budget)] if budget else budgets:
                if budget or (run is runs[0] and kind == "learner's share"):
                    rows.setdefault(place, []).append((label, None, np.nanmean(values, axis=1).tolist()))
    figure = new_figure(11.0, 0.26 * max(map(len, rows.values()), default=1) + 1.4)
    panels = figure.subplots(1, len(rows), squeeze=False)[0]
    for panel, (epsilon, found) in zip(panels, sorted(rows.items(), reverse=True), strict=True):
        for place, (_, mechanism, seeds) in enumerate(found):
            colour = "#E69F00" if mechanism is None else colour_of(mechanism)
            panel.plot(seeds, [-place] * len(seeds), "o", color=colour, alpha=0.5, markersize=4)
            panel.plot(float(np.mean(seeds)), -place, "|", color=colour, markersize=14)
        places = [-place for place in range(len(found))]
        panel.set_yticks(places, [label for label, *_ in found], fontsize="small")
        panel.set_title(f"ε = {epsilon:g}", fontsize="small")
        panel.set_xlabel("average loss, every seed")
        panel.grid(visible=True, axis="x", alpha=0.2)
    return figure
