"""What a run shows: accuracy and loss over rounds, a panel per budget, drawn from its folder alone.

Every band is mean ± one standard deviation over seeds. Methods without privacy are in every panel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from veilstream.errors import MissingExtra
from veilstream.plans.run_folder import Run
from veilstream.reports.colours import colour_of
from veilstream.reports.error_figure import save_figure

__all__ = ["draw_curves", "draw_run", "new_figure"]


def draw_run(run: Run, *, name: str = "learning") -> list[Path]:
    """Save ``name``.png and .svg into the run's folder."""
    summary = run.summary
    panels = _panels(summary)
    classifies = any(m["final"]["accuracy"] for m in summary["methods"].values())
    rows = 2 if classifies else 1
    figure = new_figure(5.2 * len(panels) + 0.6, 3.6 * rows)
    axes = figure.subplots(rows, len(panels), squeeze=False, sharex=True, sharey="row")
    losses = run.history("loss")
    for column, (title, names) in enumerate(panels.items()):
        if classifies:
            rounds, accuracy = run.held_out_accuracy()
            draw_curves(axes[0][column], np.array(rounds), accuracy, names, summary)
            axes[0][column].set_title(title, fontsize="medium")
        below = axes[-1][column]
        running = {
            n: np.nancumsum(v, axis=1) / np.maximum(np.cumsum(~np.isnan(v), axis=1), 1)
            for n, v in losses.items()
        }
        draw_curves(below, np.arange(1, summary["rounds"] + 1), running, names, summary)
        below.set_xlabel("round r")
        below.set_yscale("log")
        if not classifies:
            below.set_title(title, fontsize="medium")
    if classifies:
        axes[0][0].set_ylabel("accuracy of the published model, held out")
    axes[-1][0].set_ylabel(_loss_label(summary))
    for panel in axes[0]:
        panel.legend(fontsize="small")
    paths = [run.path / f"{name}.png", run.path / f"{name}.svg"]
    for path in paths:
        save_figure(figure, path, dpi=100)
    return paths


def new_figure(width: float, height: float) -> Any:
    """An empty figure that no window knows of."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "figures", "drawing a figure") from error

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _loss_label(summary: dict[str, Any]) -> str:
    compared = summary["comparators"]
    if compared and compared["separable_rounds"] == 1.0:
        return (
            "average loss so far = dynamic regret per step\n(every round is separable: best loss 0)"
        )
    return "average prequential loss so far"


def _panels(summary: dict[str, Any]) -> dict[str, list[str]]:
    """Names per panel: methods of one budget and accounting, with the unprotected ones."""
    free = [n for n, m in summary["methods"].items() if m["guarantee"] is None]
    panels: dict[str, list[str]] = {}
    for name, method in summary["methods"].items():
        promise = method["guarantee"]
        if promise:
            title = (
                f"({promise['epsilon']:g}, {promise['delta']:g})-LDP, simulated, "
                f"{'the paper’s' if promise['accounting'] == 'zcdp' else 'exact'} accounting"
            )
            panels.setdefault(title, [*free]).append(name)
    return panels or {"no privacy": free}


def draw_curves(
    axes: Any, rounds: Any, values: dict[str, Any], names: list[str], summary: dict[str, Any]
) -> None:
    """Mean and band of some methods; noise-free in black, not private dotted."""
    free = iter((":", (0, (1, 4)), "-."))
    for name in names:
        method = summary["methods"][name]
        if method["mechanism"] is None:
            style: dict[str, Any] = {"color": "black", "linestyle": next(free, ":")}
        else:
            plain = method["mechanism"] == "independent"
            style = {"color": colour_of(method["mechanism"]), "linestyle": "--" if plain else "-"}
            if method["guarantee"] is None:
                style["linestyle"] = ":"  # noise that protects no one
        mean, std = (
            values[name].mean(axis=0),
            values[name].std(axis=0, ddof=min(1, len(values[name]) - 1)),
        )
        label = name.split(" @")[0]
        axes.plot(rounds, mean, linewidth=1.4, label=label, **style)
        axes.fill_between(rounds, mean - std, mean + std, color=style["color"], alpha=0.15, lw=0)
    axes.grid(visible=True, alpha=0.2)
