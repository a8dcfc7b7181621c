"""The learner's page for the person beside it: what `GET /status` says, as HTML.

It has no script, loads nothing, and asks for itself again every ten seconds. What it shows is
computed from private records without noise: it is served on loopback, to whoever shows the access
token or came by a link that the token was shown for (`page_access`). A second page asks whether a
person took part; its answer needs the token itself (`person_page`).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from html import escape
from typing import Any

from veilstream.federation.learner.access import LINK_S, SESSION_S, PageAccess
from veilstream.federation.learner.local_account import duration
from veilstream.federation.learner.score_plot import LINES, score_svg

_REFRESH_S = 10
_FOLLOWS = f'Loaded again every {_REFRESH_S} seconds. <a href="/page?still=1">Stop that</a>'
_STILL = '<a href="/page">Load this page again every few seconds</a>'
_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 44rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1rem; margin: 1.6rem 0 .3rem; }
p { margin: .3rem 0; } .aside { opacity: .7; }
table { border-collapse: collapse; } th { font-weight: normal; text-align: left; }
th, td { padding: .1rem 1.5rem .1rem 0; overflow-wrap: anywhere; }
a { color: LinkText; } label { display: block; margin: .8rem 0 .2rem; }
input { font: inherit; width: 100%; box-sizing: border-box; padding: .3rem .5rem; }
button { font: inherit; margin: 1rem 0; padding: .3rem 1rem; }
td { text-align: right; font-variant-numeric: tabular-nums; }
.notices { border-left: 3px solid #c77700; padding-left: 1rem; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: currentColor; }
polyline { fill: none; stroke-width: 2; } .grid { stroke: currentColor; opacity: .15; }
.model { stroke: #0072b2; stroke-width: 2.5; }
.majority, .mean { stroke: #d55e00; stroke-dasharray: 7 4; }
.no_change { stroke: #009e73; stroke-dasharray: 2 3; }
svg text.name { stroke: none; } svg text.model { fill: #0072b2; }
svg text.majority, svg text.mean { fill: #d55e00; } svg text.no_change { fill: #009e73; }
"""
_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

PERSON_PATH = "/page/person"


def page_policy(form_action: str) -> str:
    """What a page may do: use its own style, and send a form to ``form_action``."""
    return (
        f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; "
        f"form-action {form_action}; frame-ancestors 'none'"
    )


PAGE_HEADERS = {
    "Content-Security-Policy": page_policy("'none'"),
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""Nothing but the page's own style is used, and no other page may hold or read it."""

_FROM_OUTSIDE = ("cross-site", "same-site")  # another port of this machine is the same site


class LocalPage:
    """Who may see the page, and what it answers; `status` is what `GET /status` says."""

    PATH, LINK_PATH = "/page", "/page/link"

    def __init__(self, status: Callable[[], dict[str, Any]]) -> None:
        self._status, self._access = status, PageAccess()

    def lets_in(self, method: str, path: str, headers: Any, cookies: dict[str, str], code: str | None) -> bool:
        """Whether a browser may have the page without the token: by its cookie, or a link's code.

        Asking does not use a code up (`enter` does). The cookie also gets to the question about a
        person, whose answer needs the token beside it.
        """
        asked = (method, path)
        if headers.get("sec-fetch-site") in _FROM_OUTSIDE:
            return False
        if asked == ("GET", self.PATH) and code is not None and self._access.waits(code):
            return True
        if asked not in (("GET", self.PATH), ("GET", PERSON_PATH), ("POST", PERSON_PATH)):
            return False
        mine = (value for name, value in cookies.items() if name.startswith(_COOKIE))
        return any(map(self._access.knows, mine))

    def new_link(self, host: str) -> dict[str, Any]:
        """For whoever has shown the token; ``host`` is how they reached the API."""
        code = self._access.new_code()
        return {"link": f"http://{host}{self.PATH}?once={code}", "works_s": LINK_S}

    def enter(self, code: str, port: int) -> str | None:
        """The cookie for a link's code, which is used up; None if there is no such code now."""
        session = self._access.enter(code)
        if session is None:
            return None
        return f"{_COOKIE}{port}={session}; Path={self.PATH}; Max-Age={SESSION_S:.0f}; HttpOnly; SameSite=Strict"

    def html(self, *, still: bool) -> tuple[str, dict[str, str]]:
        """As it stands now, and its headers; it reloads itself unless it is to be ``still``."""
        again = {} if still else {"Refresh": str(_REFRESH_S)}
        return page_html(self._status(), still=still), PAGE_HEADERS | again


_COOKIE = "veilstream_page_"


def page_html(status: dict[str, Any], *, still: bool = False) -> str:
    """The whole page.

    Args:
        status: what `GET /status` says.
        still: whether it stays as it is, for who cannot read it between two reloads.

    """
    local = status["local"]
    body = "<p>Nothing is counted at this learner.</p>" if local is None else _account(local)
    refusals = _table(status["refusals"].items())
    requests = f"<h2>Requests to the learner API that were refused</h2>{refusals}"
    where = f"epoch {status['epoch']}, {status['round']} of {status['rounds']} rounds sealed"
    return html_document(
        f"Learner {status['learner']}",
        f"<p>{escape(_STATES[status['state']])}; {where}.</p>"
        '<p class="aside">Exact figures from private records, for this machine alone: none of '
        "them is ever sent. Please do not pass them on.</p>"
        f"{body}{_ledger(status.get('ledger'))}{requests if status['refusals'] else ''}"
        f'<h2>One person</h2><p><a href="{PERSON_PATH}">Was this person used?</a></p>'
        f"<p>{_STILL if still else _FOLLOWS}</p>",
    )


def html_document(title: str, body: str) -> str:
    """A whole page of this style; ``body`` is HTML, ``title`` is text."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>"
        f"<h1>{escape(title)}</h1>{body}</main></body></html>"
    )


def _ledger(ledger: dict[str, Any] | None) -> str:
    if ledger is None:
        return ""
    confirmed = ledger["acknowledged"]
    rows = [
        ("promise to each of these people", ledger["promise"]),
        ("records in its chain", ledger["records"]),
        ("head of the chain", f"{ledger['head'][:16]}…" if ledger["head"] else "-"),
        ("rounds that the server has", "none" if confirmed is None else f"up to {confirmed + 1}"),
        ("seeds of this epoch's noise", "destroyed" if ledger["ended"] else "held until it ends"),
        ("witness", ledger["witness"]),
    ]
    return f"<h2>Ledger</h2>{_table(rows)}"


_STATES = {
    "open": "Callers' records are taken now",
    "waiting": "No caller's record is taken now",
    "ended": "The epoch has ended and nobody is taken any more",
}


def _account(local: dict[str, Any]) -> str:
    return _notices(local) + _score(local["score"]) + _counts(local) + _left(local)


def _notices(local: dict[str, Any]) -> str:
    if not local["notices"]:
        return ""
    said = "".join(f"<p>{escape(notice)}</p>" for notice in local["notices"])
    return f'<div class="notices">{said}</div>'


def _score(score: dict[str, Any]) -> str:
    if not score["records"]:
        return "<h2>Score</h2><p>No record has been predicted yet.</p>"
    names = [name for name in LINES if name in score]
    head = "".join(f"<td>{LINES[name]}</td>" for name in names)
    rows = ""
    for what, figures in (("lately", score["recent"]), ("since the start", score)):
        if figures["records"]:
            cells = "".join(f"<td>{figures[name]:.4g}</td>" for name in names)
            rows += f"<tr><th>{what}, {figures['records']} records</th>{cells}</tr>"
    return (
        f"<h2>Score of the model on records before it learns from them: {escape(score['kind'])}"
        f"</h2><table><tr><th></th>{head}</tr>{rows}</table>"
        f"{score_svg(score['over_rounds'], score['kind'])}"
    )


def _counts(local: dict[str, Any]) -> str:
    share = local["clipped_share"]
    counts = [
        ("records used", local["used"]),
        ("of people who may not take part again yet", local["returning"]),
        ("of other learners", local["other_learners"]),
        ("steps without a client", local["empty_steps"]),
        ("gradients that were clipped", "-" if share is None else f"{100 * share:.1f}%"),
    ]
    if local["metrics_failed"]:
        counts.append(("clients whose telemetry the task failed on", local["metrics_failed"]))
    refused = dict(local["refused"])
    if local["not_admitted"]:
        refused["not admitted by the task"] = local["not_admitted"]
    parts = f"<h2>Records</h2>{_table(counts)}"
    if refused:
        parts += f"<h2>Refused: {sum(refused.values())}</h2>{_table(refused.items())}"
    if local["clamped"]:
        parts += f"<h2>Outside the plan's range or vocabulary</h2>{_table(local['clamped'].items())}"
    return parts


def _left(local: dict[str, Any]) -> str:
    seconds, rows = local["seconds_left"], local["rows_left_about"]
    left = [
        ("places for people, one a step", local["places_left"]),
        ("rows of the file, about", rows),
        ("rounds", local["rounds_left"]),
        ("time at this rate", None if seconds is None else duration(seconds)),
    ]
    return f"<h2>Left</h2>{_table((what, n) for what, n in left if n is not None)}"


def _table(rows: Any) -> str:
    lines = (f"<tr><th>{escape(str(a))}</th><td>{escape(str(b))}</td></tr>" for a, b in rows)
    return f"<table>{''.join(lines)}</table>"
