"""Charts of private telemetry, one for each metric.

A federation's estimates have error bars. A simulation has a curve for each method, whose band is over seeds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from veilstream.learning.task_kind import Target
from veilstream.learning.task_registry import task_kind
from veilstream.learning.telemetry_estimates import OVER_CLIENTS, Estimate
from veilstream.plans.plan import Plan
from veilstream.reports.charts import MOST_POINTS, chart, levels, pack, thinned
from veilstream.reports.page_kit import Chart, Fact, Headline, measure
from veilstream.reports.quality import ALWAYS, baseline_figures
from veilstream.runs.folder import Run
from veilstream.runs.tables import ListedEstimate

NOT_MEASURED = (
    "How good the model is, is not measured: the server sees noisy sums alone. A next run measures it, under the same "
    'promise, with [telemetry] metrics = ["accuracy"] in its plan. Beside the data, each learner’s own page scores it.'
)


def telemetry_charts(run: Run) -> list[Chart]:
    """Charts of telemetry.csv; none without the file."""
    metrics: dict[str, list[ListedEstimate]] = {}
    for row in run.telemetry():
        metrics.setdefault(row.metric, []).append(row)
    charts = []
    for metric, rows in metrics.items():
        made = _of_methods(metric, rows) if rows[0].method else _of_run(metric, rows)
        known = baseline(metric, run.plan)
        made["lines"] = levels([] if known is None else [known])
        if rows[0].method and metric == "accuracy":
            made["lines"] = levels(baseline_figures(run.simulation, "held_out_accuracy")) or made["lines"]
        charts.append(made)
    return charts


def federation_headline(told: Sequence[ListedEstimate | Estimate], plan: Plan, beside: list[Fact]) -> Headline:
    """How good a federation's model is, as far as its server may know; ``told`` is of all metrics, oldest first."""
    measured = {row.metric for row in told} | set(() if plan.telemetry is None else plan.telemetry.metrics)
    metric = next((name for name in ("accuracy", "loss") if name in measured), None)
    if metric is None:
        return {"sentence": NOT_MEASURED, "better": None, "figures": [], "beside": beside}
    rows = [row for row in told if row.metric == metric]
    if not rows:
        waits = f"The model’s {metric} is estimated under the promise; the first estimate is not there yet."
        return {
            "sentence": waits,
            "better": None,
            "figures": [measure("–", f"{metric} of the model")],
            "beside": beside,
        }
    newest, first = rows[-1], rows[0]
    known = baseline(metric, plan)
    compared = [] if known is None else [(known[0], f"{known[1]:.3f}"), (ALWAYS["majority"], "learners’ pages say")]
    if first.round < newest.round:
        compared.append((f"after {first.round} round{'s' * (first.round != 1)}", _with_bar(first)))
    since = max(1, newest.round - int(newest.window) + 1)
    label = f"{metric} in rounds {since} to {newest.round}, a private estimate with its 95% error bar; "
    label += _average(newest)[0]
    better, said = _compared(newest, known)
    return {
        "sentence": said,
        "better": better,
        "figures": [measure(_with_bar(newest), label, compared)],
        "beside": beside,
    }


def _compared(newest: ListedEstimate | Estimate, known: tuple[str, float] | None) -> tuple[bool | None, str]:
    """Whether an estimate is better than what it is compared with, and a sentence that says so."""
    said = f"{newest.metric.capitalize()} {_with_bar(newest)} on the people met lately"
    if known is None:
        return None, f"{said}."
    name, value = known
    if newest.low <= value <= newest.high:
        return None, f"{said}, within its error bar of {name} ({value:.3f})."
    if newest.high < value:
        return False, f"{said}, worse than {name} ({value:.3f})."
    return None, f"{said}; {name} has {value:.3f}."


def baseline(metric: str, plan: Plan) -> tuple[str, float] | None:
    """What a metric is compared with where records are private, by the plan alone."""
    kind = task_kind(plan.learning.task)
    labels = 2 if kind is not None and kind.target is Target.SIGN else len(plan.data.labels or ())
    if metric != "accuracy" or labels < 2:
        return None
    return f"guessing among {labels} labels", 1.0 / labels


def _with_bar(row: ListedEstimate | Estimate) -> str:
    return f"{row.estimate:.3f} ± {row.high - row.estimate:.3f}"


def _average(newest: ListedEstimate | Estimate) -> tuple[str, str]:
    if newest.metric == "present":
        return "of all steps", "The share of all steps that had a client."
    if newest.average == OVER_CLIENTS:
        return "a mean over people", "A plain mean over the clients that were there."
    return "empty steps count as half", "A plain mean over all steps; a step without a client counts as half."


def _of_run(metric: str, rows: list[ListedEstimate]) -> Chart:
    kept = [rows[i] for i in thinned(len(rows), MOST_POINTS)]
    about = (
        "Each person is predicted by the round’s released model before it learns from them. An estimate from noisy "
        "sums that every client’s promise covers; the band is its error bar. "
        f"{_average(rows[-1])[1]} Window: {rows[-1].window}."
    )
    made = chart(f"telemetry-{metric}", _title(metric), about, metric, [row.round for row in kept], {})
    made["series"] = {
        metric: {
            "estimate": pack(np.array([row.estimate for row in kept])),
            "low": pack(np.array([row.low for row in kept])),
            "high": pack(np.array([row.high for row in kept])),
        }
    }
    return made


def _of_methods(metric: str, rows: list[ListedEstimate]) -> Chart:
    rounds = sorted({row.round for row in rows})
    places = {round_: i for i, round_ in enumerate(rounds)}
    seeds = {seed: i for i, seed in enumerate(dict.fromkeys(row.seed for row in rows))}
    curves = {name: np.full((len(seeds), len(rounds)), np.nan) for name in dict.fromkeys(row.method for row in rows)}
    bars: dict[str, list[float]] = {}
    for row in rows:
        curves[row.method][seeds[row.seed], places[row.round]] = row.estimate
        if row.round == rounds[-1]:
            bars.setdefault(row.method, []).append(row.high - row.estimate)
    lengths = ", ".join(f"{name} ± {np.mean(each):.2g}" for name, each in bars.items())
    about = (
        "What a server would see: estimates from noisy sums that every client’s promise covers. "
        f"{_average(rows[-1])[1]} Window: {rows[-1].window}. The band is over seeds; an estimate’s own error "
        f"bar (95%) at the end: {lengths}."
    )
    return chart(f"telemetry-{metric}", _title(metric), about, metric, rounds, curves)


def _title(metric: str) -> str:
    return f"{metric.capitalize()}, estimated under the promise"
