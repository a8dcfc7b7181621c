"""Every method at its best, with the same effort: baselines and ours.

    python experiments/search_fair.py logistic edge cnn --out FOLDER

A study is a task with a grid: clip norm, clients averaged in a step, averaging of the published
models, step size and its decay and, in the "free" half, the number of releases. Every mechanism at
every budget runs through the whole of it, on two seeds (logistic: other data; MNIST: 50,000 of the
training images, judged on the other 10,000) that no figure uses. Where two seeds are too few to
choose by, each one's best twelve run again on eight more such seeds. The best setting, by each
measure, then runs on the figure's seeds 0 to 9 and, for MNIST, all training images, judged on the
test images. `edge_near` and `cnn_near` look again, more finely, around what `edge` and `cnn` found.

`FOLDER/STUDY-search.csv` has every setting tried, `FOLDER/STUDY.csv` the best ones with every seed
and the cost of the search. Needs a GPU for the CNN; the others take long, but run, without. Started
again with the same folder it goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from search_mnist import validation

from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.simulation.engine import Simulation
from veilstream.streams.pool import Stream

MECHANISMS = ("independent", "tree", "toeplitz_normalised", "buffered", "optimal", "matched")
"""The last is `optimal` made for what the method publishes."""
DELTA = 1e-3
SEARCH_SEEDS = (1000, 1001)
SECOND_SEEDS = tuple(range(1002, 1010))
FINALISTS = 12
FIGURE_SEEDS = tuple(range(10))


@dataclass(frozen=True)
class Setting:
    """What is tuned."""

    mechanism: str
    epsilon: float
    releases: int
    steps: int
    """Of a round; each averages as many clients as then meet in it."""
    clip_norm: float
    averaging: float | None
    decay: float
    """Of the step size, `step_decay`."""
    move: float
    """Effective step times clip norm: the farthest that a first round without noise can move x."""

    def method(self, name: str, learners: int, clients: int) -> dict[str, Any]:
        """As a plan has it, where a learner meets so many clients in a round."""
        server = math.sqrt(learners)
        step = self.move / self.clip_norm / (server * self.steps)
        entry: dict[str, Any] = {
            "name": name,
            "clip_norm": self.clip_norm,
            "clients_per_step": clients // self.steps,
            "step_size": step,
            "server_step_size": server,
            "step_decay": self.decay,
        }
        if self.averaging is not None:
            entry["averaging"] = self.averaging
        if self.mechanism == "none":
            return entry | {"kind": "noise-free"}
        entry |= {"epsilon": self.epsilon, "delta": DELTA}
        if self.mechanism == "matched":
            return entry | {"mechanism": "optimal", "objective": "published"}
        return entry | {"mechanism": self.mechanism}


@dataclass(frozen=True)
class Study:
    """A task, and what is tried."""

    name: str
    task: str
    learners: int
    clients: int
    """Of one learner, in the figure."""
    searched: int
    """Of one learner, in the search."""
    epsilons: tuple[float, ...]
    releases: tuple[int, ...]
    """The first is the figure's number; the others are for those who are free to choose."""
    steps: tuple[int, ...]
    """Of a round at the figure's number of releases; with fewer, a round is one step."""
    clip_norms: tuple[float, ...]
    averaging: tuple[float | None, ...]
    moves: tuple[float, ...]
    measures: tuple[str, ...]
    decays: tuple[float, ...] = (0.0,)
    farther: tuple[float, ...] = ()
    """More moves, for fewer releases: their rounds meet more clients."""
    twice: bool = False
    """Whether the best run again on other seeds before one is chosen."""
    mechanisms: tuple[str, ...] = MECHANISMS
    floats_a_client: int = 1000
    memory_mib: int = 8_000

    def grid(self, releases: int) -> Iterator[Setting]:
        """All that is tried at this number of releases."""
        most = releases == self.releases[0]
        steps = self.steps if most else (1,)
        moves = self.moves if most else self.moves + self.farther
        for cell in itertools.product(steps, self.clip_norms, self.averaging, self.decays, moves):
            setting = Setting("none", 0.0, releases, *cell)
            yield setting
            for mechanism, epsilon in itertools.product(self.mechanisms, self.epsilons):
                plain = setting.averaging is None and setting.steps == 1 and setting.decay == 0.0
                if mechanism != "matched" or not plain:  # else `optimal` is matched
                    yield replace(setting, mechanism=mechanism, epsilon=epsilon)

    def plan(self, settings: Sequence[Setting], total: int) -> Plan:
        """Settings with one number of releases as methods of one plan."""
        releases, met = settings[0].releases, total // settings[0].releases
        data = {"kind": "synthetic"} if self.task == "logistic" else {"kind": "mnist"}
        return Plan(
            **{
                "learning": {"rounds": releases, "local_steps": met, "learners": self.learners, "task": self.task},
                "data": data | {"held_out": 2_000 if self.task == "logistic" else 10_000},
                "privacy": {"epsilon": self.epsilons[0], "delta": DELTA},
                "run": {"evaluate_every": releases, "memory_mib": self.memory_mib, "regret": False},
                "methods": [s.method(str(i), self.learners, met) for i, s in enumerate(settings)],
            }
        )

    def together(self, releases: int, seeds: int) -> int:
        """How many settings fit a device's memory at once."""
        each = seeds * self.learners * (self.clients // releases) * self.floats_a_client
        return max(1, min(96, int(3e9 / each)))  # a compiler takes long over hundreds

    def measured(
        self, settings: Sequence[Setting], seeds: Sequence[int], *, search: bool
    ) -> Iterator[tuple[Setting, dict[str, list[float]]]]:
        """Loss and accuracy of every setting, seed by seed."""
        plan = self.plan(settings, self.searched if search else self.clients)
        stream: Stream | None = validation(plan) if search and self.task != "logistic" else None
        prepared = [prepare(plan, m) for m in plan.methods]
        simulation = Simulation(plan, prepared, seeds, stream=stream)
        while not simulation.done:
            simulation.advance()
        losses = np.nanmean(simulation.history["loss"], axis=2)
        right = simulation.held_out_accuracy[:, :, -1]
        simulation.close()
        for setting, loss, accuracy in zip(settings, losses, right, strict=True):
            yield setting, {"loss": loss.tolist(), "accuracy": accuracy.tolist()}


STUDIES = {
    "logistic": Study(
        name="logistic",
        task="logistic",
        learners=20,
        clients=4000,
        searched=4000,
        epsilons=(2.0, 0.5),
        releases=(1000, 200, 50, 20),
        steps=(4, 1),
        clip_norms=(0.1, 0.2, 0.4, 1.0),
        averaging=(None, 1.0, 3.0, 8.0),
        moves=tuple(0.025 * 2**k for k in range(11)),
        decays=(0.0, 0.3),
        farther=(51.2, 102.4),
        twice=True,
        measures=("loss", "accuracy"),
    ),
    "edge": Study(
        name="edge",
        task="edge_features",
        learners=10,
        clients=6000,
        searched=5000,
        epsilons=(2.0,),
        releases=(600, 300, 100, 60, 20),
        steps=(1,),
        clip_norms=(0.03, 0.1, 0.3),
        averaging=(None, 3.0, 8.0),
        moves=(1.0, 3.0, 10.0, 30.0, 100.0, 300.0),
        measures=("accuracy",),
        floats_a_client=10_000,
        memory_mib=60_000,
    ),
    "cnn": Study(
        name="cnn",
        task="cnn",
        learners=10,
        clients=6000,
        searched=5000,
        epsilons=(2.0,),
        releases=(100, 50),
        steps=(1,),
        clip_norms=(0.1, 0.3),
        averaging=(3.0, 8.0),
        moves=(0.1, 0.3, 1.0, 3.0),
        mechanisms=("independent", "toeplitz_normalised", "optimal", "matched"),
        measures=("accuracy",),
        floats_a_client=200_000,
        memory_mib=60_000,
    ),
    "edge_near": Study(
        name="edge_near",
        task="edge_features",
        learners=10,
        clients=6000,
        searched=5000,
        epsilons=(2.0,),
        releases=(100, 60, 40),
        steps=(1,),
        clip_norms=(0.003, 0.01, 0.03, 0.06),
        averaging=(3.0, 8.0, 15.0),
        moves=(30.0, 100.0, 300.0),
        decays=(0.0, 0.3),
        farther=(1000.0,),
        twice=True,
        mechanisms=("independent", "toeplitz_normalised", "buffered", "optimal"),
        measures=("accuracy",),
        floats_a_client=10_000,
        memory_mib=60_000,
    ),
    "cnn_near": Study(
        name="cnn_near",
        task="cnn",
        learners=10,
        clients=6000,
        searched=5000,
        epsilons=(2.0,),
        releases=(100, 200),
        steps=(1,),
        clip_norms=(0.03, 0.1),
        averaging=(8.0, 15.0),
        moves=(1.0, 3.0, 10.0),
        decays=(0.0, 0.3),
        mechanisms=("independent", "toeplitz_normalised", "optimal"),
        measures=("accuracy",),
        floats_a_client=200_000,
        memory_mib=60_000,
    ),
}

Row = dict[str, Any]


def rows_of(study: Study, settings: list[Setting], seeds: Sequence[int], *, search: bool) -> Iterator[list[Row]]:
    """Every setting measured, in batches that fit."""
    several = study.together(settings[0].releases, len(seeds))
    for first in range(0, len(settings), several):
        rows = []
        for setting, found in study.measured(settings[first : first + several], seeds, search=search):
            row: Row = asdict(setting)
            for measure, values in found.items():
                row[measure] = float(np.mean(values))
                row[f"{measure} of each seed"] = " ".join(f"{v:.4f}" for v in values)
            rows.append(row)
        yield rows


def best_of(study: Study, rows: Iterable[Row], kept: int = 1) -> list[tuple[str, str, Row]]:
    """(measure, "equal" or "free" releases, row) for each mechanism and budget, best first."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        for measure in study.measures:
            if not math.isfinite(row[measure]):
                continue
            for free in ("equal", "free"):
                if free == "free" or row["releases"] == study.releases[0]:
                    key = (measure, free, row["mechanism"], row["epsilon"])
                    groups.setdefault(key, []).append(row)
    found = []
    for (measure, free, *_), group in groups.items():
        group.sort(key=lambda row: row[measure], reverse=measure == "accuracy")
        found += [(measure, free, row) for row in group[:kept]]
    return found


def again(study: Study, rows: list[Row], seeds: Sequence[int], *, search: bool) -> list[Row]:
    """The settings of these rows, each once, on other seeds."""
    settings = list(dict.fromkeys(map(setting_of, rows)))
    found: list[Row] = []
    for releases in study.releases:
        these = [s for s in settings if s.releases == releases]
        if these:
            found += itertools.chain(*rows_of(study, these, seeds, search=search))
    return found


def write(path: Path, rows: list[Row]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def setting_of(row: Row) -> Setting:
    return Setting(**{name: row[name] for name in Setting.__dataclass_fields__})


def read(path: Path) -> list[Row]:
    """What an earlier start has found, with its numbers as numbers."""
    if not path.exists():
        return []
    rows: list[Row] = []
    with path.open(newline="") as file:
        for cells in csv.DictReader(file):
            row: Row = dict(cells)
            for name in ("epsilon", "clip_norm", "decay", "move", "loss", "accuracy", "seconds"):
                row[name] = float(cells[name])
            row["averaging"] = float(cells["averaging"]) if cells["averaging"] else None
            rows.append(row | {"releases": int(cells["releases"]), "steps": int(cells["steps"])})
    return rows


def run_study(study: Study, out: Path) -> None:
    searched = out / f"{study.name}-search.csv"
    tried = read(searched)
    known = {setting_of(row) for row in tried}
    for releases in study.releases:
        open_ = [s for s in study.grid(releases) if s not in known]
        print(f"{study.name}: {len(open_)} settings at {releases} releases", flush=True)
        before = time.monotonic()
        for found in rows_of(study, open_, SEARCH_SEEDS, search=True) if open_ else ():
            took, before = time.monotonic() - before, time.monotonic()
            tried += [row | {"seconds": took / len(found)} for row in found]
            write(searched, tried)
    cost = sum(row["seconds"] for row in tried)
    judged = tried
    if study.twice:
        before = time.monotonic()
        finalists = [row for _, _, row in best_of(study, tried, FINALISTS)]
        judged = again(study, finalists, SECOND_SEEDS, search=True)
        write(out / f"{study.name}-finalists.csv", judged)
        cost += time.monotonic() - before
    chosen = best_of(study, judged)
    finals = [
        {"best by": measure, "releases are": free, "in search": other[measure]} | row
        for row in again(study, [row for _, _, row in chosen], FIGURE_SEEDS, search=False)
        for measure, free, other in chosen
        if setting_of(row) == setting_of(other)
    ]
    write(out / f"{study.name}.csv", finals)
    print(f"{study.name}: {len(tried)} settings in {cost:.0f} s", flush=True)
    for row in sorted(finals, key=lambda r: (r["best by"], r["releases are"], -r["epsilon"])):
        print(
            f"{row['best by']:9}{row['releases are']:6}{row['epsilon']:4g} {row['mechanism']:20}"
            f"loss {row['loss']:.4f} accuracy {row['accuracy']:.4f}  releases {row['releases']} "
            f"steps {row['steps']} clip {row['clip_norm']} averaging {row['averaging']} "
            f"decay {row['decay']:g} move {row['move']:g}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=STUDIES, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.study:
        run_study(STUDIES[name], arguments.out)


if __name__ == "__main__":
    main()
