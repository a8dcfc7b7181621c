"""`kind = "auto"` against the best tuned setting: the table of docs/planning.md.

    python -m experiments.search_auto constants
    python -m experiments.search_auto compare FOLDER [TASK ...] [--tables FOLDER]
    python -m experiments.search_auto join FOLDER docs/results/auto.json

`constants` is how `plans.auto` gets its constants: margins' noise, shares of gamma and what is published, on synthetic
data (labels as they are, and a fifth of them flipped) and on the tuning parts of the four streams that come with the
package, seeds 500 and 501. `compare` is the judgement, a task at a time. The same noise (buffered) gets the best of
99 settings (step, clip norm, and what is published: the model, a power-3 average, auto's) by average prequential
loss on other data: seeds 1000 and 1001 of synthetic streams, the tuning part of tables. auto sees none of it.
Both then run on seeds 0 to 4, beside each learner's running shares of its labels. A row is a failure where auto's
loss is more than a twentieth above the tuned one, or above that of those shares. Three of the tables
(experiments/auto_tables.py) were first looked at when auto was done.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
import tomllib
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from experiments.auto_tables import PLANS, plan_parts
from experiments.stored import store

from veilstream.learning.tasks import Sample
from veilstream.plans import auto
from veilstream.plans.clients import stream_of
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import Prepared, prepare
from veilstream.simulation.engine import Simulation
from veilstream.streams.pool import Stream

SYNTHETIC: dict[str, dict[str, Any]] = {
    "logistic": {
        "learning": {"rounds": 1000, "local_steps": 4, "learners": 20, "task": "logistic"},
        "data": {"dim": 100},
    },
    "small": {
        "learning": {"rounds": 500, "learners": 10, "clients_per_step": 4, "task": "logistic"},
        "data": {"dim": 30},
    },
    "least_squares": {"learning": {"rounds": 500, "learners": 10, "task": "least_squares"}, "data": {"dim": 30}},
}
STREAMS = ("electricity", "covertype", "flights", "health")
SEASONAL = {
    "learning": {"rounds": 800, "learners": 10, "clients_per_step": 4, "task": "logistic"},
    "data": {"dim": 20, "drift": "seasonal"},
}
BUDGETS = (0.5, 2.0)
MOVES = tuple(0.02 * 2.0**k for k in range(11))  # step size x clip norm
CLIP_NORMS = (0.1, 0.3, 1.0)
PUBLISHED: tuple[dict[str, float], ...] = ({}, {"averaging": 3.0}, {"newest_weight": 0.1})
TUNING_SEEDS, REPORTED_SEEDS, CONSTANT_SEEDS = (1000, 1001), (0, 1, 2, 3, 4), (500, 501)
FAILURE = 1.05
FOLDER = Path(__file__).parent


def plan_of(
    name: str, epsilon: float, methods: list[dict[str, Any]], *, tuning: bool, tables: Path | None = None
) -> Plan:
    """The task's plan; of a table, on its tuning part or on the part that is reported."""
    if name in SYNTHETIC:
        parts = SYNTHETIC[name] | {"privacy": {"delta": 1e-3}}
    elif name in PLANS:
        assert tables is not None, "--tables"
        parts = plan_parts(name, tables, "tuning" if tuning else "reported", epsilon)
    else:
        head = (FOLDER / f"streams_{name}.toml").read_text().split("[[methods]]")[0]
        parts = tomllib.loads(head.replace(f"data:{name}", f"data:{name}/tuning") if tuning else head)
    return Plan(**parts | {"privacy": parts["privacy"] | {"epsilon": epsilon}}, methods=methods)


@dataclasses.dataclass(frozen=True)
class Flipped:
    """A stream of signed labels, some of them turned round."""

    inner: Stream
    share: float
    provenance: str = "flipped labels"

    def round(self, seed: int, round_: int) -> Sample:
        """One round's clients."""
        met = self.inner.round(seed, round_)
        turned = np.random.default_rng([seed, round_, 77]).random(met.target.shape) < self.share
        return met._replace(target=np.where(turned, -met.target, met.target).astype(np.float32))

    def held_out(self, seed: int, count: int, round_: int) -> Sample:
        """As they are."""
        return self.inner.held_out(seed, count, round_)


def measured(plan: Plan, prepared: list[Prepared], seeds: Sequence[int], flipped: float = 0.0) -> np.ndarray:
    """Average prequential loss and accuracy, (2, methods)."""
    stream = Flipped(stream_of(plan), flipped) if flipped else None
    simulation = Simulation(plan, prepared, seeds, stream=stream)
    while not simulation.done:
        simulation.advance()
    loss = np.nanmean(simulation.history["loss"].astype(float), axis=(1, 2))
    right = np.full_like(loss, np.nan)
    if simulation.task.classifies:
        right = np.nanmean(simulation.history["accuracy"].astype(float), axis=(1, 2))
    simulation.close()
    return np.array([np.where(np.isfinite(loss), loss, np.inf), right])


def grid_of(plan: Plan) -> list[Prepared]:
    """Every setting; the noise is made once a clip norm."""
    learning, grid = plan.learning, []
    server = float(np.sqrt(learning.learners)) if learning.local_steps > 1 else 1.0
    fresh = min(1.0, auto.WINDOWS / learning.rounds)
    for clip in CLIP_NORMS:
        for published in PUBLISHED:
            changes = published | ({"newest_weight": fresh} if "newest_weight" in published else {})
            method = dataclasses.replace(plan.methods[0], clip_norm=clip, server_step_size=server, **changes)
            made = prepare(plan, method)
            for move in MOVES:
                name = f"B {clip:g}, move {move:g}, {changes or 'the model itself'}"
                sized = dataclasses.replace(method, name=name, step_size=move / clip / server)
                grid.append(dataclasses.replace(made, plan=sized))
    return grid


def shares_of(plan: Plan, seed: int) -> tuple[float, float, float]:
    """Loss and accuracy of each learner's running label shares, and the entropy of all labels together."""
    stream, counts, losses, right = stream_of(plan), None, [], []
    for round_ in range(plan.learning.rounds):
        met = stream.round(seed, round_)
        labels = np.asarray(met.target, int)
        labels = (labels + 1) // 2 if plan.learning.task == "logistic" else labels
        present = np.ones(labels.shape) if met.present is None else np.asarray(met.present)
        if counts is None:
            counts = np.ones((labels.shape[0], max(2, len(plan.data.labels or ()))))
        for learner, client in zip(*np.nonzero(present), strict=True):
            own, label = counts[learner], labels[learner, client]
            losses.append(-math.log(own[label] / own.sum()))
            right.append(own.argmax() == label)
            own[label] += 1
    assert counts is not None
    share = counts.sum(axis=0) / counts.sum()
    return float(np.mean(losses)), float(np.mean(right)), float(-(share * np.log(share)).sum())


def compare(name: str, tables: Path | None) -> list[dict[str, Any]]:
    """The task's rows, one for each budget."""
    rows = []
    for epsilon in BUDGETS:
        began = time.monotonic()
        like = {"kind": "ours", "mechanism": "buffered", "step_size": 1.0, "name": "tuned"}
        looked_at = plan_of(name, epsilon, [like], tuning=True, tables=tables)
        grid = grid_of(looked_at)
        losses = measured(looked_at, grid, TUNING_SEEDS)[0]
        best = grid[int(losses.argmin())]
        untuned = {"name": "auto", "kind": "auto"}
        reported = plan_of(name, epsilon, [untuned], tuning=False, tables=tables)
        ours = prepare(reported, reported.methods[0])
        tuned = dataclasses.replace(prepare(reported, best.plan), plan=best.plan)
        (auto_loss, loss), (auto_right, right) = measured(reported, [ours, tuned], REPORTED_SEEDS)
        assert ours.auto is not None
        row: dict[str, Any] = {
            "task": name,
            "seen_before": name not in PLANS,
            "epsilon": epsilon,
            "tuned_loss": loss,
            "auto_loss": auto_loss,
            "tuned_accuracy": right,
            "auto_accuracy": auto_right,
            "setting": best.plan.name,
            "settings": len(grid),
            "auto": str(ours.auto),
        }
        if ours.auto.outlook is not None:
            own_loss, own_right, _ = shares_of(reported, 0)
            row |= {"shares_loss": own_loss, "shares_accuracy": own_right}
            row |= {"stated_entropy": shares_of(looked_at, 0)[2]}  # of earlier records, as label_shares would be
        rows.append(row | {"seconds": time.monotonic() - began})
        print(row, flush=True)
    return rows


def constants(names: Sequence[str], folder: Path) -> None:
    """Losses over the noise in a margin, shares of gamma and averages."""
    SYNTHETIC["seasonal"] = SEASONAL
    for name, flipped, epsilon in product(names or (*SYNTHETIC, *STREAMS), (0.0, 0.2), BUDGETS):
        if flipped and (name == "least_squares" or name in STREAMS):
            continue
        plan, several, rows = plan_of(name, epsilon, [{"name": "auto", "kind": "auto"}], tuning=True), [], []
        for share, kappa in product((0.3, 0.6, 1.0), (0.4, 0.6, 0.9)):
            auto.GAMMA_SHARE, auto.KAPPA, auto.KAPPA_NUMBER = share, kappa, 0.7 * kappa
            for window in (None, 60.0, 200.0):
                average = {"newest_weight": min(1.0, window / plan.learning.rounds)} if window else {"averaging": 3.0}
                called = f"gamma {share}, margin {kappa}, {average}"
                several.append(prepare(plan, dataclasses.replace(plan.methods[0], name=called, **average)))
                rows.append({"gamma_share": share, "kappa": kappa, "window": window})
        losses, right = measured(plan, several, CONSTANT_SEEDS, flipped)
        for row, loss, accuracy in zip(rows, losses, right, strict=True):
            row |= {"task": name, "flipped": flipped, "epsilon": epsilon, "loss": loss, "accuracy": accuracy}
        (folder / f"constants-{name}-{flipped}-{epsilon}.json").write_text(json.dumps(rows))


def outlook(row: dict[str, Any], tables: Path | None) -> float:
    """What auto expects where the plan states the entropy of earlier labels: it follows from the plan alone."""
    plan = plan_of(row["task"], row["epsilon"], [{"name": "auto", "kind": "auto"}], tuning=False, tables=tables)
    found = prepare(plan, plan.methods[0]).auto
    assert found is not None
    assert found.outlook is not None
    labels = max(2, len(plan.data.labels or ()))
    return auto.expected_loss(labels, row["stated_entropy"], found.outlook.travel, found.margin_noise)


def join(folder: Path, out: Path, tables: Path | None) -> None:
    """One file for docs/results."""
    order = [*SYNTHETIC, *STREAMS, *PLANS]
    found = [row for path in folder.glob("auto-*.json") for row in json.loads(path.read_text())]
    found.sort(key=lambda row: (order.index(row["task"]), row["epsilon"]))
    for row in found:
        if "stated_entropy" in row:
            row["expected_loss"] = outlook(row, tables)
    command = "python -m experiments.search_auto compare FOLDER; python -m experiments.search_auto join FOLDER FILE"
    store(out, command, {"failure": FAILURE, "rows": found}, "; the runs themselves on one NVIDIA H200 with 16 cores")


def main() -> None:
    """One of the three."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["constants", "compare", "join"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--tables", type=Path)
    given = parser.parse_args()
    if given.what == "join":
        join(given.folder, Path(given.names[0]), given.tables)
    elif given.what == "constants":
        constants(given.names, given.folder)
    else:
        for name in given.names or (*SYNTHETIC, *STREAMS, *PLANS):
            (given.folder / f"auto-{name}.json").write_text(json.dumps(compare(name, given.tables)))


if __name__ == "__main__":
    main()
