"""The second witness: a file, best on another device, that remembers how far the ledger had come.

One entry of 80 bytes for every record, appended and synced before anything leaves the learner:

    8 bytes  number of the record
    32 bytes its hash in the chain
    32 bytes the client's keyed tag, or zeros: after the loss of a store, who took part is known
    8 bytes  checksum of the entry

A torn last entry (a cut while it was appended) is no evidence of anything and is dropped: what it
would have witnessed was not yet let out.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from veilstream.errors import LedgerError

__all__ = ["ENTRY_BYTES", "Entry", "Witness"]

ENTRY_BYTES = 80
NO_TAG = bytes(32)


@dataclass(frozen=True)
class Entry:
    """One record, as witnessed."""

    number: int
    hash: bytes
    tag: bytes

    def pack(self) -> bytes:
        """80 bytes."""
        body = struct.pack(">Q32s32s", self.number, self.hash, self.tag)
        return body + hashlib.sha256(body).digest()[:8]

    @classmethod
    def unpack(cls, data: bytes) -> Entry | None:
        """The entry, or None if its checksum does not agree."""
        body, checksum = data[:72], data[72:]
        if hashlib.sha256(body).digest()[:8] != checksum:
            return None
        return cls(*struct.unpack(">Q32s32s", body))


class Witness:
    """An append-only file of entries."""

    def __init__(self, path: Path) -> None:
        self.path = path
        fresh = not path.exists()
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if fresh:
            _sync_directory(path.parent)
        size = os.fstat(self._handle).st_size
        self._end = size - size % ENTRY_BYTES
        if (
            self._end
            and Entry.unpack(os.pread(self._handle, ENTRY_BYTES, self._end - ENTRY_BYTES)) is None
        ):
            self._end -= ENTRY_BYTES  # torn while it was appended

    def entries(self) -> Iterator[Entry]:
        """All of them; one in the middle that is damaged is an error."""
        for place in range(0, self._end, ENTRY_BYTES):
            entry = Entry.unpack(os.pread(self._handle, ENTRY_BYTES, place))
            if entry is None:
                raise LedgerError(
                    f"the witness {self.path} is damaged at byte {place}",
                    "restore this file from its own device; without it a restored old store "
                    "cannot be told",
                )
            yield entry

    def last(self) -> Entry | None:
        """The newest entry."""
        if not self._end:
            return None
        return Entry.unpack(os.pread(self._handle, ENTRY_BYTES, self._end - ENTRY_BYTES))

    def append(self, entries: list[Entry]) -> None:
        """Durable when it returns."""
        data = b"".join(entry.pack() for entry in entries)
        done = os.pwrite(self._handle, data, self._end)
        if done != len(data):
            raise OSError(f"only {done} of {len(data)} bytes fitted into {self.path}")
        os.fsync(self._handle)
        self._end += len(data)

    def close(self) -> None:
        """Let go of the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
