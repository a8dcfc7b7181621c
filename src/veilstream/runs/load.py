"""`veilstream.load`: a model from a run's folder, a model's file or a server."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from veilstream.errors import InputError, UnknownName
from veilstream.learning.tasks import check_members
from veilstream.plans.plan import Plan
from veilstream.runs.folder import SERVER_CHECKPOINT, Run
from veilstream.runs.model import Model
from veilstream.runs.model_download import fetch_model
from veilstream.runs.released_model import METHOD, ReleasedModel, file_content, opened, plan_digest
from veilstream.runs.tables import damaged

if TYPE_CHECKING:
    from veilstream.learning.tasks import Task

_MODELS, _RELEASED, _MODEL = "models.npz", "models.f32", "model.npz"
_HEAD = struct.Struct("<8sQ")
_LONGEST_HEAD = 1 << 24


def load(
    source: Run | Path | str,
    *,
    method: str | None = None,
    seed: int | None = None,
    ca: Path | str | None = None,
    plan: Plan | Path | str | None = None,
    task: Task | None = None,
) -> Model:
    """A released model, to predict with.

    Args:
        source: the folder of a run (a simulation's or a server's, also while it goes on), a model's file (.npz), or
            the https URL of a server's model API, with /model/ROUND for an older model.
        method: which method of a simulation; its main method where it is left out.
        seed: which seed of a simulation; the first where it is left out.
        ca: for a URL: the authority to trust, ca.pem of the server's keys.
        plan: refuse a model of another plan. Functions of your own that this plan names may then run.
        task: what the model learned, where the plan says only "custom".

    Returns:
        The model: `predict`, `predict_proba`, `coefficients`, `classes`, `plan`, `guarantee`, `round`.

    Raises:
        InputError: for what is no model, or not of this plan.

    """
    if task is not None:
        check_members(task)
    text = str(source.path if isinstance(source, Run) else source)
    name: str | None = None
    if "://" in text:
        _check_of_simulation(text, method, seed)
        released = fetch_model(text, ca=None if ca is None else Path(ca))
    else:
        if ca is not None:
            raise InputError("ca", str(ca), "nothing beside a folder or a file", "leave it out")
        path = Path(text)
        find = _in_folder if path.is_dir() else _in_file
        released, name = find(path, method, seed)
    trusted = plan is not None
    if trusted:
        _check_plan(text, released, plan if isinstance(plan, Plan) else Plan.load(Path(str(plan))))
    return Model(released, source=text, task=task, own_code=trusted, method=name)


def _check_plan(source: str, released: ReleasedModel, plan: Plan) -> None:
    theirs, ours = plan_digest(released.plan), plan_digest(plan)
    if theirs != ours:
        raise InputError(
            "plan",
            plan.name,
            f"the plan of {source} (digest {theirs[:16]}…, this has {ours[:16]}…)",
            "give the plan that the model was learned under, or leave it out",
        )


def _check_of_simulation(source: str, method: str | None, seed: int | None) -> None:
    for field, given in (("method", method), ("seed", seed)):
        if given is not None:
            raise InputError(field, given, f"nothing for {source}, which has one model", f"leave {field} out")


def _in_folder(folder: Path, method: str | None, seed: int | None) -> tuple[ReleasedModel, str | None]:
    if (folder / _RELEASED).exists():
        _check_of_simulation(str(folder), method, seed)
        return _of_server(Run(folder)), None
    if (folder / _MODELS).exists():
        return _in_file(folder / _MODELS, method, seed)
    if (folder / _MODEL).exists():
        return _in_file(folder / _MODEL, method, seed)
    if (folder / "run" / "plan.toml").exists():  # of `veilstream federation demo`
        return _in_folder(folder / "run", method, seed)
    run = Run(folder)  # its error, for a folder without a plan
    why = "models of more than 64 MiB are not kept: run fewer methods and seeds" if run.finished else "it has not ended"
    raise InputError("model", str(folder), "the folder of a run that has a model", why)


def _of_server(run: Run) -> ReleasedModel:
    name, round_ = _stands(run.path)
    path = run.path / _RELEASED
    try:
        dim = path.stat().st_size // (4 * (round_ + 1))  # rows are written before the checkpoint, one ahead at most
        dim = _dim_of(run.path, dim)
        row = np.fromfile(path, "<f4", dim, offset=4 * dim * round_)
    except OSError as error:
        raise damaged(path, 0, "the models that the run wrote", error.strerror) from error
    if not dim or len(row) != dim or not np.isfinite(row).all():
        raise damaged(path, 0, f"the model of round {round_}", "it is cut short")
    toml = (run.path / "plan.toml").read_text(encoding="utf-8")
    return ReleasedModel(row.astype(np.float32), round_, run.plan.learning.rounds, name, toml, run.guarantee.as_dict())


def _dim_of(folder: Path, otherwise: int) -> int:
    """Parameters of a server's models: its checkpoint says; in a copy without it, the file's size does."""
    head = _head(folder)
    return otherwise if head is None else int(head["dim"])


def _stands(folder: Path) -> tuple[str, int]:
    """Name of a server's run, and the rounds that are done and durable."""
    said: dict[str, Any]
    head = _head(folder)
    try:
        if head is not None:
            return str(head["run"]), int(head["round"])
        said = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        return str(said["run"]), int(said["rounds"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(folder / "summary.json", 0, "what the run came to", error) from error


def _head(folder: Path) -> dict[str, Any] | None:
    """What a server's checkpoint says first, without the numbers behind it."""
    path = folder / SERVER_CHECKPOINT
    if not path.exists():
        return None
    try:
        with path.open("rb") as file:
            magic, length = _HEAD.unpack(file.read(_HEAD.size))
            head = json.loads(file.read(min(length, _LONGEST_HEAD)))
        if not magic.startswith(b"VEILRUN"):
            raise ValueError("it is no checkpoint")
        int(head["round"]), int(head["dim"]), str(head["run"])
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise damaged(path, 0, "a whole checkpoint", error) from error
    return dict(head)


def _in_file(path: Path, method: str | None, seed: int | None) -> tuple[ReleasedModel, str | None]:
    data = file_content(path)
    with opened(data, str(path)) as stored:
        about = json.loads(str(stored["methods"])) if "methods" in stored else None
        if about is None and "model" not in stored and (path.parent / "summary.json").exists():
            return _of_version_6(Run(path.parent), method, seed)
        if about is None:
            _check_of_simulation(str(path), method, seed)
            return ReleasedModel.from_bytes(data, str(path)), None
        main, seeds, promises = str(about["main"]), list(about["seeds"]), dict(about["guarantees"])
        chosen = main if method is None else method
        if chosen not in promises:
            raise UnknownName("method", chosen, promises)
        if seed is not None and seed not in seeds:
            raise InputError("seed", seed, f"one of {seeds}", "leave it out for the first")
        model = stored[f"{METHOD}{chosen}"][0 if seed is None else seeds.index(seed)]
        if model.ndim != 1 or model.dtype != np.float32:
            raise ValueError("other contents")
    if not np.isfinite(model).all():
        why = "this method's models diverged: take another method, or a smaller step size"
        raise InputError("model", str(path), "finite parameters", why)
    first = _without_check(data, str(path))
    return replace(first, model=model, guarantee=promises[chosen]), chosen


def _without_check(data: bytes, origin: str) -> ReleasedModel:
    """The main method's model, which may have diverged where another is asked for."""
    with opened(data, origin) as stored:
        return ReleasedModel(
            np.zeros(0, np.float32),
            int(stored["round"]),
            int(stored["rounds"]),
            str(stored["run"]),
            str(stored["plan"]),
            {},
            bool(stored["simulated"]),
        )


def _of_version_6(run: Run, method: str | None, seed: int | None) -> tuple[ReleasedModel, str]:
    """A simulation's folder as 0.6 wrote it: its models are numbers alone."""
    summary = run.simulation
    chosen = summary.main.name if method is None else method
    model, promise = run.model(chosen, seed), summary.methods[chosen].guarantee
    toml = (run.path / "plan.toml").read_text(encoding="utf-8")
    told = {} if promise is None else promise.as_dict()
    rounds = run.plan.learning.rounds
    return ReleasedModel(model, summary.rounds, rounds, summary.name, toml, told, simulated=True), chosen
