"""The ledger: one SQLite file in which nothing is forgotten and nothing can be changed unseen.

Facts are records in a hash chain (`chain`). Writes are one transaction each, durable when they
return, then witnessed (`witness`). Opening checks everything (`check`); before every write the
ledger checks that store and witness are as this process left them. After a write that did not
return, nobody knows what the disk holds, so the ledger refuses everything until opened anew.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from veilstream.deployment.ledger.archive import (
    fold_segment,
    hash_at,
    mentions_of,
    pack,
    rows_from,
    segment_is_due,
    tail,
)
from veilstream.deployment.ledger.chain import Body, Chain, Record, damaged, digest, tag_key
from veilstream.deployment.ledger.check import open_chain
from veilstream.deployment.ledger.database import (
    check_format,
    create_tables,
    open_sqlite,
    readable,
    remember_witness,
    remembered_witness,
    usable,
)
from veilstream.deployment.ledger.paths import (
    empty_store,
    identity,
    lock_store,
    missing_store,
    notices_of,
    refuse_links,
    refuse_witness,
    witness_path,
)
from veilstream.deployment.ledger.visits import NOBODY, keyed_tag, past_visits, visit_key
from veilstream.deployment.ledger.witness import Entry, Witness, entries_of, missing_witness
from veilstream.errors import InputError, LedgerError, PrivacyError, StorageError
from veilstream.files import sync_directory
from veilstream.records.participation import PastVisits

CRASH_POINTS = (
    "pinned",
    "step-computed",
    "step-stored",
    "step-witnessed",
    "message-computed",
    "message-stored",
    "message-witnessed",
    "acknowledged",
    "snapshot-stored",
    "epoch-closed",
)
"""Places between two durable writes (`Ledger.reached`)."""
MASKING_CRASH_POINTS = ("masking-stored", "masking-witnessed")
"""Those of what only masks write."""


_MAKE_ROOM = (
    "make room on its disk or repair it; then the store has to be opened anew, as `veilstream learner` does by itself"
)


class Ledger:
    """Open for one writer until `close`.

    ``create=True`` makes a store where there is none, and opens one that is there. Without it a
    store that is missing is an `InputError`. One that is missing or empty while its witness
    remembers it is a `LedgerError` in either case.
    """

    _connect = staticmethod(open_sqlite)

    def __init__(self, path: Path | str, witness: Path | str | None = None, *, create: bool = False) -> None:
        self.path = Path(path)
        self._witness_is_given = bool(witness)
        self.witness_path = witness_path(self.path, witness)
        self._db: Any = None
        self._witness: Witness | None = None
        self._unwitnessed: list[Entry] = []
        self._failed = False
        self._create = create
        with usable(self.path):
            refuse_links(self.path, self.witness_path)
            if identity(self.path) is None:
                self._refuse_lost_store("there is no store")
                if not create:
                    raise missing_store(self.path)
            refuse_witness(self.path)
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = lock_store(self.path)
        try:
            with usable(self.path):
                self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        if identity(self.path) is None:
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        if not self.path.stat().st_size:
            self._refuse_empty_store()
        with readable(self.path):
            self._file = identity(self.path)
            self._db = self._connect(self.path)
            self._create_or_check()
            known = remembered_witness(self._db)
            if known is not None and not self._witness_is_given:
                self.witness_path = known
                refuse_links(self.path, known)
            sync_directory(self.path.parent)
            self.chain = open_chain(self._db, self.path)
            self.tag_key = tag_key(self._db)
            self._witness = self._open_witness()
            remember_witness(self._db, self.path, self.witness_path)
        self._witness.hold()
        self.notices = notices_of(self.path, self.witness_path)

    def _refuse_empty_store(self) -> None:
        """An interrupted first start leaves one behind, and so does a loss."""
        self._refuse_lost_store("nothing is left in the store")
        if not self._create:
            raise empty_store(self.path)

    def _refuse_lost_store(self, what: str) -> None:
        if not self.witness_path.exists():
            return
        witness = Witness(self.witness_path)
        witness.close()
        if witness.last() is not None:
            raise LedgerError(
                f"{what} {self.path}, and there is its witness {self.witness_path}",
                f"put the newest store back; if it is lost, {self._begin_again()}",
            )

    def _begin_again(self) -> str:
        beside = self.witness_path.absolute() == witness_path(self.path, None).absolute()
        where = "" if beside else f" --witness {self.witness_path}"
        return (
            f"`veilstream ledger epoch {self.path} --lost{where}` begins a new one, with everyone the witness knows "
            "of left out"
        )

    def _create_or_check(self) -> None:
        found = self._db.execute("PRAGMA user_version").fetchone()[0]
        tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if found == 0 and tables == 0:
            self._refuse_empty_store()
            create_tables(self._db, secrets.token_bytes(32), self.path, self.witness_path)
        else:
            check_format(self._db, self.path)

    def _open_witness(self) -> Witness:
        """A store behind its witness is an old copy; one record ahead is an interruption."""
        if not self.witness_path.exists():
            if self.chain.length > 1:
                known = remembered_witness(self._db)
                raise missing_witness(self.witness_path, self.path, known)
            if not self.witness_path.parent.exists():
                raise InputError(
                    "witness",
                    str(self.witness_path),
                    "a file in a folder that exists",
                    "mount its device, or make the folder",
                )
            return Witness.create(self.witness_path, self.tag_key, self._entries_from(0))
        witness = Witness(self.witness_path)
        try:
            last = witness.last()
            if last is not None:
                self._compare(last)
            seen = last.number + 1 if last else 0
            if self.chain.length - seen > 1:
                raise LedgerError(
                    f"the witness {self.witness_path} ends before record {seen}, and {self.path} "
                    f"has {self.chain.length}: the witness is an old copy",
                    "put the newest one back; if it is lost and this store is the newest there is, "
                    "`veilstream ledger verify --renew-witness` writes it anew",
                )
            if last is None and witness.tag_key != self.tag_key:
                witness.close()
                return Witness.create(self.witness_path, self.tag_key, self._entries_from(0))
            number, there = witness.reached()
            missing = list(itertools.islice(self._entries_from(number), there, None))
            witness.check_torn(len(missing))
            if missing:
                witness.append(missing)
        except BaseException:
            witness.close()
            raise
        return witness

    def _compare(self, last: Entry) -> None:
        if last.number >= self.chain.length:
            raise LedgerError(
                f"{self.path} ends before record {self.chain.length}, and its witness saw record "
                f"{last.number}: this is an old copy",
                f"put the newest store back; if it is lost, {self._begin_again()}",
            )
        if hash_at(self._db, last.number) != last.hash:
            raise LedgerError(
                f"{self.path} and its witness disagree about record {last.number}",
                "they belong to different histories: find the store that this witness saw",
            )

    def _entries_from(self, number: int) -> Iterator[Entry]:
        for record in self.records(number):
            yield from entries_of(self._db, record)

    def write(
        self,
        kind: str,
        body: Body,
        *,
        keep: dict[str, bytes] | None = None,
        destroy: list[str] | None = None,
        tag: bytes | None = None,
        tags: Sequence[bytes | None] = (),
    ) -> Record:
        """One record with all that belongs to it, durable when this returns; `witness` it next.

        ``keep`` replaces what was kept under the same name. ``tag`` took part in the body's step;
        ``tags`` in that one and those after it, None for a step without a client. When there are
        many unpacked records, they are packed in the same transaction.
        """
        self.check()
        content = replace(
            body,
            tag=None if tag is None else tag.hex(),
            tags=b"".join(each or NOBODY for each in tags).hex() if any(tags) else None,
            kept={name: digest(value) for name, value in keep.items()} if keep else None,
            destroyed=destroy or None,
            tag_key=None if self.chain.length else digest(self.tag_key),
        )
        self._failed = True
        try:
            run = self._db.execute
            self._check_files()
            run("BEGIN IMMEDIATE")
            self._check_head()
            if segment_is_due(self.chain.length - self.chain.packed, len(self.chain.kept)):
                content = replace(content, before=self.chain.summary(self._pack()))
            record, text = self.chain.next(kind, content)
            run("INSERT INTO records VALUES (?, ?, ?, ?)", (record.number, kind, text, record.hash))
            for name in destroy or []:
                run("DELETE FROM blobs WHERE name = ?", (name,))
            for name, value in (keep or {}).items():
                if name in self.chain.kept and name not in (destroy or []):
                    # In place, which is half the work where the size stays the same.
                    run("UPDATE blobs SET content = ? WHERE name = ?", (value, name))
                else:
                    run("INSERT INTO blobs VALUES (?, ?)", (name, value))
            if visits := record.visits:
                rows = [(visit_key(who, body.epoch, step),) for who, step in visits]
                self._db.executemany("INSERT INTO visits VALUES (?)", rows)
            run("COMMIT")
        except LedgerError:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise
        except (sqlite3.OperationalError, OSError) as error:
            raise StorageError(f"the ledger {self.path} could not be written ({error})", _MAKE_ROOM) from error
        except Exception as error:
            raise PrivacyError(
                f"the ledger {self.path} could not be written ({error}): nothing was released (start the learner again)"
            ) from error
        self.chain.follow(record)
        self._unwitnessed += entries_of(self._db, record)
        return record

    def _pack(self) -> str:
        """Move all records into a segment, if they are those that this process knows."""
        with readable(self.path):
            rows = list(tail(self._db))
            before = Record.read(rows[0]).body.before
            known = Chain.after(before, self.tag_key) if before else Chain(self.tag_key)
            for row in rows:
                known.take(row)
        if known.head != self.chain.head:
            raise damaged(self.path, "records that were to be packed")
        first, content = rows[0].number, pack(rows)
        self._db.execute("INSERT INTO segments VALUES (?, ?)", (first, content))
        self._db.execute("DELETE FROM records")
        return fold_segment(self.chain.archive, first, content)

    def _check_files(self) -> None:
        """Refuse to write if store or witness are not the files that this process wrote to."""
        if identity(self.path) != self._file:
            raise LedgerError(
                f"the store {self.path} was moved, or another file has taken its place",
                "put the newest store back, then start the learner again",
            )
        assert self._witness is not None
        self._witness.check()

    def _check_head(self) -> None:
        """Refuse to write after a record that this process does not know."""
        newest = "SELECT number, hash FROM records ORDER BY number DESC LIMIT 1"
        found = self._db.execute(newest).fetchone()
        if found != ((self.chain.length - 1, self.chain.head) if self.chain.length else None):
            raise LedgerError(
                f"the store {self.path} moved on without this process (its last record is another)",
                "something else wrote to it, or it was rewound under a running learner: end both, "
                "put the newest store back, then start one learner",
            )

    @staticmethod
    def reached(point: str) -> None:
        """A crash point: does nothing. Tests that kill a process there replace it in it."""

    def witness(self) -> None:
        """Witness everything written so far; only then may anything leave."""
        assert self._witness is not None
        try:
            self._witness.append(self._unwitnessed)
        except OSError as error:
            raise StorageError(f"the witness {self.witness_path} could not be written ({error})", _MAKE_ROOM) from error
        self._unwitnessed = []
        self._failed = False

    def check(self) -> None:
        """Refuse to go on after a failure."""
        if self._failed:
            raise PrivacyError(
                f"an earlier write to {self.path} failed: nothing was released (repair the disk, then open it anew)"
            )

    @property
    def failed(self) -> bool:
        """Whether a write did not return, so that the store has to be opened anew."""
        return self._failed

    def blob(self, name: str) -> bytes:
        """What was kept under this name."""
        query = "SELECT content FROM blobs WHERE name = ?"
        with readable(self.path):
            row = self._db.execute(query, (name,)).fetchone()
        if row is None:
            raise damaged(self.path, name)
        return bytes(row[0])

    def names(self, prefix: str) -> list[str]:
        """Names that begin so."""
        return sorted(name for name in self.chain.kept if name.startswith(prefix))

    def records(self, first: int = 0) -> Iterator[Record]:
        """Every record from this number on, one at a time."""
        with readable(self.path):
            for row in rows_from(self._db, first):
                yield Record.read(row)

    def knows_message(self, r: int, message: str) -> bool:
        """Whether this is the hash of round r's message, in any epoch."""
        newest = self.chain.standing
        if (r, message) == (newest.rounds - 1, newest.message):
            return True
        if len(message) != 64 or not message.isalnum():
            return False
        with readable(self.path):
            return any(
                record.kind == "message" and (record.body.round, record.body.hash) == (r, message)
                for record in map(Record.read, mentions_of(self._db, message))
            )

    def keyed(self, client: bytes) -> bytes:
        """A client's tag as the ledger keeps it."""
        return keyed_tag(self.tag_key, client)

    def past_visits(self, tags: Collection[bytes]) -> dict[bytes, PastVisits]:
        """The visits so far of each of these clients who has any."""
        with readable(self.path):
            return past_visits(self._db, tags)

    def forget(self, wait_s: float = 2.0) -> bool:
        """Remove what was destroyed from the log file too; False if someone still reads it after ``wait_s``."""
        self._failed = True
        with readable(self.path):
            self._db.execute(f"PRAGMA busy_timeout={round(1000 * wait_s)}")
            (busy, *_) = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        self._failed = False
        return not busy

    def close(self) -> None:
        """Let the next writer in."""
        with contextlib.suppress(Exception):
            if self._db is not None:
                self._db.close()
        if self._witness is not None:
            self._witness.close()
        self._lock.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
