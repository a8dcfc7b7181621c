"""What FLARE starts at the server: from the relay socket to sites and back, without state.

Its end of the relay socket's language (`veilstream.federation.transports.relay_socket`) is all it
speaks. Whether a site is there is asked for by pings, apart from rounds: a round may take as long
as a learner waits for its clients, and a call to a process that was killed would wait as long for
nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
from typing import Any

from nvflare.collab import collab

from veilstream.federation.protocol import frames
from veilstream.federation.transports.flare.exit_with_parent import exit_with_parent
from veilstream.federation.transports.flare.names import RELAY_SOCKET
from veilstream.federation.transports.flare.relay_site import ANSWERED
from veilstream.federation.transports.relay_socket import pack, unpack

__all__ = ["ServerRelay"]

_CALL_S = 3600.0
_PING_S = 4.0
_EVERY_S = 2.5
_LOOK_S = 0.5
_IN_FLIGHT = 8  # requests a site may have open; more come only if replies are lost


class ServerRelay:
    """Ends when the relay socket does, or when FLARE aborts the job."""

    def __init__(self) -> None:
        exit_with_parent()

    @collab.main  # type: ignore[untyped-decorator]
    def run(self) -> None:
        """Carry until the end."""
        sites = {proxy.name: proxy for proxy in collab.clients}
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(os.environ[RELAY_SOCKET])
            carrying = _Carrying(connection, sites)
            try:
                while not collab.is_aborted:
                    ready, _, _ = select.select([connection], [], [], _LOOK_S)
                    if ready:
                        frame = frames.receive(connection)
                        if frame is None:
                            return
                        carrying.take(frame)
            except OSError:
                return
            finally:
                carrying.ended.set()


class _Carrying:
    """One connection to the relay socket, and the sites behind it."""

    def __init__(self, connection: socket.socket, sites: dict[str, Any]) -> None:
        self._connection, self._sites = connection, sites
        self._sending = threading.Lock()
        self._counting = threading.Lock()
        self._open = dict.fromkeys(sites, 0)
        self._here = set(sites)
        self.ended = threading.Event()
        self._announce()
        for site in sites:
            threading.Thread(target=self._watch, args=(site,), daemon=True).start()

    def take(self, frame: bytes) -> None:
        """From the relay socket: each request in a thread of its own, which ends with its call."""
        kind, site, request = unpack(frame)
        if kind != b"S":
            return
        with self._counting:
            free = site in self._open and self._open[site] < _IN_FLIGHT
            if free:
                self._open[site] += 1
        if free:
            threading.Thread(target=self._call, args=(site, request), daemon=True).start()
        else:
            self._say(pack(b"F", site, b"the site does not answer"))

    def _call(self, site: str, request: bytes) -> None:
        try:
            reply = self._sites[site](timeout=_CALL_S).round(request)
            kind = b"R" if reply[:1] == ANSWERED else b"F"
            self._say(pack(kind, site, reply[1:]))
        except Exception:  # FLARE raises its own kinds; the text names processes, not causes
            self._say(pack(b"F", site, b"the site does not answer"))
        finally:
            with self._counting:
                self._open[site] -= 1

    def _watch(self, site: str) -> None:
        """Whether it is there. What was under way when it went is given up."""
        while not self.ended.is_set():
            began = time.monotonic()
            try:
                here = self._sites[site](timeout=_PING_S).ping() == ANSWERED
            except Exception:
                here = False
            with self._counting:
                changed = here != (site in self._here)
                (self._here.add if here else self._here.discard)(site)
                lost = changed and not here and self._open[site] > 0
            if changed:
                self._announce()
            if lost:
                self._say(pack(b"F", site, b"the site is gone"))
            self.ended.wait(max(0.5, _EVERY_S - (time.monotonic() - began)))

    def _announce(self) -> None:
        with self._counting:
            names = sorted(self._here)
        self._say(pack(b"N", "", json.dumps(names).encode()))

    def _say(self, frame: bytes) -> None:
        with contextlib.suppress(OSError), self._sending:
            frames.send(self._connection, frame)
