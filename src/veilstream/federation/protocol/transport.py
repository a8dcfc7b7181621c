"""What a transport must do: carry bytes from the server to learners and back. Nothing else.

    send(node, head, body)  soon, or a `Failure` comes back; many requests share one body
    receive(timeout_s)      what has come since: (node, reply bytes or Failure)
    nodes()                 who can be reached now

A node is the transport's word for a machine. Who sits there is found out by asking (`Coordinator`).
Messages may be lost, late or doubled; their contents guard against that.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass
from typing import Protocol

_AT_ONCE = 32  # replies that are handed over together: whoever reads them holds all of these


@dataclass(frozen=True)
class Failure:
    """The transport could not deliver, or got no answer."""

    why: str


class Transport(Protocol):
    """One run's way to its learners."""

    def nodes(self) -> set[str]:
        """Who can be reached now."""

    def send(self, node: str, head: bytes, body: bytes = b"") -> None:
        """Deliver a request, ``head + body``; the reply comes by `receive`.

        ``body`` is the same object for every learner of a round: a transport keeps it as it is and
        copies it only to write it.
        """

    def receive(self, timeout_s: float) -> list[tuple[str, bytes | Failure]]:
        """Replies and failures since the last call; waits for the first at most this long."""

    def close(self) -> None:
        """End the transport's run."""


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
