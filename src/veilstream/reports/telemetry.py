"""Charts of private telemetry, one for each metric.

A federation's estimates have error bars. A simulation has a curve for each method, whose band is over seeds.
"""

from __future__ import annotations

import numpy as np

from veilstream.learning.telemetry_estimates import OVER_CLIENTS
from veilstream.reports.charts import MOST_POINTS, chart, pack, thinned
from veilstream.reports.page_kit import Chart, Fact
from veilstream.runs.folder import Run
from veilstream.runs.tables import ListedEstimate


def telemetry_charts(run: Run) -> list[Chart]:
    """Charts of telemetry.csv; none without the file."""
    metrics: dict[str, list[ListedEstimate]] = {}
    for row in run.telemetry():
        metrics.setdefault(row.metric, []).append(row)
    return [_of_methods(m, rows) if rows[0].method else _of_run(m, rows) for m, rows in metrics.items()]


def latest_estimate(run: Run) -> list[Fact]:
    """The newest estimate of a federation's first metric, for the head of its page."""
    rows = run.telemetry()
    if not rows:
        return []
    newest = [row for row in rows if row.metric == rows[0].metric][-1]
    label = f"{newest.metric}, private estimate ({_average(newest)[0]})"
    return [{"label": label, "value": f"{newest.estimate:.3f} ± {newest.high - newest.estimate:.3f}"}]


def _average(newest: ListedEstimate) -> tuple[str, str]:
    if newest.metric == "present":
        return "of all steps", "The share of all steps that had a client."
    if newest.average == OVER_CLIENTS:
        return "of clients", "A plain mean over the clients that were there."
    return "empty steps count as half", "A plain mean over all steps; a step without a client counts as half."


def _of_run(metric: str, rows: list[ListedEstimate]) -> Chart:
    kept = [rows[i] for i in thinned(len(rows), MOST_POINTS)]
    about = (
        "An estimate from noisy sums that every client’s promise covers; the band is its error "
        f"bar. {_average(rows[-1])[1]} Window: {rows[-1].window}."
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
