"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterable
from pathlib import Path


def write_file(
    path: Path, content: str | bytes | Iterable[bytes], *, partial: str | None = None, shared: bool = False
) -> None:
    """Write under another name, then move into place: readers never see half, writers never mix.

    Content in pieces is written as they come, so it may be larger than memory.
    A failure leaves what was there before, and nothing else. A kill may leave the other name; where
    that must not pile up, ``partial`` says what it is (then there must be one writer only).
    Only its owner can read the file, unless it is ``shared``: then the process's umask decides.
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
