"""The server's side: a Unix socket to which FLARE's jobs connect, one for each site.

    coordinator ── FlareServer ══ Unix socket ══ FLARE's server and jobs ══ mutual TLS ══ sites

FLARE's server is not ours to run: it is started with its kit, best under an account of its own. A
job's part there (`veilstream_relay.ServerRelay`) connects, says which site it is for, and then
takes requests and gives replies, a frame each. What has no job is submitted by one child (`jobs`).
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
from collections import Counter
from pathlib import Path

from veilstream.errors import InputError
from veilstream.federation.addresses import check_loopback
from veilstream.federation.direct.wire import reply_limit
from veilstream.federation.flare.provisioning import require_flare
from veilstream.federation.processes import Child
from veilstream.federation.protocol import frames
from veilstream.federation.protocol.transport import Failure, Inbox

_ANSWERED = b"R"
_HELLO_S = 5.0


class JobSocket:
    """A `Transport` whose other half is the jobs that are connected."""

    def __init__(self, path: Path, dim: int) -> None:
        """Open the socket, for the owner and the folder's group."""
        self.path = path
        self._limit = 1 + reply_limit(dim)
        try:
            self._listener = frames.listen(path, 0o660)
        except OSError as error:
            raise InputError("--socket", str(path), "a short path in a folder of this account", str(error)) from error
        self._relays: dict[str, socket.socket] = {}
        self._waiting: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._inbox = Inbox()
        self._notes: list[str] = []
        self.bytes_sent = self.bytes_received = 0

    def nodes(self) -> set[str]:
        """Sites whose job is connected."""
        with self._lock:
            return set(self._relays)

    def send(self, node: str, request: bytes) -> None:
        """To the site's job; without one, the request fails."""
        with self._lock:
            relay = self._relays.get(node)
            self._waiting[node] += 1
        try:
            if relay is None:
                raise ConnectionError("no job of FLARE is connected")
            frames.send(relay, request)
            self.bytes_sent += len(request)
        except OSError as error:
            self._failed(node, str(error))

    def receive(self, timeout_s: float) -> list[tuple[str, bytes | Failure]]:
        """Replies and failures since the last call."""
        return self._inbox.receive(timeout_s)

    def start(self) -> None:
        """Wait for jobs."""
        threading.Thread(target=self._accept, daemon=True).start()

    def supervise(self) -> str | None:
        """Who has come or gone."""
        with self._lock:
            return self._notes.pop(0) if self._notes else None

    def close(self) -> None:
        """Stop listening; jobs see the end of their connection and end."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            relays = list(self._relays.values())
        for relay in relays:
            _hang_up(relay)
        self.path.unlink(missing_ok=True)

    # --- connections -----------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._listen, args=(connection,), daemon=True).start()

    def _listen(self, connection: socket.socket) -> None:
        """One job, from its first frame (the site's name) to its end."""
        with contextlib.suppress(OSError, UnicodeDecodeError), connection:
            hello = frames.receive(connection, limit=256, within_s=_HELLO_S)
            if hello is None:
                return
            connection.settimeout(None)
            # A relay that no longer reads must not hold the coordinator up.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 10, 0))
            self._carry(hello.decode(), connection)

    def _carry(self, node: str, connection: socket.socket) -> None:
        with self._lock:
            old = self._relays.get(node)
            self._relays[node] = connection
        if old is not None:  # the newest job counts
            _hang_up(old)
            self._lose(node)
        self._note(f"{node} can be reached through FLARE")
        try:
            while (frame := frames.receive(connection, self._limit)) is not None:
                if frame[:1] == _ANSWERED:
                    with self._lock:
                        self._waiting[node] = max(0, self._waiting[node] - 1)
                    self.bytes_received += len(frame) - 1
                    self._inbox.put(node, frame[1:])
                else:
                    self._failed(node, "the learner cannot be reached from its site")
        finally:
            with self._lock:
                current = self._relays.get(node) is connection
                if current:
                    del self._relays[node]
            if current:
                self._note(f"{node} can no longer be reached through FLARE")
                self._lose(node)

    def _lose(self, node: str) -> None:
        """What is outstanding will not be answered."""
        with self._lock:
            waiting = self._waiting.pop(node, 0)
        for _ in range(waiting):
            self._inbox.put(node, Failure("FLARE's job has ended"))

    def _failed(self, node: str, why: str) -> None:
        with self._lock:
            waiting = self._waiting[node]
            self._waiting[node] = max(0, waiting - 1)
        if waiting:  # else it was given up already
            self._inbox.put(node, Failure(why))

    def _note(self, line: str) -> None:
        with self._lock:
            if line not in self._notes:
                self._notes.append(line)


class FlareServer(JobSocket):
    """With a child that sees to it that each site has a job."""

    def __init__(
        self,
        keys: Path,
        state: Path,
        address: tuple[str, int],
        *,
        dim: int,
        socket: Path | None = None,
        insecure: bool = False,
    ) -> None:
        """The socket is open, and nothing else.

        Args:
            keys: the server's, with the kit of FLARE's administrator in them.
            state: a folder for logs.
            address: of FLARE's server, which listens there itself, as its kit says.
            dim: of the model; limits what a job may send.
            socket: where jobs connect, in a folder whose group may enter; None: in ``state``.
            insecure: refuse what is not loopback. FLARE uses mutual TLS all the same.

        """
        require_flare()
        if insecure:
            check_loopback(address[0])
        kit, state = keys / "flare", state.resolve()
        if not (kit / "startup").is_dir():
            raise InputError(
                "keys", str(kit), "the kit of FLARE's administrator", "`veilstream keys make --engine flare` makes it"
            )
        super().__init__(state / "relay.sock" if socket is None else socket.resolve(), dim)
        self._jobs = Child(
            [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "veilstream.federation.flare.jobs",
                str(kit.resolve()),
                str((keys / "learners.json").resolve()),
                str(state / "jobs"),
            ],
            state / "jobs.log",
            None,
            state,
        )
        self._said = ""

    def start(self) -> None:
        """Wait for jobs, and have them submitted."""
        super().start()
        self._jobs.start()

    def supervise(self) -> str | None:
        """Start the child again; a line to show."""
        why = "" if self._jobs.running else self._jobs.last_lines(1)
        if self._jobs.keep_running() and why != self._said:
            self._said = why
            self._note(f"FLARE's server cannot be given jobs ({why}); trying again")
        return super().supervise()

    def close(self) -> None:
        """End the child and all jobs."""
        self._jobs.end()
        super().close()


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
