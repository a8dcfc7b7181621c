"""The learner's side of a transport in another process: a Unix socket, and who may use it.

A Flower SuperNode on this machine takes orders from the server.
So it runs under another account, which can read nothing of the learner's, and reaches the daemon by
this socket alone: one request in, one signed reply out. The kernel says whose process connects; one
of the daemon's own account could read its files anyway, and is refused unless it is trusted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import socket
import stat
import struct
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from veilstream.errors import InputError
from veilstream.federation.direct.wire import request_limit
from veilstream.federation.protocol import frames
from veilstream.federation.protocol.messages import MAGIC

_log = logging.getLogger(__name__)

OWN_ACCOUNT = (
    "it runs under the learner's own account, so whoever gives it orders (the server, an app that "
    "is submitted there) could read the learner's records, store and keys, which no noise protects"
)
"""Why a carrier of the daemon's account is refused."""

_MODE = 0o660
_CONNECTIONS = 4
_FRAME_WITHIN_S = 60.0
_SEND_WITHIN_S = 30.0
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_UNKNOWN = -1


class CarrierSocket:
    """Answers one carrier: at most four connections of one account, requests whole within a minute and bounded."""

    def __init__(
        self, handle: Callable[[bytes], bytes], path: Path, *, dim: int, trust_own_account: bool = False
    ) -> None:
        """A folder with the set-group-id bit gives the socket its group; ``dim`` limits a request's size."""
        self._handle, self.path = handle, path
        self._limit, self._trusted = request_limit(dim), trust_own_account
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._open: dict[socket.socket, int] = {}
        self._notes: Counter[str] = Counter()
        self._root_noted = False

    def start(self) -> None:
        """Open it for the owner and the group, and answer in threads."""
        try:
            self._listener = frames.listen(self.path, _MODE)
        except OSError as error:
            raise InputError(
                "--socket", str(self.path), "a short path in a folder of this account", str(error)
            ) from error
        _log.info("a carrier may connect at %s", self.path)
        if not self._trusted and not _others_may_enter(self.path.parent):
            _log.warning(
                "--socket = %s: no other account can enter its folder, and one of this account is "
                "refused; use a folder that the carrier's group may enter (mode 2750), or "
                "--trust-carrier",
                self.path,
            )
        threading.Thread(target=self._accept, name="carrier socket", daemon=True).start()

    def supervise(self) -> str | None:
        """What was refused since the last call."""
        with self._lock:
            notes, self._notes = self._notes, Counter()
        lines = [f"{what} ({n} times)" if n > 1 else what for what, n in notes.items()]
        return "; ".join(lines) or None

    def close(self) -> None:
        """Close it; replies under way are not sent."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while (listener := self._listener) is not None:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            why = self._admit(connection)
            if why is None:
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()
            else:
                self._note(f"a carrier was refused: {why}")
                connection.close()

    def _admit(self, connection: socket.socket) -> str | None:
        uid = _peer_uid(connection)
        if not self._trusted:
            if uid == _UNKNOWN:
                return "this system does not say whose process it is (--trust-carrier takes it)"
            if uid == os.geteuid():
                return f"{OWN_ACCOUNT}; run it as another account, or start with --trust-carrier"
            if uid == 0 and not self._root_noted:
                self._root_noted = True
                self._note("the carrier runs as root, which can read this learner's files anyway")
        with self._lock:
            if len(self._open) >= _CONNECTIONS:
                return f"it has {_CONNECTIONS} connections already"
            others = {other for other in self._open.values() if other != uid}
            if others:
                return f"{_account(uid)} calls while {_account(others.pop())} is connected"
            self._open[connection] = uid
        return None

    def _talk(self, connection: socket.socket) -> None:
        try:
            with connection:
                while True:
                    data = frames.receive(connection, self._limit, _FRAME_WITHIN_S)
                    if data is None:
                        return
                    if not data.startswith(MAGIC):
                        self._note("the carrier sent something that is not a request, and was disconnected")
                        return
                    reply = self._handle(data)
                    if not reply:  # it stops, or its disk cannot be written
                        return
                    connection.settimeout(_SEND_WITHIN_S)
                    frames.send(connection, reply)
        except TimeoutError:
            self._note("a connection of the carrier was silent for too long, and was closed")
        except OSError as error:
            if self._listener is not None:
                self._note(f"a connection of the carrier ended ({error})")
        except Exception as error:  # the daemon is closing, or a defect; its text might hold data
            if self._listener is not None:
                self._note(f"{type(error).__name__} while answering the carrier")
        finally:
            with self._lock:
                self._open.pop(connection, None)

    def _note(self, what: str) -> None:
        with self._lock:
            self._notes[what] += 1


def _peer_uid(connection: socket.socket) -> int:
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return _UNKNOWN
    raw = connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def _account(uid: int) -> str:
    try:
        return f"account {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"account {uid}"


def _others_may_enter(folder: Path) -> bool:
    return bool(folder.stat().st_mode & (stat.S_IXGRP | stat.S_IXOTH))
