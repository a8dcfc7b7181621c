"""What changed since a reader last looked: numbered events, of which a bounded number is kept.

A reader that names an event of another process, or one that is no longer kept, gets None and starts
from the whole state. Any thread may publish.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_KEPT_EVENTS = 256
_KEPT_BYTES = 4 << 20


@dataclass(frozen=True)
class Event:
    """One change: its number in this process, and the patch as JSON."""

    number: int
    data: bytes


class EventFeed:
    """The newest events of one process."""

    def __init__(self, kept_events: int = _KEPT_EVENTS, kept_bytes: int = _KEPT_BYTES) -> None:
        self.changing = threading.RLock()
        """Held while the state changes and its event is published."""
        self._process = secrets.token_hex(4)
        self._most, self._most_bytes = kept_events, kept_bytes
        self._events: deque[Event] = deque()
        self._number = self._bytes = 0
        self._wake: set[Callable[[], None]] = set()
        self.ended = False
        self.stopped = False
        """Whether readers must leave now; they may come back to another process."""

    @property
    def last_id(self) -> str:
        """The id of the newest event, also before the first."""
        return self.id_of(self._number)

    def id_of(self, number: int) -> str:
        """How a reader names an event of this process."""
        return f"{self._process}-{number}"

    def publish(self, patch: dict[str, Any]) -> None:
        """Tell every reader; ``patch`` is what `veilstream.update` of the page takes."""
        data = json.dumps(patch, separators=(",", ":"), allow_nan=False).encode()
        with self.changing:
            self._number += 1
            self._events.append(Event(self._number, data))
            self._bytes += len(data)
            while len(self._events) > 1 and (len(self._events) > self._most or self._bytes > self._most_bytes):
                self._bytes -= len(self._events.popleft().data)
        self._tell()

    def since(self, event_id: str) -> list[Event] | None:
        """Events after this one; None if what follows it is not known here."""
        process, _, number = event_id.partition("-")
        if process != self._process or not (number.isascii() and number.isdecimal()):
            return None
        if len(number) > 18:
            return None
        after = int(number)
        with self.changing:
            first_kept = self._number - len(self._events)
            if not first_kept <= after <= self._number:
                return None
            return [event for event in self._events if event.number > after]

    def end(self) -> None:
        """Nothing follows: readers get the last events, and leave."""
        self.ended = True
        self._tell()

    def stop(self) -> None:
        """The process ends: readers leave at once."""
        self.stopped = True
        self._tell()

    def on_change(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call ``wake`` from any thread after every change; call the result to stop that."""
        with self.changing:
            self._wake.add(wake)

        def forget() -> None:
            with self.changing:
                self._wake.discard(wake)

        return forget

    def _tell(self) -> None:
        with self.changing:
            waiting = tuple(self._wake)
        for wake in waiting:
            wake()
