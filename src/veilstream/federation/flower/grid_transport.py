"""Flower's grid as a `Transport`: messages to SuperNodes and back, by Flower's public API."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flwr.app import Message, MessageType, RecordDict

from veilstream.federation.direct.wire import reply_limit, request_limit
from veilstream.federation.flower import RECORD, REPLY, REQUEST
from veilstream.federation.flower.client_app import packed
from veilstream.federation.protocol.transport import Failure, Received

_log = logging.getLogger(__name__)

_LOOK_S = 0.5
_POLL_S = 0.05
_UNREACHABLE = "its SuperNode did not reach the learner's daemon"


@dataclass(frozen=True)
class _Out:
    message: str
    request: bytes
    at: float
    since: str
    """When the SuperNode had connected; after a reconnection it has forgotten the request."""


class GridTransport:
    """One Flower run, driven by `receive` in one thread. A SuperNode has one request; the newest waits."""

    def __init__(self, grid: Any, *, dim: int, answer_within_s: float) -> None:
        """``answer_within_s``: after this time a request is lost, also for Flower."""
        self._grid, self._within_s = grid, answer_within_s
        self._request_limit, self._reply_limit = request_limit(dim), reply_limit(dim)
        self._nodes: dict[str, str] = {}
        self._looked = float("-inf")
        self._waiting: dict[str, bytes] = {}
        self._out: dict[str, _Out] = {}
        self._found: list[tuple[str, Received]] = []

    def start(self) -> None:
        """Flower has started it."""

    def supervise(self) -> str | None:
        """Nothing to report."""
        return None

    def nodes(self) -> set[str]:
        """SuperNodes that the SuperLink has online."""
        now = time.monotonic()
        if now - self._looked > _LOOK_S:
            with _unless_away():
                self._nodes = {
                    str(node.node_id): str(getattr(node, "last_activated_at", "")) for node in self._grid.get_nodes()
                }
            self._looked = now
        return set(self._nodes)

    def send(self, node: str, head: bytes, body: bytes = b"") -> None:
        """Send with the next `receive`, or once the request before it is answered."""
        request, out = head + body, self._out.get(node)
        if len(request) > self._request_limit:
            why = f"a request of {len(request)} bytes, and at most {self._request_limit} are allowed"
            self._found.append((node, Failure(why)))
        elif out is None or out.request != request:
            self._waiting[node] = request
        else:
            self._waiting.pop(node, None)

    def receive(self, timeout_s: float) -> list[tuple[str, Received]]:
        """Replies and failures since the last call; waits for the first at most this long."""
        until = time.monotonic() + timeout_s
        while True:
            self._push()
            self._pull()
            if self._found or time.monotonic() > until:
                found, self._found = self._found, []
                return found
            time.sleep(_POLL_S)

    def close(self) -> None:
        """The run ends with the ServerApp."""

    def _push(self) -> None:
        ready = [(node, self._waiting.pop(node)) for node in set(self._waiting) - set(self._out)]
        if not ready:
            return
        messages = [
            Message(RecordDict({RECORD: packed(REQUEST, request)}), int(node), MessageType.QUERY, ttl=self._within_s)
            for node, request in ready
        ]
        names: list[str | None] = [None] * len(ready)
        with _unless_away():
            taken = list(self._grid.push_messages(messages))
            names[: len(taken)] = taken
        now = time.monotonic()
        for (node, request), name in zip(ready, names, strict=True):
            if name:
                self._out[node] = _Out(name, request, now, self._nodes.get(node, ""))
            else:
                self._found.append((node, Failure("the SuperLink did not take the message")))

    def _pull(self) -> None:
        replies: list[Any] = []
        if self._out:
            with _unless_away():
                replies = list(self._grid.pull_messages([out.message for out in self._out.values()]))
        asked = {out.message: node for node, out in self._out.items()}
        for reply in replies:
            node = asked.get(reply.metadata.reply_to_message_id)
            if node is not None:
                del self._out[node]
                self._found.append((node, self._content(reply)))
        self._give_up()

    def _give_up(self) -> None:
        now, here = time.monotonic(), self.nodes()
        for node, out in list(self._out.items()):
            why = None
            if node not in here:
                why = "its SuperNode is away"
            elif self._nodes[node] != out.since:
                why = "its SuperNode reconnected"
            elif now - out.at > self._within_s:
                why = f"no answer within {self._within_s:g} s"
            if why is not None:
                del self._out[node]
                self._found.append((node, Failure(why)))

    def _content(self, reply: Any) -> Received:
        if reply.has_error():
            return Failure(f"Flower says: {str(reply.error.reason)[:200]!r}")
        try:
            content = reply.content[RECORD][REPLY]
        except KeyError:
            return Failure("a reply of unknown form")
        if not isinstance(content, bytes):
            return Failure("a reply of unknown form")
        if len(content) > self._reply_limit:
            return Failure(f"a reply of {len(content)} bytes, and at most {self._reply_limit} are allowed")
        return content or Failure(_UNREACHABLE)


@contextmanager
def _unless_away() -> Iterator[None]:
    """Go on if the SuperLink cannot be reached (Flower's client uses httpx)."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and type(error).__module__.split(".")[0] != "httpx":
            raise
        _log.warning("the SuperLink did not answer (%s)", type(error).__name__)
        time.sleep(_POLL_S)
