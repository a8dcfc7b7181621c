"""The report of a run folder, made from that folder alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from veilstream.privacy.guarantee import Accounting, Guarantee
from veilstream.reports.federation_report import federation_state, write_federation_report
from veilstream.reports.page_kit import (
    REPORT,
    Headline,
    Method,
    PageState,
    Table,
    cell,
    measure,
    page_state,
    percent,
    write_page,
)
from veilstream.reports.promise import promise_of
from veilstream.reports.provenance import audit_of, provenance_of
from veilstream.reports.simulation_charts import learning_charts, noise_charts
from veilstream.reports.telemetry import telemetry_charts
from veilstream.runs.folder import Run
from veilstream.runs.summary import SimulationSummary

FIGURES = {
    "held_out_accuracy": "held-out accuracy",
    "prequential_accuracy": "prequential accuracy",
    "rmse": "held-out error",
    "explained": "share explained",
    "average_loss": "average loss",
    "dynamic_regret": "dynamic regret",
    "static_regret": "static regret",
}


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
    notices += [f"{method.name} {method.remark}." for method in summary.methods.values() if method.remark]
    return page_state(
        "simulation",
        summary.name,
        _headline(summary),
        subtitle=run.plan.description,
        notices=notices,
        promise=promise_of(summary.main.guarantee, simulated=True),
        methods=[legend_entry(m.name, m.mechanism, m.guarantee) for m in summary.methods.values()],
        main=summary.main.name,
        seeds=list(summary.seeds),
        charts={"learning": learning_charts(run), "telemetry": telemetry_charts(run), "noise": noise_charts(run)},
        results=_results(summary),
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


def _headline(summary: SimulationSummary) -> Headline:
    main = summary.main
    kinds = (
        ("held_out_accuracy", "held-out accuracy", percent),
        ("explained", "of the variance explained", percent),
        ("average_loss", "average loss", "{:.4g}".format),
    )
    key, label, form = next((kind for kind in kinds if kind[0] in main.final), ("", "", str))
    if not key:
        figures = [measure("diverged", f"{main.name}: no final figure")]
        return {"sentence": "", "better": None, "figures": figures, "beside": []}
    others = [
        m
        for m in summary.methods.values()
        if m is not main
        and key in m.final
        and (m.mechanism is None or (m.mechanism == "independent" and m.budget == main.budget))
    ]
    seeds = len(summary.seeds)
    spread = f"± {form(main.final[key].std)} over {seeds} seeds" if seeds > 1 else "one seed"
    compared = [(m.name, form(m.final[key].mean)) for m in others[:3]]
    figures = [measure(form(main.final[key].mean), f"{label}, {main.name}, {spread}", compared)]
    return {"sentence": "", "better": None, "figures": figures, "beside": []}


def shown_figures(finals: Iterable[Iterable[str]]) -> list[str]:
    """Keys of `FIGURES` that some method has."""
    there = {key for final in finals for key in final}
    return [key for key in FIGURES if key in there]


def _results(summary: SimulationSummary) -> Table:
    keys = shown_figures(m.final for m in summary.methods.values())
    regret = "; regret is per step" if any("regret" in key for key in keys) else ""
    return {
        "columns": ["method", "protects (ε, δ)", "noise std V", *(FIGURES[key] for key in keys)],
        "rows": [
            [m.name, m.protects, f"{m.noise_std:.3g}", *(cell(m.final.get(key)) for key in keys)]
            for m in summary.methods.values()
        ],
        "note": f"Mean ± standard deviation over {len(summary.seeds)} seeds{regret}. Data: {summary.data}.",
        "main": summary.main.name,
    }
