"""The server's side: FLARE's server and a steward as child processes, and the hub between us.

    coordinator ── hub ══ Unix socket ══ relay (FLARE's job) ══ mutual TLS ══ sites
                    └ FlareServer.tend ── steward (submits and aborts the job)

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

from veilstream.engines.federation import frames
from veilstream.engines.federation.addresses import (
    check_loopback,
    is_loopback,
    wait_until_free,
)
from veilstream.engines.federation.carrier import Failure
from veilstream.engines.federation.hub import Hub
from veilstream.engines.federation.processes import Child
from veilstream.engines.flare.family import end
from veilstream.engines.flare.names import HUB, PROJECT
from veilstream.engines.flare.provisioning import require_flare
from veilstream.engines.flare.steward import STUCK
from veilstream.engines.flare.workspace import admin_workspace, environment, server_workspace

__all__ = ["FlareServer"]

_LONGEST_NAME = 80  # of the folder of a Unix socket


class FlareServer:
    """A `Carrier` over FLARE; `tend` keeps it alive."""

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
        self._hub = Hub(self._sockets / "hub.sock")
        self._server = Child(
            [
                sys.executable, "-m", "nvflare.private.fed.app.server.server_train",
                "-m", str(workspace), "-s", "fed_server.json", "--set", "secure_train=true",
                f"org={PROJECT}", "config_folder=config",
            ],
            self._state / "server.log", environment({HUB: str(self._hub.path)}), self._state,
        )  # fmt: skip
        self._desk = self._sockets / "steward.sock"
        self._steward = Child(
            [
                sys.executable, "-m", "veilstream.engines.flare.steward", str(admin),
                str(self._state / "job"), str((keys / "learners.json").resolve()), str(self._desk),
            ],
            self._state / "steward.log", environment({}), self._state,
        )  # fmt: skip
        self._notes: list[str] = []
        self._heeded = 0  # up to which steward we have done as it asked

    @property
    def pid(self) -> int | None:
        """Of FLARE's server."""
        return self._server.pid

    # --- as a carrier ----------------------------------------------------------------------------

    def nodes(self) -> set[str]:
        """Sites that answer through the running job."""
        return self._hub.nodes()

    def send(self, node: str, request: bytes) -> None:
        """By the hub."""
        self._hub.send(node, request)

    def receive(self, timeout_s: float) -> list[tuple[str, bytes | Failure]]:
        """From the hub; what went down with a job has failed."""
        return self._hub.receive(timeout_s)

    # --- its processes ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start FLARE's server and the steward."""
        host, port = self._address
        # FLARE would try for ever, and say so in its log alone.
        wait_until_free(host if is_loopback(host) else "", port)
        self._server.start()
        self._steward.start()

    def tend(self) -> str | None:
        """Start again what has ended, tell the steward whom the hub reaches; a line to show."""
        if not self._server.running:
            code = self._server.exit_code
            self._server.end()
            self._lay_out()  # no job of the last one must come back to life
            if self._server.keep_running():
                self._notes.append(f"FLARE's server had ended ({code}) and was started again")
        if not self._steward.running:
            if self._steward.exit_code == STUCK and self._heeded < self._steward.starts:
                self._heeded = self._steward.starts
                end(self._server)
            self._steward.keep_running()
        self._tell()
        return self._notes.pop(0) if self._notes else None

    def close(self) -> None:
        """End all of it."""
        self._steward.end()
        self._hub.close()
        end(self._server)
        self._desk.unlink(missing_ok=True)
        if self._sockets != self._state:
            shutil.rmtree(self._sockets, ignore_errors=True)

    def _lay_out(self) -> None:
        server_workspace(self._kit / "server", self._state / "server", self._address)

    def _tell(self) -> None:
        news = {"reached": sorted(self._hub.nodes()), "connected": self._hub.connected}
        try:
            self._notes += json.loads(frames.ask(self._desk, json.dumps(news).encode(), 1.0))
        except (OSError, ValueError):
            return  # it is just being started
