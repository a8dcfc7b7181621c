"""The report of a run folder, made from that folder alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from veilstream.privacy.guarantee import Accounting, Guarantee
from veilstream.reports.federation_report import federation_state, write_federation_report
from veilstream.reports.page_kit import REPORT, Method, PageState, Table, cell, page_state, write_page
from veilstream.reports.promise import promise_of
from veilstream.reports.provenance import audit_of, provenance_of
from veilstream.reports.quality import (
    baseline_cell,
    figure_names,
    label_table,
    method_verdicts,
    named,
    simulation_headline,
)
from veilstream.reports.simulation_charts import learning_charts, noise_charts
from veilstream.reports.telemetry import telemetry_charts
from veilstream.runs.folder import Run
from veilstream.runs.summary import SimulationSummary

FIGURES = figure_names(None)


def write_report(run: Run) -> Path:
    """Write a run folder's report.html from the other files in it, whole or not at all."""
    if run.is_federation:
        return write_federation_report(run)
    return write_page(run.path / REPORT, report_state(run), shared=True)


def report_state(run: Run) -> PageState:
    """The page of a run folder, complete or not."""
    if run.is_federation:
        return federation_state(run)
    summary = run.simulation
    notices = [
        "Simulation: its noise comes from seeds and protected no one. The promise below is what a deployed "
        "learner with these settings keeps."
    ]
    if not summary.complete:
        notices.append(
            f"Not complete: {summary.rounds} of {run.plan.learning.rounds} rounds. "
            "veilstream run --resume continues it."
        )
    if summary.verdict is not None:
        notices += [f"To try: {text}." for text in summary.verdict.advice]
    notices += [f"{method.name} {method.remark}." for method in summary.methods.values() if method.remark]
    return page_state(
        "simulation",
        summary.name,
        simulation_headline(summary),
        subtitle=run.plan.description,
        notices=notices,
        promise=promise_of(summary.main.guarantee, simulated=True),
        methods=[legend_entry(m.name, m.mechanism, m.guarantee) for m in summary.methods.values()],
        main=summary.main.name,
        seeds=list(summary.seeds),
        charts={"learning": learning_charts(run), "telemetry": telemetry_charts(run), "noise": noise_charts(run)},
        results=_results(summary),
        labels=label_table(summary.main),
        facts=method_verdicts(summary),
        audit=audit_of(run),
        provenance=provenance_of(run),
    )


def legend_entry(name: str, mechanism: str | None, promise: Guarantee | None) -> Method:
    """A method in the legend; methods with the same budget and accounting share a group."""
    group = None
    if promise:
        how = "the paper’s accounting" if promise.accounting is Accounting.ZCDP else "exact"
        group = f"ε = {promise.epsilon:g}, δ = {promise.delta:g}, {how}"
    label = name.split(" @")[0] if promise else name
    return {"name": name, "label": label, "group": group, "mechanism": mechanism, "private": promise is not None}


def shown_figures(finals: Iterable[Iterable[str]]) -> list[str]:
    """Keys of `FIGURES` that some method has."""
    there = {key for final in finals for key in final}
    return [key for key in FIGURES if key in there]


def _results(summary: SimulationSummary) -> Table:
    keys, names = shown_figures(m.final for m in summary.methods.values()), figure_names(summary.unit)
    regret = "; regret is per step" if any("regret" in key for key in keys) else ""
    rows = [
        [m.name, m.protects, f"{m.noise_std:.3g}", *(cell(m.final.get(key)) for key in keys)]
        for m in summary.methods.values()
    ]
    rows += [
        [named(name, told), "–", "–", *(baseline_cell(summary, name, key) for key in keys)]
        for name, told in summary.baselines.items()
    ]
    return {
        "columns": ["method", "protects (ε, δ)", "noise std V", *(names[key] for key in keys)],
        "rows": rows,
        "note": f"Mean ± standard deviation over {len(summary.seeds)} seeds{regret}. Accuracy, recall, AUC, log loss "
        f"(calibrated) and RMSE are of held-out records. Data: {summary.data}.",
        "main": summary.main.name,
    }
