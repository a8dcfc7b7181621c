"""Whether an address is free to listen on."""

from __future__ import annotations

import socket
import time

from veilstream.errors import InputError

__all__ = ["wait_until_free"]


def wait_until_free(host: str, port: int, patience_s: float = 10.0) -> None:
    """An error if it stays taken.

    The engine of a server that was killed needs a moment to follow it; a server that is started
    again at once waits for that.
    """
    until = time.monotonic() + patience_s
    while True:
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind((host, port))
                return
        except OSError as error:
            if time.monotonic() > until:
                raise InputError(
                    "--listen", f"{host}:{port}", "an address that is free", str(error)
                ) from None
        time.sleep(0.1)
