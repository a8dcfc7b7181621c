"""A run is a folder: plan, guarantees, history, summary, versions. Figures are drawn from it alone.

    plan.toml        what was asked
    guarantee.json   what each method would promise if it were deployed; `simulated` is true here
    history.csv      one row per method, seed and round
    accuracy.csv     held-out accuracy at the rounds that were looked at
    telemetry.csv    with [telemetry]: private estimates with 95% intervals, at the same rounds
    baselines.csv    prequential accuracy and loss of majority, no change and a frozen model, in
                     runs of `veilstream reproduce streams`
    models.npz       the last published model of every method and seed, unless they are very large
    summary.json     per method: final accuracy, average loss, regret: mean, std and every seed
    versions.json    what ran
    start.json       with learning.start: which model the run started from (start.f32)
    checkpoint.npz   only while a run is not complete; one per seed batch where there are several
    seed_batches.json       likewise: which seeds run together

Files are written whole or not at all.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import platform
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError, UnknownName
from veilstream.plans.plan import Plan

__all__ = ["Run", "check_folder", "clear_earlier", "history_csv", "versions"]

Float32s = NDArray[np.float32]


def _same_run(one: Plan, other: Plan) -> bool:
    """Whether both plans have the same numbers; memory changes none of them."""
    budget = dataclasses.replace(other.run, memory_mib=one.run.memory_mib)
    return one == dataclasses.replace(other, run=budget)


def _stored_plan(path: Path) -> Plan:
    """The plan of a run folder; one that is damaged is refused by its name."""
    try:
        return Plan.load(path)
    except InputError as error:
        raise InputError(
            "out", str(path), "the plan that the run in this folder wrote",
            f"restore it, or name another folder; {error}",
        ) from error  # fmt: skip


def check_folder(
    path: Path, plan: Plan, *, resume: bool, besides: frozenset[str] = frozenset()
) -> None:
    """Refuse a folder that holds another run, or anything else; or this run, unless resumed.

    Files named in ``besides`` may be there.
    """
    stored = path / "plan.toml"
    if stored.exists():
        if not _same_run(_stored_plan(stored), plan):
            raise InputError("out", str(path), "a folder without another run", "name a new folder")
        if not resume:
            raise InputError(
                "out", str(path), "a folder without a run", "--resume continues it; or name another"
            )
    elif path.exists() and (
        not path.is_dir() or any(found.name not in besides for found in path.iterdir())
    ):
        raise InputError("out", str(path), "a new or empty folder", "name another folder")


_OWN_FILES = frozenset(
    {
        "plan.toml",
        "guarantee.json",
        "history.csv",
        "accuracy.csv",
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
    others = {n for n in names - _OWN_FILES if not re.fullmatch(r"checkpoint-\d+\.npz", n)}
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
        if not (self.path / "plan.toml").exists():
            raise InputError(
                "run", str(path), "a folder with a plan.toml", "veilstream run makes one"
            )

    @property
    def plan(self) -> Plan:
        """What was asked."""
        return _stored_plan(self.path / "plan.toml")

    @property
    def summary(self) -> dict[str, Any]:
        """Per method, and at the top the first private method's own figures."""
        return self._json("summary.json")

    @property
    def guarantees(self) -> dict[str, Any]:
        """What each method would promise if it were deployed, beside ``simulated``: true."""
        return self._json("guarantee.json")

    @property
    def simulated(self) -> bool:
        """Whether seeds made the noise, so that this run itself protected no one."""
        return bool(self.summary.get("simulated", False))

    def _json(self, name: str) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(
                "run", str(self.path / name), "a file that the run wrote",
                f"{error}; --resume an unfinished run, or run it again",
            ) from error  # fmt: skip
        return content

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
                "run", str(self.path), "a complete run that keeps its models",
                "models of more than 64 MiB are not kept; run fewer methods and seeds",
            )  # fmt: skip
        try:
            with np.load(path) as stored:
                chosen: Float32s = stored[method][seeds.index(seed)]
        except (OSError, EOFError, ValueError, KeyError, IndexError, zipfile.BadZipFile) as error:
            raise InputError(
                "run", str(path), "the models that the run wrote", f"{error}; run it again"
            ) from error
        return chosen

    def history(self, column: str) -> dict[str, Float32s]:
        """One column of the history: an array (seeds, rounds) per method."""
        return self._table("history.csv", column)

    def baselines(self, column: str) -> dict[str, Float32s]:
        """Likewise of predictions that need no learning, in runs that have them."""
        return self._table("baselines.csv", column)

    def held_out_accuracy(self) -> tuple[list[int], dict[str, Float32s]]:
        """Rounds that were looked at, and an array (seeds, those rounds) per method."""
        with (self.path / "accuracy.csv").open() as file:
            rounds = sorted({int(row["round"]) for row in csv.DictReader(file)})
        return rounds, self._table("accuracy.csv", "accuracy")

    def telemetry(self) -> list[dict[str, str | float]]:
        """Rows of telemetry.csv, numbers as numbers; none where the plan has no telemetry."""
        path = self.path / "telemetry.csv"
        if not path.exists():
            return []
        words = ("method", "metric")
        with path.open(newline="") as file:
            return [
                {key: cell if key in words else float(cell or "nan") for key, cell in row.items()}
                for row in csv.DictReader(file)
            ]

    def _table(self, name: str, column: str) -> dict[str, Float32s]:
        values: dict[str, dict[int, list[float]]] = {}
        with (self.path / name).open() as file:
            for row in csv.DictReader(file):
                seeds = values.setdefault(row["method"], {})
                seeds.setdefault(int(row["seed"]), []).append(float(row[column] or "nan"))
        return {m: np.array(list(by_seed.values()), np.float32) for m, by_seed in values.items()}


def history_csv(
    names: list[str], seeds: list[int], columns: dict[str, NDArray[Any]], rounds: list[int]
) -> str:
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

    found = {"python": sys.version.split()[0], "machine": platform.machine()}
    for package in ("veilstream", "numpy", "scipy", "jax", "jaxlib", "cryptography"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
