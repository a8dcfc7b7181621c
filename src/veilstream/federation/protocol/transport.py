"""What an engine must do: carry bytes from the server to learners and back. Nothing else.

    send(node, request)     soon, or a `Failure` comes back
    receive(timeout_s)      what has come since: (node, reply bytes or Failure)
    nodes()                 who can be reached now
    send_parts(node, ...)   for those that can: a head, and a body that others share

A node is the engine's word for a machine. Who sits there is found out by asking (`Coordinator`).
Messages may be lost, late or doubled; their contents guard against that.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

_AT_ONCE = 32  # replies that are handed over together: whoever reads them holds all of these


@dataclass(frozen=True)
class Failure:
    """The engine could not deliver, or got no answer."""

    why: str


class Transport(Protocol):
    """One engine's run."""

    def nodes(self) -> set[str]:
        """Who can be reached now."""

    def send(self, node: str, request: bytes) -> None:
        """Deliver a request; the reply comes by `receive`."""

    def receive(self, timeout_s: float) -> list[tuple[str, bytes | Failure]]:
        """Replies and failures since the last call; waits for the first at most this long."""

    def close(self) -> None:
        """End the engine's run."""


@runtime_checkable
class SharesBodies(Protocol):
    """A transport that takes a request in two parts, so that a thousand share one model."""

    def send_parts(self, node: str, head: bytes, body: bytes) -> None:
        """As `Transport.send`, of both together."""


class Inbox:
    """What has come back, from any thread."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[str, bytes | Failure]] = queue.Queue()

    def put(self, node: str, what: bytes | Failure) -> None:
        """A reply or a failure."""
        self._queue.put((node, what))

    @property
    def waiting(self) -> int:
        """About how many have not been received yet."""
        return self._queue.qsize()

    def receive(self, timeout_s: float) -> list[tuple[str, bytes | Failure]]:
        """Some that have come since, oldest first; waits for the first at most this long."""
        found: list[tuple[str, bytes | Failure]] = []
        try:
            found.append(self._queue.get(timeout=timeout_s))
            while len(found) < _AT_ONCE:
                found.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        return found
