"""The learner's side of Flower: the relay as a child process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from veilstream.errors import InputError, ProtocolError
from veilstream.federation.addresses import check_loopback, is_loopback
from veilstream.federation.processes import Child
from veilstream.federation.transports.flower.environment import (
    address_of,
    environment,
    require_flwr,
)
from veilstream.files import write_file

__all__ = ["FlowerNode"]

_REFUSED = 77  # as in `relay`, which imports flwr


class FlowerNode:
    """Keeps a relay between a server and a learner's socket."""

    def __init__(
        self,
        keys: Path,
        socket: Path,
        state: Path,
        server: tuple[str, int],
        *,
        insecure: bool = False,
    ) -> None:
        require_flwr()
        self._keys, self._socket = keys.absolute(), socket.absolute()
        self._state, self._server, self._insecure = state.absolute(), server, insecure
        if insecure:
            check_loopback(server[0])
        self._child = Child(
            [sys.executable, "-W", "ignore", "-m", "veilstream.federation.transports.flower.relay",
             str(self._state)],
            self._state / "relay.log", environment(self._state), self._state,
        )  # fmt: skip
        self._said = ""

    @property
    def pid(self) -> int | None:
        """Of the relay."""
        return self._child.pid

    @property
    def online(self) -> bool:
        """Whether the server has let it in."""
        return self._child.running and self._status().get("state") == "online"

    def start(self) -> None:
        """Start the relay; whether the server will have it, `supervise` says."""
        host, port = self._server
        self._state.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._state.chmod(0o700)
        for needed in ("node.key", *(() if self._insecure else ("ca.pem",))):
            if not (self._keys / needed).is_file():
                raise InputError(
                    "keys", str(self._keys / needed), "a file that `veilstream keys` made",
                    "make keys for this learner",
                )  # fmt: skip
        settings = {
            "address": address_of(host, port), "direct": is_loopback(host),
            "socket": str(self._socket), "key": str(self._keys / "node.key"),
            "ca": None if self._insecure else (self._keys / "ca.pem").read_text(),
        }  # fmt: skip
        write_file(self._state / "relay.json", json.dumps(settings))
        (self._state / "relay.status").unlink(missing_ok=True)
        self._child.start()

    def supervise(self) -> str | None:
        """Start a relay that has ended again; a line to show if there is one."""
        status = self._status()
        if not self._child.running and self._child.exit_code == _REFUSED:
            raise ProtocolError(status.get("note", "refused"), status.get("way_out", ""))
        if self._child.keep_running():
            return "the relay had ended; it was started again"
        note = status.get("note", "")
        if note != self._said:
            self._said = note
            return note
        return None

    def close(self) -> None:
        """End the relay, which tells the server."""
        self._child.end()

    def _status(self) -> dict[str, str]:
        try:
            said: dict[str, str] = json.loads((self._state / "relay.status").read_text())
        except (OSError, ValueError):
            return {}
        return said
