"""One server a run: a lock that the operating system drops when its holder dies, however it dies.

Two servers in one folder would each write models and checkpoints over the other's.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from veilstream.errors import InputError, RunBusy

LOCK_FILE = "server.lock"


class RunLock:
    """Held from creation to `close`; the lock file says by which process."""

    def __init__(self, folder: Path) -> None:
        """Take it.

        Raises:
            RunBusy: another server holds it.
            InputError: a folder that cannot be written to, or a lock file that is a link.

        """
        path = folder / LOCK_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            how = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._handle = os.open(path, how, 0o600)
        except OSError as error:
            raise InputError(
                "--out",
                str(path),
                "a file, not a link, that this account may write",
                f"{error.strerror}; name another folder",
            ) from None
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._handle, 32, 0).decode(errors="replace").strip()
            os.close(self._handle)
            raise RunBusy(str(folder), holder or "unknown") from None
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Let the next server in."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
