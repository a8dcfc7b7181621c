"""The SQLite file of a ledger: tables, settings, format, and errors with a way out."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from veilstream.deployment.ledger.archive import SEGMENTS_TABLE
from veilstream.deployment.ledger.chain import damaged
from veilstream.deployment.ledger.paths import witness_path
from veilstream.deployment.ledger.visits import VISITS_TABLE
from veilstream.errors import LedgerError, StorageError

FORMAT = 0x56530001
"""Of the store, as SQLite's ``user_version``: "VS" and 1. Earlier stores have 1 to 4 there."""
_EARLIER = range(1, 5)
_TABLES = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
    "CREATE TABLE records (number INTEGER PRIMARY KEY, kind TEXT NOT NULL, body TEXT NOT NULL, hash BLOB NOT NULL)",
    SEGMENTS_TABLE,
    VISITS_TABLE,
    "CREATE TABLE blobs (name TEXT PRIMARY KEY, content BLOB NOT NULL)",
)


def open_sqlite(path: Path) -> Any:
    """A connection whose commits outlast a power cut, and whose deletions leave nothing behind."""
    # One thread at a time, as for the learner itself; not always the same one.
    connection = sqlite3.connect(path, isolation_level=None, timeout=0.0, check_same_thread=False)
    for pragma in (
        "page_size=16384",
        "journal_mode=WAL",
        "synchronous=FULL",
        "secure_delete=ON",
        "wal_autocheckpoint=1000",
    ):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def create_tables(db: Any, tag_key: bytes, store: Path, witness: Path) -> None:
    """An empty store."""
    db.execute("BEGIN IMMEDIATE")
    for statement in _TABLES:
        db.execute(statement)
    db.execute("INSERT INTO meta VALUES ('tag_key', ?)", (tag_key,))
    remember_witness(db, store, witness)
    db.execute(f"PRAGMA user_version={FORMAT}")
    db.execute("COMMIT")


def remember_witness(db: Any, store: Path, witness: Path) -> None:
    """Have the store know where its witness lies; one beside it needs no memory, and may move."""
    elsewhere = witness.absolute() != witness_path(store, None).absolute()
    known = remembered_witness(db)
    if elsewhere and known != witness.absolute():
        where = os.fsencode(witness.absolute())
        db.execute("INSERT OR REPLACE INTO meta VALUES ('witness', ?)", (where,))
    elif not elsewhere and known is not None:
        db.execute("DELETE FROM meta WHERE name = 'witness'")


def remembered_witness(db: Any) -> Path | None:
    """Where the witness was at the last start; None if beside the store."""
    row = db.execute("SELECT value FROM meta WHERE name = 'witness'").fetchone()
    return None if row is None else Path(os.fsdecode(bytes(row[0])))


def find_witness(store: Path, witness: Path | str | None) -> Path:
    """Where to look for a witness: where someone says, else where the store says, else beside it.

    Changes nothing, and leaves it to others to report a damaged store.
    """
    found = None
    if not witness and store.is_file() and not store.is_symlink():
        with contextlib.suppress(sqlite3.Error, ValueError, TypeError):
            where = f"{store.resolve().as_uri()}?mode=ro"
            db = sqlite3.connect(where, uri=True, isolation_level=None)
            try:
                found = remembered_witness(db)
            finally:
                db.close()
    return found or witness_path(store, witness)


def check_format(db: Any, path: Path) -> None:
    """Refuse a store that another version wrote."""
    found = db.execute("PRAGMA user_version").fetchone()[0]
    if found == FORMAT:
        return
    if found in _EARLIER:
        raise LedgerError(
            f"{path} is a store of an earlier veilstream (format {found})",
            "finish its run with the version that wrote it, or begin another store, with other clients only",
        )
    raise LedgerError(f"{path} is no store that this veilstream can read", "use the version that wrote it")


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what SQLite or JSON raise on a broken file into one error."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise (StorageError if _disk_failed(error) else LedgerError)(
            f"{path} cannot be used ({error})", "see that it can be written, that its disk is mounted and has room"
        ) from error
    except sqlite3.ProgrammingError as error:  # the caller's: after `close`, above all
        raise LedgerError(f"{path} cannot be read ({error})", "open it again, if it was closed") from error
    except (sqlite3.Error, ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        raise damaged(path, str(error)) from error


@contextmanager
def usable(path: Path) -> Iterator[None]:
    """Turn an error of the operating system into one with a way out."""
    try:
        yield
    except OSError as error:
        raise (StorageError if _disk_failed(error) else LedgerError)(
            f"{path} cannot be used ({error})",
            "see that its directory can be written, that its disk is mounted and has room",
        ) from error


_FULL_OR_FAILING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})
_SQLITE_FAILED = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY})


def _disk_failed(error: sqlite3.OperationalError | OSError) -> bool:
    """Whether waiting may help: a disk that is full, read-only or failing, and not a wrong path."""
    if isinstance(error, OSError):
        return error.errno in _FULL_OR_FAILING
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _SQLITE_FAILED
