"""What a report says, from a run folder alone: plain values that the page draws.

    title, subtitle, kind          what this is: "simulation", "federation" or "comparison"
    notices                        what a reader must know first
    headline                       the one number, and what stands beside it
    promise                        the guarantee in words and symbols, and what it rests on
    methods, groups, main          what the legend toggles
    charts                         by section: lists of charts (`report_curves`)
    results                        a table
    audit                          bounds of the last audit, or None
    provenance                     facts, the command that repeats it, the plan

A live page sends the same keys as they change (`veilstream.update` in page.js).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from veilstream.reports.federation_report import federation_state, write_federation_report
from veilstream.reports.page_kit import REPORT, SCHEMA, write_page
from veilstream.reports.promise import promise_of
from veilstream.reports.provenance import audit_of, provenance_of
from veilstream.reports.simulation_charts import learning_charts, noise_charts
from veilstream.reports.telemetry import telemetry_charts
from veilstream.runs.folder import Run

_RESULTS = {
    "held_out_accuracy": "held-out accuracy",
    "prequential_accuracy": "prequential accuracy",
    "rmse": "held-out error",
    "explained": "share explained",
    "average_loss": "average loss",
    "dynamic_regret": "dynamic regret",
    "static_regret": "static regret",
}


def write_report(run: Run) -> Path:
    """Write a run folder's report.html from the other files in it, whole or not at all.

    Raises:
        InputError: for a folder whose files are missing or damaged.

    """
    if run.is_federation:
        return write_federation_report(run)
    return write_page(run.path / REPORT, report_state(run), shared=True)


def report_state(run: Run) -> dict[str, Any]:
    """The state of a run's page.

    Args:
        run: a simulation's folder, complete or not, or a federation's.

    Raises:
        InputError: for a folder whose files are missing or damaged.

    """
    if run.is_federation:
        return federation_state(run)
    summary = run.summary
    methods = listed_methods(summary["methods"])
    main = summary["main_method"]
    notices = [
        "Simulation: its noise comes from seeds and protected no one. What is promised here is "
        "what a deployed learner with these settings gives."
    ]
    if not summary["complete"]:
        notices.append(
            f"Not complete: {summary['rounds']} of {run.plan.learning.rounds} rounds. "
            "veilstream run --resume continues it."
        )
    notices += [f"{name} {m['final']['remark']}." for name, m in summary["methods"].items() if m["final"].get("remark")]
    return {
        "schema": SCHEMA,
        "kind": "simulation",
        "title": summary["name"],
        "subtitle": run.plan.description,
        "notices": notices,
        "headline": _headline(summary),
        "promise": promise_of(summary["methods"][main]["guarantee"], simulated=True),
        "methods": methods,
        "groups": list(dict.fromkeys(m["group"] for m in methods if m["group"])),
        "main": main,
        "seeds": summary["seeds"],
        "charts": {"learning": learning_charts(run), "telemetry": telemetry_charts(run), "noise": noise_charts(run)},
        "results": _results(summary),
        "audit": audit_of(run),
        "provenance": provenance_of(run),
    }


def listed_methods(methods: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the legend shows; methods of one budget and accounting share a group."""
    listed = []
    for name, method in methods.items():
        promise = method["guarantee"]
        group = None
        if promise:
            how = "the paper’s accounting" if promise["accounting"] == "zcdp" else "exact"
            group = f"ε = {promise['epsilon']:g}, δ = {promise['delta']:g}, {how}"
        listed.append(
            {
                "name": name,
                "label": name.split(" @")[0] if promise else name,
                "group": group,
                "mechanism": method["mechanism"],
                "private": promise is not None,
            }
        )
    return listed


def _headline(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The recommended method's figure, beside methods without noise and with independent noise."""
    main = summary["main_method"]
    kinds = (
        ("held_out_accuracy", "held-out accuracy", "percent"),
        ("accuracy", "held-out accuracy", "percent"),
        ("explained", "of the variance explained", "percent"),
        ("average_loss", "average loss", "number"),
    )
    own = summary["methods"][main]["final"]
    found = [kind for kind in kinds if own.get(kind[0])]
    if not found:
        return {"value": "diverged", "label": f"{main}: no final figure", "spread": "", "beside": []}
    key, label, form = found[0]
    budget = summary["methods"][main]["guarantee"]
    beside = []
    for name, method in summary["methods"].items():
        alike = method["mechanism"] is None or (
            method["mechanism"] == "independent"
            and budget
            and method["guarantee"]
            and all(method["guarantee"][k] == budget[k] for k in ("epsilon", "delta", "accounting"))
        )
        if alike and name != main and method["final"].get(key):
            beside.append({"label": name, "value": _form(method["final"][key]["mean"], form)})
    seeds = len(summary["seeds"])
    spread = f"± {_form(own[key]['std'], form)} over {seeds} seeds" if seeds > 1 else "one seed"
    return {"value": _form(own[key]["mean"], form), "label": f"{label}, {main}", "spread": spread, "beside": beside[:3]}


def _form(value: float, form: str) -> str:
    return f"{100 * value:.1f} %" if form == "percent" else f"{value:.4g}"


def _results(summary: Mapping[str, Any]) -> dict[str, Any]:
    methods = summary["methods"]
    keys = [k for k in _RESULTS if any(m["final"].get(k) for m in methods.values())]
    if "held_out_accuracy" not in keys and any(m["final"].get("accuracy") for m in methods.values()):
        keys.insert(0, "accuracy")  # a folder of an earlier version
    rows = []
    for name, method in methods.items():
        promise = method["guarantee"]
        rows.append(
            [
                name,
                f"({promise['epsilon']:g}, {promise['delta']:g})" if promise else "nothing",
                f"{method['noise_std']:.3g}",
                *(_cell(method["final"].get(key)) for key in keys),
            ]
        )
    columns = ["method", "protects (ε, δ)", "noise std V"]
    return {
        "columns": columns + [_RESULTS.get(key, "held-out accuracy") for key in keys],
        "rows": rows,
        "note": f"Mean ± standard deviation over {len(summary['seeds'])} seeds"
        f"{'; regret is per step' if any('regret' in key for key in keys) else ''}. "
        f"Data: {summary['data']}.",
        "main": summary["main_method"],
    }


def _cell(value: Mapping[str, Any] | None) -> str:
    return "–" if value is None else f"{value['mean']:.4f} ± {value['std']:.4f}"
