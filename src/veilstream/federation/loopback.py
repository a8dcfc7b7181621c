"""A transport for tests and federations on one machine: each node is a learner's Unix socket."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from veilstream.federation.protocol import frames
from veilstream.federation.protocol.transport import Failure, Inbox, Received


class Loopback:
    """Nodes by name, each behind a socket; one that does not answer is a failure."""

    def __init__(self, sockets: Mapping[str, Path], timeout_s: float = 60.0) -> None:
        self._sockets, self._timeout_s = dict(sockets), timeout_s
        self._inbox = Inbox()

    def nodes(self) -> set[str]:
        """Those whose socket exists."""
        return {node for node, path in self._sockets.items() if path.exists()}

    def send(self, node: str, head: bytes, body: bytes = b"") -> None:
        """Ask in a thread of its own."""
        threading.Thread(target=self._ask, args=(node, head + body), daemon=True).start()

    def _ask(self, node: str, request: bytes) -> None:
        try:
            answer: Received = frames.ask(self._sockets[node], request, self._timeout_s)
        except OSError as error:
            answer = Failure(str(error))
        self._inbox.put(node, answer)

    def receive(self, timeout_s: float) -> list[tuple[str, Received]]:
        """Replies and failures since the last call."""
        return self._inbox.receive(timeout_s)

    def close(self) -> None:
        """Nothing to end."""
