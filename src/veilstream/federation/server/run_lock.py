"""One server a run: two in one folder would write models and checkpoints over each other's."""

from __future__ import annotations

from pathlib import Path

from veilstream.errors import InputError, RunBusy
from veilstream.files import FileLock

LOCK_FILE = "server.lock"


def lock_run(folder: Path) -> FileLock:
    """Hold a run's folder until `FileLock.close`.

    Raises:
        RunBusy: another server holds it.
        InputError: a folder that cannot be written to, or a lock file that is a link.

    """
    path = folder / LOCK_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(path, lambda holder: RunBusy(str(folder), holder))
    except OSError as error:
        raise InputError(
            "--out",
            str(path),
            "a file, not a link, that this account may write",
            f"{error.strerror}; name another folder",
        ) from None
