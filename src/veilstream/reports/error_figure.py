"""The error of prefix sums over time, one line per mechanism."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from veilstream.errors import InputError, MissingExtra
from veilstream.reports.comparison import Comparison

__all__ = ["draw_error_over_time"]

# Okabe and Ito's colours, told apart by nearly everyone; independent noise is always grey.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#000000")
_FORMATS = (".png", ".svg", ".pdf")


def draw_error_over_time(comparison: Comparison, path: Path) -> Path:
    """Draw and save; the format follows from the file's ending (.png, .svg or .pdf)."""
    if path.suffix.lower() not in _FORMATS:
        raise InputError(
            "figure", str(path), "a name ending in .png, .svg or .pdf", "try error.png"
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "figures", "drawing a figure") from error

    setting = comparison.setting
    figure = Figure(figsize=(8.0, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ends = np.arange(setting.local_steps, setting.horizon + 1, setting.local_steps)
    colours = iter(_COLOURS * 2)
    for row in comparison.rows:
        plain = row.mechanism == "independent"
        axes.plot(
            ends / setting.local_steps,
            row.error_over_time[ends - 1],
            color="0.5" if plain else next(colours),
            linestyle="--" if plain else "-",
            linewidth=2.2 if row is comparison.recommended else 1.2,
            label=f"{row.mechanism} ({row.relative_to_independent:.3g}x)",
        )
    axes.set_yscale("log")
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
    axes.legend(title="mechanism (error relative to independent)", fontsize="small", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path
