"""A learner's pages for the person beside it: its status, and whether one person took part.

Every figure is exact and comes from private records, so the learner API serves these pages on
loopback only, to callers that it knows (`federation.learner.local_page`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from veilstream.deployment.ledger.inspect import PersonsPart
from veilstream.federation.learner.local_account import duration
from veilstream.federation.learner.local_page import PERSON_PATH, REFRESH_S, LocalPage
from veilstream.reports.charts import chart
from veilstream.reports.page_kit import (
    Chart,
    Facts,
    Headline,
    PageState,
    Table,
    facts,
    measure,
    page_html,
    page_policy,
    page_state,
    percent,
)
from veilstream.reports.quality import ALWAYS, against, beats, figure

_LINES = {"model": "published model", **ALWAYS}
_STATES = {
    "open": "Takes callers’ records now",
    "waiting": "Takes no caller’s record now",
    "blocked": "Its disk cannot be written, so it takes and sends nothing",
    "ended": "The epoch has ended; nobody is taken any more",
}
_FORM = f"""<form method="post" action="{PERSON_PATH}" autocomplete="off">
<label for="client">The person’s tag, as it is given with a record</label>
<input id="client" name="client" required autocomplete="off" spellcheck="false">
<label for="token">The access token (the learner’s token file)</label>
<input id="token" name="token" type="password" required autocomplete="off">
<button type="submit">Ask</button></form>"""


def policy(*, form: bool) -> str:
    """The content security policy of a page, with or without a form."""
    return f"{page_policy(form=form)}; frame-ancestors 'none'"


def status_html(status: Mapping[str, Any], *, still: bool = False) -> str:
    """The page of a learner's status (`GET /status`); ``still`` offers to reload it."""
    return page_html(status_state(status, still=still))


def person_html(answer: PersonsPart | str | None) -> str:
    """The form that asks about a person; with the answer, or the reason why there is none."""
    said = [] if answer is None else [answer if isinstance(answer, str) else _sentence(answer)]
    links = [{"text": "Back to the learner’s page", "href": LocalPage.PATH}]
    state = page_state("learner", "Was this person used?", None, notices=said, links=links)
    return page_html(state, body=_FORM, form=True)


def status_state(status: Mapping[str, Any], *, still: bool) -> PageState:
    """The page's state."""
    local, ledger = status["local"], status.get("ledger")
    sealed = f"{status['round']} of {status['rounds']}"
    notices = [
        "Exact figures from private records, for this machine only: they are never sent. Please do not pass them on."
    ]
    if why := status.get("health", {}).get("why"):
        notices.insert(0, f"{why}. Make room or repair the disk: the learner tries again by itself.")
    shown: dict[str, Any] = {}
    lists: list[Facts] = []
    headline: Headline = {
        "sentence": "How good the model is, is not known yet: no record was predicted.",
        "better": None,
        "figures": [],
        "beside": facts([("rounds done", sealed)]),
    }
    if local is None:
        notices.append("This learner counts nothing.")
    else:
        notices += [f"Warning. {warning['text']}. Look at the data." for warning in local.get("warnings", ())]
        if local.get("warnings"):
            notices.append(
                "Nothing acts on a warning by itself, since the server would see it. `veilstream ledger pause` stops "
                "rounds; `veilstream ledger resume` goes on and takes the newest records as usual."
            )
        notices += local["notices"]
        score = local["score"]
        if score["records"]:
            headline = _headline(score, sealed, local["used"])
            shown = {"charts": {"learning": _charts(score)}, "results": _scores(score)}
            lists = _recall(score)
        lists += _counts(local)
    if ledger is not None:
        lists.append(_ledger(ledger))
    if core := status.get("core"):
        told = [("part of every sum so far", f"{core['learners']} learners"), ("rounds need", str(core["needed"]))]
        lists.append(_listed("Sums over learners", told))
    if status["refusals"]:
        lists.append(_listed("Refused requests to the learner API", status["refusals"].items()))
    reload = (
        {"text": f"Reload this page every {REFRESH_S} seconds", "href": LocalPage.PATH}
        if still
        else {"text": "Stop reloading", "href": f"{LocalPage.PATH}?still=1"}
    )
    return page_state(
        "learner",
        f"Learner {status['learner']}",
        headline,
        subtitle=f"{_STATES[status['state']]}; epoch {status['epoch']}, {sealed} rounds sealed.",
        notices=notices,
        facts=lists,
        links=[{"text": "Was this person used?", "href": PERSON_PATH}, reload],
        **shown,
    )


def _share(score: Mapping[str, Any]) -> bool:
    return bool(score["kind"] == "accuracy")


def _lines(figures: Mapping[str, Any]) -> list[str]:
    return [name for name in _LINES if name in figures]


def _headline(score: Mapping[str, Any], sealed: str, used: int) -> Headline:
    recent, share = score["recent"] if score["recent"]["records"] else score, _share(score)
    others = {name: recent[name] for name in _lines(recent) if name != "model"}
    best = (max if share else min)(others, key=lambda name: others[name])
    better = beats(recent["model"], others[best], recent["records"], share=share)
    model, unit = figure(recent["model"], share=share), f" ({score['label']})" if "label" in score and not share else ""
    figures = [
        measure(
            model,
            f"{score['kind']}{unit} of the published model on the last {recent['records']:,} records, before it "
            "learned from them",
            [(_LINES[name], figure(value, share=share)) for name, value in others.items()],
        )
    ]
    if balanced := _balanced(score):
        figures.append(measure(figure(balanced[0], share=True), "balanced accuracy since the start", balanced[1]))
    return {
        "sentence": f"{score['kind'].capitalize()} {model}, {against(better)} {_LINES[best]} "
        f"({figure(others[best], share=share)}).",
        "better": better,
        "figures": figures,
        "beside": facts([("records used", f"{used:,}"), ("rounds done", sealed)]),
    }


def _balanced(score: Mapping[str, Any]) -> tuple[float, list[tuple[str, str]]] | None:
    """Mean recall over the labels that came, and what always the commonest one has; None for numbers."""
    counts = score.get("by_label", {})
    if len(counts) < 2:
        return None
    recall = [right / records for records, right in counts.values()]
    return sum(recall) / len(recall), [(_LINES["majority"], figure(1.0 / len(recall), share=True))]


def _recall(score: Mapping[str, Any]) -> list[Facts]:
    each = [
        (f"“{label}”, of {records:,} records", figure(right / records, share=True))
        for label, (records, right) in score.get("by_label", {}).items()
    ]
    return [_listed("Recall: the share of each label that was found", each)] if each else []


def _charts(score: Mapping[str, Any]) -> list[Chart]:
    points = score["over_rounds"]
    if len(points) < 2:
        return []
    values = {_LINES[name]: np.array([[point[name] for point in points]], np.float64) for name in _lines(points[0])}
    about = "Each record is predicted by the published model of its round, before anything is learned from it."
    title = f"{score['kind'].capitalize()} over rounds"
    rounds = [point["round"] for point in points]
    return [chart("score", title, about, score["kind"], rounds, values, share=score["kind"] == "accuracy")]


def _scores(score: Mapping[str, Any]) -> Table:
    names, share = _lines(score), _share(score)
    stretches = [("recently", score["recent"]), ("since the start", score)]
    rows = [
        [f"{when}, {figures['records']:,} records", *(figure(figures[name], share=share) for name in names)]
        for when, figures in stretches
        if figures["records"]
    ]
    return {
        "columns": [score["kind"], *(_LINES[name] for name in names)],
        "rows": rows,
        "note": "What is predicted without a model knows the labels that came before: their commonest (or mean), or "
        "the last one.",
        "main": None,
    }


def _counts(local: Mapping[str, Any]) -> list[Facts]:
    share, seconds = local["clipped_share"], local["seconds_left"]
    counts = {
        "records used": local["used"],
        "over the visit limit": local["returning"],
        "for other learners": local["other_learners"],
        "steps without a client": local["empty_steps"],
        "clipped gradients": "–" if share is None else percent(share),
        "clients on whom telemetry failed": local["metrics_failed"] or None,
    }
    refused = dict(local["refused"])
    if local["not_admitted"]:
        refused["not admitted by the task"] = local["not_admitted"]
    left = {
        "places for people, one per step": local["places_left"],
        "rows of the file, about": local["rows_left_about"],
        "rounds": local["rounds_left"],
        "time at this rate": None if seconds is None else duration(seconds),
    }
    lists = [
        _listed("Records", counts.items()),
        _listed(f"Refused: {sum(refused.values())}", refused.items()),
        _listed("Outside the plan’s range or vocabulary", local["clamped"].items()),
        _listed("Left", left.items()),
    ]
    return [each for each in lists if each["rows"]]


def _ledger(ledger: Mapping[str, Any]) -> Facts:
    confirmed = ledger["acknowledged"]
    rows = {
        "promise to each of these people": ledger["promise"],
        "records in its chain": ledger["records"],
        "head of the chain": f"{ledger['head'][:16]}…" if ledger["head"] else "–",
        "rounds that the server has": "none" if confirmed is None else f"up to {confirmed + 1}",
        "seeds of this epoch’s noise": "destroyed" if ledger["ended"] else "kept until it ends",
        "witness": ledger["witness"],
    }
    return _listed("Ledger", rows.items())


def _listed(title: str, rows: Iterable[tuple[str, Any]]) -> Facts:
    return {"title": title, "rows": facts([(label, value) for label, value in rows if value is not None])}


def _sentence(part: PersonsPart) -> str:
    if not part.used:
        return "No: this learner used no record under this tag."
    if part.carried_over:
        return (
            "Yes: this person took part before the store was lost, and is left out for good. "
            "How often they took part is not known."
        )
    places = "one place" if part.times == 1 else f"{part.times} places"
    return (
        f"Yes: this person took {places} in steps of this learner, the last in epoch {part.last_epoch}. In a secret "
        "order that step may still come, or have passed without the record. The promise covers what left this machine; "
        "no record is kept after its step, its window or its epoch."
    )
