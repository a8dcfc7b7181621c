"""A learner's side: FLARE's site as a child process, beside the daemon that answers."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from veilstream.federation.addresses import check_loopback
from veilstream.federation.processes import Child
from veilstream.federation.transports.flare.names import PROJECT, SOCKET
from veilstream.federation.transports.flare.preflight import check_server
from veilstream.federation.transports.flare.process_tree import end
from veilstream.federation.transports.flare.provisioning import require_flare
from veilstream.federation.transports.flare.workspace import environment, site_workspace

__all__ = ["FlareNode"]

_AGAIN_S = 1.0


class FlareNode:
    """Starts FLARE's site when the server accepts us, and again whenever it ends."""

    def __init__(
        self,
        keys: Path,
        socket: Path,
        state: Path,
        server: tuple[str, int],
        *,
        insecure: bool = False,
    ) -> None:
        require_flare()
        if insecure:  # and mutual TLS all the same
            check_loopback(server[0])
        self._kit, self._server = keys / "flare", server
        workspace = state.resolve() / "site"
        name = site_workspace(self._kit, workspace, server)
        self._child = Child(
            [
                sys.executable, "-m", "nvflare.private.fed.app.client.client_train",
                "-m", str(workspace), "-s", "fed_client.json", "--set", "secure_train=true",
                f"org={PROJECT}", "config_folder=config", f"uid={name}", "heart_beat_interval=3",
            ],
            state.resolve() / "site.log", environment({SOCKET: str(socket.resolve())}),
            workspace,
        )  # fmt: skip
        self._said: str | None = None
        self._due = 0.0

    @property
    def pid(self) -> int | None:
        """Of FLARE's site."""
        return self._child.pid

    def start(self) -> None:
        """Knock; an error if we are refused. A server that is not there yet is waited for."""
        if check_server(self._kit, self._server) is None:
            self._child.start()

    def supervise(self) -> str | None:
        """Start what has ended, if the server accepts us; a line if anything is new."""
        if self._child.running or time.monotonic() < self._due:
            return None
        note = check_server(self._kit, self._server, 2.0)
        if note is not None:
            self._due = time.monotonic() + _AGAIN_S
            new, self._said = note != self._said, note
            return note if new else None
        self._said = None
        if self._child.starts == 0:
            self._child.start()
            return "the server is there"
        return "FLARE's site was started again" if self._child.keep_running() else None

    def close(self) -> None:
        """End FLARE's site and its worker."""
        end(self._child)
