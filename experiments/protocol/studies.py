"""The comparisons: what is learned from whom, what is searched first, and on whom it is reported."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from experiments.protocol.measure import ANY, NO_NOISE, World
from experiments.protocol.search import Arm
from experiments.protocol.settings import NEWEST, POWER_3, Limits, Point

from veilstream.plans.clients import stream_of
from veilstream.streams.mnist import load_mnist, mnist_stream
from veilstream.streams.pool import PoolStream
from veilstream.streams.splits import PaperSplit

FOLDER = Path(__file__).parent.parent
SEARCH_SEEDS = (1000, 1001, 1002, 1003)
REPORT_SEEDS = tuple(range(500, 510))
MECHANISMS = ("independent", "tree", "buffered", "optimal")


@dataclass(frozen=True)
class Study:
    """One comparison."""

    searched: Callable[[], World]
    reported: Callable[[], World]
    epsilons: tuple[float, ...]
    coarse: tuple[Point, ...]
    measure: str = "loss"
    """Of `Figures`, by which settings are chosen."""
    mechanisms: tuple[str, ...] = MECHANISMS
    held: tuple[tuple[tuple[str, int], ...], ...] = ((),)
    """Dimensions held where they are; each method is searched once for every entry."""
    gain: float = 1e-3
    """Smaller relative gains are not followed."""
    places: int = 32
    """Settings of each mechanism that run together; for memory."""
    seeds_together: int = 10
    limits: Limits = field(default=Limits(4000))

    def arms(self) -> list[Arm]:
        """Every method at every budget."""
        found = [Arm(NO_NOISE, 0.0, held) for held in self.held]
        for held, epsilon, mechanism in itertools.product(self.held, self.epsilons, self.mechanisms):
            found.append(Arm(mechanism, epsilon, held))
        return found


def _coarse(clients: tuple[int, ...], reach: tuple[int, ...], clip: tuple[int, ...], published: tuple[int, ...]) -> Any:
    return tuple(Point(*each) for each in itertools.product(clients, reach, clip, published))


def _stream_world(name: str, part: str, seeds: tuple[int, ...], separation: int | None) -> World:
    tables = tomllib.loads((FOLDER / f"streams_{name}.toml").read_text().split("[[methods]]")[0])
    learning = tables["learning"]
    total = learning["rounds"] * learning["clients_per_step"]
    tables["data"]["source"] += part
    world = World(tables, total, seeds, separation=separation)
    if separation is not None:
        return world
    finest = world.plan((1, 1), [ANY])
    return World(tables, total, seeds, stream_of(finest))


def _stream(name: str, total: int, separation: int | None = None, least: int = 1) -> Study:
    return Study(
        searched=partial(_stream_world, name, "/tuning", SEARCH_SEEDS, separation),
        reported=partial(_stream_world, name, "", REPORT_SEEDS, separation),
        epsilons=(0.5, 2.0, 8.0),
        coarse=_coarse((3, 5) if separation else (4, 6, 8), (5, 7, 9, 11, 13), (-4, -1), (POWER_3, NEWEST, NEWEST + 4)),
        limits=Limits(total, separation or 10**9, least),
    )


def _synthetic_world(data: dict[str, float], seeds: tuple[int, ...]) -> World:
    tables = {
        "learning": {"learners": 20, "task": "logistic"},
        "data": {"kind": "synthetic", "dim": 100, "held_out": 2000} | data,
        "privacy": {"epsilon": 2.0, "delta": 1e-3},
    }
    return World(tables, 4000, seeds)


def _synthetic(held: tuple[tuple[tuple[str, int], ...], ...] = ((),), **data: float) -> Study:
    return Study(
        searched=partial(_synthetic_world, data, SEARCH_SEEDS),
        reported=partial(_synthetic_world, data, REPORT_SEEDS),
        epsilons=(0.5, 2.0),
        coarse=_coarse((2, 4, 6, 8), (6, 8, 10, 12, 14), (-4, -1), (POWER_3, NEWEST)),
        held=held,
        limits=Limits(4000),
    )


def _mnist_world(task: str, seeds: tuple[int, ...], *, search: bool) -> World:
    tables = {
        "learning": {"learners": 10, "task": task},
        "data": {"kind": "mnist", "held_out": 10_000},
        "privacy": {"epsilon": 2.0, "delta": 1e-3},
    }
    whole = mnist_stream(load_mnist(), learners=10, rounds=6000, per_round=1)
    return World(tables, 5000 if search else 6000, seeds, _validation() if search else whole)


@cache
def _validation() -> PoolStream:
    """50,000 training images as clients, the other 10,000 held out: the same for every setting."""
    mnist = load_mnist()
    mixed = np.random.default_rng(50_000).permutation(60_000)
    labels = mnist.train_labels.astype(np.int32)
    clients, held = mixed[:50_000], mixed[50_000:]
    return PoolStream(
        learners=10,
        rounds=5000,
        per_round=1,
        features=mnist.train_images[clients],
        targets=labels[clients],
        held_features=mnist.train_images[held],
        held_targets=labels[held],
        split=PaperSplit(),
        provenance="MNIST training images, 10,000 of them held out",
    )


def _mnist(task: str, search_seeds: tuple[int, ...], **more: Any) -> Study:
    return Study(
        searched=partial(_mnist_world, task, search_seeds, search=True),
        reported=partial(_mnist_world, task, REPORT_SEEDS, search=False),
        measure="held_out",
        limits=Limits(5000),
        **more,
    )


_SPREADS = {
    f"a{alpha:g}-s{spread:g}-c{shared:g}": {"alpha": alpha, "beta": alpha, "spread": spread, "shared": shared}
    for alpha, spread, shared in (
        (0.1, 1.0, 1.0),
        (0.1, 4.0, 0.0),
        (0.1, 4.0, 0.5),
        (0.1, 4.0, 1.0),
        (0.1, 16.0, 0.0),
        (0.1, 16.0, 0.5),
        (0.1, 16.0, 1.0),
        (1.0, 1.0, 0.0),
        (1.0, 16.0, 0.5),
        (1.0, 16.0, 1.0),
    )
}
STUDIES: dict[str, Study] = {
    "electricity": _stream("electricity", 22_656, least=2),
    "covertype": _stream("covertype", 14_496),
    "flights": _stream("flights", 8_496),
    "health": _stream("health", 1_108, separation=56),
    "logistic": _synthetic(((), (("clients", 2),)), alpha=0.1, beta=0.1),
    **{f"sweep-{name}": _synthetic(**data) for name, data in _SPREADS.items()},
    "edge": _mnist(
        "edge_features",
        (1000, 1001, 1002),
        epsilons=(0.5, 2.0),
        coarse=_coarse((5, 7), (9, 11, 13, 15), (-7, -4), (POWER_3, POWER_3 + 1)),
        gain=0.01,
        places=6,
    ),
    "cnn": _mnist(
        "cnn",
        (1000, 1001),
        epsilons=(2.0,),
        coarse=_coarse((6,), (5, 7, 9), (-4,), (POWER_3, POWER_3 + 1)),
        mechanisms=("independent", "tree", "buffered"),
        gain=0.02,
        places=2,
        seeds_together=5,
    ),
}
"""`clients` 2 is four clients of a learner in a release: a thousand releases, as in the paper's figure."""
