"""Addresses to listen at: who can reach them, whether they are free, how many connections to take."""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import time
from urllib.parse import urlsplit

from veilstream.errors import InputError
from veilstream.http_client import is_loopback

_log = logging.getLogger(__name__)

Address = tuple[str, int]

_SPARE_FILES, _OWN_FILES = 4096, 64


def is_own_host(host: str, port: int) -> bool:
    """Whether a Host header names this machine and our port; a page that rebinds DNS has another name."""
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
    """Refuse to go without TLS beyond this machine."""
    if not is_loopback(host):
        raise InputError("--insecure", host, "a loopback address", "use 127.0.0.1, or keys and TLS (the default)")


def free_port() -> int:
    """A port of this machine on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_free(host: str, port: int, patience_s: float = 10.0) -> None:
    """Wait for an address that a server which was just killed may still hold."""
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


def listen_at(address: Address, option: str, backlog: int = 128) -> socket.socket:
    """A socket that listens; `option` is what to name if it cannot."""
    host, port = address
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # asyncio sets TCP_NODELAY only on sockets that name the protocol. Without it, every second
        # answer on a connection waits 40 ms for the caller's delayed ACK.
        listening = socket.socket(family, kind, socket.IPPROTO_TCP)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(where)
            listening.listen(backlog)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise InputError(option, f"{host}:{port}", "an address to listen at", str(error)) from None
    listening.setblocking(False)
    return listening


def connections_allowed(peers: int) -> int:
    """How many connections to take on one port: a third of the open files, or more for that many peers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # a system may allow less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * peers + _SPARE_FILES
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, max(soft // 3, min(peers + _OWN_FILES, soft - _OWN_FILES))))
