"""Table and figure of `veilstream reproduce streams`, from run folders alone: prequential, by budget."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.files import write_file
from veilstream.research.error_figure import save_figure
from veilstream.research.learning_figure import draw_curves, legend_below, new_figure
from veilstream.runs.folder import Run

Floats = NDArray[Any]
WINDOWS = 40  # Points of a curve: each is the average over a fortieth of the rounds
_STYLES = {"majority": "#E69F00", "no change": "#56B4E9", "frozen": "#999933"}


@dataclass(frozen=True)
class StreamRow:
    """One line of the table."""

    stream: str  # The run folder's name
    method: str
    epsilon: float | None  # None without privacy
    accuracy: float
    accuracy_std: float  # Over seeds
    loss: float
    loss_std: float


def stream_rows(runs: Sequence[Run]) -> list[StreamRow]:
    """Averages over all rounds: baselines first, then methods in the plan's order."""
    rows: list[StreamRow] = []
    for run in runs:
        summary = run.summary
        accuracy, loss = run.baselines("prequential_accuracy"), run.baselines("loss")
        for name, right in accuracy.items():
            means = float(np.nanmean(right)), float(np.nanmean(loss[name]))
            rows.append(StreamRow(run.path.name, name, None, means[0], 0.0, means[1], 0.0))
        for name, method in summary["methods"].items():
            final, promise = method["final"], method["guarantee"]
            epsilon = promise["epsilon"] if promise else None
            right, lost = final["prequential_accuracy"], final["average_loss"]
            figures = right["mean"], right["std"], lost["mean"], lost["std"]
            rows.append(StreamRow(run.path.name, name.partition(" @ ")[0], epsilon, *figures))
    return rows


def write_stream_tables(rows: Sequence[StreamRow], folder: Path) -> list[Path]:
    """streams.csv with every figure, streams.md with one table for each stream."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = list(StreamRow.__dataclass_fields__)
    writer.writerow(names)
    for row in rows:
        writer.writerow(["" if (v := getattr(row, n)) is None else v for n in names])
    text = "\n".join(_markdown(name, rows) for name in dict.fromkeys(r.stream for r in rows))
    for name, content in (("streams.csv", out.getvalue()), ("streams.md", text)):
        write_file(folder / name, content, shared=True)
    return [folder / "streams.csv", folder / "streams.md"]


def _markdown(stream: str, rows: Sequence[StreamRow]) -> str:
    own = [row for row in rows if row.stream == stream]
    budgets = sorted({row.epsilon for row in own if row.epsilon is not None})
    head = ["", *(f"ε = {e:g}, accuracy" for e in budgets), *(f"ε = {e:g}, loss" for e in budgets)]
    lines = [f"**{stream}**", "", "| " + " | ".join(head) + " |"]
    lines.append("| --- |" + " ---: |" * (2 * len(budgets)))
    for name in dict.fromkeys(row.method for row in own):
        mine = {row.epsilon: row for row in own if row.method == name}
        found = [mine.get(e) or mine.get(None) for e in budgets]
        cells = [f"{r.accuracy:.3f}{_spread(r.accuracy_std, r)}" if r else "" for r in found]
        cells += [f"{r.loss:.3f}{_spread(r.loss_std, r)}" if r else "" for r in found]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _spread(std: float, row: StreamRow) -> str:
    return f" ± {std:.3f}" if row.epsilon is not None else ""


def draw_streams(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Accuracy over time: a row for each stream, a column for each budget; returns the files."""
    budgets = sorted(
        {m["guarantee"]["epsilon"] for run in runs for m in run.summary["methods"].values() if m["guarantee"]}
    )
    figure = new_figure(4.4 * len(budgets) + 0.6, 2.9 * len(runs) + 0.4)
    axes = figure.subplots(len(runs), len(budgets), squeeze=False, sharex="row", sharey="row")
    for line, run in zip(axes, runs, strict=True):
        summary = run.summary
        at, curves = _windows(run.history("prequential_accuracy"))
        _, beside = _windows(run.baselines("prequential_accuracy"))
        for panel, epsilon in zip(line, budgets, strict=True):
            names = [
                name
                for name, m in summary["methods"].items()
                if not m["guarantee"] or m["guarantee"]["epsilon"] == epsilon
            ]
            for name, values in beside.items():
                panel.plot(at, values[0], color=_STYLES[name], linewidth=1, alpha=0.8, label=name)
            draw_curves(panel, at, curves, names, summary)
            panel.set_title(f"{run.path.name}, ε = {epsilon:g} (simulated)", fontsize="medium")
        line[0].set_ylabel("prequential accuracy")
    for panel in axes[-1]:
        panel.set_xlabel("round r")
    legend_below(figure, axes.flat)
    paths = [folder / "streams.png", folder / "streams.svg"]
    for path in paths:
        save_figure(figure, path, dpi=100)
    return paths


def _windows(values: dict[str, Any]) -> tuple[Floats, dict[str, Floats]]:
    rounds = next(iter(values.values())).shape[1]
    ends = np.unique(np.linspace(0, rounds, min(WINDOWS, rounds) + 1).astype(int))
    spans = list(pairwise(ends))
    return ends[1:], {name: np.stack([_mean(own[:, a:b]) for a, b in spans], axis=1) for name, own in values.items()}


def _mean(own: Floats) -> Floats:
    there = ~np.isnan(own)
    total = np.where(there, own, 0.0).sum(axis=1)
    count = there.sum(axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
