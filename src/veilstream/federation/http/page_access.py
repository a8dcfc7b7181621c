"""How a browser gets to the learner's local page: a link that works once, then a cookie.

    link = page_link(("127.0.0.1", 8490), token)      what `veilstream ledger page` prints

A browser cannot show the access token in a header by itself, and a token in an address would stay
in its history. So whoever can read the token asks the learner API for a link (`POST /page/link`).
It opens the page once, within a minute, and leaves a cookie that scripts cannot read and that no
other site's page can send along. Cookies do not know ports: another program that listens on this
machine may be shown it by the same browser, if it is called under ``/page``. Hence the cookie opens
this page and nothing else, and ends with the learner's process, or after twelve hours.
"""

from __future__ import annotations

import hmac
import json
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from veilstream.errors import InputError, ProtocolError
from veilstream.federation.addresses import is_loopback

LINK_S = 60.0
"""How long a link works."""
SESSION_S = 12 * 3600.0
"""How long a browser may look before it needs another link."""

_MOST = 8
_ASK_S = 10.0


class PageAccess:
    """Links that have not been used, and browsers that have used one; in memory only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._codes, self._sessions = _Secrets(LINK_S, clock), _Secrets(SESSION_S, clock)

    def new_code(self) -> str:
        """For one link."""
        return self._codes.new()

    def waits(self, code: str) -> bool:
        """Whether a link with this code would open the page now."""
        return self._codes.has(code)

    def enter(self, code: str) -> str | None:
        """A session for a code, which is used up by this; None if there is no such code now."""
        return self._sessions.new() if self._codes.remove(code) else None

    def knows(self, session: str) -> bool:
        """Whether this session was begun here and has not ended."""
        return self._sessions.has(session)


class _Secrets:
    """A few random texts, each until its time."""

    def __init__(self, lasts_s: float, clock: Callable[[], float]) -> None:
        self._lasts_s, self._clock = lasts_s, clock
        self._until: dict[str, float] = {}

    def new(self) -> str:
        self._forget()
        while len(self._until) >= _MOST:
            del self._until[next(iter(self._until))]  # the oldest
        made = secrets.token_urlsafe(32)
        self._until[made] = self._clock() + self._lasts_s
        return made

    def has(self, shown: str) -> bool:
        return self._find(shown) is not None

    def remove(self, shown: str) -> bool:
        found = self._find(shown)
        if found is not None:
            del self._until[found]
        return found is not None

    def _find(self, shown: str) -> str | None:
        self._forget()
        told = shown.encode(errors="replace")
        known = [one for one in self._until if hmac.compare_digest(one.encode(), told)]
        return known[0] if known else None

    def _forget(self) -> None:
        now = self._clock()
        self._until = {one: until for one, until in self._until.items() if until > now}


def page_link(address: tuple[str, int], token: str) -> str:
    """Ask a running learner for a link to its page.

    Raises:
        InputError: an address beyond this machine, where the token would be read on the way.
        ProtocolError: nothing answers there, or not with a link.

    """
    host, port = address
    if not is_loopback(host):
        raise InputError("--learner-api", host, "a loopback address", "ask on the learner's machine")
    at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    request = urllib.request.Request(f"http://{at}/page/link", b"", {"Authorization": f"Bearer {token}"}, method="POST")
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=_ASK_S) as answer:
            said = json.loads(answer.read(1 << 14))
        link = said["link"]
    except urllib.error.HTTPError as error:
        with error:
            raise ProtocolError(
                f"what answers at {at} refused the token (HTTP {error.code})",
                "is it this store's learner? --token-file names another token",
            ) from None
    except (OSError, ValueError, KeyError, TypeError):
        raise ProtocolError(
            f"no learner API answers at {at}",
            "start the learner with --learner-api, or give the address that its log shows",
        ) from None
    if not isinstance(link, str) or not link.startswith(f"http://{at}/page?once="):
        raise ProtocolError(f"what answers at {at} is not a learner API", "check --learner-api")
    return link
