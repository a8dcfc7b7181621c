"""A batch's checkpoint: from which --resume goes on, and nothing else.

An archive of NumPy arrays (`Simulation.state`) with a checksum each. One that is damaged, or
belongs to another run, is refused by name.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from veilstream.errors import InputError
from veilstream.files import write_file
from veilstream.simulation.block import METRICS

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
"""What reading an archive with bytes missing or changed may end in."""


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write whole or not at all."""
    buffer = io.BytesIO()
    np.savez(buffer, **state)
    write_file(path, buffer.getvalue(), shared=True)


def read_checkpoint(
    path: Path, *, methods: int, seeds: int, rounds: int, looks: int, metrics: int = 0
) -> dict[str, Any]:
    """Read and check.

    Args:
        path: the file.
        methods: how many methods the run has.
        seeds: how many seeds the batch has.
        rounds: how many rounds the run has.
        looks: how often held-out accuracy is measured.
        metrics: how many of telemetry there are.

    Returns:
        The arrays, as `Simulation.restore` takes them.

    Raises:
        InputError: for a file that is damaged, or is not of this run.

    """
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as stored:
            state = {name: stored[name] for name in stored.files}
        _check(state, methods, seeds, rounds, looks)
        if metrics:
            _check_telemetry(state, (methods, seeds, rounds, metrics))
    except _DAMAGE as error:
        reason = str(error).strip().splitlines()
        raise InputError(
            "checkpoint",
            str(path),
            "a whole checkpoint of this run",
            f"{reason[0] if reason else type(error).__name__}: restore it from a copy, or remove "
            "it, and --resume begins its seeds again",
        ) from error
    return state


def _check(state: dict[str, Any], methods: int, seeds: int, rounds: int, looks: int) -> None:
    """Raise ValueError or KeyError for what no run of this shape would have written."""
    shape = (methods, seeds, rounds)
    for name in METRICS:
        if state[f"history_{name}"].shape != shape:
            raise ValueError(f"history_{name} is not of {shape} methods, seeds and rounds")
    if state["held_out_accuracy"].shape != (methods, seeds, looks):
        raise ValueError("held_out_accuracy has other methods, seeds or rounds")
    if not 0 <= int(state["round"]) <= rounds or int(state["block_rounds"]) < 1:
        raise ValueError(f"round {state['round']} in blocks of {state['block_rounds']}")
    str(state["noise_place"])
    groups = [state[name] for name in state if name.startswith("methods")]
    if sorted(int(m) for group in groups for m in group) != list(range(methods)):
        raise ValueError("its methods are not the run's")
    for i, group in enumerate(groups):
        for name in ("current", "average", "start"):
            found = state[f"{name}{i}"].shape
            if len(found) != 3 or found[:2] != (len(group), seeds):
                raise ValueError(f"{name}{i} has shape {found}")


def _check_telemetry(state: dict[str, Any], shape: tuple[int, int, int, int]) -> None:
    if state["telemetry"].shape != shape:
        raise ValueError("telemetry has other methods, seeds, rounds or metrics")


def read_seed_batches(path: Path, seeds: list[int]) -> tuple[tuple[tuple[int, ...], ...], int, int]:
    """Which seeds run together, rounds of a block, and processes, as the run was begun.

    Raises:
        InputError: for a file that is damaged, or is not of a run with these seeds.

    """
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
            f"{type(error).__name__} {error}: restore it, or name another folder and begin again",
        ) from error
    return cut, numbers[0], numbers[1]
