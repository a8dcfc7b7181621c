"""Who may see the learner's page in a browser, and the headers it is served with.

The page shows exact figures from private records, so it is served on loopback, to callers with the
access token. A browser cannot send the token in a header, and a token in an address would stay in its
history. So a program that can read the token asks for a link (`POST /page/link`). The link opens the
page once, within a minute, and leaves a cookie that scripts cannot read and other sites cannot send.
Cookies ignore ports: the browser may show this one to another program on this machine, if that is
called under ``/page``. So the cookie opens this page and nothing else, and ends with the learner's
process, or after twelve hours. A second page asks whether a person took part. Its answer needs the
token itself, typed into the form. The tag is sent in the body of a POST; it is in no address and no log.

The HTML is made elsewhere (`LearnerPages`): the command line injects `veilstream.reports.learner_page`.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from veilstream.deployment.ledger.inspect import PersonsPart

LINK_S = 60.0
SESSION_S = 12 * 3600.0
"""How long a browser may look before it needs another link."""
PERSON_PATH = "/page/person"
REFRESH_S = 10
_MOST_SECRETS = 8
_COOKIE = "veilstream_page_"
_FROM_OUTSIDE = ("cross-site", "same-site")  # another port of this machine is the same site


class LearnerPages(Protocol):
    """Makes the HTML of a learner's pages."""

    def status_html(self, status: Mapping[str, Any], *, still: bool) -> str:
        """The page of what ``GET /status`` says."""

    def person_html(self, answer: PersonsPart | str | None) -> str:
        """The form that asks about a person, with an answer or a reason why there is none."""

    def policy(self, *, form: bool) -> str:
        """The content security policy of these pages."""


class LocalPage:
    """Access to the page: links, cookies and headers."""

    PATH, LINK_PATH = "/page", "/page/link"

    def __init__(self, pages: LearnerPages, clock: Callable[[], float] = time.monotonic) -> None:
        self.pages = pages
        self._codes, self._sessions = _Secrets(LINK_S, clock), _Secrets(SESSION_S, clock)

    def lets_in(self, method: str, path: str, headers: Any, cookies: dict[str, str], code: str | None) -> bool:
        """Whether a browser may have the page without the token: by its cookie, or a link's code, not used up."""
        asked = (method, path)
        if headers.get("sec-fetch-site") in _FROM_OUTSIDE:
            return False
        if asked == ("GET", self.PATH) and code is not None and self._codes.find(code) is not None:
            return True
        if asked not in (("GET", self.PATH), ("GET", PERSON_PATH), ("POST", PERSON_PATH)):
            return False
        mine = (value for name, value in cookies.items() if name.startswith(_COOKIE))
        return any(self._sessions.find(value) is not None for value in mine)

    def new_link(self, host: str) -> dict[str, Any]:
        """A link for a caller that has shown the token; ``host`` is how it reached the API."""
        code = self._codes.new()
        return {"link": f"http://{host}{self.PATH}?once={code}", "works_s": LINK_S}

    def enter(self, code: str, port: int) -> str | None:
        """Use up a link's code: the cookie for it, or None if the code is not valid now."""
        if not self._codes.remove(code):
            return None
        session = self._sessions.new()
        return f"{_COOKIE}{port}={session}; Path={self.PATH}; Max-Age={SESSION_S:.0f}; HttpOnly; SameSite=Strict"

    def headers(self, *, form: bool = False, reload: bool = False) -> dict[str, str]:
        """A page uses only its own style and scripts, and no other page may hold or read it."""
        headers = {
            "Content-Security-Policy": self.pages.policy(form=form),
            "X-Frame-Options": "DENY",
            # Under "no-referrer" a browser sends a form with the origin "null", which is refused here.
            "Referrer-Policy": "same-origin" if form else "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
        }
        return headers | ({"Refresh": str(REFRESH_S)} if reload else {})


class _Secrets:
    def __init__(self, lasts_s: float, clock: Callable[[], float]) -> None:
        self._lasts_s, self._clock = lasts_s, clock
        self._until: dict[str, float] = {}

    def new(self) -> str:
        self._forget_old()
        while len(self._until) >= _MOST_SECRETS:
            del self._until[next(iter(self._until))]  # the oldest
        made = secrets.token_urlsafe(32)
        self._until[made] = self._clock() + self._lasts_s
        return made

    def find(self, shown: str) -> str | None:
        self._forget_old()
        told = shown.encode(errors="replace")
        known = [one for one in self._until if hmac.compare_digest(one.encode(), told)]
        return known[0] if known else None

    def remove(self, shown: str) -> bool:
        found = self.find(shown)
        if found is not None:
            del self._until[found]
        return found is not None

    def _forget_old(self) -> None:
        now = self._clock()
        self._until = {one: until for one, until in self._until.items() if until > now}
