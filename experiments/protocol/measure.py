"""Runs settings in the simulator that `veilstream run` uses: those of one shape together, compiled once."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from experiments.protocol.search import Arm
from experiments.protocol.settings import Point
from numpy.typing import NDArray

from veilstream.plans.clients import stream_of
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import Prepared, prepare
from veilstream.simulation.engine import Simulation
from veilstream.streams.pool import PoolStream, Stream
from veilstream.streams.synthetic import SyntheticStream

NO_NOISE = "none"
ANY = {"name": "any", "kind": "noise-free", "step_size": 1.0}
"""A method of a plan that only says where clients come from."""
Floats = NDArray[np.float64]
WINDOWS = 24


def windows(by_round: Floats) -> Floats:
    """Means over equal parts of the last axis."""
    rounds = by_round.shape[-1]
    ends = np.linspace(0, rounds, min(WINDOWS, rounds) + 1).astype(int)
    parts = [by_round[..., a:b].mean(axis=-1) for a, b in itertools.pairwise(ends)]
    return np.stack(parts, axis=-1, dtype=np.float64)


@dataclass(frozen=True)
class Figures:
    """Of one setting, seed by seed."""

    loss: Floats
    accuracy: Floats
    """Prequential, both: of the published model, on the clients met next."""
    held_out: Floats
    """Accuracy of the last published model on held-out clients; NaN where there are none."""
    curve: Floats
    """`accuracy` of up to `WINDOWS` equal parts of the run, (seeds, parts)."""


@dataclass(frozen=True)
class World:
    """A task and its clients, for search or for report."""

    tables: dict[str, Any]
    """Of a plan, but for methods, rounds and clients."""
    total: int
    """Clients of a learner."""
    seeds: tuple[int, ...]
    stream: Stream | None = None
    """Clients of another choice than the plan's."""
    separation: int | None = None
    """Records of a learner between two visits of one person, where people return."""

    @property
    def learners(self) -> int:
        """N."""
        return int(self.tables["learning"]["learners"])

    def plan(self, shape: tuple[int, int], methods: Sequence[dict[str, Any]]) -> Plan:
        """Methods of one shape as a plan."""
        clients, steps = shape
        rounds, each = self.total // clients, clients // steps
        made = {"rounds": rounds, "local_steps": steps, "clients_per_step": each}
        privacy = dict(self.tables["privacy"])
        if self.separation is not None:
            apart = self.separation // each
            visits = min(privacy["participations"], -(-rounds * steps // apart))
            privacy |= {"min_separation": apart, "participations": visits}
        run = {"evaluate_every": rounds, "regret": False, "memory_mib": 40_000}
        return Plan(
            **self.tables | {"learning": self.tables["learning"] | made, "privacy": privacy, "run": run},
            methods=list(methods),
        )


@dataclass
class Bench:
    """Measures settings of a world: one compiled simulation for each shape, with places for every mechanism."""

    world: World
    search_total: int
    """Clients of a learner in the search; steps are chosen for it."""
    mechanisms: Sequence[str]
    places: int
    """Settings of each mechanism that run together."""
    _simulations: dict[tuple[int, int], Simulation] = field(default_factory=dict)
    _noise: dict[tuple[Any, ...], Prepared] = field(default_factory=dict)
    _streams: dict[int, Stream] = field(default_factory=dict)
    runs: int = 0
    """Settings times seeds so far."""

    def __call__(self, asked: Sequence[tuple[Arm, Point]]) -> Iterable[Figures]:
        """Figures in the order asked for."""
        found: dict[tuple[Arm, Point], Figures] = {}
        shapes: dict[tuple[int, int], list[tuple[Arm, Point]]] = {}
        for arm, point in asked:
            shapes.setdefault(point.shape, []).append((arm, point))
        for shape, these in sorted(shapes.items()):
            found |= self._of_shape(shape, these)
        self.runs += len(asked) * len(self.world.seeds)
        return [found[pair] for pair in asked]

    def close(self) -> None:
        """Let go of compiled simulations and their noise."""
        for simulation in self._simulations.values():
            simulation.close()
        self._simulations.clear()

    def _of_shape(self, shape: tuple[int, int], asked: list[tuple[Arm, Point]]) -> dict[tuple[Arm, Point], Figures]:
        waiting: dict[str, list[tuple[Arm, Point]]] = {m: [] for m in self.mechanisms}
        for arm, point in asked:
            if arm.mechanism != NO_NOISE:
                waiting[arm.mechanism].append((arm, point))
        for arm, point in asked:  # without noise: any mechanism will do, at standard deviation zero
            if arm.mechanism == NO_NOISE:
                min(waiting.values(), key=len).append((arm, point))
        found: dict[tuple[Arm, Point], Figures] = {}
        while any(waiting.values()):
            batch, places = [], []
            for mechanism, queue in waiting.items():
                now, waiting[mechanism] = queue[: self.places], queue[self.places :]
                filled = now or [(Arm(NO_NOISE, 0.0), asked[0][1])]
                filled = filled + [filled[-1]] * (self.places - len(filled))
                batch += [self._prepared(shape, mechanism, *pair) for pair in filled]
                places += [*now, *[None] * (self.places - len(now))]
            for place, figures in zip(places, self._run(shape, batch), strict=True):
                found |= {} if place is None else {place: figures}
        return found

    def _prepared(self, shape: tuple[int, int], mechanism: str, arm: Arm, point: Point) -> Prepared:
        entry = point.method(self.world.learners, self.search_total)
        private = arm.mechanism != NO_NOISE
        key = (shape, mechanism, arm.epsilon if private else 1.0)
        if key not in self._noise:
            unit = {"name": "unit", "mechanism": mechanism, "epsilon": key[2], "clip_norm": 1.0, "step_size": 1.0}
            unit["clients_per_step"] = entry["clients_per_step"]
            plan = self.world.plan(shape, [unit])
            self._noise[key] = prepare(plan, plan.methods[0])
        unit_noise = self._noise[key]
        method = dataclasses.replace(unit_noise.plan, **entry)
        return dataclasses.replace(
            unit_noise,
            plan=method,
            rule=dataclasses.replace(unit_noise.rule, clip_norm=method.clip_norm),
            noise_std=unit_noise.noise_std * entry["clip_norm"] if private else 0.0,
            guarantee=None,  # of the unit; no method is recommended here
        )

    def _run(self, shape: tuple[int, int], batch: list[Prepared]) -> Iterable[Figures]:
        simulation = self._simulations.get(shape)
        if simulation is None:
            plan = self.world.plan(shape, [ANY])
            simulation = Simulation(plan, batch, self.world.seeds, stream=self._stream(plan))
            self._simulations[shape] = simulation
        else:
            simulation.again(batch)
        while not simulation.done:
            simulation.advance()
        loss, accuracy = (simulation.history[name].mean(axis=2, dtype=np.float64) for name in ("loss", "accuracy"))
        loss[~np.isfinite(loss)] = math.inf  # diverged: every round has clients
        measured = simulation.held_out_accuracy[:, :, -1].astype(np.float64)
        if simulation.plan.data.kind == "table":
            measured[...] = math.nan  # nobody is held out
        for place, held_out in enumerate(measured):
            yield Figures(loss[place], accuracy[place], held_out, windows(simulation.history["accuracy"][place]))

    def _stream(self, plan: Plan) -> Stream:
        given = self.world.stream
        learning = plan.learning
        size = {"rounds": learning.rounds, "per_round": learning.local_steps * learning.clients_per_step}
        if isinstance(given, PoolStream):
            return dataclasses.replace(given, **size)
        made = stream_of(plan)
        if isinstance(made, SyntheticStream):
            return Remembered(made)
        return made


class Remembered:
    """A stream whose rounds are made once: a search asks for them many times."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._rounds: dict[tuple[int, int], Any] = {}

    @property
    def provenance(self) -> str:
        """The stream's."""
        return self._stream.provenance

    def round(self, seed: int, round_: int) -> Any:
        """The stream's, made once."""
        key = seed, round_
        if key not in self._rounds:
            self._rounds[key] = self._stream.round(seed, round_)
        return self._rounds[key]

    def held_out(self, seed: int, count: int, round_: int) -> Any:
        """The stream's."""
        return self._stream.held_out(seed, count, round_)
