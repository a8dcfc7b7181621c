"""A run is a folder: plan, guarantees, history, summary, versions. Figures are drawn from it alone.

docs/runs-and-reports.md lists its files and their columns. `accuracy` alone names nothing in them:
`prequential_accuracy` is of a round's own clients before they are learned from, and
`held_out_accuracy` of clients who are never learned from. Folders of before that rule are read too.

Files are written whole or not at all; those of a simulation are as open as the umask lets them be.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import math
import platform
import re
import subprocess
import sys
import time
import tomllib
import zipfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError, UnknownName
from veilstream.plans.plan import Plan
from veilstream.runs.tables import cell_number, damaged_table, numbered_rows, table_rows

Float32s = NDArray[np.float32]

SERVER_CHECKPOINT = "checkpoint.bin"
"""What a server goes on from; a simulation writes no file of this name."""


def _changed_keys(stored: Plan, asked: Plan) -> list[str]:
    """Keys of a plan that differ and change a run's numbers, with both values.

    Memory changes no number; regret may be left out of a run that was begun with it.
    """
    free = {"run.memory_mib"} | (set() if asked.run.regret else {"run.regret"})
    before, now = flat_keys(stored), flat_keys(asked)
    return [
        f"{key} = {now.get(key, 'not given')!r} (was {before.get(key, 'not given')!r})"
        for key in dict.fromkeys([*before, *now])
        if before.get(key) != now.get(key) and key not in free
    ]


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


def new_folder(name: str, base: Path = Path("runs")) -> Path:
    """A folder that no run has: runs/NAME, or runs/NAME-2 and so on."""
    return next(path for path in _numbered(name, base) if not path.exists())


def latest_folder(name: str, base: Path = Path("runs")) -> Path:
    """The folder that `new_folder` gave out last; runs/NAME where there is none."""
    folders = [base / name]
    for path in _numbered(name, base):
        if not path.exists():
            return folders[-1]
        folders.append(path)
    raise AssertionError("there is no end of numbers")


def _numbered(name: str, base: Path) -> Iterator[Path]:
    yield base / name
    for number in itertools.count(2):
        yield base / f"{name}-{number}"


def _stored_plan(path: Path) -> Plan:
    """The plan of a run folder; one that is damaged is refused by its name."""
    try:
        return Plan.load(path)
    except InputError as error:
        raise InputError(
            "out",
            str(path),
            "the plan that the run in this folder wrote",
            f"restore it, or name another folder; {error}",
        ) from error


def check_folder(path: Path, plan: Plan, *, resume: bool, besides: frozenset[str] = frozenset()) -> None:
    """Refuse a folder that holds another run, or anything else; or this run, unless resumed.

    Files named in ``besides`` may be there.
    """
    stored = path / "plan.toml"
    if stored.exists():
        changed = _changed_keys(_stored_plan(stored), plan)
        if changed:
            raise InputError(
                "out",
                str(path),
                "a folder without another run",
                f"{'; '.join(changed[:5])}: set it back to resume, or name a new folder",
            )
        if not resume:
            raise InputError("out", str(path), "a folder without a run", "--resume continues it; or name another")
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
    """Remove an earlier run of this very plan (seeds aside) that nobody has added files to."""
    stored = path / "plan.toml"
    names = {p.name for p in path.iterdir()} if stored.exists() else set()
    others = {n for n in names - _OWN_FILES if not re.fullmatch(r"(checkpoint|regret)-\d+\.npz", n)}
    if not names or others:
        return
    earlier = _stored_plan(stored)
    if dataclasses.replace(earlier, run=plan.run) == plan:
        for file in path.iterdir():
            file.unlink()


class Run:
    """A run folder, read.

    Args:
        path: the folder.

    Raises:
        InputError: for a folder without a plan.toml, and later for files that are damaged.

    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._tables: dict[str, tuple[int, dict[str, dict[str, Float32s]]]] = {}
        if not (self.path / "plan.toml").exists():
            raise InputError("run", str(path), "a folder with a plan.toml", "veilstream run makes one")

    @property
    def plan(self) -> Plan:
        """What was asked."""
        return _stored_plan(self.path / "plan.toml")

    @property
    def summary(self) -> dict[str, Any]:
        """Per method, and at the top the recommended method's own figures."""
        content = self._json("summary.json")
        if "learners" in content:
            self._check_entries("learners", content, _SEAT_KEYS)
            return content
        self._check_keys("summary.json", content, _SUMMARY_KEYS)
        self._check_entries("methods", content, _METHOD_KEYS)
        self._check_keys("summary.json, methods", content["methods"], (content["main_method"],))
        return content

    @property
    def guarantees(self) -> dict[str, Any]:
        """What each method would promise if it were deployed, beside ``simulated``: true."""
        content = self._json("guarantee.json")
        by_method = any(isinstance(v, dict) and "guarantee" in v for v in content.values())
        if not by_method:  # a federation has one
            needed = [*_GUARANTEE_KEYS]
            needed += ["arithmetic_delta"] if "arithmetic_mu" in content else []
            needed += ["epsilon_exact"] if content.get("accounting") == "zcdp" else []
            self._check_keys("guarantee.json", content, needed)
        return content

    @property
    def simulated(self) -> bool:
        """Whether seeds made the noise, so that this run itself protected no one."""
        return bool(self.summary.get("simulated", False))

    @property
    def is_federation(self) -> bool:
        """Whether a server's run is here, under whose promise real clients may have been.

        Its checkpoint says so; in a copy without it, a summary that names the run. A summary of a
        simulation says that it is none, whatever else lies beside it. No name that a plan gives,
        of a method or of the run, plays a part.
        """
        begun = (self.path / SERVER_CHECKPOINT).exists()
        if not (self.path / "summary.json").exists():
            return begun
        summary = self.summary
        return "simulated" not in summary and (begun or "run" in summary)

    def _json(self, name: str) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(
                "run",
                str(self.path / name),
                "a file that the run wrote",
                f"{error}; --resume an unfinished run, or run it again",
            ) from error
        self._check_keys(name, content, ())
        return content

    def _check_entries(self, key: str, content: dict[str, Any], keys: Iterable[str]) -> None:
        """Refuse a summary whose entries under a key are not those that a run writes."""
        self._check_keys(f"summary.json, {key}", content[key], ())
        for name, entry in content[key].items():
            self._check_keys(f"summary.json, {key}.{name}", entry, keys)

    def _check_keys(self, where: str, content: Any, keys: Iterable[str]) -> None:
        if not isinstance(content, dict):
            raise damaged_table(self.path / where, 0, "an object", "it holds something else")
        absent = [key for key in keys if key not in content]
        if absent:
            raise damaged_table(self.path / where, 0, "every key that the run wrote", f"{', '.join(absent)} missing")

    def model(self, method: str | None = None, seed: int | None = None) -> Float32s:
        """The model that a method published last, as a flat vector.

        Args:
            method: which; the run's main method where it is left out.
            seed: which; the first where it is left out.

        Returns:
            The parameters, float32.

        Raises:
            InputError: for a method or seed that was not run, or a run that keeps no models.

        """
        summary = self.summary
        method = summary["main_method"] if method is None else method
        if method not in summary["methods"]:
            raise UnknownName("method", method, summary["methods"])
        seeds = summary["seeds"]
        seed = seeds[0] if seed is None else seed
        if seed not in seeds:
            raise InputError("seed", seed, f"one of {seeds}", "see summary['seeds']")
        path = self.path / "models.npz"
        if not path.exists():
            raise InputError(
                "run",
                str(self.path),
                "a run that keeps its models",
                "models of more than 64 MiB are not kept; run fewer methods and seeds",
            )
        try:
            with np.load(path) as stored:
                chosen: Float32s = stored[method][seeds.index(seed)]
        except (OSError, EOFError, ValueError, KeyError, IndexError, zipfile.BadZipFile) as error:
            raise InputError("run", str(path), "the models that the run wrote", f"{error}; run it again") from error
        return chosen

    @property
    def versions(self) -> dict[str, Any]:
        """What ran, when and where."""
        return self._json("versions.json")

    def history(self, column: str) -> dict[str, Float32s]:
        """One column of the history: an array (seeds, rounds) per method.

        Args:
            column: "loss", "prequential_accuracy" (or "accuracy", as it was called), "noise",
                "distance" or "optimum".

        Raises:
            InputError: for a column that the run did not write.

        """
        found = self._table("history.csv", column)
        self._check_seeds(self.path / "history.csv", found, self.summary.get("rounds"))
        return found

    def baselines(self, column: str) -> dict[str, Float32s]:
        """Likewise of predictions that need no learning, in runs that have them."""
        return self._table("baselines.csv", column)

    def held_out_accuracy(self) -> tuple[list[int], dict[str, Float32s]]:
        """Rounds that were looked at, and an array (seeds, those rounds) per method."""
        path = self.path / "accuracy.csv"
        looked = {cell_number(path, n, row["round"]) for n, row in table_rows(path, ["round"])}
        if not all(round_.is_integer() for round_ in looked):
            raise damaged_table(path, 0, "whole numbers as rounds", "there are others")
        rounds = sorted(int(round_) for round_ in looked)
        found = self._table("accuracy.csv", "held_out_accuracy")
        self._check_seeds(path, found, len(rounds))
        return rounds, found

    def noise(self) -> dict[str, Float32s]:
        """Noise in the learners' averaged sums after each round, as it was calibrated.

        Standard deviations, a coordinate; no methods where the run did not write them.
        """
        path = self.path / "noise.csv"
        if not path.exists():
            return {}
        found: dict[str, list[float]] = {}
        for line, row in table_rows(path, ["method", "std"]):
            found.setdefault(row["method"], []).append(cell_number(path, line, row["std"]))
        return {name: np.array(values, np.float32) for name, values in found.items()}

    def telemetry(self) -> list[dict[str, str | float]]:
        """Rows of telemetry.csv, numbers as numbers; none where the plan has no telemetry."""
        path = self.path / "telemetry.csv"
        if not path.exists():
            return []
        words = ("method", "metric", "average")
        found: list[dict[str, str | float]] = []
        needed = ["round", "metric", "estimate", "low", "high", "window"]
        for line, row in table_rows(path, needed):
            read: dict[str, str | float] = {
                key: cell if key in words else cell_number(path, line, cell) for key, cell in row.items()
            }
            if not math.isfinite(float(read["round"])):
                raise damaged_table(path, line, "a round in every row", "here is none")
            found.append(read)
        return found

    def _table(self, name: str, column: str) -> dict[str, Float32s]:
        path = self.path / name
        table = self._read_table(name)
        own = _column(column, list(table))
        if own is None:
            raise damaged_table(
                path, 1, f"a column {column}", f"no column {column}; there are {', '.join(table) or 'no others'}"
            )
        return dict(table[own])

    def _check_seeds(self, path: Path, found: dict[str, Float32s], rounds: int | None) -> None:
        """Refuse a table from which rows of methods, seeds or rounds are missing."""
        summary = self.summary
        whole = (len(summary["seeds"]), rounds)
        for method in summary["methods"]:
            there = found[method].shape if method in found else (0, 0)
            if there != whole:
                raise damaged_table(
                    path,
                    0,
                    f"{whole[0]} seeds of {whole[1]} rows for every method",
                    f"{method} has {there[0]} of {there[1]}",
                )

    def _read_table(self, name: str) -> dict[str, dict[str, Float32s]]:
        """By column and method, an array (seeds, rounds); read once as long as it stays the same.

        Rows of a method and seed must follow each other, as `history_csv` writes them.
        """
        path = self.path / name
        state = path.stat().st_mtime_ns if path.exists() else 0
        if self._tables.get(name, (None, {}))[0] != state:
            numbers, length = array("f"), dict[str, dict[str, int]]()
            columns: list[str] = []
            before = ("", "")
            for line, cells in numbered_rows(path, ["method", "seed", "round"]):
                if line == 1:
                    if cells[:3] != ["method", "seed", "round"]:
                        raise damaged_table(path, 1, "method, seed and round first", "they stand elsewhere")
                    columns = cells[3:]
                    continue
                method, seed = cells[0], cells[1]
                seeds = length.setdefault(method, {})
                if (method, seed) != before and (seed in seeds or (seeds and method != before[0])):
                    raise damaged_table(
                        path,
                        line,
                        "rows of a method and seed together",
                        f"rows of {method}, seed {seed}, are not together",
                    )
                before = method, seed
                seeds[seed] = seeds.get(seed, 0) + 1
                numbers.extend([cell_number(path, line, cell) for cell in cells[3:]])
            count = sum(sum(seeds.values()) for seeds in length.values())
            table = np.array(numbers, np.float32).reshape(count, len(columns))
            read: dict[str, dict[str, Float32s]] = {column: {} for column in columns}
            first = 0
            for method, seeds in length.items():
                last = first + sum(seeds.values())
                if len(set(seeds.values())) > 1:
                    raise damaged_table(
                        path,
                        0,
                        "as many rows for every seed of a method",
                        f"{method} has {min(seeds.values())} to {max(seeds.values())}",
                    )
                rows = (last - first) // len(seeds)
                values = table[first:last].reshape(len(seeds), rows, len(columns))
                for place, column in enumerate(columns):
                    read[column][method] = values[..., place]
                first = last
            self._tables[name] = state, read
        return self._tables[name][1]


_SUMMARY_KEYS = ("name", "complete", "rounds", "seeds", "main_method", "comparators", "data", "methods")
_METHOD_KEYS = ("mechanism", "guarantee", "noise_std", "final")
_SEAT_KEYS = ("epoch", "rounds")
_GUARANTEE_KEYS = (
    "epsilon",
    "delta",
    "unit",
    "neighbours",
    "participation",
    "horizon",
    "accounting",
    "mechanism",
    "clip_norm",
    "sensitivity",
    "noise_std",
    "mu",
    "adversary",
)
"""What pages and figures read of a run's JSON files."""


_OLD_NAMES = {"prequential_accuracy": "accuracy", "held_out_accuracy": "accuracy"}
"""What columns were called in folders of earlier versions."""


def _column(asked: str, there: Sequence[str]) -> str | None:
    """The column of this name, or of the name that it had or has; None where there is none."""
    names = {asked, _OLD_NAMES.get(asked, asked)}
    names |= {new for new, old in _OLD_NAMES.items() if old == asked}
    return next((name for name in there if name in names), None)


def history_csv(names: list[str], seeds: list[int], columns: dict[str, NDArray[Any]], rounds: list[int]) -> str:
    """CSV of arrays (methods, seeds, rounds); NaN becomes an empty cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", "seed", "round", *columns])
    stacked = np.stack([np.asarray(values, np.float64) for values in columns.values()], axis=-1)
    for m, name in enumerate(names):
        for s, seed in enumerate(seeds):
            for r, round_ in enumerate(rounds):
                cells = ["" if np.isnan(v) else f"{v:.7g}" for v in stacked[m, s, r]]
                writer.writerow([name, seed, round_, *cells])
    return out.getvalue()


def versions() -> dict[str, str]:
    """What ran."""
    from importlib.metadata import PackageNotFoundError, version

    found = {
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
    """Which state of the source ran, where it is a git checkout."""
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
