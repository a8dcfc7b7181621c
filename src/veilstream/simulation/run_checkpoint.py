"""A batch's state, and the checkpoint from which --resume continues it: NumPy arrays with a checksum each."""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.files import write_file
from veilstream.simulation.block import METRICS, ModelArrays

Float32s = NDArray[np.float32]

_DAMAGE = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    NotImplementedError,
    MemoryError,
    RuntimeError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""Errors of reading an archive with bytes missing or changed."""


@dataclass(frozen=True)
class StateShape:
    """The numbers that decide the shapes of a batch's arrays."""

    methods: int
    seeds: int
    rounds: int
    looks: int  # How often held-out accuracy is measured
    metrics: int = 0  # Metrics of the plan's telemetry


@dataclass(frozen=True)
class BatchState:
    """Where a batch of seeds stands, and what it has measured."""

    round: int
    block_rounds: int
    noise_place: str
    methods: tuple[NDArray[np.int64], ...]  # Of each group of methods that are computed together
    models: tuple[ModelArrays, ...]  # Of each group
    history: dict[str, Float32s]  # By metric, (methods, seeds, rounds)
    held_out_accuracy: Float32s
    telemetry: NDArray[np.float64] | None = None
    """As released, (methods, seeds, rounds, metrics); None where the plan has none."""

    def published(self) -> Float32s:
        """The models published last, (methods, seeds, d)."""
        shape = (*self.held_out_accuracy.shape[:2], self.models[0].average.shape[-1])
        published = np.empty(shape, np.float32)
        for methods, models in zip(self.methods, self.models, strict=True):
            published[methods] = models.average
        return published

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Everything by name, as a checkpoint holds it."""
        found: dict[str, NDArray[Any]] = {
            "round": np.array(self.round),
            "block_rounds": np.array(self.block_rounds),
            "noise_place": np.array(self.noise_place),
            "held_out_accuracy": self.held_out_accuracy,
        }
        for i, (methods, models) in enumerate(zip(self.methods, self.models, strict=True)):
            found[f"methods{i}"] = methods
            found |= {f"{name}{i}": array for name, array in models._asdict().items()}
        found |= {f"history_{name}": values for name, values in self.history.items()}
        return found if self.telemetry is None else found | {"telemetry": self.telemetry}

    @classmethod
    def of_arrays(cls, found: dict[str, NDArray[Any]], shape: StateShape) -> BatchState:
        """Build it from what a checkpoint holds; ValueError or KeyError for another shape."""
        groups = sum(name.startswith("methods") for name in found)
        state = cls(
            int(found["round"]),
            int(found["block_rounds"]),
            str(found["noise_place"]),
            tuple(found[f"methods{i}"] for i in range(groups)),
            tuple(ModelArrays(*(found[f"{name}{i}"] for name in ModelArrays._fields)) for i in range(groups)),
            {name: found[f"history_{name}"] for name in METRICS},
            found["held_out_accuracy"],
            found["telemetry"] if shape.metrics else None,
        )
        state._check(shape)
        return state

    def _check(self, shape: StateShape) -> None:
        measured = (shape.methods, shape.seeds, shape.rounds)
        for name, values in self.history.items():
            if values.shape != measured:
                raise ValueError(f"history_{name} is not of {measured} methods, seeds and rounds")
        if self.held_out_accuracy.shape != (*measured[:2], shape.looks):
            raise ValueError("held_out_accuracy has other methods, seeds or rounds")
        if self.telemetry is not None and self.telemetry.shape != (*measured, shape.metrics):
            raise ValueError("telemetry has other methods, seeds, rounds or metrics")
        if not 0 <= self.round <= shape.rounds or self.block_rounds < 1:
            raise ValueError(f"round {self.round} in blocks of {self.block_rounds}")
        if sorted(int(m) for group in self.methods for m in group) != list(range(shape.methods)):
            raise ValueError("its methods are not the run's")
        for methods, models in zip(self.methods, self.models, strict=True):
            for name, array in models._asdict().items():
                if array.ndim != 3 or array.shape[:2] != (len(methods), shape.seeds):
                    raise ValueError(f"{name} has shape {array.shape}")


def write_checkpoint(path: Path, state: BatchState) -> None:
    """Write whole or not at all."""
    buffer = io.BytesIO()
    np.savez(buffer, **state.arrays())  # type: ignore[arg-type]
    write_file(path, buffer.getvalue(), shared=True)


def read_checkpoint(path: Path, shape: StateShape) -> BatchState:
    """Read and check; `InputError` for a file that is damaged, or is not of this run."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as stored:
            return BatchState.of_arrays({name: stored[name] for name in stored.files}, shape)
    except _DAMAGE as error:
        reason = str(error).strip().splitlines()
        raise InputError(
            "checkpoint",
            str(path),
            "a whole checkpoint of this run",
            f"{reason[0] if reason else type(error).__name__}: restore it from a copy, or remove "
            "it, and --resume starts its seeds again",
        ) from error


def read_seed_batches(path: Path, seeds: list[int]) -> tuple[tuple[tuple[int, ...], ...], int, int]:
    """Which seeds run together, rounds of a block, and processes, as the run was started; `InputError` if damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        cut = tuple(tuple(batch) for batch in content["seeds"])
        if [seed for batch in cut for seed in batch] != seeds or not all(cut):
            raise ValueError(f"its seeds are not the run's {len(seeds)}")
        numbers = [content["block_rounds"], content["processes"]]
        if any(type(number) is not int or number < 1 for number in numbers):
            raise ValueError("block_rounds and processes are not whole numbers from 1")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            "seed_batches",
            str(path),
            "which seeds run together, as the run wrote it",
            f"{type(error).__name__} {error}: restore it, or start again in another folder",
        ) from error
    return cut, numbers[0], numbers[1]
