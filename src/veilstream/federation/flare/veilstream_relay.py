"""The two parts of FLARE's job: bytes between FLARE and a Unix socket, at the server and at a site.

FLARE copies this file into the job and runs it on both sides under the name `veilstream_relay`, so
it imports the standard library and FLARE, and nothing of veilstream. Neither part has state or
looks inside: what it carries is signed on both ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

# Where PyTorch is installed FLARE imports it, for tensors that are never sent here: seconds, and
# hundreds of megabytes a process. None stands for "not installed".
sys.modules.setdefault("torch", None)  # type: ignore[arg-type]

from nvflare.collab import collab  # noqa: E402

SERVER_SOCKET = "VEILSTREAM_RELAY_SOCKET"
"""Environment variable of FLARE's server: the socket of `veilstream server`."""
LEARNER_SOCKET = "VEILSTREAM_SOCKET"
"""Environment variable of FLARE's site: the socket of `veilstream learner`."""
ANSWERED, FAILED = b"R", b"F"
_LENGTH = struct.Struct("<Q")
_ROUND_S = 3600.0
_PING_S = 4.0
_PING_EVERY_S = 2.0
_LOOK_S = 0.5
_IN_FLIGHT = 3  # requests that may be open at once; more come only if replies are lost


class SiteRelay:
    """At a site: one connection to the learner for each request."""

    def __init__(self) -> None:
        _begin()

    @collab.publish  # type: ignore[untyped-decorator]
    def round(self, request: bytes) -> bytes:
        """The learner's reply."""
        return ask(os.environ.get(LEARNER_SOCKET, ""), request)

    @collab.publish  # type: ignore[untyped-decorator]
    def ping(self) -> bytes:
        """That this process runs."""
        return ANSWERED


class ServerRelay:
    """At the server, for one site; ends with that site, with `veilstream server`, or by abort."""

    def __init__(self) -> None:
        _begin()

    @collab.main  # type: ignore[untyped-decorator]
    def run(self) -> None:
        """Carry until the end."""
        (site,) = collab.clients
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.connect(os.environ[SERVER_SOCKET])
            carry(server, site, lambda: bool(collab.is_aborted))


def ask(path: str, request: bytes) -> bytes:
    """A learner's reply, or one constant error: why is not the server's to know."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as learner:
            learner.settimeout(_ROUND_S)
            learner.connect(path)
            _send(learner, request)
            reply = _receive(learner)
        return FAILED if reply is None else ANSWERED + reply
    except OSError:
        return FAILED


def carry(server: socket.socket, site: Any, aborted: Callable[[], bool]) -> None:
    """Between the socket of `veilstream server` and a site, until one of them is gone."""
    _send(server, site.name.encode())
    carrying = _Carrying(server, site)
    threading.Thread(target=carrying.watch, daemon=True).start()
    with contextlib.suppress(OSError):
        while not aborted():
            if select.select([server], [], [], _LOOK_S)[0]:
                request = _receive(server)
                if request is None:
                    return
                carrying.take(request)


class _Carrying:
    """One site behind one connection."""

    def __init__(self, server: socket.socket, site: Any) -> None:
        self._server, self._site = server, site
        self._sending = threading.Lock()
        self._free = threading.Semaphore(_IN_FLIGHT)

    def take(self, request: bytes) -> None:
        """In a thread of its own, which ends with the call."""
        if self._free.acquire(blocking=False):
            threading.Thread(target=self._call, args=(request,), daemon=True).start()
        else:
            self._say(FAILED)

    def _call(self, request: bytes) -> None:
        try:
            self._say(self._site(timeout=_ROUND_S).round(request))
        except Exception:  # FLARE raises its own kinds; the text names processes, not causes
            self._say(FAILED)
        finally:
            self._free.release()

    def _say(self, frame: bytes) -> None:
        with contextlib.suppress(OSError), self._sending:
            _send(self._server, frame)

    def watch(self) -> None:
        """Hang up when the site is gone: a call to a process that was killed waits for nothing."""
        while True:
            try:
                here = self._site(timeout=_PING_S).ping() == ANSWERED
            except Exception:
                here = False
            if not here:
                with contextlib.suppress(OSError):
                    self._server.shutdown(socket.SHUT_RDWR)
                return
            time.sleep(_PING_EVERY_S)


def _begin() -> None:
    """Four lines of log a call are too many; and a process that has lost its parent ends."""
    logging.getLogger("nvflare.collab").setLevel(logging.WARNING)
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(1)  # FLARE would leave it waiting for ever

    threading.Thread(target=watch, daemon=True).start()


def _send(connection: socket.socket, content: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(content)) + content)


def _receive(connection: socket.socket) -> bytes | None:
    """One frame, as `veilstream.federation.protocol.frames` writes it; None at the end."""
    head = _exactly(connection, _LENGTH.size)
    return None if head is None else _exactly(connection, _LENGTH.unpack(head)[0])


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    found = bytearray()
    while len(found) < count:
        part = connection.recv(min(count - len(found), 1 << 20))
        if not part:
            return None
        found += part
    return bytes(found)
