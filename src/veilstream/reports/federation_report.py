"""The report of a federation: nothing on it that its server does not know already."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.reports.charts import chart
from veilstream.reports.page_kit import REPORT, Chart, Headline, PageState, facts, page_state, write_page
from veilstream.reports.promise import promise_of
from veilstream.reports.provenance import audit_of, provenance_of
from veilstream.reports.telemetry import federation_headline, telemetry_charts
from veilstream.runs.folder import Run
from veilstream.runs.tables import ListedRound, changed_settings, read_rounds

ROUND_CHARTS = {  # by id: title, axis, text, and the names of its columns
    "answered": ("Learners that answered", "learners", "In each round.", {"answered": "Learners that answered"}),
    "seconds": (
        "Duration of a round",
        "seconds",
        "From announcing a model to publishing the next.",
        {"seconds": "Duration of a round"},
    ),
    "bytes": (
        "Bytes of messages",
        "bytes",
        "All learners together, in each round; since this server’s last start.",
        {"sent": "to learners", "received": "from learners"},
    ),
}


def write_federation_report(run: Run) -> Path:
    """Write the report.html of a server's folder, for its owner only."""
    return write_page(run.path / REPORT, federation_state(run), shared=False)


def federation_state(run: Run) -> PageState:
    """The page of a server's folder; what there is so far where the run goes on."""
    plan, listed = run.plan, read_rounds(run.path)
    rounds = listed.rounds
    learners = run.federation.learners if run.finished else {}
    notices = [listed.remark] if listed.remark else []
    if not run.finished and not plan.learning.unbounded:
        notices.insert(0, f"Not complete: {len(rounds)} of {plan.learning.rounds} rounds are done.")
    notices += [f"Changed between two starts of the server: {line}." for line in changed_settings(run.path)]
    incomplete = sum(bool(row.missing) for row in rounds)
    columns = {name: [float(getattr(row, name)) for row in rounds] for name in ("answered", "seconds")}
    return page_state(
        "federation",
        plan.name,
        _headline(run, rounds),
        subtitle=plan.description,
        notices=notices,
        promise=promise_of(run.guarantee, simulated=False),
        charts={"telemetry": telemetry_charts(run), "rounds": round_charts([row.round + 1 for row in rounds], columns)},
        results={
            "columns": ["learner", "epoch", "rounds taken part"],
            "rows": [[name, str(each.epoch), str(each.rounds)] for name, each in learners.items()],
            "note": f"{len(rounds)} rounds; at least one learner was missing in {incomplete} of them.",
            "main": None,
        },
        audit=audit_of(run),
        provenance=provenance_of(run),
    )


def round_charts(
    rounds: Sequence[int] | NDArray[Any], columns: Mapping[str, Sequence[float] | NDArray[Any]]
) -> list[Chart]:
    """The charts whose columns are there; none before the first round."""
    if not len(rounds):
        return []
    return [
        chart(
            key,
            title,
            about,
            label,
            rounds,
            {name: np.asarray(columns[column])[None] for column, name in series.items()},
            from_zero=True,
            whole=key == "answered",
        )
        for key, (title, label, about, series) in ROUND_CHARTS.items()
        if set(series) <= set(columns)
    ]


def _headline(run: Run, rounds: list[ListedRound]) -> Headline:
    learning = run.plan.learning
    total = "" if learning.unbounded else f" of {learning.rounds:,}"
    beside = facts([("rounds done", f"{len(rounds):,}{total}"), ("learners", learning.learners)])
    if rounds:
        beside += facts([("median round", f"{statistics.median(row.seconds for row in rounds):.2f} s")])
    return federation_headline(run.telemetry(), run.plan, beside)
