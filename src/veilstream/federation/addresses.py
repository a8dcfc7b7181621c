"""Addresses: whether nobody else can hear, and whether one can listen there."""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
from urllib.parse import urlsplit

from veilstream.errors import InputError

_log = logging.getLogger(__name__)


def is_loopback(host: str) -> bool:
    """Whether nobody else can hear."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_own_host(host: str, port: int) -> bool:
    """A name or address of this machine, with our port: a page that rebinds DNS has another."""
    try:
        parts = urlsplit(f"//{host}")
        return (
            parts.netloc == host
            and "@" not in host
            and is_loopback(parts.hostname or "")
            and (80 if parts.port is None else parts.port) == port
        )
    except ValueError:
        return False


def check_loopback(host: str) -> None:
    """Without TLS only to oneself."""
    if not is_loopback(host):
        raise InputError("--insecure", host, "a loopback address", "use 127.0.0.1, or keys and TLS (the default)")


def free_port() -> int:
    """One that nobody listens on now, on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_free(host: str, port: int, patience_s: float = 10.0) -> None:
    """An error if it stays taken.

    The engine of a server that was killed needs a moment to follow it; a server that is started
    again at once waits for that, and says so.
    """
    until, said = time.monotonic() + patience_s, False
    while True:
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind((host, port))
                return
        except OSError as error:
            if time.monotonic() > until:
                raise InputError("--listen", f"{host}:{port}", "an address that is free", str(error)) from None
            if not said:
                said = True
                _log.warning("%s:%d: %s; waiting %g s for it", host, port, error.strerror, patience_s)
        time.sleep(0.1)
