"""The ledger: one SQLite file in which nothing is forgotten and nothing can be changed unseen.

Every fact is a *record*: a number, a kind, a body, and a hash over all of that and the record
before it. What is secret or large (seeds, noisy steps, models, snapshots) lies beside the records,
each bound to one by its own hash, so that it can be destroyed later while the chain stays whole.

Writes are one transaction each, durable (WAL, synchronous=FULL) when they return, then witnessed.
Opening a ledger reads the whole chain and everything that hangs on it, and compares it with the
witness. Tags of clients are kept as keyed hashes.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veilstream.errors import InputError, LedgerError, PrivacyError
from veilstream.ledger.lock import OneWriter
from veilstream.ledger.witness import NO_TAG, Entry, Witness

__all__ = ["SCHEMA", "Ledger", "Record"]

SCHEMA = 1
_GENESIS = bytes(32)
_TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE records (number INTEGER PRIMARY KEY, kind TEXT NOT NULL, body TEXT NOT NULL,
                      hash BLOB NOT NULL);
CREATE TABLE tags (tag BLOB PRIMARY KEY, number INTEGER NOT NULL, times INTEGER NOT NULL)
  WITHOUT ROWID;
CREATE TABLE blobs (name TEXT PRIMARY KEY, content BLOB NOT NULL) WITHOUT ROWID;
"""

Connect = Callable[[Path], Any]


@dataclass(frozen=True)
class Record:
    """One fact."""

    number: int
    kind: str
    body: dict[str, Any]
    hash: bytes


def _open_sqlite(path: Path) -> Any:
    connection = sqlite3.connect(path, isolation_level=None, timeout=0.0)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA secure_delete=ON")
    connection.execute("PRAGMA wal_autocheckpoint=2000")
    return connection


class Ledger:
    """Open for one writer until `close`."""

    def __init__(
        self,
        path: Path | str,
        witness: Path | str | None = None,
        *,
        connect: Connect = _open_sqlite,
    ) -> None:
        self.path = Path(path)
        self.witness_path = Path(witness) if witness else self.path.with_suffix(".witness")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._failed = False
        self._lock = OneWriter(self.path.with_suffix(".lock"))
        try:
            new = not self.path.exists()
            if new and self.witness_path.exists() and self.witness_path.stat().st_size:
                raise LedgerError(
                    f"there is a witness {self.witness_path} and no store {self.path}",
                    "the store was lost: `veilstream ledger epoch` starts a new one that still "
                    "knows who took part",
                )
            with _readable(self.path):
                if new:
                    os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
                self._db = connect(self.path)
                self._create_or_check()
            self._witness = Witness(self.witness_path)
            with _readable(self.path):
                self.records = list(self._read_chain())
            self._compare_witness()
        except BaseException:
            self._lock.close()
            raise

    # --- opening ---------------------------------------------------------------------------------

    def _create_or_check(self) -> None:
        found = self._db.execute("PRAGMA user_version").fetchone()[0]
        tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if found == 0 and tables == 0:
            self._db.execute("BEGIN IMMEDIATE")
            for statement in _TABLES.split(";"):
                if statement.strip():
                    self._db.execute(statement)
            key = secrets.token_bytes(32)
            self._db.execute("INSERT INTO meta VALUES ('tag_key', ?)", (key,))
            self._db.execute(f"PRAGMA user_version={SCHEMA}")
            self._db.execute("COMMIT")
        elif found != SCHEMA:
            raise LedgerError(
                f"{self.path} has schema {found}, this program knows {SCHEMA}",
                "use the version of veilstream that wrote it, or a newer one",
            )
        (self._tag_key,) = self._db.execute(
            "SELECT value FROM meta WHERE name = 'tag_key'"
        ).fetchone()

    def _read_chain(self) -> Iterator[Record]:
        """Every record, each checked against the one before and what hangs on it."""
        previous, expected = _GENESIS, 0
        tags: dict[bytes, tuple[int, int]] = {}
        names: dict[str, str] = {}
        rows = self._db.execute("SELECT number, kind, body, hash FROM records ORDER BY number")
        for number, kind, body, stored in rows.fetchall():
            if number != expected or _link(previous, number, kind, body) != stored:
                raise _damaged(self.path, f"record {number}")
            content = json.loads(body)
            if number == 0 and content["tag_key"] != _digest(self._tag_key):
                raise _damaged(self.path, "the key of tags")
            if tag := content.get("tag"):
                times = tags.get(bytes.fromhex(tag), (0, 0))[1] + 1
                tags[bytes.fromhex(tag)] = (number, times)
            for gone in content.get("destroyed", []):
                names.pop(gone, None)
            names |= content.get("kept", {})
            yield Record(number, kind, content, stored)
            previous, expected = stored, number + 1
        self._head = previous
        kept = dict(self._db.execute("SELECT name, content FROM blobs").fetchall())
        if {name: _digest(content) for name, content in kept.items()} != names:
            raise _damaged(self.path, "what is kept beside the records")
        found = self._db.execute("SELECT tag, number, times FROM tags").fetchall()
        if {tag: (number, times) for tag, number, times in found} != tags:
            raise _damaged(self.path, "the list of who took part")

    def _compare_witness(self) -> None:
        """A store that is behind its witness is an old copy; one entry ahead is an interruption."""
        last = self._witness.last()
        if last is not None:
            if last.number >= len(self.records):
                raise LedgerError(
                    f"{self.path} ends at record {len(self.records) - 1}, and its witness saw "
                    f"record {last.number}: this is an old copy",
                    "put the newest store back; if it is lost, `veilstream ledger epoch` starts "
                    "anew with everyone the witness knows of left out",
                )
            if self.records[last.number].hash != last.hash:
                raise LedgerError(
                    f"{self.path} and its witness disagree about record {last.number}",
                    "they belong to different histories: find the store that this witness saw",
                )
        missing = self.records[(last.number + 1 if last else 0) :]
        self._testify(missing)

    def _testify(self, records: list[Record]) -> None:
        entries = [
            Entry(r.number, r.hash, bytes.fromhex(r.body["tag"]) if r.body.get("tag") else NO_TAG)
            for r in records
        ]
        if entries:
            self._witness.append(entries)

    # --- writing ---------------------------------------------------------------------------------

    def write(
        self,
        kind: str,
        body: dict[str, Any],
        *,
        keep: dict[str, bytes] | None = None,
        destroy: list[str] | None = None,
        tag: bytes | None = None,
    ) -> Record:
        """One record with all that belongs to it; durable and witnessed when it returns.

        Any failure is final: whether the disk holds it is unknown, so the ledger must be opened
        anew before anything else happens.
        """
        if self._failed:
            raise LedgerError(f"an earlier write to {self.path} failed", "start the learner again")
        content = dict(body)
        if tag is not None:
            content["tag"] = tag.hex()
        if keep:
            content["kept"] = {name: _digest(value) for name, value in keep.items()}
        if destroy:
            content["destroyed"] = destroy
        if not self.records:
            content["tag_key"] = _digest(self._tag_key)
        number = len(self.records)
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        link = _link(self._head, number, kind, text)
        self._failed = True
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("INSERT INTO records VALUES (?, ?, ?, ?)", (number, kind, text, link))
            for name in destroy or []:
                self._db.execute("DELETE FROM blobs WHERE name = ?", (name,))
            for name, value in (keep or {}).items():
                self._db.execute("INSERT INTO blobs VALUES (?, ?)", (name, value))
            if tag is not None:
                self._db.execute(
                    "INSERT INTO tags VALUES (?, ?, 1) "
                    "ON CONFLICT (tag) DO UPDATE SET number = excluded.number, times = times + 1",
                    (tag, number),
                )
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise PrivacyError(
                f"the ledger {self.path} could not be written ({error}): nothing was released "
                "(make room on the disk or repair it, then start the learner again)"
            ) from error
        record = Record(number, kind, content, link)
        self.records.append(record)
        self._head = link
        return record

    def witness(self) -> None:
        """Have everything written so far witnessed; only then may anything leave."""
        last = self._witness.last()
        try:
            self._testify(self.records[(last.number + 1 if last else 0) :])
        except OSError as error:
            raise PrivacyError(
                f"the witness {self.witness_path} could not be written ({error}): nothing was "
                "released (repair its disk, then start the learner again)"
            ) from error
        self._failed = False

    def blob(self, name: str) -> bytes:
        """What was kept under this name."""
        row = self._db.execute("SELECT content FROM blobs WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise _damaged(self.path, name)
        content: bytes = row[0]
        return content

    def names(self, prefix: str) -> list[str]:
        """Names that begin so."""
        rows = self._db.execute("SELECT name FROM blobs ORDER BY name").fetchall()
        return [name for (name,) in rows if name.startswith(prefix)]

    def keyed(self, client: bytes) -> bytes:
        """A client's tag as the ledger keeps it: of no use to whoever has only the file's rows."""
        return hmac.new(self._tag_key, client, hashlib.sha256).digest()

    def times(self, tag: bytes) -> int:
        """How often this client took part."""
        row = self._db.execute("SELECT times FROM tags WHERE tag = ?", (tag,)).fetchone()
        return 0 if row is None else int(row[0])

    @property
    def head(self) -> bytes:
        """Hash of the last record."""
        return self._head

    def forget(self) -> None:
        """Make sure that what was destroyed is gone from the log file too."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Let the next writer in."""
        self._db.close()
        self._witness.close()
        self._lock.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _link(previous: bytes, number: int, kind: str, body: str) -> bytes:
    text = json.dumps([number, kind, body]).encode()
    return hashlib.sha256(previous + text).digest()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _damaged(path: Path, what: str) -> LedgerError:
    return LedgerError(
        f"{path} is damaged ({what})",
        "put the newest intact store back; if there is none, `veilstream ledger epoch` starts anew "
        "with everyone the witness knows of left out",
    )


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Whatever a broken file makes SQLite or JSON say is one error."""
    try:
        yield
    except (sqlite3.Error, ValueError, KeyError, TypeError, IndexError) as error:
        if isinstance(error, InputError):
            raise
        raise _damaged(path, str(error)) from error
