"""One writer: a lock that the operating system drops when its holder dies, however it dies."""

from __future__ import annotations

import os
from pathlib import Path

from veilstream.errors import StoreBusy

__all__ = ["OneWriter"]


class OneWriter:
    """Held from creation to `close`. The lock file says who holds it."""

    def __init__(self, path: Path) -> None:
        import fcntl

        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._handle, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._handle)
            raise StoreBusy(str(path), holder) from None
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Let the next writer in."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
