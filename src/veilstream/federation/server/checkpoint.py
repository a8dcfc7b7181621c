"""What a server must not forget: the model, the round, and each learner's last accepted message.

    models.f32      every released model, x⁰ first, float32; rows are never changed
    messages.bin    two slots a seat, each as large as one message
    checkpoint.bin  x, and which slots count

A message goes into the slot that the last checkpoint does not name, so an interrupted write leaves
intact what the checkpoint names. The checkpoint is written whole or not at all, after the other two
and before the next round is announced: a server that is killed loses at most the round in flight.
Prefixes are read back when they are needed and not kept in memory.

    8 bytes   VEILRUN2 (VEILRUN1, of earlier versions, has no `terms` in its head)
    8 bytes   length of the head, little-endian
    head      JSON: `RunHead`
    8·d       x, float64
    8·d       the average that is published, float64; left out where it is x
    32 bytes  SHA-256 of all before
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.release import HEADER_BYTES, Message, decode
from veilstream.errors import InputError
from veilstream.federation.protocol.fold import Seat, SeatState
from veilstream.federation.protocol.messages import Buffer
from veilstream.files import sync_directory, write_file
from veilstream.runs.folder import SERVER_CHECKPOINT

CHECKPOINT, MESSAGES = SERVER_CHECKPOINT, "messages.bin"

_MAGIC, _EARLIER = b"VEILRUN2", b"VEILRUN1"
_HEAD = struct.Struct("<8sQ")
_HASH_BYTES = 32


@dataclass(frozen=True)
class SeatHead:
    """How far one learner has come, by the server's account."""

    name: str
    epoch: int
    round: int
    accepted: tuple[int, str] | None
    """Its own round and the hash of its last message that was taken; None: none of this epoch."""
    state: SeatState
    why: str
    slot: int | None
    """Where that message lies in messages.bin."""


@dataclass(frozen=True)
class RunHead:
    """What a checkpoint says of its run; messages are not opened, so a server may be running."""

    run: str
    round: int
    dim: int
    release_dim: int
    """Numbers of a message: telemetry makes them more than ``dim``."""
    seats: tuple[SeatHead, ...]
    terms: str = ""
    """Digest of the terms that the run is under (`Terms.settings`); "" where an earlier version wrote it."""

    @classmethod
    def load(cls, folder: Path) -> RunHead:
        """As the server saved it last."""
        return _read(folder / CHECKPOINT)[0]


@dataclass
class Position:
    """Where a run stands, between two rounds."""

    run: str
    round: int
    x: NDArray[np.float64]
    average: NDArray[np.float64]
    """What is published: x itself, or an average of all so far."""
    seats: Mapping[str, Seat]
    messages: MessageFile
    terms: str = ""
    """As `RunHead.terms`."""

    def save(self, folder: Path) -> None:
        """Durable when it returns, messages included."""
        self.messages.sync()
        seats = tuple(
            SeatHead(s.name, s.epoch, s.round, s.accepted, s.state, s.why, _slots(s).slot) for s in self.seats.values()
        )
        about = RunHead(self.run, self.round, len(self.x), self.messages.dim, seats, self.terms)
        head = json.dumps(dataclasses.asdict(about)).encode()
        pieces = [_HEAD.pack(_MAGIC, len(head)), head, self.x.astype("<f8").tobytes()]
        if not np.array_equal(self.average, self.x):
            pieces.append(self.average.astype("<f8").tobytes())
        hashed = hashlib.sha256()
        for piece in pieces:
            hashed.update(piece)
        write_file(folder / CHECKPOINT, [*pieces, hashed.digest()])
        sync_directory(folder)
        for seat in self.seats.values():
            _slots(seat).saved()

    @classmethod
    def load(cls, folder: Path) -> Position:
        """As it was saved."""
        head, numbers = _read(folder / CHECKPOINT)
        messages = MessageFile(folder / MESSAGES, head.release_dim)
        seats = {}
        for index, s in enumerate(head.seats):
            slots = Slots(messages, index, s.slot)
            if s.accepted is not None:
                slots.check(s.name, *s.accepted)
            seats[s.name] = Seat(s.name, slots, s.epoch, s.round, s.accepted, s.state, s.why)
        x, average = numbers[: head.dim], numbers[-head.dim :].copy()
        return cls(head.run, head.round, x, average, seats, messages, head.terms)


def _slots(seat: Seat) -> Slots:
    assert isinstance(seat.kept, Slots)
    return seat.kept


def _read(path: Path) -> tuple[RunHead, NDArray[np.float64]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _missing(path, "the server's checkpoint", error) from error
    whole = memoryview(data)[:-_HASH_BYTES]
    if data[:4] == _MAGIC[:4] and data[:8] not in (_MAGIC, _EARLIER):
        raise InputError(
            "run folder",
            str(path),
            "a checkpoint of version 1 or 2",
            "another veilstream wrote it: finish the run with that one, or begin a new run in another folder",
        )
    if data[:8] not in (_MAGIC, _EARLIER) or hashlib.sha256(whole).digest() != data[-_HASH_BYTES:]:
        raise InputError(
            "run folder", str(path), "a whole checkpoint", "it is damaged: put the whole folder back from one copy"
        )
    end = _HEAD.size + _HEAD.unpack_from(data)[1]
    told = json.loads(bytes(whole[_HEAD.size : end]))
    for seat in told["seats"]:
        seat["accepted"] = seat["accepted"] and tuple(seat["accepted"])
    told["seats"] = tuple(SeatHead(**seat) for seat in told["seats"])
    return RunHead(**told), np.frombuffer(whole[end:], "<f8").astype(np.float64)


def stored_message(folder: Path, head: RunHead, index: int) -> Message:
    """The message that a checkpoint names for the seat at ``index``; only read, so a server may be running."""
    seat, path = head.seats[index], folder / MESSAGES
    assert seat.accepted is not None
    size = HEADER_BYTES + 8 * head.release_dim
    try:
        with path.open("rb") as file:
            file.seek((2 * index + (seat.slot or 0)) * size)
            found = file.read(size)
    except OSError as error:
        raise _missing(path, "the file with the learners' last messages", error) from error
    _check_message(path, seat.name, found, *seat.accepted)
    return decode(found)


def _check_message(path: Path, name: str, found: bytes, round_: int, hashed: str) -> None:
    if hashlib.sha256(found).hexdigest() != hashed or decode(found).round != round_:
        raise InputError(
            "run folder",
            str(path),
            f"to hold the message of {name!r} that the checkpoint names",
            "the file is damaged, or from another moment: put the whole folder back from one copy",
        )


def _missing(path: Path, rule: str, error: OSError) -> InputError:
    return InputError("run folder", str(path), rule, f"put it back from a copy of the folder ({error.strerror})")


class MessageFile:
    """The last messages of all learners, two slots a seat; `Slots` is one seat's part of it."""

    def __init__(self, path: Path, dim: int, *, create: bool = False) -> None:
        self.path, self.dim = path, dim
        self.message_bytes = HEADER_BYTES + 8 * dim
        how = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        try:
            self._handle = os.open(path, how, 0o600)
        except OSError as error:
            raise _missing(path, "the file with the learners' last messages", error) from error
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
    """Where one learner's last accepted message is kept: a `LastMessage` of the fold."""

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
        """Refuse a message that is not the one that the checkpoint names."""
        found = b"" if self.slot is None else self._file.read(self._index, self.slot)
        _check_message(self._file.path, name, found, round_, hashed)


class ModelFile:
    """The released models, in one file; rows are never changed."""

    def __init__(self, path: Path, dim: int) -> None:
        self.path, self.dim = path, dim

    def write(self, round_: int, model: NDArray[np.float32]) -> None:
        """Durable when it returns."""
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(handle, model.astype("<f4").tobytes(), 4 * self.dim * round_)
            os.fsync(handle)
        finally:
            os.close(handle)

    def read(self, round_: int) -> NDArray[np.float32]:
        """The model that came out of so many rounds."""
        data = b""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(4 * self.dim * round_)
                data = file.read(4 * self.dim)
        if len(data) < 4 * self.dim:
            raise InputError("round", round_, "a round whose model is released", "try latest")
        return np.frombuffer(data, "<f4")
