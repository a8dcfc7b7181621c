"""A transport for tests and audits in one process: each node is a learner's function of bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from veilstream.federation.protocol.transport import Failure, Inbox, Received


class Loopback:
    """Nodes by name; one that says nothing is a failure. ``learners`` may change meanwhile."""

    def __init__(self, learners: Mapping[str, Callable[[bytes], bytes]]) -> None:
        self._learners = learners
        self._inbox = Inbox()

    def nodes(self) -> set[str]:
        """Those that are there now."""
        return set(self._learners)

    def send(self, node: str, head: bytes, body: bytes = b"") -> None:
        """Ask in a thread of its own."""
        threading.Thread(target=self._ask, args=(node, head + body), daemon=True).start()

    def _ask(self, node: str, request: bytes) -> None:
        answer = self._learners.get(node)
        reply: Received = b"" if answer is None else answer(request)
        self._inbox.put(node, reply or Failure("no answer"))

    def receive(self, timeout_s: float) -> list[tuple[str, Received]]:
        """Replies and failures since the last call."""
        return self._inbox.receive(timeout_s)

    def close(self) -> None:
        """Nothing to end."""
