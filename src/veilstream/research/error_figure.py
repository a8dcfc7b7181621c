"""The error of prefix sums over time, one line per mechanism."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np

from veilstream.colours import colour_of
from veilstream.errors import InputError, MissingExtra
from veilstream.files import write_file
from veilstream.plans.comparison import Comparison

_FORMATS = (".png", ".svg", ".pdf")


def check_figure_path(path: Path) -> None:
    """Refuse a path that could not be written, before any work is done."""
    if path.suffix.lower() not in _FORMATS:
        raise InputError("figure", str(path), "a name ending in .png, .svg or .pdf", "try error.png")
    if path.is_dir():
        raise InputError("figure", str(path), "a file, not a folder", "name a file in it")
    inside = next(parent for parent in path.absolute().parents if parent.exists())
    if not inside.is_dir() or not os.access(inside, os.W_OK):
        raise InputError("figure", str(path), "in a folder that can be written", "try error.png")


def draw_error_over_time(comparison: Comparison, path: Path) -> Path:
    """Draw and save, whole or not at all; the file's ending gives the format."""
    check_figure_path(path)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter
    except ImportError as error:
        raise MissingExtra("matplotlib", "figures", "drawing a figure") from error

    setting = comparison.setting
    figure = Figure(figsize=(9.5, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ends = np.arange(setting.local_steps, setting.horizon + 1, setting.local_steps)
    for row in sorted(comparison.rows, key=lambda row: -row.error_published):
        chosen = row is comparison.recommended
        axes.plot(
            ends / setting.local_steps,
            row.error_over_time[ends - 1],
            color=colour_of(row.mechanism),
            linestyle="--" if row.mechanism == "independent" else "-",
            linewidth=2.4 if chosen else 1.0,
            label=f"{row.title}  {row.relative_to_independent:.3g}x{' *' if chosen else ''}",
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.set_xlabel("round r")
    axes.set_ylabel("noise std in the averaged prefix sum, per coordinate")
    budget = setting.budget
    axes.set_title(
        f"Noise that reaches the released model at ({budget.epsilon:g}, {budget.delta:g})-LDP\n"
        f"R = {setting.rounds}, τ = {setting.local_steps}, n = {setting.learners}, "
        f"clip norm {setting.clip_norm:g}, {setting.accounting.value} accounting",
        fontsize="medium",
    )
    axes.grid(visible=True, which="both", alpha=0.2)
    figure.legend(
        *axes.get_legend_handles_labels(),
        title="noise in what is published,\nrelative to independent\n(* recommended)",
        loc="outside right upper",
        fontsize="small",
        title_fontsize="small",
    )
    save_figure(figure, path, dpi=150)
    return path


def save_figure(figure: Any, path: Path, dpi: int) -> None:
    """Save a matplotlib figure, whole or not at all."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=dpi, format=path.suffix.lower().removeprefix("."))
    write_file(path, drawn.getvalue(), shared=True)
