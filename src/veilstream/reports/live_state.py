"""A page that goes on by itself: a `PageState`, and events that change it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from veilstream.federation.http.event_feed import EventFeed
from veilstream.reports.page_kit import PageState, page_html


class LiveState:
    """The state of one live page; subclasses change it."""

    shown_by = "veilstream.reports.live_state:LiveState"
    """What shows this state in another process, which is told of every change."""

    def __init__(self, state: PageState, path: str) -> None:
        self.feed = EventFeed()
        self.relay: Callable[[dict[str, Any], dict[str, Any] | None], None] = lambda *_: None
        self._state: dict[str, Any] = dict(state)
        self._events = f"{path.rstrip('/')}/events"

    def change(self, patch: dict[str, Any], told: dict[str, Any] | None = None) -> None:
        """Replace top-level keys (of ``charts`` single sections), and tell every reader this, or ``told`` instead."""
        with self.feed.changing:
            charts = {**self._state["charts"], **patch.get("charts", {})}
            self._state = {**self._state, **patch, "charts": charts}
            self.feed.publish(patch if told is None else told)
            self.relay(patch, told)

    def _now(self) -> tuple[str, dict[str, Any]]:
        with self.feed.changing:
            last = self.feed.last_id
            return last, {**self._state, "live": {"events": self._events, "after": last}}

    def snapshot(self) -> tuple[str, bytes]:
        """The last event's id, and the whole state at that event, as JSON."""
        last, state = self._now()
        return last, json.dumps(state, separators=(",", ":"), allow_nan=False).encode()

    def html(self) -> tuple[str, bytes]:
        """The last event's id, and the whole page at that event."""
        last, state = self._now()
        return last, page_html(state, live=True).encode()
