"""The server's side: FLARE's server and a job manager as children, a relay socket between us.

    coordinator ── relay socket ══ Unix socket ══ relay (FLARE's job) ══ mutual TLS ══ sites
                    └ FlareServer.supervise ── job manager (submits and aborts the job)

All that is written lies in one folder and may be deleted between runs: what counts is in the
coordinator's checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from veilstream.federation.addresses import check_loopback, is_loopback, wait_until_free
from veilstream.federation.processes import Child
from veilstream.federation.protocol import frames
from veilstream.federation.protocol.transport import Failure
from veilstream.federation.transports.flare.job_manager import STUCK
from veilstream.federation.transports.flare.names import PROJECT, RELAY_SOCKET
from veilstream.federation.transports.flare.process_tree import end
from veilstream.federation.transports.flare.provisioning import require_flare
from veilstream.federation.transports.flare.workspace import (
    admin_workspace,
    environment,
    server_workspace,
)
from veilstream.federation.transports.relay_socket import RelaySocket

__all__ = ["FlareServer"]

_LONGEST_NAME = 80  # of the folder of a Unix socket


class FlareServer:
    """A `Transport` over FLARE; `supervise` keeps it alive."""

    def __init__(
        self, keys: Path, state: Path, address: tuple[str, int], *, insecure: bool = False
    ) -> None:
        require_flare()
        if insecure:  # and mutual TLS all the same
            check_loopback(address[0])
        self._kit, self._address = keys / "flare", address
        self._state = state.resolve()
        self._state.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._state.chmod(0o700)
        self._sockets = self._state
        if len(os.fsencode(self._state)) > _LONGEST_NAME:
            self._sockets = Path(tempfile.mkdtemp(prefix="veilstream-"))
        workspace, admin = self._state / "server", self._state / "admin"
        admin_workspace(self._kit / "admin", admin, address[1])
        self._lay_out()
        self._relay_socket = RelaySocket(self._sockets / "relay.sock")
        self._server = Child(
            [
                sys.executable, "-m", "nvflare.private.fed.app.server.server_train",
                "-m", str(workspace), "-s", "fed_server.json", "--set", "secure_train=true",
                f"org={PROJECT}", "config_folder=config",
            ],
            self._state / "server.log", environment({RELAY_SOCKET: str(self._relay_socket.path)}),
            self._state,
        )  # fmt: skip
        self._status = self._sockets / "job_manager.sock"
        self._job_manager = Child(
            [
                sys.executable, "-m", "veilstream.federation.transports.flare.job_manager",
                str(admin), str(self._state / "job"), str((keys / "learners.json").resolve()),
                str(self._status),
            ],
            self._state / "job_manager.log", environment({}), self._state,
        )  # fmt: skip
        self._notes: list[str] = []
        self._heeded = 0  # up to which job manager we have done as it asked

    @property
    def pid(self) -> int | None:
        """Of FLARE's server."""
        return self._server.pid

    # --- as a transport --------------------------------------------------------------------------

    def nodes(self) -> set[str]:
        """Sites that answer through the running job."""
        return self._relay_socket.nodes()

    def send(self, node: str, request: bytes) -> None:
        """By the relay socket."""
        self._relay_socket.send(node, request)

    def receive(self, timeout_s: float) -> list[tuple[str, bytes | Failure]]:
        """From the relay socket; what went down with a job has failed."""
        return self._relay_socket.receive(timeout_s)

    # --- its processes ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start FLARE's server and the job manager."""
        host, port = self._address
        # FLARE would try for ever, and say so in its log alone.
        wait_until_free(host if is_loopback(host) else "", port)
        self._server.start()
        self._job_manager.start()

    def supervise(self) -> str | None:
        """Start again what has ended, tell the job manager who is reached; a line to show."""
        if not self._server.running:
            code = self._server.exit_code
            self._server.end()
            self._lay_out()  # no job of the last one must come back to life
            if self._server.keep_running():
                self._notes.append(f"FLARE's server had ended ({code}) and was started again")
        if not self._job_manager.running:
            if self._job_manager.exit_code == STUCK and self._heeded < self._job_manager.starts:
                self._heeded = self._job_manager.starts
                end(self._server)
            self._job_manager.keep_running()
        self._tell()
        return self._notes.pop(0) if self._notes else None

    def close(self) -> None:
        """End all of it."""
        self._job_manager.end()
        self._relay_socket.close()
        end(self._server)
        self._status.unlink(missing_ok=True)
        if self._sockets != self._state:
            shutil.rmtree(self._sockets, ignore_errors=True)

    def _lay_out(self) -> None:
        server_workspace(self._kit / "server", self._state / "server", self._address)

    def _tell(self) -> None:
        news = {
            "reached": sorted(self._relay_socket.nodes()),
            "connected": self._relay_socket.connected,
        }
        try:
            self._notes += json.loads(frames.ask(self._status, json.dumps(news).encode(), 1.0))
        except (OSError, ValueError):
            return  # it is just being started
