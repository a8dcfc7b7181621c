"""What a comparison leaves behind, and paired differences with intervals."""

from __future__ import annotations

import csv
import fcntl
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from experiments.protocol.search import Arm, Walk
from experiments.protocol.settings import Point
from scipy.stats import t as student

from veilstream.files import write_file

Row = dict[str, Any]


class Difference(NamedTuple):
    """Mean over seeds of a method minus another on the same seeds, with a 95% interval (Student's t)."""

    mean: float
    half_width: float


def paired(values: Mapping[int, float], others: Mapping[int, float]) -> Difference:
    """Of two methods, seed by seed."""
    apart = np.array([values[seed] - others[seed] for seed in sorted(values)])
    error = float(apart.std(ddof=1)) / math.sqrt(len(apart))
    return Difference(float(apart.mean()), float(student.ppf(0.975, len(apart) - 1)) * error)


def store(out: Path, kind: str, study: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Put a study's rows into the file of this kind, in place of those it had; studies may run side by side."""
    path = out / f"comparisons{kind and '-'}{kind}.csv"
    folder = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        others = [row for row in _read(path) if row["study"] != study]
        every = sorted([*others, *({"study": study} | row for row in rows)], key=lambda row: row["study"])
        names = list(dict.fromkeys(name for row in every for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(every)
        write_file(path, text.getvalue(), shared=True)
    finally:
        os.close(folder)


def stored(out: Path, kind: str, study: str) -> list[dict[str, str]]:
    """A study's rows in the file of this kind; none where there are none."""
    return [row for row in _read(out / f"comparisons{kind and '-'}{kind}.csv") if row["study"] == study]


def _read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def held_text(arm: Arm) -> str:
    """The dimensions that an arm holds, for a cell."""
    return " ".join(f"{name}={value}" for name, value in arm.fixed)


def _held(text: str) -> tuple[tuple[str, int], ...]:
    pairs = (part.split("=") for part in text.split())
    return tuple((name, int(value)) for name, value in pairs)


def tried_rows(walks: Mapping[Arm, Walk]) -> list[Row]:
    """Every setting of every arm, as points of the grid, with its mean over the search's seeds."""
    return [
        {"mechanism": arm.mechanism, "epsilon": f"{arm.epsilon:g}", "held": held_text(arm)}
        | asdict(point)
        | {"found": f"{value:.6g}"}
        for arm, walk in walks.items()
        for point, value in walk.found.items()
    ]


def tried(rows: Iterable[Mapping[str, str]]) -> dict[Arm, dict[Point, float]]:
    """The inverse of `tried_rows`."""
    found: dict[Arm, dict[Point, float]] = {}
    for row in rows:
        arm = Arm(row["mechanism"], float(row["epsilon"]), _held(row["held"]))
        point = Point(**{name: int(row[name]) for name in Point.__dataclass_fields__})
        found.setdefault(arm, {})[point] = float(row["found"])
    return found


def setting(point: Point, learners: int, total: int, releases: int) -> Row:
    """A chosen setting in a plan's words."""
    clients, steps = point.shape
    method = point.method(learners, total)
    return {
        "releases": releases,
        "clients": clients,
        "local_steps": steps,
        "clip_norm": f"{method['clip_norm']:.6g}",
        "step_size": f"{method['step_size']:.6g}",
        "step_decay": f"{method['step_decay']:.1f}",
        "averaging": f"{method['averaging']:g}" if "averaging" in method else "",
        "newest_weight": f"{method['newest_weight']:.6g}" if "newest_weight" in method else "",
    }


def log_rows(walks: Mapping[Arm, Walk], seeds: int, learners: int) -> list[Row]:
    """For each arm: settings and runs, what was chosen, and its edges.

    Those of the search: none, once the chosen setting's neighbours in every direction were tried and none is better.
    Beside them its limits, where there is no neighbour: no fewer local steps than one.
    """
    return [
        {
            "mechanism": arm.mechanism,
            "epsilon": f"{arm.epsilon:g}",
            "held": held_text(arm),
            "settings": len(walk.found),
            "runs": len(walk.found) * seeds,
            "edges": " ".join(walk.edges) or "none",
            "limits": " ".join(walk.at_limits),
            "found": f"{walk.found[walk.best]:.6g}",
        }
        | setting(walk.best, learners, walk.limits.total, walk.best.releases(walk.limits.total))
        for arm, walk in walks.items()
    ]
