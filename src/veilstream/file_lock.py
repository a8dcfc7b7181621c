"""One holder at a time: a lock that the operating system drops when its holder dies, however it dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path


class FileLock:
    """Held from creation to `close`; the lock file names the process that holds it.

    Args:
        path: the lock file; it is created if need be, and must not be a link.
        busy: makes the error to raise when another process, whose number it is given, holds the lock.

    Raises:
        OSError: the file cannot be opened.

    """

    def __init__(self, path: Path, busy: Callable[[str], Exception]) -> None:
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = _pid(self._handle)
            os.close(self._handle)
            raise busy(pid) from None
        with contextlib.suppress(OSError):  # on a full disk the lock still holds, without a number
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Release the lock."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def holder(path: Path) -> str | None:
    """Number of the process that holds the lock now; None if no process does."""
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
