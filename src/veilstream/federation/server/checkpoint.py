"""What a server must not forget: the model, the round, and each learner's last accepted message.

Models that were released lie one after the other in one file, x⁰ first, float32. The messages lie
in another (`message_file`), in two slots each. The checkpoint holds x and names the slots that
count; it is written whole or not at all, after the other two and before the next round is
announced, so a server that is killed loses at most the round in flight.

    8 bytes   VEILCKP1
    8 bytes   length of the head, little-endian
    head      JSON: run, round, d, seats (name, epoch, round, accepted, slot); release_d, the
              numbers of a message, where telemetry makes them more than d
    8·d       x, float64
    8·d       the average that is published, float64; left out where it is x
    8·d       the server's velocity, float64; only with momentum, and the head says so
    32 bytes  SHA-256 of all before
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.federation.protocol.fold import Seat
from veilstream.federation.server.message_file import MessageFile, Slots
from veilstream.files import sync_directory, write_file
from veilstream.runs.folder import SERVER_CHECKPOINT

CHECKPOINT, MESSAGES = SERVER_CHECKPOINT, "messages.bin"
"""Files in a run's folder."""

_MAGIC = b"VEILCKP1"
_HEAD = struct.Struct("<8sQ")
_HASH_BYTES = 32


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
    velocity: NDArray[np.float64] | None = None
    """m, where the server has momentum."""

    def save(self, folder: Path) -> None:
        """Durable when it returns, messages included."""
        self.messages.sync()
        about: dict[str, Any] = {
            "run": self.run,
            "round": self.round,
            "d": len(self.x),
            "seats": [
                [s.name, s.epoch, s.round, s.accepted, s.state, s.why, _slots(s).slot] for s in self.seats.values()
            ],
        }
        if self.velocity is not None:
            about["velocity"] = True
        if self.messages.dim != len(self.x):
            about["release_d"] = self.messages.dim
        head = json.dumps(about).encode()
        pieces = [_HEAD.pack(_MAGIC, len(head)), head, self.x.astype("<f8").tobytes()]
        if not np.array_equal(self.average, self.x):
            pieces.append(self.average.astype("<f8").tobytes())
        if self.velocity is not None:
            pieces.append(self.velocity.astype("<f8").tobytes())
        hashed = hashlib.sha256()
        for piece in pieces:
            hashed.update(piece)
        write_file(folder / CHECKPOINT, [*pieces, hashed.digest()])
        sync_directory(folder)
        for seat in self.seats.values():
            _slots(seat).saved()

    @classmethod
    def load(cls, folder: Path) -> Position:
        """As it was saved.

        Raises:
            InputError: the checkpoint is damaged, or the messages are not those that it names.

        """
        about, numbers = _read(folder / CHECKPOINT)
        dim = about["d"]
        messages = MessageFile(folder / MESSAGES, about.get("release_d", dim))
        seats = {}
        for index, (name, epoch, round_, accepted, state, why, slot) in enumerate(about["seats"]):
            slots = Slots(messages, index, slot)
            if slot is not None:  # else an aggregator holds it
                slots.check(name, *accepted)
            seats[name] = Seat(name, slots, epoch, round_, accepted and tuple(accepted), state, why)
        velocity = None
        if about.get("velocity"):
            numbers, velocity = numbers[:-dim], numbers[-dim:].copy()
        x, average = numbers[:dim], numbers[-dim:].copy()
        return cls(about["run"], about["round"], x, average, seats, messages, velocity)


@dataclass(frozen=True)
class SeatHead:
    """How far one learner has come, by the server's account."""

    name: str
    epoch: int
    accepted: tuple[int, str] | None
    """Its own round and the hash of its last message that was taken; None: none of this epoch."""
    state: str


@dataclass(frozen=True)
class RunHead:
    """What a checkpoint says of its run; messages are not opened, so a server may be running."""

    run: str
    round: int
    dim: int
    """Parameters of the model."""
    seats: tuple[SeatHead, ...]

    @classmethod
    def load(cls, folder: Path) -> RunHead:
        """As the server saved it last.

        Raises:
            InputError: the checkpoint is missing or damaged.

        """
        try:
            about, _ = _read(folder / CHECKPOINT)
        except OSError as error:
            raise InputError(
                "run folder",
                str(folder / CHECKPOINT),
                "the server's checkpoint",
                f"put it back from a copy of the folder ({error.strerror})",
            ) from error
        seats = tuple(
            SeatHead(name, epoch, accepted and tuple(accepted), state)
            for name, epoch, _, accepted, state, _, _ in about["seats"]
        )
        return cls(about["run"], about["round"], about["d"], seats)


def _slots(seat: Seat) -> Slots:
    assert isinstance(seat.kept, Slots)
    return seat.kept


def _read(path: Path) -> tuple[dict[str, Any], NDArray[np.float64]]:
    data = path.read_bytes()
    whole = memoryview(data)[:-_HASH_BYTES]
    if data[:8] != _MAGIC or hashlib.sha256(whole).digest() != data[-_HASH_BYTES:]:
        raise InputError(
            "run folder",
            str(path),
            "a whole checkpoint of this version",
            "it is damaged: put the whole folder back from one copy",
        )
    end = _HEAD.size + _HEAD.unpack_from(data)[1]
    about: dict[str, Any] = json.loads(bytes(whole[_HEAD.size : end]))
    return about, np.frombuffer(whole[end:], "<f8").astype(np.float64)


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
