"""Bytes over a Unix socket, in frames of eight bytes of length and content. Standard library only.

Engines' relays import this module and nothing else of veilstream.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path

__all__ = ["ask", "listen", "receive", "send"]

_LENGTH = struct.Struct("<Q")
LARGEST = 1 << 32


def send(connection: socket.socket, content: bytes) -> None:
    """One frame."""
    connection.sendall(_LENGTH.pack(len(content)) + content)


def receive(connection: socket.socket) -> bytes | None:
    """The next frame; None when the other side has closed."""
    head = _exactly(connection, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > LARGEST:
        raise ConnectionError(f"a frame of {length} bytes")
    return _exactly(connection, length)


def ask(path: str | Path, content: bytes, timeout_s: float | None = None) -> bytes:
    """One frame there, one back."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        send(connection, content)
        answer = receive(connection)
    if answer is None:
        raise ConnectionError(f"{path} closed without an answer")
    return answer


def listen(path: Path) -> socket.socket:
    """A socket that only its owner may use."""
    if len(os.fsencode(path)) > 100:
        raise OSError(f"{path} is too long a name for a Unix socket (100 bytes)")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Bound under another name, so that nobody can connect before the mode is right.
    hidden = path.with_name(f".{path.name}")
    with contextlib.suppress(FileNotFoundError):
        hidden.unlink()
    listener.bind(str(hidden))
    hidden.chmod(0o600)
    listener.listen(64)
    hidden.rename(path)
    return listener


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts: list[bytes] = []
    while count:
        part = connection.recv(min(count, 1 << 20))
        if not part:
            if parts:
                raise ConnectionError("closed in the middle of a frame")
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
