"""A simulation's table: every method beside predictions without a model, and what the figures are measured on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from veilstream.cli.tables import escape
from veilstream.reports.quality import named
from veilstream.runs.summary import Figure, HeldOut, MethodSummary, SimulationSummary

_SHOWN_RECALLS = 3  # of more labels the lowest is shown

Cells = Callable[[MethodSummary], str]
OfBaseline = Callable[[str, Mapping[str, float | str | None]], str]


def run_table(summary: SimulationSummary) -> Table:
    """Methods, then baselines."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("method", "protects (simulated)", "noise std"):
        table.add_column(name, overflow="fold")
    columns = _columns(summary)
    for title, _, _ in columns:
        table.add_column(title, justify="right")
    for method in summary.methods.values():
        protects = method.protects if method.guarantee else "[red]nothing[/red]"
        cells = [of_method(method) for _, of_method, _ in columns]
        table.add_row(escape(method.name), protects, f"{method.noise_std:.3g}", *cells)
    for name, told in summary.baselines.items():
        cells = [of_baseline(name, told) for _, _, of_baseline in columns]
        table.add_row(f"[dim]{escape(named(name, told))}[/dim]", "–", "–", *cells)
    return table


def show_quality(console: Console, summary: SimulationSummary) -> None:
    """The verdict, what to try, and what the figures are measured on."""
    if summary.verdict is not None:
        console.print(f"[bold]Does it learn?[/bold]  {escape(summary.main.name)}: {escape(summary.verdict.sentence)}")
        for advice in summary.verdict.advice:
            console.print(f"  try: {escape(advice)}")
    if summary.held_out is not None:
        console.print(f"[dim]{_measured_on(summary.held_out, summary.unit)}[/dim]")


_SPLITS = {
    "time": "the last records of each learner, by time",
    "people": "people who were never learned from",
    "made-up": "made-up records that were never learned from",
}


def _measured_on(held: HeldOut, unit: str | None) -> str:
    people = "" if held.people in (None, held.rows) else f" of {held.people} people"
    error = ""
    if held.sampling_error is not None:
        what = "RMSE" if unit is not None else "accuracy"
        error = f"; the choice of these rows leaves ± {held.sampling_error:.2g} in {what} (95%)"
    return f"final figures: all {held.rows} held-out rows{people}, {_SPLITS[held.split]}{error}"


def _columns(summary: SimulationSummary) -> list[tuple[str, Cells, OfBaseline]]:
    found = list(_quality_columns(summary))
    others = {
        "prequential_accuracy": "prequential accuracy",
        "average_loss": "average loss",
        "dynamic_regret": "dynamic regret",
        "static_regret": "static regret",
    }
    there = {key for method in summary.methods.values() for key in method.final}
    if "held_out_accuracy" in there:
        del others["prequential_accuracy"]
    found += [_column(title, key) for key, title in others.items() if key in there]
    return found


def _quality_columns(summary: SimulationSummary) -> Sequence[tuple[str, Cells, OfBaseline]]:
    methods = list(summary.methods.values())
    there = {key for method in methods for key in method.final}
    if "rmse" in there:
        unit = f" ({summary.unit})" if summary.unit else ""
        return [_column(f"RMSE{unit}", "rmse", "{:.4g} ± {:.2g}", "{:.4g}"), _column("R²", "r2", "{:.3f}", "{:.3f}")]
    regret = any("regret" in key for key in there)  # of made-up records, whose table is wide enough
    wanted = {
        "held_out_accuracy": ("accuracy", "{:.4f} ± {:.4f}"),
        "balanced_accuracy": ("balanced", "{:.3f}"),
        "auc": ("AUC", "{:.3f}"),
        "log_loss": ("log loss", "{:.4f}"),
    }
    found = [
        _column(title, key, form, "{:.4f}" if "4" in form else "{:.3f}")
        for key, (title, form) in wanted.items()
        if key in there and not (regret and key == "log_loss")
    ]
    if any(method.recall for method in methods) and not regret:
        many = max(len(method.recall) for method in methods) > _SHOWN_RECALLS
        found.append(("lowest recall" if many else "recall", _recall, _recall_of_baseline(methods)))
    return found


def _column(
    title: str, key: str, form: str = "{:.4f} ± {:.4f}", of_baseline: str = "{:.4f}"
) -> tuple[str, Cells, OfBaseline]:
    names = {"held_out_accuracy": "accuracy"}

    def method_cell(method: MethodSummary) -> str:
        figure = method.final.get(key)
        return "–" if figure is None else form.format(figure.mean, figure.std)

    def baseline_cell(name: str, told: Mapping[str, float | str | None]) -> str:
        value = 0.5 if (name, key) == ("majority", "auc") else told.get(names.get(key, key))
        return of_baseline.format(value) if isinstance(value, float) else "–"

    return title, method_cell, baseline_cell


def _recall(method: MethodSummary) -> str:
    each: Mapping[str, Figure] = method.recall
    if len(each) > _SHOWN_RECALLS:
        name = min(each, key=lambda label: each[label].mean)
        return f"{escape(name)} {each[name].mean:.2f}"
    return ", ".join(f"{escape(name)} {figure.mean:.2f}" for name, figure in each.items()) or "–"


def _recall_of_baseline(methods: Sequence[MethodSummary]) -> OfBaseline:
    labels = max((list(method.recall) for method in methods), key=len)

    def cell(name: str, told: Mapping[str, float | str | None]) -> str:
        if name != "majority":
            return "–"
        if len(labels) > _SHOWN_RECALLS:
            return "0.00"
        return ", ".join(f"{escape(label)} {float(label == told['label']):.2f}" for label in labels)

    return cell
