"""What many releases are worth: a world that changes at once, and decisions that are taken between releases.

    python -m studies.freshness run FOLDER [WORLD ...]     a world: changes, or changes:late, as 4 or 4:20
    python -m studies.freshness join FOLDER docs/results/freshness.csv

50 learners meet a client at each of 1,000 times (d = 10, all learners share one model, a twentieth of the labels are
wrong). At 0, 4 or 16 times the model is replaced by another. Labels may come late: what is learned at a time is of
clients who were met 20 times before. Models are released 1,000, 200, 50 or 20 times; the clients between two releases
are averaged in one step, so that the promise is the same and only freshness and noise differ. Each client needs a
decision when it comes, by the newest model that was released: the figure is the share of right ones.

Every noise (buffered, independent, none) at every number of releases has the best of 22 settings (eleven steps, the
model itself or an exponential average over a fiftieth of the run), chosen by that figure on seeds 1000 and 1001.
Seeds 0 to 9 are reported and compared seed by seed with 1,000 releases of the same noise.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from veilstream.learning.tasks import Sample
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.simulation.engine import Simulation

TIMES, LEARNERS, DIM, WRONG = 1000, 50, 10, 0.05
RELEASES = (1000, 200, 50, 20)
STEPS = tuple(0.2 * 2.0**k for k in range(11))
BUDGETS = (2.0, 8.0)
SEARCH_SEEDS, SEEDS = (1000, 1001), tuple(range(10))
WORLDS = ("0", "4", "16", "4:20")
COLUMNS = ("changes", "late", "epsilon", "noise", "releases", "step", "average", "seed", "accuracy")


@dataclass(frozen=True)
class Changing:
    """Clients of a world whose model is replaced at some times; asked by round, of so many times each."""

    changes: int
    late: int
    releases: int
    provenance: str = "studies/freshness.py"

    def model(self, seed: int, time: int) -> np.ndarray:
        """The model that decides labels at a time; changes are spread evenly, from a place that the seed chooses."""
        rng = np.random.default_rng([seed, 0])
        models, first = rng.standard_normal((self.changes + 1, DIM)), rng.random()
        passed = 0 if self.changes == 0 else int(np.floor(time / TIMES * self.changes + first))
        return models[min(passed, self.changes)]

    def clients(self, seed: int, time: int) -> tuple[np.ndarray, np.ndarray]:
        """One client of each learner: features (n, d) of norm one, labels (n,)."""
        rng = np.random.default_rng([seed, 1, max(0, time)])
        raw = rng.standard_normal((LEARNERS, DIM))
        labels = np.where(raw @ self.model(seed, max(0, time)) >= 0, 1.0, -1.0)
        labels *= np.where(rng.random(LEARNERS) < WRONG, -1.0, 1.0)
        return raw / np.linalg.norm(raw, axis=1, keepdims=True), labels

    def round(self, seed: int, round_: int) -> Sample:
        """Those from whom the model learns in a round: met `late` times before."""
        return self._met(seed, round_, self.late)

    def held_out(self, seed: int, count: int, round_: int) -> Sample:
        """Those who need a decision in a round: all who come in it."""
        met = self._met(seed, round_, 0)
        return Sample(met.features.reshape(-1, DIM)[:count], met.target.reshape(-1)[:count])

    def _met(self, seed: int, round_: int, late: int) -> Sample:
        span = TIMES // self.releases
        found = [self.clients(seed, time - late) for time in range(round_ * span, (round_ + 1) * span)]
        features = np.stack([each[0] for each in found], axis=1)
        return Sample(features.astype(np.float32), np.stack([each[1] for each in found], axis=1).astype(np.float32))


def plan_of(releases: int, methods: list[dict[str, Any]]) -> Plan:
    """A round is what comes between two releases, as one step."""
    return Plan(
        name="freshness",
        learning={"rounds": releases, "learners": LEARNERS, "clients_per_step": TIMES // releases, "task": "logistic"},
        data={"dim": DIM, "drift": "abrupt", "held_out": LEARNERS * TIMES // releases},
        privacy={"epsilon": 1.0, "delta": 1e-5},
        run={"evaluate_every": 1, "regret": False},
        methods=methods,
    )


def settings(releases: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """A row's columns and a plan's method."""
    kinds: list[tuple[str, float, dict[str, Any]]] = [("none", 0.0, {"kind": "noise-free"})]
    for epsilon in BUDGETS:
        kinds.append(("buffered", epsilon, {"mechanism": "buffered", "epsilon": epsilon}))
        kinds.append(("independent", epsilon, {"kind": "independent", "epsilon": epsilon}))
    for noise, epsilon, method in kinds:
        for step in STEPS:
            for average in (None, min(1.0, 50.0 / releases)):
                published = {} if average is None else {"newest_weight": average}
                name = f"{noise} {epsilon:g} {step:g} {average}"
                row = {"epsilon": epsilon, "noise": noise, "releases": releases, "step": step, "average": average or ""}
                yield row, {"name": name, "step_size": step} | published | method


def accuracies(world: Changing, seeds: tuple[int, ...]) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Settings, and the share of right decisions of each (settings, seeds)."""
    found = list(settings(world.releases))
    plan = plan_of(world.releases, [method for _, method in found])
    simulation = Simulation(plan, [prepare(plan, method) for method in plan.methods], seeds, stream=world)
    while not simulation.done:
        simulation.advance()
    right = simulation.held_out_accuracy[:, :, : world.releases].astype(float).mean(axis=2)
    simulation.close()
    return [row for row, _ in found], right


def run(changes: int, late: int, releases: int, out: Path) -> None:
    """One world at one number of releases: every noise at its best, seed by seed."""
    began = time.monotonic()
    world = Changing(changes, late, releases)
    rows, right = accuracies(world, SEARCH_SEEDS + SEEDS)
    looked, reported = right[:, : len(SEARCH_SEEDS)].mean(axis=1), right[:, len(SEARCH_SEEDS) :]
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for noise, epsilon in dict.fromkeys((row["noise"], row["epsilon"]) for row in rows):
            best = max(
                (k for k, row in enumerate(rows) if (row["noise"], row["epsilon"]) == (noise, epsilon)),
                key=lambda k: float(looked[k]),
            )
            for seed, accuracy in zip(SEEDS, reported[best], strict=True):
                line = {"changes": changes, "late": late, **rows[best], "seed": seed, "accuracy": f"{accuracy:.5f}"}
                writer.writerow(line)
            print(f"{out.stem}: {noise} {epsilon:g}: {reported[best].mean():.4f} with {rows[best]}", flush=True)
    print(f"{out.stem}: {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    """Run worlds, or put their files together."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["run", "join"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--releases", type=int, nargs="*", default=RELEASES)
    given = parser.parse_args()
    if given.what == "join":
        files = sorted(given.folder.glob("fresh-*.csv"))
        lines = [line for file in files for line in file.read_text().splitlines()[1:]]
        Path(given.names[0]).write_text("\n".join([",".join(COLUMNS), *lines]) + "\n")
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    for name in given.names or WORLDS:
        changes, _, late = name.partition(":")
        for releases in given.releases:
            run(int(changes), int(late or 0), releases, given.folder / f"fresh-{changes}-{late or 0}-{releases}.csv")


if __name__ == "__main__":
    main()
