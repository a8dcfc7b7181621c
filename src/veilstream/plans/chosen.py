"""What the comparisons chose (docs/results/comparisons-log.csv), as plans: every method at its own best.

A plan has one number of releases, so a comparison is several plans: one for each number of clients in a
round, and of local steps, that some method chose.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from veilstream.errors import UnknownName
from veilstream.plans.plan import Plan

_LOG = "comparisons-log.csv"
_SETTING = ("clip_norm", "step_size", "step_decay", "averaging", "newest_weight")


def chosen_plans(
    study: str, head: Path, changes: dict[str, Any], rounds: int | None = None
) -> Iterator[tuple[str, Plan]]:
    """Folder and plan of each group of methods of a comparison.

    Args:
        study: its name in the log.
        head: a plan of the same task and data; its methods are not used.
        changes: of keys, after everything else.
        rounds: for a quick try: so many for all methods together, whatever they chose, of four clients each.

    """
    plan = Plan.load(head)
    learning = plan.learning
    total = learning.rounds * learning.local_steps * learning.clients_per_step
    groups: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for row in _rows(study):
        shape = (int(row["clients"]), int(row["local_steps"])) if rounds is None else (4, 1)
        method = _method(row, learning.learners, at_once=row["held"])
        groups.setdefault(shape, {}).setdefault(method["name"], method)
    for (clients, steps), methods in sorted(groups.items()):
        releases = total // clients if rounds is None else rounds
        made = {
            "learning.rounds": releases,
            "learning.local_steps": steps,
            "learning.clients_per_step": clients // steps,
            "run.evaluate_every": max(1, releases // 50),
        }
        made |= _visits(plan, made) | changes
        names = ", ".join(methods)
        described = {"description": f"{plan.description}; {releases} releases: {names}"}
        part = Plan.load(head, {"methods": list(methods.values())} | described | made)
        yield f"{releases}-releases" + (f"-{steps}-steps" if steps > 1 else ""), part


def _method(row: dict[str, str], learners: int, at_once: str) -> dict[str, Any]:
    made: dict[str, Any] = {key: float(row[key]) for key in _SETTING if row[key]}
    made["server_step_size"] = math.sqrt(learners)
    if row["mechanism"] == "none":
        return {"name": "noise-free", "kind": "noise-free"} | made
    name = f"{row['mechanism']} @ {row['epsilon']}" + (", releases given" if at_once else "")
    return {"name": name, "mechanism": row["mechanism"], "epsilon": float(row["epsilon"])} | made


def _visits(plan: Plan, made: dict[str, Any]) -> dict[str, Any]:
    """People who return stay as many records apart, and all their visits fit into the rounds."""
    people = plan.participation
    if people.times == 1:
        return {}
    records = people.min_separation * plan.learning.clients_per_step
    steps = made["learning.rounds"] * made["learning.local_steps"]
    apart = min(records // made["learning.clients_per_step"], max(1, (steps - 1) // (people.times - 1)))
    return {"privacy.min_separation": apart}


def _rows(study: str) -> list[dict[str, str]]:
    package = Path(__file__).parent.parent
    for folder in (package / "_experiments", package.parent.parent / "docs" / "results"):
        if (folder / _LOG).exists():
            with (folder / _LOG).open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            found = [row for row in rows if row["study"] == study and row["local_steps"]]
            if not found:
                raise UnknownName("study", study, sorted({row["study"] for row in rows}))
            return found
    raise UnknownName("study", study, [])
