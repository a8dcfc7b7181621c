"""A released model in one file: its parameters, plan and guarantee.

The file is NumPy's `.npz` with arrays `model`, `round`, `rounds` and the texts `run`, `plan` (TOML) and
`guarantee` (JSON); nothing in it is pickled. A released model is public.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.files import write_file
from veilstream.plans.plan import Plan

_TEXTS = ("run", "plan", "guarantee")
_WAY_OUT = "`veilstream model fetch` writes one"


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

    @cached_property
    def plan(self) -> Plan:
        """The plan, parsed."""
        return Plan.parse(self.plan_toml)

    def to_bytes(self) -> bytes:
        """The content of the file."""
        buffer = io.BytesIO()
        np.savez(
            buffer,
            model=self.model.astype("<f4"),
            round=np.int64(self.round),
            rounds=np.int64(self.rounds),
            run=np.array(self.run),
            plan=np.array(self.plan_toml),
            guarantee=np.array(json.dumps(self.guarantee, allow_nan=False)),
        )
        return buffer.getvalue()

    def save(self, path: Path | str) -> None:
        """Write the file, whole or not at all."""
        write_file(Path(path), self.to_bytes())

    @classmethod
    def load(cls, path: Path | str) -> ReleasedModel:
        """Read a file that `save` or `veilstream model fetch` wrote."""
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise InputError("model", str(path), "a file", f"{error.strerror}; {_WAY_OUT}") from None
        return cls.from_bytes(data, str(path))

    @classmethod
    def from_bytes(cls, data: bytes, origin: str) -> ReleasedModel:
        """Read the content of a file; ``origin`` names it in errors."""
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as members:
                if sum(member.file_size for member in members.infolist()) > len(data):
                    raise ValueError("it is compressed")  # a small file could fill all memory
            with np.load(io.BytesIO(data), allow_pickle=False) as stored:
                texts = {name: _text(stored[name]) for name in _TEXTS}
                model, round_, rounds = stored["model"], stored["round"], stored["rounds"]
            guarantee = json.loads(texts["guarantee"])
            if model.dtype != np.float32 or model.ndim != 1 or not isinstance(guarantee, dict):
                raise ValueError("other contents")
            whole = int(round_), int(rounds)
        except (OSError, EOFError, ValueError, TypeError, KeyError, zipfile.BadZipFile) as error:
            raise InputError(
                "model", origin, "an .npz file with model, round, plan and guarantee", f"{error}; {_WAY_OUT}"
            ) from None
        if not np.isfinite(model).all():
            raise InputError("model", origin, "finite parameters", "fetch another round")
        return cls(model, *whole, texts["run"], texts["plan"], guarantee)


def _text(array: NDArray[Any]) -> str:
    if array.dtype.kind != "U" or array.ndim:
        raise ValueError("other contents")
    return str(array)
