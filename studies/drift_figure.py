"""The figure of `studies.drift`: where each way wins against a constant step."""

from __future__ import annotations

from pathlib import Path

from veilstream.colours import colour_of
from veilstream.research.error_figure import save_figure

__all__ = ["draw"]

Differences = dict[str, dict[str, dict[str, tuple[float, float]]]]
"""By world, budget and way: mean difference to the constant step, and its standard error."""

_COLOURS = [colour_of(name) for name in ("buffered", "optimal", "tree", "toeplitz", "independent")]
_MARKERS = "osD^v"


def draw(differences: Differences, path: Path) -> None:
    """One panel a budget, one row a world, one mark a way with two standard errors.

    To the left of zero a way is better than the constant step. The scale is linear near zero and
    logarithmic beyond 0.003.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    worlds = list(differences)
    budgets = list(differences[worlds[0]])
    ways = [way for way in differences[worlds[0]][budgets[0]] if way != "constant step"]
    figure = Figure(figsize=(12.5, 1.2 + 0.75 * len(worlds)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(budgets), sharey=True, squeeze=False)[0]
    for axes, budget in zip(panels, budgets, strict=True):
        axes.axvline(0.0, color="0.4", linewidth=1.0)
        for i, way in enumerate(ways):
            seen = [differences[world][budget][way] for world in worlds]
            heights = [row + 0.6 * (i / max(1, len(ways) - 1) - 0.5) for row in range(len(worlds))]
            axes.errorbar(
                [mean for mean, _ in seen],
                heights,
                xerr=[2.0 * error for _, error in seen],
                fmt=_MARKERS[i % len(_MARKERS)],
                color=_COLOURS[i % len(_COLOURS)],
                label=way,
                markersize=5,
                elinewidth=1.0,
            )
        for row in range(1, len(worlds)):
            axes.axhline(row - 0.5, color="0.9", linewidth=0.8)
        axes.set_xscale("symlog", linthresh=3e-3)
        axes.set_title(budget)
        axes.set_xlabel("loss above that of the constant step")
    panels[0].set_yticks(range(len(worlds)), worlds)
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    save_figure(figure, path, dpi=130)
