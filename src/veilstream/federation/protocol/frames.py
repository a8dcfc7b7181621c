"""Bytes over a Unix socket, in frames of eight bytes of length and content; relays import this and nothing else."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import time
from pathlib import Path

_LENGTH = struct.Struct("<Q")
LARGEST = 1 << 32
LONGEST_PATH = 90
"""Bytes in a socket's path, with room for the name under which it is bound first."""


def send(connection: socket.socket, content: bytes) -> None:
    """One frame."""
    connection.sendall(_LENGTH.pack(len(content)) + content)


def receive(connection: socket.socket, limit: int = LARGEST, within_s: float | None = None) -> bytes | None:
    """The next frame, whole within ``within_s``; None when the other side has closed."""
    until = None if within_s is None else time.monotonic() + within_s
    head = _exactly(connection, _LENGTH.size, until)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > limit:
        raise ConnectionError(f"a frame of {length} bytes where at most {limit} are allowed")
    content = _exactly(connection, length, until)
    if content is None:
        raise ConnectionError("closed in the middle of a frame")
    return content


def ask(path: str | Path, content: bytes, timeout_s: float | None = None, limit: int = LARGEST) -> bytes:
    """One frame there, one of at most ``limit`` bytes back."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        send(connection, content)
        answer = receive(connection, limit)
    if answer is None:
        raise ConnectionError(f"{path} closed without an answer")
    return answer


def listen(path: Path, mode: int = 0o600) -> socket.socket:
    """A socket at this path, by default for its owner alone; a link there is neither followed nor replaced."""
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise OSError(f"{path} is too long a name for a Unix socket ({LONGEST_PATH} bytes)")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _remove_socket(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Bound under another name, so that nobody can connect before the mode is right.
    hidden = path.with_name(f".{path.name}")
    try:
        _remove_socket(hidden)
        listener.bind(str(hidden))
        hidden.chmod(mode)
        listener.listen(64)
        hidden.rename(path)
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_socket(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(f"{path} is there and is not a socket; name another path")
        path.unlink()


def _exactly(connection: socket.socket, count: int, until: float | None = None) -> bytes | None:
    parts: list[bytes] = []
    while count:
        if until is not None:
            # Zero would mean not to wait, which is another error.
            connection.settimeout(max(until - time.monotonic(), 1e-3))
        part = connection.recv(min(count, 1 << 20))
        if not part:
            if parts:
                raise ConnectionError("closed in the middle of a frame")
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
