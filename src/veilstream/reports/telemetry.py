"""Charts of private telemetry, a chart for each metric.

A federation has one run: its estimates with their error bars. A simulation has several methods and
seeds: a curve for each method with every seed, like its other charts, whose band says how far seeds
are apart; how long an estimate's own error bar is, the chart says in words.
"""

from __future__ import annotations

import csv
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.learning.telemetry_estimates import OVER_CLIENTS
from veilstream.reports.charts import MOST_POINTS, chart, pack, thinned, unpack
from veilstream.runs.folder import Run

_NUMBERS = ("round", "estimate", "low", "high")


def telemetry_charts(run: Run) -> list[dict[str, Any]]:
    """Of telemetry.csv; none without the file.

    Raises:
        InputError: for a file that is not what a run writes.

    """
    path = run.path / "telemetry.csv"
    if not path.exists():
        return []
    metrics: dict[str, list[dict[str, Any]]] = {}
    try:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                read: dict[str, Any] = row | {c: float(row[c]) for c in _NUMBERS}
                _ = row["window"]  # or it is no such file
                metrics.setdefault(row["metric"], []).append(read)
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise InputError(
            "run",
            str(path),
            "round, metric, estimate, low, high and window in every row",
            f"{error}; restore it, or remove it",
        ) from error
    return [
        _of_methods(metric, rows) if rows[0].get("method") is not None else _of_run(metric, rows)
        for metric, rows in metrics.items()
    ]


def latest_estimate(charts: list[dict[str, Any]]) -> dict[str, str] | None:
    """The newest estimate of a federation's first metric, for the head of its page."""
    if not charts:
        return None
    first = charts[0]
    series = first["series"][first["y_label"]]
    value, high = (float(unpack(series[part])[-1]) for part in ("estimate", "high"))
    return {
        "label": f"{first['y_label']}, private estimate ({first['average']})",
        "value": f"{value:.3f} ± {high - value:.3f}",
    }


def _words(metric: str, rows: list[dict[str, Any]]) -> tuple[str, str]:
    """What the newest estimate averages over, short and as a sentence."""
    if metric == "present":
        return "of all steps", "Of all steps, the share that had a client."
    if rows[-1].get("average") == OVER_CLIENTS:
        return "of clients", "A plain mean over the clients that were there."
    return (
        "empty steps count as half-way",
        "A plain mean over all steps, of which one without a client counts as half-way.",
    )


def _of_run(metric: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a federation: the estimate with its error bar."""
    table = np.array([[row[c] for c in _NUMBERS] for row in rows])
    table = table[thinned(len(rows), MOST_POINTS)]
    short, sentence = _words(metric, rows)
    about = (
        "An estimate from noisy sums that every client’s promise covers; the band is its error "
        f"bar. {sentence} Window: {rows[-1]['window']}."
    )
    made = chart(
        f"telemetry-{metric}", _title(metric), about, metric, table[:, 0], {}
    )  # series below: a bar of its own instead of seeds
    made["series"] = {metric: {part: pack(table[:, i]) for i, part in enumerate(_NUMBERS) if part != "round"}}
    return made | {"average": short}


def _of_methods(metric: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a simulation: a curve for each method, with every seed; no number where it has none."""
    rounds = sorted({row["round"] for row in rows})
    seeds = {seed: i for i, seed in enumerate(dict.fromkeys(row["seed"] for row in rows))}
    places = {r: i for i, r in enumerate(rounds)}
    curves: dict[str, NDArray[np.float64]] = {
        name: np.full((len(seeds), len(rounds)), np.nan) for name in dict.fromkeys(row["method"] for row in rows)
    }
    bars: dict[str, list[float]] = {}
    for row in rows:
        curves[row["method"]][seeds[row["seed"]], places[row["round"]]] = row["estimate"]
        if row["round"] == rounds[-1]:
            bars.setdefault(row["method"], []).append(row["high"] - row["estimate"])
    short, sentence = _words(metric, rows)
    said = ", ".join(f"{name} ± {np.mean(each):.2g}" for name, each in bars.items())
    about = (
        "What a server would see: estimates from noisy sums that every client’s promise covers. "
        f"{sentence} Window: {rows[-1]['window']}. The band is over seeds; an estimate’s own error "
        f"bar (95%) at the end: {said}."
    )
    return chart(f"telemetry-{metric}", _title(metric), about, metric, np.array(rounds), curves) | {"average": short}


def _title(metric: str) -> str:
    return f"{metric.capitalize()}, as the promise lets it be seen"
