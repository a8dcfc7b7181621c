"""Several runs on one page: the recommended method of each, or one that is named."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError, UnknownName
from veilstream.reports.charts import held_out_chart, loss_chart, running_mean
from veilstream.reports.page_kit import Chart, Facts, Headline, PageState, cell, facts, measure, page_state
from veilstream.reports.quality import SHARES, baseline_cell, baseline_figures, figure, figure_names, named
from veilstream.reports.report import shown_figures
from veilstream.runs.folder import Run
from veilstream.runs.summary import MethodSummary, SimulationSummary


@dataclass(frozen=True)
class Compared:
    """One run in a comparison."""

    name: str
    run: Run
    summary: SimulationSummary
    method: MethodSummary


def compared_runs(runs: Sequence[Run], method: str | None = None) -> list[Compared]:
    """Name runs by their folders, with as many folders above as tell them apart."""
    if len(runs) < 2:
        raise InputError("run", len(runs), "at least two run folders", "name another")
    paths = [run.path.resolve() for run in runs]
    depth = 1
    while depth < 8 and len({p.parts[-depth:] for p in paths}) < len(paths):
        depth += 1
    names = ["/".join(p.parts[-depth:]) for p in paths]
    if len(set(names)) < len(names):
        raise InputError("run", names, "folders that differ", "name each once")
    return [_compared(name, run, method) for name, run in zip(names, runs, strict=True)]


def _compared(name: str, run: Run, method: str | None) -> Compared:
    if run.is_federation:
        why = "a federation's accuracy is private; its own report shows what may be seen"
        raise InputError("run", str(run.path), "a simulation's folder", why)
    summary = run.simulation
    chosen = summary.main.name if method is None else method
    if chosen not in summary.methods:
        raise UnknownName("method", chosen, summary.methods)
    return Compared(name, run, summary, summary.methods[chosen])


def comparison_state(compared: Sequence[Compared]) -> PageState:
    """The page: a table, and a chart for each measure that all runs have."""
    best, headline = _best(compared)
    keys = shown_figures(each.method.final for each in compared)
    units = {each.summary.unit for each in compared}
    names = figure_names(units.pop() if len(units) == 1 else None)
    command = ["veilstream", "compare", *(str(each.run.path) for each in compared)]
    return page_state(
        "comparison",
        " · ".join(each.name for each in compared[:3]) + (" …" if compared[3:] else ""),
        headline,
        subtitle=f"{len(compared)} runs side by side: "
        + ", ".join(f"{each.method.name} of {each.name}" for each in compared),
        notices=["Simulations: their noise comes from seeds and protected no one."],
        methods=[
            {
                "name": each.name,
                "label": each.name,
                "group": None,
                "mechanism": None,
                "private": each.method.guarantee is not None,
                "colour": i,
            }
            for i, each in enumerate(compared)
        ],
        seeds=list(range(max(len(each.summary.seeds) for each in compared))),
        charts={"learning": _charts(compared)},
        results={
            "columns": ["run", "method", "protects (ε, δ)", *(names[key] for key in keys)],
            "rows": [row for each in compared for row in _rows(each, keys)],
            "note": "Mean ± standard deviation over each run’s own seeds; below each run, what a prediction without a "
            "model has on the same held-out records.",
            "main": best,
        },
        facts=_verdicts(compared),
        provenance={
            "facts": facts([(each.name, each.run.path) for each in compared]),
            "command": shlex.join(command),
            "plan": "",
        },
    )


def _charts(compared: Sequence[Compared]) -> list[Chart]:
    charts = []
    if all(each.run.has_held_out for each in compared):
        found = {each.name: (each.method.name, *each.run.held_out_accuracy()) for each in compared}
        rounds = sorted({r for _, own, _ in found.values() for r in own})
        values = {
            name: _spread(accuracy[method], [rounds.index(r) for r in own], len(rounds))
            for name, (method, own, accuracy) in found.items()
        }
        charts.append(held_out_chart(rounds, values, _levels(compared)))
    longest = max(each.summary.rounds for each in compared)
    losses = {}
    for each in compared:
        mean = running_mean(each.run.history("loss")[each.method.name])
        losses[each.name] = _spread(mean, list(range(mean.shape[1])), longest)
    charts.append(loss_chart(losses))
    return charts


def _levels(compared: Sequence[Compared]) -> list[tuple[str, float]]:
    """Accuracies of the runs' baselines; one line for those that are the same."""
    found: dict[tuple[str, float], list[str]] = {}
    for each in compared:
        for name, value in baseline_figures(each.summary, "held_out_accuracy"):
            found.setdefault((name, round(value, 4)), []).append(each.name)
    everyone = len(compared)
    return [
        (name if len(runs) == everyone else f"{name}, {', '.join(runs)}", value)
        for (name, value), runs in found.items()
    ]


def _spread(values: NDArray[np.floating], places: list[int], length: int) -> NDArray[np.float64]:
    filled = np.full((len(values), length), np.nan)
    filled[:, places] = values
    return filled


def _rows(each: Compared, keys: Sequence[str]) -> list[list[str]]:
    """A run's method, and its baselines below."""
    summary = each.summary
    rows = [[each.name, each.method.name, each.method.protects, *(cell(each.method.final.get(key)) for key in keys)]]
    return rows + [
        ["without a model", named(name, told), "–", *(baseline_cell(summary, name, key) for key in keys)]
        for name, told in summary.baselines.items()
    ]


def _verdicts(compared: Sequence[Compared]) -> list[Facts]:
    said = [(each.name, each.method.verdict) for each in compared if each.method.verdict]
    return [{"title": "Each run beside its baseline", "rows": facts(said)}] if said else []


_ORDER = ("auc", "balanced_accuracy", "held_out_accuracy", "rmse", "average_loss")


def _best(compared: Sequence[Compared]) -> tuple[str | None, Headline]:
    """The run with the best figure, by the first that all have."""
    with_figures = [each for each in compared if each.method.final]
    shared = [key for key in _ORDER if with_figures and all(key in each.method.final for each in with_figures)]
    if not shared:
        none = [measure("–", "no run has a final figure")]
        return None, {"sentence": "", "better": None, "figures": none, "beside": []}
    key, share = shared[0], shared[0] in SHARES
    best = (max if share else min)(with_figures, key=lambda each: each.method.final[key].mean)
    top = best.method.final[key]
    others = [
        (each.name, figure(each.method.final[key].mean, share=share)) for each in with_figures if each is not best
    ]
    known = [(name, figure(value, share=share)) for name, value in baseline_figures(best.summary, key)]
    label = f"{'best' if share else 'least'} {figure_names(best.summary.unit)[key]}, {best.name}"
    label += f", ± {figure(top.std, share=share)} over its seeds"
    figures = [measure(figure(top.mean, share=share), label, known + others[:4])]
    return best.name, {
        "sentence": best.method.verdict or "",
        "better": best.summary.verdict.better if best.summary.verdict and best.method is best.summary.main else None,
        "figures": figures,
        "beside": [],
    }
