"""What a transport must do: carry bytes from the server to learners and back. Nothing else.

A node is the transport's word for a machine. Who sits there is found out by asking (`Coordinator`).
Messages may be lost, late or doubled; their contents guard against that.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

_log = logging.getLogger(__name__)

_SUPERVISE_EVERY_S = 1.0
_AT_ONCE = 32  # replies that are handed over together: whoever reads them holds all of these


@dataclass(frozen=True)
class Failure:
    """The transport could not deliver, or got no answer."""

    why: str


Received = bytes | memoryview | Failure
"""A reply, or why there is none."""


class Transport(Protocol):
    """One run's way to its learners."""

    def nodes(self) -> set[str]:
        """Who can be reached now."""

    def send(self, node: str, head: bytes, body: bytes = b"") -> None:
        """Deliver ``head + body``; a round's learners share one body, so it is copied only to write it."""

    def receive(self, timeout_s: float) -> list[tuple[str, Received]]:
        """Replies and failures since the last call; waits for the first at most this long."""

    def close(self) -> None:
        """End the transport's run."""


class ServerSide(Transport, Protocol):
    """A transport that the server starts itself."""

    def start(self) -> None:
        """Begin to carry."""

    def supervise(self) -> str | None:
        """What happened since the last call, if anything."""


class Node(Protocol):
    """A learner's side of a transport."""

    def start(self) -> None:
        """Connect."""

    def supervise(self) -> str | None:
        """What happened since the last call, if anything; raises if the server refuses this learner."""

    def close(self) -> None:
        """Disconnect."""


def supervisor(side: ServerSide | Node) -> Callable[[], None]:
    """A function to call often: once a second it logs what happened, and raises what cannot be mended."""
    next_at = 0.0

    def check() -> None:
        nonlocal next_at
        if time.monotonic() >= next_at:
            next_at = time.monotonic() + _SUPERVISE_EVERY_S
            if note := side.supervise():
                _log.warning("%s", note)

    return check


class Inbox:
    """What has come back, from any thread."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[str, Received]] = queue.Queue()

    def put(self, node: str, what: Received) -> None:
        """A reply or a failure."""
        self._queue.put((node, what))

    @property
    def waiting(self) -> int:
        """About how many have not been received yet."""
        return self._queue.qsize()

    def receive(self, timeout_s: float) -> list[tuple[str, Received]]:
        """Some that have come since, oldest first; waits for the first at most this long."""
        found: list[tuple[str, Received]] = []
        try:
            found.append(self._queue.get(timeout=timeout_s))
            while len(found) < _AT_ONCE:
                found.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        return found
