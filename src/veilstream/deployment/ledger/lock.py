"""One writer: a lock that the operating system drops when its holder dies, however it dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from veilstream.errors import StoreBusy


class OneWriter:
    """Held from creation to `close`. The lock file says who holds it."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = _pid(self._handle)
            os.close(self._handle)
            raise StoreBusy(str(path), pid) from None
        with contextlib.suppress(OSError):  # on a full disk the lock still holds, without a name
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Let the next writer in."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def holder(path: Path) -> str | None:
    """Process that holds the lock now, if any."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _pid(handle)
    finally:
        os.close(handle)
    return None


def _pid(handle: int) -> str:
    return os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
