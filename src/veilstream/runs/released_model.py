"""A released model in one file: its parameters, plan and guarantee. Servers, exports and run folders write it.

The file is NumPy's `.npz` with arrays `format`, `model`, `round`, `rounds`, `simulated` and the texts `run`, `plan`
(TOML) and `guarantee` (JSON, {} for a method that promises nothing); nothing in it is pickled. A simulation's
models.npz also has `method/NAME` (seeds, parameters) for every method, and says about them in the text `methods`
(JSON). A released model is public.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.files import write_file
from veilstream.plans.plan import Plan

FORMAT = 1
_TEXTS = ("run", "plan", "guarantee")
_WAY_OUT = "`veilstream run`, `model fetch` and `model export` write one"
_MOST_BYTES = 4 << 30
METHOD = "method/"  # before a method's name, in the name of its array


def model_sha256(model: NDArray[np.float32]) -> str:
    """SHA-256 of a model's little-endian float32 numbers: how start.json, a pin and an ETag name it."""
    return hashlib.sha256(model.astype("<f4", copy=False).tobytes()).hexdigest()


def plan_digest(plan: Plan) -> str:
    """SHA-256 of a plan as text; spacing, order and comments of its file do not matter."""
    return hashlib.sha256(plan.to_toml().encode()).hexdigest()


def rest_digest(plan: Plan) -> str:
    """`plan_digest` of the plan without its rounds: equal for plans that differ in nothing else."""
    lines = plan.to_toml().splitlines()
    return hashlib.sha256("\n".join(line for line in lines if not line.startswith("rounds = ")).encode()).hexdigest()


@dataclass(frozen=True)
class ReleasedModel:
    """A model after ``round`` of ``rounds`` rounds."""

    model: NDArray[np.float32]
    round: int
    rounds: int
    run: str
    plan_toml: str
    guarantee: dict[str, Any]
    """As `Guarantee.as_dict` gives it, unread: `Terms.promises` compares it with the plan's own."""
    simulated: bool = False
    """Whether seeds made the noise, so that the guarantee protected no one in this run."""

    @cached_property
    def plan(self) -> Plan:
        """The plan, parsed."""
        return Plan.parse(self.plan_toml)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """What the file holds, by name."""
        return {
            "format": np.array(FORMAT, np.int64),
            "model": self.model.astype("<f4"),
            "round": np.array(self.round, np.int64),
            "rounds": np.array(self.rounds, np.int64),
            "run": np.array(self.run),
            "plan": np.array(self.plan_toml),
            "guarantee": np.array(json.dumps(self.guarantee, allow_nan=False)),
            "simulated": np.array(self.simulated),
        }

    def to_bytes(self) -> bytes:
        """The content of the file."""
        return packed(self.arrays())

    def save(self, path: Path | str) -> None:
        """Write the file, whole or not at all."""
        write_file(Path(path), self.to_bytes())

    @classmethod
    def load(cls, path: Path | str) -> ReleasedModel:
        """Read a file that a run, `save` or `veilstream model fetch` wrote."""
        return cls.from_bytes(file_content(Path(path)), str(path))

    @classmethod
    def from_bytes(cls, data: bytes, origin: str) -> ReleasedModel:
        """Read the content of a file; ``origin`` names it in errors."""
        with opened(data, origin) as stored:
            texts = {name: _text(stored[name]) for name in _TEXTS}
            model, round_, rounds = stored["model"], stored["round"], stored["rounds"]
            simulated = "simulated" in stored and bool(stored["simulated"])
            guarantee = json.loads(texts["guarantee"])
            if model.dtype != np.float32 or model.ndim != 1 or not isinstance(guarantee, dict):
                raise ValueError("other contents")
            whole = int(round_), int(rounds)
        if not np.isfinite(model).all():
            raise InputError("model", origin, "finite parameters", "fetch another round")
        return cls(model, *whole, texts["run"], texts["plan"], guarantee, simulated)


def file_content(path: Path) -> bytes:
    """The bytes of a model's file."""
    try:
        if not path.is_file():
            why = "it is no plain file" if path.exists() else "No such file"
            raise InputError("model", str(path), "a file", f"{why}; {_WAY_OUT}")
        if path.stat().st_size > _MOST_BYTES:
            raise InputError("model", str(path), f"a file of at most {_MOST_BYTES >> 30} GiB", _WAY_OUT)
        return path.read_bytes()
    except OSError as error:
        raise InputError("model", str(path), "a file", f"{error.strerror}; {_WAY_OUT}") from None


def packed(arrays: Mapping[str, Any]) -> bytes:
    """As `numpy.savez`, which takes a name like "file" for its own argument."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)
    return buffer.getvalue()


@contextmanager
def opened(data: bytes, origin: str) -> Iterator[Any]:
    """Arrays of a model's file by name; whatever is wrong with them becomes one `InputError` that names ``origin``."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as members:
            if sum(member.file_size for member in members.infolist()) > len(data):
                raise ValueError("it is compressed")  # a small file could fill all memory
        with np.load(io.BytesIO(data), allow_pickle=False) as stored:
            if "format" in stored and int(stored["format"]) != FORMAT:
                why = "another version of veilstream wrote it: read it with that one"
                raise InputError("model", origin, f"format {FORMAT}, not {int(stored['format'])}", why)
            yield stored
    except InputError:
        raise
    except (OSError, EOFError, ValueError, TypeError, KeyError, RecursionError, zipfile.BadZipFile) as error:
        rule = "an .npz file with model, round, plan and guarantee"
        raise InputError("model", origin, rule, f"{str(error) or type(error).__name__}; {_WAY_OUT}") from None


def _text(array: NDArray[Any]) -> str:
    if array.dtype.kind != "U" or array.ndim:
        raise ValueError("other contents")
    return str(array)
