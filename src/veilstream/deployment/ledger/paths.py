"""The files of a ledger: where they are, and what the file system must not do to them.

Links in the place of a file, and second names of it, are refused: two names would have two locks.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from veilstream.errors import InputError, LedgerError, StoreBusy
from veilstream.files import FileLock

WITNESS_MAGIC = b"VSWITN01"

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def witness_path(store: Path, witness: Path | str | None) -> Path:
    """Where the witness of a store is, if nothing else is said."""
    return Path(witness) if witness else store.with_suffix(".witness")


def lock_path(store: Path) -> Path:
    """Where the lock of a store is."""
    return store.with_suffix(".lock")


def lock_store(store: Path) -> FileLock:
    """Hold a store as its one writer until `FileLock.close`; `StoreBusy` while another process does."""
    path = lock_path(store)
    return FileLock(path, lambda holder: StoreBusy(str(path), holder))


def refuse_links(store: Path, witness: Path) -> None:
    """Raise `LedgerError` if a file of this ledger is a link, or has a second name."""
    logs = [store.with_name(store.name + end) for end in ("-wal", "-shm")]
    for path in (store, *logs, lock_path(store), witness):
        if path.is_symlink():
            raise LedgerError(
                f"{path} is a symbolic link, and a ledger follows none",
                f"give the path of the file itself ({path.readlink()}), or put the file here",
            )
    for path in (store, witness):
        if path.is_file() and path.stat().st_nlink > 1:
            raise LedgerError(
                f"{path} has a second name (a hard link), which another learner could open",
                "remove the other name, or copy the file to a name of its own",
            )


def refuse_witness(store: Path) -> None:
    """Raise `InputError` if what should be a store is a witness: their names are alike."""
    with contextlib.suppress(OSError), store.open("rb") as file:
        if file.read(len(WITNESS_MAGIC)) == WITNESS_MAGIC:
            beside = store.with_suffix(".db")
            raise InputError(
                "store",
                str(store),
                "a learner's store; this file is a witness",
                f"name the store ({beside if beside.exists() else 'NAME.db'}), and this file with "
                "--witness if it is not found by itself",
            )


def identity(path: Path) -> tuple[int, int] | None:
    """Which file a path leads to now (device and inode); None if to none."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def notices_of(store: Path, witness: Path) -> list[str]:
    """Notices for the learner's operator about its files, a sentence each.

    Files that other accounts may read are closed to them (mode 0600) where that can be done.
    """
    notices = []
    for what, path in (("store", store), ("witness", witness)):
        if path.stat().st_mode & _OTHERS:
            notices.append(f"the {what} {path} was open to other accounts: {_shut(path)}")
    if _device(store) == _device(witness):
        notices.append(
            f"the witness {witness} is on the same device as the store {store}: whatever loses or "
            "rewinds that device does so to both, and then only the server can notice "
            "(put the witness on another device, --witness)"
        )
    return notices


def _device(path: Path) -> int:
    return path.stat().st_dev


def _shut(path: Path) -> str:
    with contextlib.suppress(OSError):
        path.chmod(0o600)
    if path.stat().st_mode & _OTHERS:
        return "its mode cannot be changed, so keep them from its directory or mount"
    return "it is for its owner alone now (mode 0600)"


def check_room(path: Path, size: int) -> None:
    """Write and sync so many bytes beside a file, and remove them: an `OSError` where its disk cannot be written."""
    trial = path.with_name(f".{path.name}.room")
    try:
        handle = os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            left = size
            while left:
                left -= os.write(handle, bytes(min(left, 1 << 16)))
            os.fsync(handle)
        finally:
            os.close(handle)
    finally:
        trial.unlink(missing_ok=True)


def missing_store(path: Path) -> InputError:
    """The error for a store that is not there and was not asked for."""
    return InputError(
        "store",
        str(path),
        "a store that exists",
        "if it should be there, mount its disk or correct the path; a learner's first start asks "
        "for a new one: --new-store, or create=True in Python",
    )


def empty_store(path: Path) -> LedgerError:
    """The error for a file that holds nothing and was not asked for."""
    return LedgerError(
        f"{path} is empty, so it is no store",
        "if its first start was interrupted, ask for a new one again (--new-store, or create=True "
        "in Python); else put the newest store back",
    )
