"""The second witness: a file, best on another device, that remembers how far the ledger had come.

96 bytes at the start, and 96 for every record, appended and synced before anything leaves the
learner; a record of several clients has an entry for each of them, in one append:

    start   8 bytes  VSWITN01
            32 bytes the key that clients' tags are hashed with: after the loss of a store, who took
                     part can still be recognised
            40 bytes zero
            16 bytes checksum
    entry   8 bytes  number of the record
            8 bytes  its epoch
            32 bytes its hash in the chain
            32 bytes a client's keyed tag, or zeros
            16 bytes checksum

A torn end (a cut while it was appended) is no evidence of anything and is dropped: what it would
have witnessed was not yet let out. One append is about one record, and has at most `MOST_AT_ONCE`
entries, so as many may be torn; where one of them is there, the store must have its record, and
completes the others when it is opened. Anything else that cannot be read is damage, and is refused: more
entries than that, more than two at the end that are not simply empty, or more than the store has to
complete.

Before it appends, a learner looks whether the file is as it left it: the same file under the same
path, of the same size, with the same last entry. If not, someone else wrote to it (a clone of the
learner, or the learner that this one is a resumed snapshot of), and this learner stops.

The file is sensitive: with the key and a list of people, anyone can tell who of them took part.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veilstream.deployment.ledger.chain import Record
from veilstream.deployment.ledger.paths import WITNESS_MAGIC, identity
from veilstream.deployment.ledger.visits import carried_tags
from veilstream.errors import LedgerError, StoreBusy
from veilstream.files import sync_directory, write_file
from veilstream.records.participation import MOST_AT_ONCE

ENTRY_BYTES = 96
_NO_TAG = bytes(32)
_BODY = struct.Struct(">QQ32s32s")
_TORN_WITH_CONTENT = 2
"""Of a longer torn end, all but so many are empty: nothing was written there before the cut."""
_AT_ONCE = 4096


@dataclass(frozen=True)
class Entry:
    """One record, as witnessed."""

    number: int
    epoch: int
    hash: bytes
    tag: bytes | None

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
            self._end = 0
            self._beyond: Entry | None = None
            self._torn = 0
            self._size = os.fstat(self._handle).st_size
            self.tag_key = self._checked_start()
            self._last = self._find_end()
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, path: Path, tag_key: bytes, entries: Iterable[Entry] = ()) -> Witness:
        """Write a file anew, whole or not at all, and open it."""
        start = _sealed(WITNESS_MAGIC + tag_key + bytes(40))
        content = itertools.chain([start], _packed(entries))
        write_file(path, content, partial=f".{path.name}.new")  # a kill leaves no stray key
        sync_directory(path.parent)
        return cls(path)

    def entries(self) -> Iterator[Entry]:
        """All of them; one in the middle that is damaged is an error."""
        if self._beyond is not None:
            raise LedgerError(
                f"the witness {self.path} was cut in the middle of its last append",
                "start the learner on its newest store, which completes it",
            )
        piece = _AT_ONCE * ENTRY_BYTES
        for start in range(ENTRY_BYTES, self._end, piece):
            data = self._read(start, min(piece, self._end - start))
            for at in range(0, len(data), ENTRY_BYTES):
                entry = Entry.unpack(data[at : at + ENTRY_BYTES])
                if entry is None:
                    raise self._damaged(f"at byte {start + at}")
                yield entry

    def last(self) -> Entry | None:
        """The newest entry, also if others of its append are torn."""
        return self._beyond or self._last

    def reached(self) -> tuple[int, int]:
        """The record of the last entry before anything torn, and how many entries it has; else (0, 0)."""
        if self._last is None:
            return 0, 0
        found, place = 0, self._end
        while place > ENTRY_BYTES:
            size = min(_AT_ONCE * ENTRY_BYTES, place - ENTRY_BYTES)
            place -= size
            data = self._read(place, size)
            for at in range(size - ENTRY_BYTES, -1, -ENTRY_BYTES):
                entry = Entry.unpack(data[at : at + ENTRY_BYTES])
                if entry is None or entry.number != self._last.number:
                    return self._last.number, found
                found += 1
        return self._last.number, found

    def check_torn(self, lacking: int) -> None:
        """Raise `LedgerError` if the torn end is longer than the ``lacking`` entries that the store has."""
        if self._torn > max(_TORN_WITH_CONTENT, lacking):
            raise self._damaged(f"in its last {self._torn} entries")

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
        if self._checked_start() != self.tag_key:
            raise self._moved_on("its key is another one")
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
        self._last, self._beyond, self._torn = entries[-1], None, 0

    def close(self) -> None:
        """Let go of the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _read(self, place: int, size: int) -> bytes:
        return os.pread(self._handle, size, place)

    def _checked_start(self) -> bytes:
        start = self._read(0, ENTRY_BYTES)
        if start.startswith(b"VEILWIT"):
            raise LedgerError(
                f"{self.path} is a witness of an earlier veilstream",
                "finish its run with the version that wrote it, or begin another store, with other clients only",
            )
        if start[:8] != WITNESS_MAGIC or _sealed(start[: _BODY.size]) != start:
            raise self._damaged("at its start")
        return start[8:40]

    def _find_end(self) -> Entry | None:
        size = os.fstat(self._handle).st_size
        whole = size - size % ENTRY_BYTES
        start = max(ENTRY_BYTES, whole - (MOST_AT_ONCE + 1) * ENTRY_BYTES)
        data = self._read(start, whole - start)
        pieces = [data[at : at + ENTRY_BYTES] for at in range(0, len(data), ENTRY_BYTES)]
        found = [Entry.unpack(piece) for piece in pieces]
        readable = [at for at, entry in enumerate(found) if entry is not None]
        kept = readable[-1] + 1 if readable else 0
        torn = pieces[kept:]
        with_content = sum(any(piece) for piece in torn)
        if len(torn) > MOST_AT_ONCE or with_content > _TORN_WITH_CONTENT:
            raise self._damaged(f"in its last {len(torn)} entries")
        if kept:
            kept = self._before_hole(found[:kept], start)
        self._end, self._torn = start + kept * ENTRY_BYTES, len(found) - kept
        return found[kept - 1] if kept else None

    def _before_hole(self, found: list[Entry | None], start: int) -> int:
        """How many of these entries, whose last is whole, come before any that is torn.

        The last append is about one record: none of an older one can be torn.
        """
        last = found[-1]
        assert last is not None
        hole = None
        for at in range(len(found) - 1, -1, -1):
            entry = found[at]
            if entry is None:
                hole = at
            elif entry.number != last.number:
                break
        else:
            if hole is not None and (start > ENTRY_BYTES or not last.number or not hole):
                raise self._damaged(f"at byte {start + hole * ENTRY_BYTES}")
        if hole is None:
            return len(found)
        self._beyond = last
        return hole

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


def missing_witness(path: Path, store: Path, known: Path | None) -> LedgerError:
    """The error for a store whose witness is not there; ``known`` is where the store says it is."""
    where = f"the witness {path} of {store} is missing"
    if known is not None:
        there = path.absolute() == known
        where += f" ({'where' if there else f'{known} is where'} it was at the last start)"
    return LedgerError(
        where,
        "mount its device; if it lies elsewhere, say where with --witness (witness= in Python); "
        "only if it is lost and this store is the newest there is, `veilstream ledger verify "
        "--renew-witness` writes it anew",
    )


def entries_of(db: Any, record: Record) -> Iterator[Entry]:
    """What a witness should hold of a record: an entry for each of its clients, or one for none.

    One that carries clients over from a lost store has an entry more.
    """
    tags: Iterable[bytes | None] = [tag for tag, _ in record.visits] or [None]
    if record.kind == "recovered":
        tags = itertools.chain(carried_tags(db), [None])
    for tag in tags:
        yield Entry(record.number, record.body.epoch, record.hash, tag)


def _packed(entries: Iterable[Entry]) -> Iterator[bytes]:
    rest = iter(entries)
    while piece := b"".join(entry.pack() for entry in itertools.islice(rest, _AT_ONCE)):
        yield piece


def _sealed(body: bytes) -> bytes:
    return body + hashlib.sha256(body).digest()[: ENTRY_BYTES - _BODY.size]
