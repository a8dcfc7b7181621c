"""Several runs on one page: the recommended method of each, or one that is named."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError, UnknownName
from veilstream.reports.charts import held_out_chart, loss_chart, running_mean
from veilstream.reports.page_kit import Chart, Headline, PageState, cell, facts, measure, page_state, percent
from veilstream.reports.report import FIGURES, shown_figures
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
            "columns": ["run", "method", "protects (ε, δ)", *(FIGURES[key] for key in keys)],
            "rows": [
                [each.name, each.method.name, each.method.protects, *(cell(each.method.final.get(k)) for k in keys)]
                for each in compared
            ],
            "note": "Mean ± standard deviation over each run’s own seeds.",
            "main": best,
        },
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
        charts.append(held_out_chart(rounds, values))
    longest = max(each.summary.rounds for each in compared)
    losses = {}
    for each in compared:
        mean = running_mean(each.run.history("loss")[each.method.name])
        losses[each.name] = _spread(mean, list(range(mean.shape[1])), longest)
    charts.append(loss_chart(losses))
    return charts


def _spread(values: NDArray[np.floating], places: list[int], length: int) -> NDArray[np.float64]:
    filled = np.full((len(values), length), np.nan)
    filled[:, places] = values
    return filled


def _best(compared: Sequence[Compared]) -> tuple[str | None, Headline]:
    """The run with the best figure: accuracy if all have one, else loss."""
    accurate = all("held_out_accuracy" in each.method.final for each in compared)
    key = "held_out_accuracy" if accurate else "average_loss"
    label = "best held-out accuracy" if accurate else "least average loss"
    form = percent if accurate else "{:.4g}".format
    there = {each.name: each.method.final[key] for each in compared if key in each.method.final}
    if not there:
        none = [measure("–", "no run has a final figure")]
        return None, {"sentence": "", "better": None, "figures": none, "beside": []}
    best = (max if accurate else min)(there, key=lambda name: there[name].mean)
    others = [(name, form(figure.mean)) for name, figure in there.items() if name != best]
    figures = [measure(form(there[best].mean), f"{label}, {best}, ± {form(there[best].std)}", others[:4])]
    return best, {"sentence": "", "better": None, "figures": figures, "beside": []}
