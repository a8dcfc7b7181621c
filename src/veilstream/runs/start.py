"""The model that a run starts from (`[learning] start`): a finished run's folder, an .npz file or a model API.

A released model is public, so starting from it costs no one's privacy: it is post-processing. (A
simulation's model has seeded noise, which protects no one whose real data went into it.) The run's
folder keeps the model (start.json, start.f32), and a resumed run starts from that copy.
"""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError, VeilstreamError
from veilstream.files import write_file
from veilstream.http_client import send_request
from veilstream.plans.plan import Plan
from veilstream.runs.folder import Run
from veilstream.runs.released_model import model_sha256

Float32s = NDArray[np.float32]

_WAIT_S = 30.0
_FACTS, _MODEL = "start.json", "start.f32"
_MOST_FACTS = 1 << 20
_MOST_GROWTH = 20  # when a compressed file is unpacked
_RAW = "application/octet-stream"


@dataclass(frozen=True)
class StartingModel:
    """An earlier model, and where it came from."""

    model: Float32s
    source: str
    run: str | None = None  # None, as the round, where it is not known
    round: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """The content of start.json."""
        known = {key: value for key, value in (("run", self.run), ("round", self.round)) if value is not None}
        return {"start": self.source, **known, "sha256": model_sha256(self.model)}

    def keep(self, folder: Path) -> None:
        """Write it into a run's folder."""
        write_file(folder / _MODEL, self.model.astype("<f4").tobytes(), shared=True)
        write_file(folder / _FACTS, json.dumps(self.as_dict(), indent=2) + "\n", shared=True)


def kept_start(folder: Path) -> Float32s | None:
    """The model that the run in this folder starts from; None: the task's initial model."""
    if not (folder / _FACTS).exists():
        return None
    try:
        said = json.loads((folder / _FACTS).read_text(encoding="utf-8"))["sha256"]
        model = np.frombuffer((folder / _MODEL).read_bytes(), "<f4").astype(np.float32)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, str(error)) from error
    if model_sha256(model) != said:
        raise _damaged(folder, "they do not agree")
    return model


def _damaged(folder: Path, why: str) -> InputError:
    return InputError("out", str(folder / _MODEL), "the model that start.json names", f"{why}; name a new folder")


def starting_model(plan: Plan, dim: int) -> StartingModel | None:
    """The model that the plan names, checked; None if it names none."""
    text = plan.learning.start
    if text is None:
        return None
    if "://" in text:
        found = _from_url(text, plan.learning.start_ca, dim)
    elif Path(text).is_dir():
        found = last_released(Path(text))
    else:
        found = _from_file(Path(text), dim)
    _check(plan, found.model, dim)
    return found


def _refused(text: object, rule: str, way_out: str) -> InputError:
    return InputError("learning.start", text, rule, way_out)


def _check(plan: Plan, model: Float32s, dim: int) -> None:
    text, wanted = plan.learning.start, plan.learning.start_sha256
    if model.shape != (dim,):
        raise _refused(
            text,
            f"a model of {dim} numbers, as the task has (this has {model.size})",
            "it must come from a run with the same task and data.dim",
        )
    if not np.isfinite(model).all():
        raise _refused(text, "a model of finite numbers", "that run diverged; take another")
    norm, cap = float(np.linalg.norm(model.astype(np.float64))), plan.learning.model_norm_cap
    if norm > cap:
        raise _refused(
            text,
            f"a model of norm at most learning.model_norm_cap = {cap:g} (this has {norm:g})",
            "learners would refuse it: take another, or a larger cap on every side",
        )
    if wanted is not None and model_sha256(model) != wanted:
        raise InputError(
            "learning.start_sha256",
            wanted,
            f"the model's own, {model_sha256(model)}",
            f"{text} holds another model than the one agreed on",
        )


def last_released(folder: Path) -> StartingModel:
    """The last model of a finished run, a simulation's or a server's."""
    if not (folder / "summary.json").exists():
        raise _refused(
            str(folder),
            "the folder of a finished run (it has no summary.json)",
            "let that run end first; `veilstream run` and `veilstream server` write one",
        )
    run = Run(folder)
    if run.simulated:
        return StartingModel(run.model(), str(folder), round=run.simulation.rounds)
    summary = run.federation
    try:
        models = (folder / "models.f32").read_bytes()
        rows = np.frombuffer(models, "<f4").reshape(summary.rounds + 1, -1)
    except (OSError, ValueError) as error:
        raise _refused(str(folder), "a run with its models.f32", str(error)) from error
    return StartingModel(rows[-1].astype(np.float32), str(folder), summary.run, summary.rounds)


def _from_file(path: Path, dim: int) -> StartingModel:
    most = _MOST_FACTS + 16 * dim  # numbers of up to 16 bytes, and the plan's text
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise _refused(
            str(path),
            "a run's folder, an .npz file, or an https address",
            f"{error.strerror}; paths are relative to where the command is started",
        ) from error
    if len(data) > most:
        rule = f"a file of at most {most:,} bytes, enough for a model of {dim} numbers"
        raise _refused(str(path), rule, "it must come from a run with the same task and data.dim")
    return _from_npz(data, str(path))


def _from_npz(data: bytes, source: str) -> StartingModel:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as members:
            if sum(member.file_size for member in members.infolist()) > _MOST_GROWTH * len(data):
                raise ValueError("it unpacks to far more than its size")  # a small file could fill all memory
        with np.load(io.BytesIO(data), allow_pickle=False) as stored:
            model = np.asarray(stored["model"])
            if model.ndim != 1 or model.dtype.kind != "f":
                raise ValueError("its array `model` is not a list of floating-point numbers")
            run = str(stored["run"]) if "run" in stored else None
            round_ = int(stored["round"]) if "round" in stored else None
    except (OSError, EOFError, ValueError, TypeError, KeyError, zipfile.BadZipFile) as error:
        raise _refused(
            source, "an .npz file with an array `model`", f"{error}; `veilstream model fetch` writes one"
        ) from error
    return StartingModel(model.astype(np.float32), source, run, round_)


def _from_url(text: str, ca: str | None, dim: int) -> StartingModel:
    """One request, to one place; no more is read than a model of this size needs."""
    url = text.rstrip("/") if urlsplit(text).path not in ("", "/") else f"{text.rstrip('/')}/model/latest"
    try:
        answer = send_request(url, most_bytes=4 * dim, headers={"Accept": _RAW}, ca=ca, timeout_s=_WAIT_S)
    except InputError as error:
        raise _refused(text, f"an https address ({error.rule})", error.way_out) from error
    except VeilstreamError as error:
        raise _refused(text, "a model API that answers", f"{error}; your own CA: learning.start_ca") from error
    kind = answer.headers.get("content-type", "")
    if answer.status != 200 or not kind.startswith(_RAW):
        raise _refused(
            text,
            f"a model as raw float32 (it answered {answer.status} with {kind[:60]!a})",
            "name /model/latest or /model/ROUND of a veilstream server",
        )
    if len(answer.body) != 4 * dim:
        raise _refused(
            text,
            f"a model of {dim} numbers, {4 * dim} bytes (it sent {len(answer.body)})",
            "it must come from a run with the same task and data.dim",
        )
    model = np.frombuffer(answer.body, "<f4").astype(np.float32)
    run, round_ = (answer.headers.get(f"veilstream-{name}", "") for name in ("run", "round"))
    is_number = round_.isascii() and round_.isdecimal() and len(round_) < 10
    return StartingModel(model, text, ascii(run[:200])[1:-1] or None, int(round_) if is_number else None)
