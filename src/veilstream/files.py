"""Files that are written whole or not at all, and the lock of one that has a single writer."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path


def write_file(
    path: Path, content: str | bytes | Iterable[bytes], *, partial: str | None = None, shared: bool = False
) -> None:
    """Write under another name, then move into place: readers never see half, writers never mix.

    A failure leaves what was there before. A kill may leave the other name; where that must not pile up,
    ``partial`` says what it is (then there must be one writer only). Only its owner can read the file, unless
    it is ``shared``: then the process's umask decides.
    """
    data = content.encode() if isinstance(content, str) else content
    pieces = [data] if isinstance(data, bytes) else data
    path.parent.mkdir(parents=True, exist_ok=True)
    if shared:
        other = str(path.parent / f".partial-{secrets.token_hex(8)}{path.suffix}")
        handle = os.open(other, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    elif partial is None:
        handle, other = tempfile.mkstemp(dir=path.parent, prefix=".partial-", suffix=path.suffix)
    else:
        other = str(path.parent / partial)
        how = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(other, how, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        Path(other).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(other).unlink()
        raise


def sync_directory(path: Path) -> None:
    """Make new names in a directory outlast a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class FileLock:
    """An exclusive lock, held until `close`; the operating system drops it when its holder dies."""

    def __init__(self, path: Path, busy: Callable[[str], Exception]) -> None:
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = _process_in(self._handle)
            os.close(self._handle)
            raise busy(holder) from None
        with contextlib.suppress(OSError):  # on a full disk the lock still holds, without a name
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Let the next process in."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def lock_holder(path: Path) -> str | None:
    """Process that holds this lock now, if any."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _process_in(handle)
    finally:
        os.close(handle)
    return None


def _process_in(handle: int) -> str:
    return os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
