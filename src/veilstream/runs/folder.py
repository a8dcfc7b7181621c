"""A run is a folder: plan, guarantees, history, summary, versions.

Simulation and server write it, each file whole or not at all; reports and figures are made from it alone.
docs/runs-and-reports.md lists the files and their columns.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import platform
import re
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError, UnknownName
from veilstream.plans.plan import Plan
from veilstream.privacy.guarantee import Guarantee
from veilstream.runs.released_model import METHOD
from veilstream.runs.summary import FederationSummary, SimulationSummary
from veilstream.runs.tables import ListedEstimate, cell_number, damaged, read_history, read_telemetry, table_rows

Float32s = NDArray[np.float32]

FORMAT = 1  # version of run folders, in versions.json
OPERATIONAL = frozenset(
    f"federation.{name}" for name in ("quorum", "deadline_s", "grace_s", "patience_s", "min_clients")
)
"""Keys of a plan that say how people wait for each other: no number of a run's terms follows from them."""
SERVER_CHECKPOINT = "checkpoint.bin"  # a server's checkpoint; a simulation writes no file of this name

T = TypeVar("T")


def _changed_keys(stored: Plan, asked: Plan) -> list[str]:
    """Keys that differ and change a run's numbers, with both values; regret may be dropped."""
    free = {"run.memory_mib"} | (set() if asked.run.regret else {"run.regret"})
    return [f"{key} = {now} (was {before})" for key, (before, now) in changed(stored, asked).items() if key not in free]


def changed(stored: Plan, asked: Plan) -> dict[str, tuple[str, str]]:
    """Keys in which two plans differ, with both values as text."""
    before, now = flat_keys(stored), flat_keys(asked)
    return {
        key: (repr(before.get(key, "not given")), repr(now.get(key, "not given")))
        for key in dict.fromkeys([*before, *now])
        if before.get(key) != now.get(key)
    }


def flat_keys(plan: Plan) -> dict[str, Any]:
    """A plan's keys, dotted, with their values; methods and features by their names."""
    return _flat(tomllib.loads(plan.to_toml()))


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
        value = {str(v.get("name", v.get("column", i))): v for i, v in enumerate(value)}
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(inner, f"{prefix}.{key}" if prefix else key)
    return flat


def new_folder(name: str) -> Path:
    """The first free folder: runs/NAME, runs/NAME-2 and so on."""
    return next(path for path in _numbered(name) if not path.exists())


def latest_folder(name: str) -> Path:
    """The folder that `new_folder` gave last; runs/NAME where there is none."""
    taken = list(itertools.takewhile(Path.exists, _numbered(name)))
    return taken[-1] if taken else Path("runs", name)


def _numbered(name: str) -> Iterator[Path]:
    yield Path("runs", name)
    for number in itertools.count(2):
        yield Path("runs", f"{name}-{number}")


def check_version(path: Path) -> None:
    """Refuse a run folder of another version of the format."""
    file = path / "versions.json"
    if file.exists() and (found := _json_object(file).get("format")) != FORMAT:
        raise InputError(
            "run",
            str(file),
            f"format {FORMAT}, not {found}",
            "another version of veilstream wrote this folder: read it with that one, or run the plan again",
        )


def _json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(path, 0, "a file that the run wrote", error) from error
    if not isinstance(content, dict):
        raise damaged(path, 0, "an object", "it holds something else")
    return content


def stored_plan(folder: Path) -> Plan:
    """The plan that the run in this folder wrote."""
    path = folder / "plan.toml"
    try:
        return Plan.load(path)
    except InputError as error:
        raise InputError(
            "out",
            str(path),
            "the plan that the run in this folder wrote",
            f"restore it, or name another folder; {error}",
        ) from error


def other_settings(path: Path, unlike: list[str]) -> InputError:
    """The error for a folder whose run was started with other settings."""
    return InputError(
        "out",
        str(path),
        "a folder of the same plan",
        f"it was started with other settings: {'; '.join(unlike[:5])}; set them back, or name a new folder",
    )


def check_folder(path: Path, plan: Plan, *, resume: bool, besides: frozenset[str] = frozenset()) -> None:
    """Refuse a folder with another run or files other than ``besides``; or with this run, unless it is resumed."""
    if (path / "plan.toml").exists():
        check_version(path)
        unlike = _changed_keys(stored_plan(path), plan)
        if unlike:
            raise other_settings(path, unlike)
        if not resume:
            raise InputError(
                "out",
                str(path),
                "a new or empty folder",
                "it holds this run: --resume continues it, or name another folder",
            )
    elif path.exists() and (not path.is_dir() or any(found.name not in besides for found in path.iterdir())):
        raise InputError("out", str(path), "a new or empty folder", "name another folder")


_OWN_FILES = frozenset(
    {
        "plan.toml",
        "guarantee.json",
        "history.csv",
        "accuracy.csv",
        "noise.csv",
        "report.html",
        "telemetry.csv",
        "baselines.csv",
        "summary.json",
        "versions.json",
        "start.json",
        "start.f32",
        "models.npz",
        "checkpoint.npz",
        "seed_batches.json",
        "learning.png",
        "learning.svg",
    }
)


def clear_earlier(path: Path, plan: Plan) -> None:
    """Remove an earlier run of the same plan (seeds aside), if there are no other files in the folder."""
    stored = path / "plan.toml"
    names = {p.name for p in path.iterdir()} if stored.exists() else set()
    others = {n for n in names - _OWN_FILES if not re.fullmatch(r"(checkpoint|regret)-\d+\.npz", n)}
    if not names or others:
        return
    earlier = stored_plan(path)
    if dataclasses.replace(earlier, run=plan.run) == plan:
        for file in path.iterdir():
            file.unlink()


class Run:
    """A run folder, read.

    Args:
        path: the folder.

    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._tables: dict[str, tuple[int, dict[str, dict[str, Float32s]]]] = {}
        if not (self.path / "plan.toml").exists():
            raise InputError("run", str(path), "a folder with a plan.toml", "veilstream run makes one")
        check_version(self.path)

    @property
    def plan(self) -> Plan:
        """The plan of the run."""
        return stored_plan(self.path)

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json as it is: per method, and at the top the recommended method's own figures."""
        return self._json("summary.json")

    @property
    def simulation(self) -> SimulationSummary:
        """A simulation's summary, typed."""
        return self._typed("summary.json", SimulationSummary.of)

    @property
    def federation(self) -> FederationSummary:
        """A federation's summary, typed; a server writes it after the last round."""
        return self._typed("summary.json", FederationSummary.of)

    @property
    def guarantees(self) -> dict[str, Any]:
        """guarantee.json as it is: by method in a simulation; a federation has one guarantee."""
        return self._json("guarantee.json")

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of a federation."""
        return self._typed("guarantee.json", Guarantee.from_dict)

    @property
    def versions(self) -> dict[str, Any]:
        """What ran, when and where."""
        return self._json("versions.json")

    @property
    def simulated(self) -> bool:
        """Whether seeds made the noise, so that this run itself protected no one."""
        return bool(self.summary.get("simulated", False))

    @property
    def finished(self) -> bool:
        """Whether there is a summary."""
        return (self.path / "summary.json").exists()

    @property
    def is_federation(self) -> bool:
        """Whether this is a server's run, under whose promise real clients may have been.

        Its checkpoint says so; in a copy without it, a summary that names the run. No name in a plan plays a part.
        """
        begun = (self.path / SERVER_CHECKPOINT).exists()
        if not self.finished:
            return begun
        summary = self.summary
        return "simulated" not in summary and (begun or "run" in summary)

    def _json(self, name: str) -> dict[str, Any]:
        return _json_object(self.path / name)

    def _typed(self, name: str, read: Callable[[dict[str, Any]], T]) -> T:
        content = self._json(name)
        try:
            return read(content)
        except KeyError as error:
            raise damaged(self.path / name, 0, "every key that the run wrote", f"{error} is missing") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise damaged(self.path / name, 0, "values that the run wrote", "one is of another kind") from error

    def model(self, method: str | None = None, seed: int | None = None) -> Float32s:
        """The model that a method published last, as a flat vector; `veilstream.load(run)` is one to predict with.

        Args:
            method: which; the run's main method where it is left out.
            seed: which; the first where it is left out.

        Returns:
            The parameters, float32.

        """
        summary = self.simulation
        method = summary.main.name if method is None else method
        if method not in summary.methods:
            raise UnknownName("method", method, summary.methods)
        seed = summary.seeds[0] if seed is None else seed
        if seed not in summary.seeds:
            raise InputError("seed", seed, f"one of {summary.seeds}", "see summary['seeds']")
        path = self.path / "models.npz"
        if not path.exists():
            why = "models of more than 64 MiB are not kept; run fewer methods and seeds"
            raise InputError("run", str(self.path), "a run that keeps its models", why)
        try:
            with np.load(path) as stored:  # version 0.6 had no prefix
                name = f"{METHOD}{method}" if f"{METHOD}{method}" in stored else method
                chosen: Float32s = stored[name][summary.seeds.index(seed)]
        except (OSError, EOFError, ValueError, KeyError, IndexError, zipfile.BadZipFile) as error:
            raise damaged(path, 0, "the models that the run wrote", error) from error
        return chosen

    def history(self, column: str) -> dict[str, Float32s]:
        """One column of the history: an array (seeds, rounds) per method.

        Args:
            column: "loss", "prequential_accuracy", "noise", "distance" or "optimum".

        """
        return self._column("history.csv", column, self.simulation.rounds)

    def baselines(self, column: str) -> dict[str, Float32s]:
        """The same for predictions that need no learning, in runs that have them."""
        return self._column("baselines.csv", column, None)

    @property
    def has_baselines(self) -> bool:
        """Whether predictions from labels alone were written beside the history."""
        return (self.path / "baselines.csv").exists()

    @property
    def has_held_out(self) -> bool:
        """Whether the run measured accuracy on clients who are never learned from."""
        return (self.path / "accuracy.csv").exists()

    def held_out_accuracy(self) -> tuple[list[int], dict[str, Float32s]]:
        """Rounds at which accuracy was measured, and an array (seeds, those rounds) per method."""
        path = self.path / "accuracy.csv"
        looked = {cell_number(path, n, row["round"]) for n, row in table_rows(path, ["round"])}
        if not all(round_.is_integer() for round_ in looked):
            raise damaged(path, 0, "whole numbers as rounds", "there are others")
        rounds = sorted(int(round_) for round_ in looked)
        return rounds, self._column("accuracy.csv", "held_out_accuracy", len(rounds))

    def noise(self) -> dict[str, Float32s]:
        """Standard deviation, per coordinate, of the noise in the learners' averaged sums after each round."""
        path = self.path / "noise.csv"
        found: dict[str, list[float]] = {}
        if path.exists():
            for line, row in table_rows(path, ["method", "std"]):
                found.setdefault(row["method"], []).append(cell_number(path, line, row["std"]))
        return {name: np.array(values, np.float32) for name, values in found.items()}

    def telemetry(self) -> list[ListedEstimate]:
        """Private estimates; none where the plan has no telemetry."""
        return read_telemetry(self.path / "telemetry.csv")

    def _column(self, name: str, column: str, rounds: int | None) -> dict[str, Float32s]:
        """One column; with ``rounds`` every method must have so many rows for each seed."""
        path = self.path / name
        state = path.stat().st_mtime_ns if path.exists() else 0
        if name not in self._tables or self._tables[name][0] != state:
            self._tables[name] = state, read_history(path)
        table = self._tables[name][1]
        if column not in table:
            why = f"no column {column}; there are {', '.join(table) or 'no others'}"
            raise damaged(path, 1, f"a column {column}", why)
        found = table[column]
        if rounds is not None:
            summary = self.simulation
            whole = (len(summary.seeds), rounds)
            for method in summary.methods:
                there = found[method].shape if method in found else (0, 0)
                if there != whole:
                    rule = f"{whole[0]} seeds of {whole[1]} rows for every method"
                    raise damaged(path, 0, rule, f"{method} has {there[0]} of {there[1]}")
        return dict(found)


def versions() -> dict[str, str | int]:
    """Format, time, commit and packages, for versions.json."""
    found: dict[str, str | int] = {
        "format": FORMAT,
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "python": sys.version.split()[0],
        "machine": platform.machine(),
    }
    for package in ("veilstream", "numpy", "scipy", "jax", "jaxlib", "cryptography"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _commit() -> str:
    source = Path(__file__).resolve().parents[3]
    if not (source / ".git").exists():
        return "not a checkout"
    try:
        said = [
            subprocess.run(["git", "-C", str(source), *words], capture_output=True, text=True, timeout=10)
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "-uno"))
        ]
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    if any(each.returncode for each in said):
        return "unknown"
    return said[0].stdout.strip() + ("+changes" if said[1].stdout.strip() else "")
