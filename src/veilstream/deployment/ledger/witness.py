"""The second witness: a file, best on another device, that remembers how far the ledger had come.

96 bytes at the start, and 96 for every record, appended and synced before anything leaves the
learner:

    start   8 bytes  VEILWIT2
            32 bytes the key that clients' tags are hashed with: after the loss of a store, who took
                     part can still be recognised
            40 bytes zero
            16 bytes checksum
    entry   8 bytes  number of the record
            8 bytes  its epoch
            32 bytes its hash in the chain
            32 bytes the client's keyed tag, or zeros
            16 bytes checksum

A torn last entry (a cut while it was appended) is no evidence of anything and is dropped: what it
would have witnessed was not yet let out. (The first form of this file had no start and entries of
80 bytes, without epochs; it is still read, and replaced.)

Before it appends, a learner looks whether the file is as it left it: the same file under the same
path, of the same size, with the same last entry. If not, someone else wrote to it (a clone of the
learner, or the learner that this one is a resumed snapshot of), and this learner stops.

The file is sensitive: with the key and a list of people, anyone can tell who of them took part.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veilstream.deployment.ledger.chain import Record, carried_tags
from veilstream.deployment.ledger.paths import identity
from veilstream.errors import LedgerError, StoreBusy
from veilstream.files import sync_directory, write_file

__all__ = ["ENTRY_BYTES", "Entry", "Witness", "entries_of", "missing_witness"]

ENTRY_BYTES = 96
_MAGIC = b"VEILWIT2"
_NO_TAG = bytes(32)
_BODY = struct.Struct(">QQ32s32s")
_FIRST_FORM = struct.Struct(">Q32s32s8s")


@dataclass(frozen=True)
class Entry:
    """One record, as witnessed."""

    number: int
    epoch: int
    hash: bytes
    tag: bytes | None

    @classmethod
    def of(cls, record: Record) -> Entry:
        """What is worth remembering of a record."""
        return cls(record.number, record.body.get("epoch", 0), record.hash, record.tag)

    def pack(self) -> bytes:
        """As it stands in the file."""
        return _sealed(_BODY.pack(self.number, self.epoch, self.hash, self.tag or _NO_TAG))

    @classmethod
    def unpack(cls, data: bytes) -> Entry | None:
        """The entry, or None if its checksum does not agree."""
        if _sealed(data[: _BODY.size]) != data:
            return None
        number, epoch, link, tag = _BODY.unpack_from(data)
        return cls(number, epoch, link, None if tag == _NO_TAG else tag)


class Witness:
    """An append-only file of entries."""

    def __init__(self, path: Path) -> None:
        """Open a file that `create` made."""
        self.path = path
        path.with_name(f".{path.name}.new").unlink(missing_ok=True)
        self._handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self._first_form = self._read(0, 8) != _MAGIC
            self._end = 0
            self._size = os.fstat(self._handle).st_size
            if self._first_form:
                self._last = self._last_of_first_form()
            else:
                self.tag_key = self._checked_start()
                self._last = self._find_end()
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, path: Path, tag_key: bytes, entries: Iterable[Entry] = ()) -> Witness:
        """Write a file anew, whole or not at all, and open it."""
        start = _sealed(_MAGIC + tag_key + bytes(40))
        content = start + b"".join(entry.pack() for entry in entries)
        write_file(path, content, partial=f".{path.name}.new")  # a kill leaves no stray key
        sync_directory(path.parent)
        return cls(path)

    @property
    def outdated(self) -> bool:
        """Whether the file has the first form, and is to be written anew."""
        return self._first_form

    def entries(self) -> Iterator[Entry]:
        """All of them; one in the middle that is damaged is an error."""
        for place in range(ENTRY_BYTES, self._end, ENTRY_BYTES):
            entry = Entry.unpack(self._read(place, ENTRY_BYTES))
            if entry is None:
                raise self._damaged(f"at byte {place}")
            yield entry

    def last(self) -> Entry | None:
        """The newest entry."""
        return self._last

    def hold(self) -> None:
        """Keep other writers away until `close`, where the file system has locks."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreBusy(str(self.path), "unknown") from None
        except OSError:  # no locks here: `check` still notices what others wrote
            return

    def check(self) -> None:
        """Raise `LedgerError` unless the file is as this process left it."""
        here = os.fstat(self._handle)
        if identity(self.path) != (here.st_dev, here.st_ino):
            raise self._moved_on("its path leads to another file, or to none")
        if here.st_size != self._size:
            raise self._moved_on(f"it was left with {self._size} bytes and has {here.st_size}")
        if self._last is not None:
            last = Entry.unpack(self._read(self._end - ENTRY_BYTES, ENTRY_BYTES))
            if last != self._last:
                raise self._moved_on("its last entry is not the one that was left")

    def append(self, entries: list[Entry]) -> None:
        """Durable when it returns; nothing that others wrote is overwritten (see `check`)."""
        self.check()
        data = b"".join(entry.pack() for entry in entries)
        done = os.pwrite(self._handle, data, self._end)
        if done != len(data):
            raise OSError(f"only {done} of {len(data)} bytes fitted into {self.path}")
        os.fsync(self._handle)
        self._end += len(data)
        self._size = max(self._size, self._end)  # a torn end may be longer than what replaced it
        self._last = entries[-1]

    def close(self) -> None:
        """Let go of the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _read(self, place: int, size: int) -> bytes:
        return os.pread(self._handle, size, place)

    def _checked_start(self) -> bytes:
        start = self._read(0, ENTRY_BYTES)
        if _sealed(start[: _BODY.size]) != start:
            raise self._damaged("at its start")
        return start[8:40]

    def _find_end(self) -> Entry | None:
        size = os.fstat(self._handle).st_size
        self._end = size - size % ENTRY_BYTES
        while self._end > ENTRY_BYTES:
            last = Entry.unpack(self._read(self._end - ENTRY_BYTES, ENTRY_BYTES))
            if last is not None:
                return last
            self._end -= ENTRY_BYTES  # torn while it was appended
        return None

    def _last_of_first_form(self) -> Entry | None:
        size = os.fstat(self._handle).st_size
        whole = size - size % _FIRST_FORM.size
        for place in range(whole - _FIRST_FORM.size, -1, -_FIRST_FORM.size):
            data = self._read(place, _FIRST_FORM.size)
            number, link, tag, checksum = _FIRST_FORM.unpack(data)
            if hashlib.sha256(data[:72]).digest()[:8] == checksum:
                return Entry(number, 0, link, None if tag == _NO_TAG else tag)
        if size >= _FIRST_FORM.size:
            raise self._damaged("everywhere")
        return None

    def _moved_on(self, how: str) -> LedgerError:
        return LedgerError(
            f"the witness {self.path} moved on without this process ({how})",
            "another learner wrote to it: this one is a clone, or a snapshot that was resumed. End "
            "this one and keep the other; if there is no other, start this one again: it compares "
            "its store with the witness",
        )

    def _damaged(self, where: str) -> LedgerError:
        return LedgerError(
            f"the witness {self.path} is damaged {where}",
            "put this file back from its own device; if it is lost and the store is the newest "
            "there is, `veilstream ledger verify --renew-witness` writes it anew",
        )


def missing_witness(path: Path, store: Path) -> LedgerError:
    """The error for a store whose witness is not there."""
    return LedgerError(
        f"the witness {path} of {store} is missing",
        "mount its device or put it back; if it is lost and this store is the newest there is, "
        "`veilstream ledger verify --renew-witness` writes it anew",
    )


def entries_of(db: Any, first: int) -> list[Entry]:
    """What a witness should hold of a store's records from this number on.

    A record that carries clients over from a lost store has an entry for each of them.
    """
    entries = []
    rows = db.execute("SELECT * FROM records WHERE number >= ? ORDER BY number", (first,))
    for number, kind, body, link in rows.fetchall():
        record = Record(number, kind, json.loads(body), link)
        if kind == "recovered":
            epoch = record.body["epoch"]
            entries += [Entry(number, epoch, link, tag) for tag in carried_tags(db)]
        entries.append(Entry.of(record))
    return entries


def _sealed(body: bytes) -> bytes:
    return body + hashlib.sha256(body).digest()[: ENTRY_BYTES - _BODY.size]
