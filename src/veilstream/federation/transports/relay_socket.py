"""The server's end of an engine: a Unix socket to which the engine's server side connects.

The coordinator lives in our own process and outlives any run of an engine. What the engine starts
is a relay without state. It connects here and speaks in frames:

    to the relay     S, node, request           send this
    from the relay   N, JSON list               who can be reached
                     R, node, reply             this came back
                     F, node, text              this did not

When the relay is gone, nobody can be reached until the next one connects.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from pathlib import Path

from veilstream.federation.protocol import frames
from veilstream.federation.protocol.transport import Failure, Inbox

__all__ = ["RelaySocket", "pack", "unpack"]


def pack(kind: bytes, node: str, content: bytes = b"") -> bytes:
    """One frame of the relay's language."""
    name = node.encode()
    return kind + struct.pack("<H", len(name)) + name + content


def unpack(frame: bytes) -> tuple[bytes, str, bytes]:
    """Kind, node, content."""
    (length,) = struct.unpack_from("<H", frame, 1)
    return frame[:1], frame[3 : 3 + length].decode(), frame[3 + length :]


class RelaySocket:
    """A `Transport` whose other half is whichever relay is connected now."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = frames.listen(path)
        self._relay: socket.socket | None = None
        self._nodes: set[str] = set()
        self._inbox = Inbox()
        self._sending = threading.Lock()
        self._outstanding: set[str] = set()
        self.bytes_sent = self.bytes_received = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def connected(self) -> bool:
        """Whether a relay is there."""
        return self._relay is not None

    def nodes(self) -> set[str]:
        """Who can be reached now."""
        return set(self._nodes)

    def send(self, node: str, request: bytes) -> None:
        """Hand over to the relay; without one, the request fails."""
        relay = self._relay
        try:
            if relay is None:
                raise ConnectionError("the engine is not running")
            self._outstanding.add(node)
            with self._sending:
                frames.send(relay, pack(b"S", node, request))
            self.bytes_sent += len(request)
        except OSError as error:
            self._inbox.put(node, Failure(str(error)))

    def receive(self, timeout_s: float) -> list[tuple[str, bytes | Failure]]:
        """Replies and failures since the last call."""
        return self._inbox.receive(timeout_s)

    def close(self) -> None:
        """Stop listening; a connected relay sees the end and leaves."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._relay is not None:
            with contextlib.suppress(OSError):
                self._relay.shutdown(socket.SHUT_RDWR)
        self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            # A relay that no longer reads must not hold the coordinator up.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 10, 0))
            old, self._relay = self._relay, connection
            if old is not None:  # one relay at a time; the newest run of the engine counts
                with contextlib.suppress(OSError):
                    old.shutdown(socket.SHUT_RDWR)
                self._fail_outstanding()
            threading.Thread(target=self._listen, args=(connection,), daemon=True).start()

    def _listen(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            while (frame := frames.receive(connection)) is not None:
                self._hear(connection, frame)
        if self._relay is connection:
            self._relay, self._nodes = None, set()
            self._fail_outstanding()

    def _fail_outstanding(self) -> None:
        waiting, self._outstanding = self._outstanding, set()
        for node in waiting:
            self._inbox.put(node, Failure("the engine's run has ended"))

    def _hear(self, connection: socket.socket, frame: bytes) -> None:
        if self._relay is not connection:
            return
        kind, node, content = unpack(frame)
        if kind == b"N":
            self._nodes = set(json.loads(content))
            return
        self._outstanding.discard(node)
        if kind == b"R":
            self.bytes_received += len(content)
            self._inbox.put(node, content)
        elif kind == b"F":
            self._inbox.put(node, Failure(content.decode(errors="replace")))
