"""Pictures of the comparisons from their stored curves: `python -m experiments.protocol.figures docs/images`."""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from veilstream.colours import colour_of
from veilstream.research.error_figure import save_figure
from veilstream.research.learning_figure import legend_below, new_figure

CURVES = Path(__file__).parents[2] / "docs" / "results" / "comparisons-curves.csv"
RULES = {"learner's share": "#E69F00", "noisy count": "#CC79A7", "last label": "#56B4E9"}
METHODS = ("noise-free", "independent", "tree", "buffered")
STREAMS = ("electricity", "covertype", "flights", "health")
Curves = dict[tuple[str, str, str], list[tuple[float, float, float]]]


def curves() -> Curves:
    """(Share of the run, mean, standard deviation) by study, method and ε, where nothing is held."""
    found: Curves = defaultdict(list)
    with CURVES.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if not row["held"]:
                values = float(row["share"]), float(row["accuracy"]), float(row["std"])
                found[row["study"], row["method"], row["epsilon"]].append(values)
    return found


def panel(axes: Any, found: Curves, study: str, epsilon: str, rules: Sequence[str]) -> None:
    """Methods at a budget, those without noise, and labels alone."""
    for method in (*rules, *METHODS):
        own = found.get((study, method, epsilon)) or found.get((study, method, ""))
        if not own:
            continue
        share, mean, std = np.array(own).T
        style: dict[str, Any] = {"color": RULES.get(method, "black"), "linestyle": "-." if method in RULES else ":"}
        if method in METHODS[1:]:
            style = {"color": colour_of(method), "linestyle": "--" if method == "independent" else "-"}
        middle = share - share[0] / 2  # of each part
        axes.plot(middle, mean, linewidth=1.4, label=method, **style)
        axes.fill_between(middle, mean - std, mean + std, color=style["color"], alpha=0.15, lw=0)
    axes.grid(visible=True, alpha=0.2)


def streams(found: Curves) -> Any:
    """A row for each stream, a column for each budget."""
    budgets = ("0.5", "2", "8")
    figure = new_figure(13.6, 11.8)
    axes = figure.subplots(len(STREAMS), len(budgets), squeeze=False, sharex=True, sharey="row")
    for line, study in zip(axes, STREAMS, strict=True):
        for place, epsilon in zip(line, budgets, strict=True):
            panel(place, found, study, epsilon, tuple(RULES))
            place.set_title(f"{study}, ε = {epsilon} (simulated)", fontsize="medium")
        line[0].set_ylabel("prequential accuracy")
    for place in axes[-1]:
        place.set_xlabel("share of the stream")
    legend_below(figure, axes.flat)
    return figure


def first_page(found: Curves) -> Any:
    """A real stream and MNIST at ε = 2: accuracy on the clients met next."""
    figure = new_figure(10.0, 4.4)
    axes = figure.subplots(1, 2)
    for place, (study, title) in zip(
        axes, (("covertype", "covertype (δ = 1e-5)"), ("edge", "MNIST (δ = 1e-3)")), strict=True
    ):
        panel(place, found, study, "2", ("learner's share", "noisy count"))
        place.set_title(f"{title}, ε = 2, simulated", fontsize="medium")
        place.set_xlabel("share of the clients met")
    axes[0].set_ylabel("accuracy on the clients met next")
    legend_below(figure, axes)
    return figure


def main(folder: Path) -> None:
    """Write both pictures."""
    found = curves()
    for name, figure in (("streams", streams(found)), ("private-learning", first_page(found))):
        save_figure(figure, folder / f"{name}.png", dpi=100)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
