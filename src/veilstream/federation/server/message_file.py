"""The last accepted message of every learner, in one file that is never rewritten as a whole.

    seat 0, slot 0 | seat 0, slot 1 | seat 1, slot 0 | ...      each as large as one message

A message goes into the slot that the last checkpoint does not name, so that whatever is cut short
leaves what the checkpoint names untouched. `sync` makes all of a round's messages durable at once;
then a checkpoint may name them. Prefixes are read back when they are needed and not kept in memory:
a server holds n messages on disk, and those of a moment in memory.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.release import HEADER_BYTES, decode
from veilstream.errors import InputError
from veilstream.federation.protocol.messages import Buffer


class MessageFile:
    """Two slots a seat; `Slots` is one seat's part of it."""

    def __init__(self, path: Path, dim: int, *, create: bool = False) -> None:
        self.path, self.dim = path, dim
        self.message_bytes = HEADER_BYTES + 8 * dim
        how = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        try:
            self._handle = os.open(path, how, 0o600)
        except OSError as error:
            raise InputError(
                "run folder",
                str(path),
                "the file with the learners' last messages",
                f"put it back from a copy of the folder ({error.strerror})",
            ) from error
        self._dirty = False

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None:
            os.close(handle)

    def write(self, index: int, slot: int, payload: Buffer) -> None:
        """Durable after `sync`."""
        if len(payload) != self.message_bytes:
            raise InputError("message", f"{len(payload)} bytes", f"{self.message_bytes}", "check the sender")
        view, at = memoryview(payload), self._offset(index, slot)
        while view:
            written = os.pwrite(self._handle, view, at)
            view, at = view[written:], at + written
        self._dirty = True

    def read(self, index: int, slot: int) -> bytes:
        """What lies there; shorter than a message where nothing was written."""
        return os.pread(self._handle, self.message_bytes, self._offset(index, slot))

    def sync(self) -> None:
        """Make all that was written durable."""
        if self._dirty:
            os.fsync(self._handle)
            self._dirty = False

    def _offset(self, index: int, slot: int) -> int:
        return (2 * index + slot) * self.message_bytes


class Slots:
    """Where one learner's last accepted message is kept."""

    def __init__(self, file: MessageFile, index: int, slot: int | None = None) -> None:
        self._file, self._index = file, index
        self.slot = slot
        """That of the message; None without one."""
        self._safe = slot
        """That of the last checkpoint, which is not written to."""
        self._before: int | None = None
        """That of the message before."""
        self._newest: int | None = slot
        """That of the message that came last, also when it has been forgotten since."""

    @property
    def held(self) -> bool:
        """Whether there is one."""
        return self.slot is not None

    def prefix(self) -> NDArray[np.int64]:
        """The message's; zeros without one."""
        return self._prefix(self.slot)

    def increment(self) -> NDArray[np.int64]:
        """What the message has added to the one before it; known until the next checkpoint."""
        return self._prefix(self._newest) - self._prefix(self._before)

    def _prefix(self, slot: int | None) -> NDArray[np.int64]:
        if slot is None:
            return np.zeros(self._file.dim, np.int64)
        return np.frombuffer(self._file.read(self._index, slot), "<i8", offset=HEADER_BYTES)

    def keep(self, payload: Buffer) -> None:
        """Take this message for the last one."""
        slot = 0 if self._safe is None else 1 - self._safe
        self._file.write(self._index, slot, payload)  # first: it may fail
        self._before, self.slot = self.slot, slot
        self._newest = slot

    def forget(self) -> None:
        """There is none any more: a new epoch's sums begin at zero."""
        self.slot = None

    def saved(self) -> None:
        """A checkpoint that names this slot is durable."""
        self._safe = self.slot

    def check(self, name: str, round_: int, hashed: str) -> None:
        """Whether it is the message that the checkpoint names.

        Raises:
            InputError: the file was damaged, or is not of the same moment as the checkpoint.

        """
        found = b"" if self.slot is None else self._file.read(self._index, self.slot)
        if hashlib.sha256(found).hexdigest() != hashed or decode(found).round != round_:
            raise InputError(
                "run folder",
                str(self._file.path),
                f"to hold the message of {name!r} that the checkpoint names",
                "the file is damaged, or from another moment: put the whole folder back from one copy",
            )
