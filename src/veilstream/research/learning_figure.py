"""Accuracy and loss of a run over rounds, a panel per budget, drawn from its folder alone.

Every band is mean ± one standard deviation over seeds. Methods without privacy are in every panel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from veilstream.colours import COLOURS, colour_of
from veilstream.errors import MissingExtra
from veilstream.research.error_figure import save_figure
from veilstream.runs.folder import Run


def draw_run(run: Run, *, name: str = "learning") -> list[Path]:
    """Save ``name``.png and .svg into the run's folder."""
    summary = run.summary
    panels = _panels(summary)
    classifies = (run.path / "accuracy.csv").exists()
    rows = 2 if classifies else 1
    figure = new_figure(5.2 * len(panels) + 0.6, 3.6 * rows)
    axes = figure.subplots(rows, len(panels), squeeze=False, sharex=True, sharey="row")
    losses = run.history("loss")
    beside = {c: run.baselines(c) for c in ("loss", "prequential_accuracy")} if run.has_baselines else {}
    for column, (title, names) in enumerate(panels.items()):
        shown = _label_rules(beside.get("loss", {}), summary, names)
        if classifies:
            rounds, accuracy = run.held_out_accuracy()
            draw_curves(axes[0][column], np.array(rounds), accuracy, names, summary)
            _draw_rules(axes[0][column], beside.get("prequential_accuracy", {}), shown)
            axes[0][column].set_title(title, fontsize="medium")
        below = axes[-1][column]
        running = {n: _so_far(v) for n, v in losses.items()}
        draw_curves(below, np.arange(1, summary["rounds"] + 1), running, names, summary)
        _draw_rules(below, beside.get("loss", {}), shown)
        below.set_xlabel("round r")
        below.set_yscale("log")
        if not classifies:
            below.set_title(title, fontsize="medium")
        plain_numbers(below.yaxis)
    if classifies:
        axes[0][0].set_ylabel("held-out accuracy")
    axes[-1][0].set_ylabel(_loss_label(summary))
    legend_below(figure, axes.flat)
    paths = [run.path / f"{name}.png", run.path / f"{name}.svg"]
    for path in paths:
        save_figure(figure, path, dpi=100)
    return paths


_RULES = {"learner's share": "#E69F00", "noisy count": "#CC79A7"}
"""Of labels alone, those that a model must beat."""


def _label_rules(known: Mapping[str, Any], summary: dict[str, Any], names: Sequence[str]) -> list[str]:
    """The rules of a panel: each learner's label share, and the noisy count at the panel's budget."""
    budgets = {promise["epsilon"] for n in names if (promise := summary["methods"][n]["guarantee"])}
    wanted = ["learner's share", *(f"noisy count @ {epsilon:g}" for epsilon in budgets)]
    return [name for name in wanted if name in known]


def _draw_rules(axes: Any, values: Mapping[str, Any], shown: Sequence[str]) -> None:
    """Averages so far, dash-dotted: on the clients met, of losses and of shares that are right."""
    for name in shown:
        kind, mean = name.partition(" @ ")[0], _so_far(values[name]).mean(axis=0)
        axes.plot(np.arange(1, len(mean) + 1), mean, color=_RULES[kind], linestyle="-.", linewidth=1.2, label=kind)


def draw_panel(run: Run, path: Path) -> Path:
    """One panel for a page or a paper: held-out accuracy, or the average loss where nothing is classified.

    Shown are the methods that share the recommended one's budget and those without noise.
    """
    summary = run.summary
    names = next(n for n in _panels(summary).values() if summary["main_method"] in n)
    figure = new_figure(8.0, 4.2)
    axes = figure.subplots()
    if (run.path / "accuracy.csv").exists():
        rounds, accuracy = run.held_out_accuracy()
        draw_curves(axes, np.array(rounds), accuracy, names, summary)
        axes.set_ylabel("held-out accuracy of the published model")
    else:
        losses = {n: _so_far(values) for n, values in run.history("loss").items()}
        draw_curves(axes, np.arange(1, summary["rounds"] + 1), losses, names, summary)
        axes.set_yscale("log")
        plain_numbers(axes.yaxis)
        axes.set_ylabel("average prequential loss so far")
    axes.set_xlabel("round")
    promise = summary["methods"][summary["main_method"]]["guarantee"]
    if promise:
        axes.set_title(
            f"every client has ({promise['epsilon']:g}, {promise['delta']:g})-local differential privacy (simulated)",
            fontsize="medium",
            loc="left",
        )
    legend_beside(figure, [axes])
    save_figure(figure, path, dpi=150)
    return path


def draw_comparison(lines: Sequence[tuple[str, Run, str]], path: Path) -> Path:
    """Draw several runs in one panel, a line each: its label, its folder and its method."""
    figure = new_figure(8.0, 4.2)
    axes = figure.subplots()
    accurate = all((run.path / "accuracy.csv").exists() for _, run, _ in lines)
    for place, (label, run, method) in enumerate(lines):
        if accurate:
            rounds, found = run.held_out_accuracy()
            at, values = np.array(rounds), found[method]
        else:
            values = _so_far(run.history("loss")[method])
            at = np.arange(1, values.shape[1] + 1)
        colour = list(COLOURS.values())[place % len(COLOURS)]
        _band(axes, at, values, f"{label}: {method}", {"color": colour})
    axes.grid(visible=True, alpha=0.2)
    axes.set_xlabel("round")
    axes.set_ylabel("held-out accuracy" if accurate else "average prequential loss so far")
    if not accurate:
        axes.set_yscale("log")
        plain_numbers(axes.yaxis)
    legend_below(figure, [axes], columns=2)
    save_figure(figure, path, dpi=150)
    return path


def plain_numbers(axis: Any) -> None:
    """Label a logarithmic axis with decimals (0.5, 1, 2), not with powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0, 7.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def legend_below(figure: Any, panels: Iterable[Any], columns: int = 6) -> None:
    """One legend for all panels, off the curves."""
    found = _entries(panels)
    figure.legend(
        found.values(),
        found.keys(),
        loc="outside lower center",
        fontsize="small",
        frameon=False,
        ncols=min(columns, len(found)),
    )


def legend_beside(figure: Any, panels: Iterable[Any]) -> None:
    """The same at the right."""
    found = _entries(panels)
    figure.legend(found.values(), found.keys(), loc="outside right center", fontsize="small", frameon=False)


def _entries(panels: Iterable[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return found


def _so_far(values: Any) -> Any:
    return np.nancumsum(values, axis=1) / np.maximum(np.cumsum(~np.isnan(values), axis=1), 1)


def new_figure(width: float, height: float) -> Any:
    """An empty figure without a window."""
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
        return "average loss so far = dynamic regret per step\n(every round is separable: best loss 0)"
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


def draw_curves(axes: Any, rounds: Any, values: dict[str, Any], names: list[str], summary: dict[str, Any]) -> None:
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
        _band(axes, rounds, values[name], name.split(" @")[0], style)
    axes.grid(visible=True, alpha=0.2)


def _band(axes: Any, rounds: Any, values: Any, label: str, style: dict[str, Any]) -> None:
    mean, std = values.mean(axis=0), values.std(axis=0, ddof=min(1, len(values) - 1))
    axes.plot(rounds, mean, linewidth=1.4, label=label, **style)
    axes.fill_between(rounds, mean - std, mean + std, color=style["color"], alpha=0.15, lw=0)
