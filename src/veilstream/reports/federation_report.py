"""What the report of a federation says: nothing that its server does not know already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from veilstream.reports.charts import pack, thinned
from veilstream.reports.page_kit import REPORT, SCHEMA, write_page
from veilstream.reports.promise import promise_of
from veilstream.reports.provenance import audit_of, provenance_of
from veilstream.reports.telemetry import latest_estimate, telemetry_charts
from veilstream.runs.folder import Run
from veilstream.runs.tables import ListedRound, read_rounds

_MOST_POINTS = 500


def write_federation_report(run: Run) -> Path:
    """Write the report.html of a server's folder, for its owner only.

    Raises:
        InputError: for a folder whose files are missing or damaged.

    """
    return write_page(run.path / REPORT, federation_state(run), shared=False)


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
        "schema": SCHEMA,
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
            "rows": [[name, str(seat["epoch"]), str(seat["rounds"])] for name, seat in learners.items()],
            "note": f"{len(rounds)} rounds; in {len(missing)} of them someone was missing.",
            "main": None,
        },
        "audit": audit_of(run),
        "provenance": provenance_of(run),
    }


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


def _headline(rounds: list[ListedRound], telemetry: list[dict[str, Any]], learners: int) -> dict[str, Any]:
    times = sorted(row.seconds for row in rounds)
    beside = [{"label": "learners", "value": str(learners)}]
    if times:
        beside.append({"label": "median round", "value": f"{times[len(times) // 2]:.2f} s"})
    newest = latest_estimate(telemetry)
    if newest is not None:
        beside.append(newest)
    return {"value": f"{len(rounds):,}", "label": "rounds under the promise", "spread": "", "beside": beside}
