"""What the report of a federation says: nothing that its server does not know already."""

from __future__ import annotations

from typing import Any

import numpy as np

from veilstream.plans.run_folder import Run
from veilstream.plans.run_tables import ListedRound, read_rounds
from veilstream.reports.packed_series import pack, thinned, unpack
from veilstream.reports.promise_words import promise_of

__all__ = ["federation_state", "telemetry_charts"]

_MOST_POINTS = 500
_ESTIMATE = ("round", "estimate", "low", "high")


def federation_state(run: Run) -> dict[str, Any]:
    """The page of a server's folder; of what it has so far where the run goes on."""
    plan = run.plan
    listed = read_rounds(run.path)
    rounds = listed.rounds
    finished = (run.path / "summary.json").exists()
    learners: dict[str, Any] = run.summary["learners"] if finished else {}
    telemetry = telemetry_charts(run)
    wanted = plan.learning.rounds
    notices = []
    if not finished and not plan.learning.unbounded:
        notices.append(f"Not complete: {len(rounds)} of {wanted} rounds are done.")
    if listed.remark:
        notices.append(listed.remark)
    missing = [row for row in rounds if row.missing]
    return {
        "kind": "federation",
        "title": plan.name,
        "subtitle": plan.description,
        "notices": notices,
        "headline": _headline(rounds, telemetry, plan.learning.learners),
        "promise": promise_of(run.guarantees, simulated=False),
        "methods": [],
        "groups": [],
        "main": None,
        "seeds": [],
        "charts": {"telemetry": telemetry, "rounds": _round_charts(rounds)},
        "results": {
            "columns": ["learner", "epoch", "rounds taken part"],
            "rows": [
                [name, str(seat["epoch"]), str(seat["rounds"])] for name, seat in learners.items()
            ],
            "note": f"{len(rounds)} rounds; in {len(missing)} of them someone was missing.",
            "main": None,
        },
    }


def telemetry_charts(run: Run) -> list[dict[str, Any]]:
    """Private telemetry with its error bars, a chart for each metric; none without the file."""
    metrics: dict[str, list[list[float]]] = {}
    windows: dict[str, float] = {}
    for row in run.telemetry():
        metric = str(row["metric"])
        metrics.setdefault(metric, []).append([float(row[column]) for column in _ESTIMATE])
        windows[metric] = float(row["window"])
    charts = []
    for metric, rows in metrics.items():
        table = np.array(rows)[thinned(len(rows), _MOST_POINTS)]
        charts.append(
            {
                "id": f"telemetry-{metric}",
                "title": f"{metric.capitalize()}, as the promise lets it be seen",
                "about": "An estimate from noisy sums that every client’s promise covers; the band "
                f"is its error bar. Window: {windows[metric]:g}.",
                "x_label": "round",
                "y_label": metric,
                "logarithmic": False,
                "share": False,
                "x": [int(v) for v in table[:, 0]],
                "series": {
                    metric: {
                        "estimate": pack(table[:, 1]),
                        "low": pack(table[:, 2]),
                        "high": pack(table[:, 3]),
                    }
                },
                "lines": [],
            }
        )
    return charts


def _round_charts(rounds: list[ListedRound]) -> list[dict[str, Any]]:
    if not rounds:
        return []
    kept = [rounds[i] for i in thinned(len(rounds), _MOST_POINTS)]
    columns = (
        ("answered", "Learners that answered", "learners", "In each round."),
        ("seconds", "Time of a round", "seconds", "From announcing a model to moving it."),
    )
    return [
        {
            "id": key,
            "title": title,
            "about": about,
            "x_label": "round",
            "y_label": label,
            "logarithmic": False,
            "share": False,
            "from_zero": True,
            "whole": key == "answered",
            "x": [row.round + 1 for row in kept],
            "series": {title: pack(np.array([[float(getattr(row, key)) for row in kept]]))},
            "lines": [],
        }
        for key, title, label, about in columns
    ]


def _headline(
    rounds: list[ListedRound], telemetry: list[dict[str, Any]], learners: int
) -> dict[str, Any]:
    times = sorted(row.seconds for row in rounds)
    beside = [{"label": "learners", "value": str(learners)}]
    if times:
        beside.append({"label": "median round", "value": f"{times[len(times) // 2]:.2f} s"})
    for chart in telemetry[:1]:
        series = chart["series"][chart["y_label"]]
        last = [float(unpack(series[part])[-1]) for part in ("estimate", "high")]
        value = f"{last[0]:.3f} ± {last[1] - last[0]:.3f}"
        beside.append({"label": f"{chart['y_label']}, private estimate", "value": value})
    return {
        "value": f"{len(rounds):,}",
        "label": "rounds under the promise",
        "spread": "",
        "beside": beside,
    }
