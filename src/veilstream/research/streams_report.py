"""Table and figure of `veilstream reproduce streams`, from run folders alone: prequential, by budget."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
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
_STYLES = {"majority": "#999933", "learner's share": "#E69F00", "last label": "#56B4E9", "noisy count": "#CC79A7"}
_OWN = "buffered"  # A noisy count is shown as often released as this method

Runs = Mapping[str, Sequence[Run]]
"""By stream: a run for each number of releases that some method chose."""


@dataclass(frozen=True)
class StreamRow:
    """One line of the table."""

    stream: str
    method: str
    epsilon: float | None  # None without privacy
    accuracy: float
    accuracy_std: float  # Over seeds
    loss: float
    loss_std: float
    releases: int


def by_stream(runs: Mapping[str, Run]) -> Runs:
    """Runs by the first part of their folders' names."""
    found: dict[str, list[Run]] = {}
    for folder, run in runs.items():
        found.setdefault(folder.partition("/")[0], []).append(run)
    return found


def stream_rows(runs: Runs) -> list[StreamRow]:
    """Averages over all rounds: labels alone first, then methods, by budget."""
    rows: list[StreamRow] = []
    for stream, parts in runs.items():
        rows += [_label_row(stream, name, None, parts[0]) for name in list(_STYLES)[:3]]
        private: list[StreamRow] = []
        for run in parts:
            summary = run.summary
            for name, method in summary["methods"].items():
                final, promise = method["final"], method["guarantee"]
                epsilon = promise["epsilon"] if promise else None
                kind = name.partition(" @ ")[0]
                right, lost = final["prequential_accuracy"], final["average_loss"]
                figures = right["mean"], right["std"], lost["mean"], lost["std"]
                row = StreamRow(stream, kind, epsilon, *figures, summary["rounds"])
                (rows if epsilon is None else private).append(row)
                if kind == _OWN:
                    private.append(_label_row(stream, "noisy count", epsilon, run))
        rows += sorted(private, key=lambda row: (row.epsilon or 0.0, _ORDER.index(row.method)))
    return rows


_ORDER = ("noisy count", "independent", "tree", "buffered", "optimal")


def _label_row(stream: str, name: str, epsilon: float | None, run: Run) -> StreamRow:
    stored = name if epsilon is None else f"{name} @ {epsilon:g}"
    right, lost = (np.nanmean(run.baselines(c)[stored], axis=1) for c in ("prequential_accuracy", "loss"))
    figures = right.mean(), _std(right), lost.mean(), _std(lost)
    accuracy, spread, loss, loss_spread = map(float, figures)
    return StreamRow(stream, name, epsilon, accuracy, spread, loss, loss_spread, run.summary["rounds"])


def _std(values: Floats) -> Any:
    return values.std(ddof=min(1, len(values) - 1))


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


def draw_streams(runs: Runs, folder: Path) -> list[Path]:
    """Accuracy over the stream: a row for each stream, a column for each budget; returns the files."""
    budgets = sorted({row.epsilon for row in stream_rows(runs) if row.epsilon is not None})
    figure = new_figure(4.4 * len(budgets) + 0.6, 2.9 * len(runs) + 0.4)
    axes = figure.subplots(len(runs), len(budgets), squeeze=False, sharex="row", sharey="row")
    for line, (stream, parts) in zip(axes, runs.items(), strict=True):
        for panel, epsilon in zip(line, budgets, strict=True):
            for run in parts:
                _draw_part(panel, run, epsilon, first=run is parts[0])
            panel.set_title(f"{stream}, ε = {epsilon:g} (simulated)", fontsize="medium")
        line[0].set_ylabel("prequential accuracy")
    for panel in axes[-1]:
        panel.set_xlabel("share of the stream")
    legend_below(figure, axes.flat)
    paths = [folder / "streams.png", folder / "streams.svg"]
    for path in paths:
        save_figure(figure, path, dpi=100)
    return paths


def _draw_part(panel: Any, run: Run, epsilon: float, *, first: bool) -> None:
    """The methods of a run that belong into this panel, and labels alone."""
    summary = run.summary
    at, curves = _windows(run.history("prequential_accuracy"))
    _, beside = _windows(run.baselines("prequential_accuracy"))
    names = [n for n, m in summary["methods"].items() if not m["guarantee"] or m["guarantee"]["epsilon"] == epsilon]
    shown = {name: name for name in list(_STYLES)[:3]} if first else {}
    if any(name.startswith(_OWN) for name in names):
        shown[f"noisy count @ {epsilon:g}"] = "noisy count"
    for stored, name in shown.items():
        panel.plot(at, beside[stored].mean(axis=0), color=_STYLES[name], linewidth=1, alpha=0.8, label=name)
    draw_curves(panel, at, curves, names, summary)


def _windows(values: dict[str, Any]) -> tuple[Floats, dict[str, Floats]]:
    rounds = next(iter(values.values())).shape[1]
    ends = np.unique(np.linspace(0, rounds, min(WINDOWS, rounds) + 1).astype(int))
    spans = list(pairwise(ends))
    return ends[1:] / rounds, {
        name: np.stack([_mean(own[:, a:b]) for a, b in spans], axis=1) for name, own in values.items()
    }


def _mean(own: Floats) -> Floats:
    there = ~np.isnan(own)
    total = np.where(there, own, 0.0).sum(axis=1)
    count = there.sum(axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
