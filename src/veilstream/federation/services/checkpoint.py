"""What a server must not forget: the model, the round, and each learner's last accepted prefix.

Models that were released lie one after the other in one file, x⁰ first, float32. The checkpoint
says how many of them count; it is written whole or not at all, before the next round is announced,
so a server that is killed loses at most the round in flight.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.federation.protocol.fold import Seat
from veilstream.files import sync_directory, write_file

__all__ = ["ModelFile", "Position"]


@dataclass
class Position:
    """Where a run stands, between two rounds."""

    run: str
    round: int
    x: NDArray[np.float64]
    average: NDArray[np.float64]
    """What is published: x itself, or an average of all so far."""
    seats: Mapping[str, Seat]

    def save(self, path: Path) -> None:
        """Durable when it returns."""
        seats = list(self.seats.values())
        about = {
            "run": self.run, "round": self.round,
            "seats": [[s.name, s.epoch, s.round, s.accepted, s.state, s.why] for s in seats],
        }  # fmt: skip
        buffer = io.BytesIO()
        np.savez(
            buffer, about=np.frombuffer(json.dumps(about).encode(), np.uint8), x=self.x,
            average=self.average, prefixes=np.stack([s.prefix for s in seats]),
        )  # fmt: skip
        write_file(path, buffer.getvalue())
        sync_directory(path.parent)

    @classmethod
    def load(cls, path: Path) -> Position:
        """As it was saved."""
        with np.load(path) as stored:
            about = json.loads(stored["about"].tobytes())
            seats = {
                name: Seat(name, prefix, epoch, round_, accepted and tuple(accepted), state, why)
                for (name, epoch, round_, accepted, state, why), prefix in zip(
                    about["seats"], stored["prefixes"], strict=True
                )
            }
            return cls(about["run"], about["round"], stored["x"], stored["average"], seats)


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
