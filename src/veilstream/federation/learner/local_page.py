"""Who may see the learner's page in a browser, and the headers it is served with.

The page shows exact figures from private records. So it is served on loopback, to callers with the
access token or with the cookie that a link leaves (`access`). A second page asks whether a person
took part. Its answer needs the token itself, typed into the form: another program of this machine
may see the cookie. The tag is sent in the body of a POST; it is in no address and no log.

The HTML is made elsewhere (`LearnerPages`): the command line injects `veilstream.reports.learner_page`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from veilstream.deployment.ledger.inspect import PersonsPart
from veilstream.federation.learner.access import LINK_S, SESSION_S, PageAccess

PERSON_PATH = "/page/person"
REFRESH_S = 10
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

    def __init__(self, pages: LearnerPages) -> None:
        self.pages, self._access = pages, PageAccess()

    def lets_in(self, method: str, path: str, headers: Any, cookies: dict[str, str], code: str | None) -> bool:
        """Whether a browser may have the page without the token: by its cookie, or a link's code.

        This does not use up a code (`enter` does). The cookie also opens the question about a
        person, whose answer needs the token too.
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
        """A link for a caller that has shown the token; ``host`` is how it reached the API."""
        code = self._access.new_code()
        return {"link": f"http://{host}{self.PATH}?once={code}", "works_s": LINK_S}

    def enter(self, code: str, port: int) -> str | None:
        """Use up a link's code: the cookie for it, or None if the code is not valid now."""
        session = self._access.enter(code)
        if session is None:
            return None
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
