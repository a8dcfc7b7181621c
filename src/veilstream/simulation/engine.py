"""All seeds, learners and methods at once: blocks of rounds, with their history and checkpoints.

The plan's budget (`run.memory_mib`) bounds memory, whatever the horizon. Block length and other
seeds beside a seed change its numbers by float32 rounding at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.learning.algorithm import LARGE, step_size
from veilstream.learning.client_metrics import check_metrics
from veilstream.learning.tasks import Sample, Task, TaskDetails
from veilstream.mechanisms import Factorization
from veilstream.plans.clients import stream_of
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import Prepared, main_method
from veilstream.plans.tasks import task_of
from veilstream.simulation.attendance import Attendance
from veilstream.simulation.block import METRICS, Block, ModelArrays, Schedule
from veilstream.simulation.held_out import HeldOut
from veilstream.simulation.memory import GroupSize, MemoryPlan, memory_plan
from veilstream.simulation.noise_source import DeviceNoise, HostNoise, NoisePlace, OwnPaceNoise, noise_place_of
from veilstream.simulation.records import ExpectedRecords, clients_of
from veilstream.simulation.run_checkpoint import BatchState
from veilstream.simulation.secret_order import SecretOrder, most_in_a_step
from veilstream.simulation.telemetry import SimulatedTelemetry
from veilstream.streams.pool import PoolStream, Stream

Float32s = NDArray[np.float32]

_IN_FLIGHT = 2  # blocks handed to the device before the oldest must be done


@dataclass(frozen=True)
class Progress:
    """Where a run stands."""

    round: int
    accuracy: float | None  # Prequential accuracy of the main method over the last block; None if not yet known


def evaluated_rounds(plan: Plan) -> list[int]:
    """Rounds before which held-out accuracy is measured, and the end."""
    R = plan.learning.rounds
    return [r for r in range(R + 1) if r % plan.run.evaluate_every == 0 or r == R]


def _by_shape(prepared: Sequence[Prepared]) -> list[list[int]]:
    shapes: dict[object, list[int]] = {}
    for index, p in enumerate(prepared):
        shapes.setdefault(p.shape, []).append(index)
    return list(shapes.values())


def _mechanisms(prepared: Sequence[Prepared]) -> tuple[list[Factorization], tuple[int, ...]]:
    """The different mechanisms of some methods, and which one each method uses (0 for none)."""
    known: dict[object, int] = {}
    found: list[Factorization] = []
    used = []
    for p in prepared:
        if p.factorization is None:
            used.append(0)
            continue
        if p.recipe not in known:
            known[p.recipe] = len(found)
            found.append(p.factorization)
        used.append(known[p.recipe])
    return found, tuple(used)


def memory_of(
    plan: Plan, prepared: Sequence[Prepared], seeds: int, task: Task, stream: Stream, processes: int = 1
) -> MemoryPlan:
    """Seeds and rounds at once that fit the plan's budget, in each process."""
    groups = []
    for indices in _by_shape(prepared):
        members = [prepared[i] for i in indices]
        states = tuple(m.program.state_size for m in _mechanisms(members)[0])
        steps, clients, *_ = members[0].shape
        if plan.order == "secret":
            clients = most_in_a_step(clients)
        groups.append(GroupSize(len(members), steps, clients, states))
    if isinstance(stream, PoolStream):
        record = stream.features.shape[1:]
    else:
        record = stream.round(plan.run.first_seed, 0).features.shape[2:]
    return memory_plan(
        budget_bytes=plan.run.memory_mib * 2**20,
        groups=groups,
        seeds=seeds,
        learners=plan.learning.learners,
        dim=task.dim + (len(plan.telemetry.metrics) if plan.telemetry else 0),
        rounds=plan.learning.rounds,
        evaluate_every=plan.run.evaluate_every,
        workspace=TaskDetails.of(task).workspace,
        feature_floats=int(np.prod(record)),
        pooled=isinstance(stream, PoolStream),
        on_host=noise_place_of(plan) == "host",
        processes=processes,
    )


@dataclass
class _Group:
    methods: list[int]
    prepared: list[Prepared]
    block: Block
    noise: HostNoise | DeviceNoise
    clip_norm: Float32s
    noise_std: Float32s
    run_block: Callable[..., Any] = field(repr=False)

    @classmethod
    def of(cls, methods: list[int], members: list[Prepared], block: Block, noise: Any, run_block: Any) -> _Group:
        empty = np.empty(0, np.float32)
        group = cls(methods, members, block, noise, empty, empty, run_block)
        group.take(members)
        return group

    def take(self, members: list[Prepared]) -> None:
        """The numbers of these methods, which compiled code is given."""
        self.prepared = members
        self.clip_norm = np.array([p.rule.clip_norm for p in members], np.float32)
        self.noise_std = np.array([p.noise_std for p in members], np.float32)


@dataclass(frozen=True)
class _Position:
    """Round, models and noise, replaced in one assignment, so that an interrupt finds all or none."""

    round: int
    models: tuple[ModelArrays, ...]
    noise: tuple[Any, ...]
    unread: tuple[Any, ...]  # Blocks given to the device whose measurements have not been read


class Simulation:
    """A plan in motion: `advance` runs the next block of rounds."""

    def __init__(
        self,
        plan: Plan,
        prepared: Sequence[Prepared],
        seeds: Sequence[int],
        *,
        task: Task | None = None,
        stream: Stream | None = None,
        block_rounds: int | None = None,
        start: Float32s | None = None,
    ) -> None:
        """``start`` is the first model of every method and seed; by default the task's own."""
        self.plan, self._x0 = plan, start
        self.task = task_of(plan) if task is None else task
        self.stream = stream_of(plan) if stream is None else stream
        self.seeds = tuple(seeds)
        self._expected = ExpectedRecords.of(plan, self.task)
        if isinstance(self.stream, PoolStream):
            self._expected.check_pool(self.stream, plan.learning.rounds)
        self._prepared = list(prepared)
        self._main = main_method(self._prepared)
        R = plan.learning.rounds
        if block_rounds is None:
            fits = memory_of(plan, prepared, len(self.seeds), self.task, self.stream)
            block_rounds = fits.rounds_per_block
        self.block_rounds = block_rounds
        self.noise_place: NoisePlace = noise_place_of(plan)
        self._attendance = Attendance.of(plan)
        self.telemetry = SimulatedTelemetry.of(plan, self._prepared, self.seeds)
        """Telemetry of each method and seed; None if the plan has none."""
        if self.telemetry is not None:
            check_metrics(self.telemetry.telemetry, self.task)
        shape = (len(self._prepared), len(self.seeds), R)
        self.history: dict[str, Float32s] = {m: np.full(shape, np.nan, np.float32) for m in METRICS}
        self.evaluated = evaluated_rounds(plan)
        self.held_out_accuracy = np.full((*shape[:2], len(self.evaluated)), np.nan, np.float32)
        self._held_out = HeldOut(plan, self.task, self.stream, self.seeds, self._expected)
        self._pool = self._device_pool()
        secretly = plan.order == "secret"
        self._secret = SecretOrder(plan, self.stream, self.seeds, self._expected) if secretly else None
        self._groups = [self._group(indices) for indices in _by_shape(self._prepared)]
        self._position = self._start()

    def _device_pool(self) -> Sample | None:
        import jax.numpy as jnp

        if not isinstance(self.stream, PoolStream):
            return None
        targets = self.stream.targets
        whole = np.issubdtype(targets.dtype, np.integer)
        return Sample(jnp.asarray(self.stream.features), jnp.asarray(targets, jnp.int32 if whole else jnp.float32))

    def _group(self, indices: list[int]) -> _Group:
        import jax

        members = [self._prepared[i] for i in indices]
        steps, clients, unit_steps, gamma, forgets = members[0].shape
        together = None
        if self._secret is not None:
            clients, together = self._secret.places, float(clients)
        learners = self.plan.learning.learners
        mechanisms, used = _mechanisms(members)
        block = Block(
            task=self.task,
            steps=steps,
            clients=clients,
            unit_steps=unit_steps,
            gamma=gamma,
            projection_radius=members[0].rule.projection_radius,
            learners=learners,
            twin=_twins(members),
            mechanism_of=used,
            keep=1 if self._rounds_apart else -(-self.block_rounds // self.plan.run.evaluate_every),
            forgetting=tuple(p.plan.forgetting for p in members) if forgets else (),
            weights=members[0].rule.weights,
            telemetry=tuple(t for p in members if (t := self.plan.telemetry_of(p.plan))),
            together=together,
        )
        noise: HostNoise | DeviceNoise
        run_block: Any = block.run
        if self.noise_place == "host":
            noise = self._host_noise(members, block)
        else:
            noise = DeviceNoise(mechanisms, self.seeds, **self._noise_size(block))
            run_block = _with_device_noise(block, noise)
        return _Group.of(indices, members, block, noise, jax.jit(run_block))

    def _noise_size(self, block: Block) -> dict[str, int]:
        width = self.plan.learning.learners * (self.task.dim + block.telemetry_count)
        return {"steps": block.steps, "dim": width, "rounds": self.block_rounds}

    def _host_noise(self, members: Sequence[Prepared], block: Block) -> HostNoise:
        mechanisms, size = _mechanisms(members)[0], self._noise_size(block)
        if self._attendance is not None:
            one_clock = self.plan.trust is not None
            return OwnPaceNoise(mechanisms, self.seeds, self._attendance, **size, one_clock=one_clock)
        return HostNoise(mechanisms, self.seeds, **size)

    def again(self, prepared: Sequence[Prepared]) -> None:
        """Start over with other step sizes, clip norms, budgets or averages, without compiling again.

        The new methods must have the old ones' shapes and recipes of noise, one by one.
        """
        alike = len(prepared) == len(self._prepared) and all(
            new.shape == old.shape and new.recipe == old.recipe
            for new, old in zip(prepared, self._prepared, strict=True)
        )
        if not alike:
            rule = "methods of the same shapes and recipes, in the same order"
            raise InputError("prepared", [p.plan.name for p in prepared], rule, "make another Simulation")
        self.close()
        self._prepared, self._main = list(prepared), main_method(prepared)
        for group in self._groups:
            members = [self._prepared[i] for i in group.methods]
            if _twins(members) != group.block.twin:
                rule = "noise-free methods whose steps are the same methods' as before"
                raise InputError("prepared", [p.plan.name for p in members], rule, "make another Simulation")
            group.take(members)
            if isinstance(group.noise, HostNoise):
                group.noise = self._host_noise(members, group.block)
        for figures in (*self.history.values(), self.held_out_accuracy):
            figures[...] = np.nan
        self._position = self._start()

    def _start(self) -> _Position:
        import jax.numpy as jnp

        x0 = self._x0
        each = [self.task.init(seed) if x0 is None else jnp.asarray(x0) for seed in self.seeds]
        drawn = jnp.stack(each)
        models, noise = [], []
        for group in self._groups:
            x = jnp.broadcast_to(drawn, (len(group.methods), *drawn.shape))
            models.append(ModelArrays(x, x, x if group.block.forgetting else x[..., :0]))
            source = group.noise
            noise.append(source.initial_state() if isinstance(source, DeviceNoise) else ())
        return _Position(0, tuple(models), tuple(noise), ())

    @property
    def round(self) -> int:
        """Rounds run so far."""
        return self._position.round

    @property
    def measured(self) -> int:
        """Rounds whose measurements have been read; the device may be ahead."""
        unread = self._position.unread
        return unread[0][0] if unread else self.round

    @property
    def done(self) -> bool:
        """Whether every round has been run and read."""
        return self.round >= self.plan.learning.rounds and not self._position.unread

    def advance(self) -> Progress:
        """Run the next block of rounds; the device may lag behind by a block or two until the run ends."""
        import jax

        here, R = self._position, self.plan.learning.rounds
        first = here.round
        count = min(self.block_rounds, R - first)
        clients = self._clients(first, count)
        with jax.default_matmul_precision("highest"):
            results = [self._advance_group(index, clients, first, count) for index in range(len(self._groups))]
        models, noise, unread = zip(*results, strict=True)
        self._position = _Position(first + count, models, noise, (*here.unread, (first, unread)))
        leave = 0 if first + count == R else _IN_FLIGHT
        return Progress(first + count, self._catch_up(leave))

    def _clients(self, first: int, count: int) -> Any:
        if self._secret is not None:
            return self._secret.clients(first, count)
        if not isinstance(self.stream, PoolStream):
            return clients_of(self.stream, self.seeds, first, count, self._expected)
        each = [self.stream.indices(seed, first, count) for seed in self.seeds]
        return np.stack(each, axis=1)

    def _advance_group(self, index: int, clients: Any, first: int, count: int) -> Any:
        group, here = self._groups[index], self._position
        x = here.models[index]
        schedule = self._schedule(group, first, count)
        fixed = (schedule, group.clip_norm, group.noise_std, self._pool)
        if isinstance(group.noise, HostNoise):
            following = min(self.block_rounds, self.plan.learning.rounds - first - count)
            made = group.noise.take(first, count, following)
            if self._rounds_apart:
                return self._one_by_one(group, x, clients, made, fixed)
            models, measured, kept = group.run_block(x, clients, made, *fixed)
            return models, (), (measured, kept)
        number = first // self.block_rounds
        state, models, measured, kept = group.run_block(here.noise[index], number, x, clients, *fixed)
        return models, state, (measured, kept)

    @property
    def _rounds_apart(self) -> bool:
        """Whether rounds are separate calls: in a loop a CPU uses one core, which costs more for large models."""
        return self.noise_place == "host" and self.task.dim >= LARGE

    def _one_by_one(self, group: _Group, x: Any, clients: Any, noise: Any, fixed: Any) -> Any:
        import jax

        schedule, *constants = fixed
        measured, kept = [], []
        for r in range(len(schedule.slot)):
            met, made, now = jax.tree.map(lambda a, r=r: a[r : r + 1], (clients, noise, schedule))
            looked = now.slot[0] >= 0
            x, figures, published = group.run_block(
                x, met, made, now._replace(slot=np.minimum(now.slot, 0)), *constants
            )
            measured.append(figures)
            kept += [published[0]] if looked else []
        joined = {m: _Joined([figures[m] for figures in measured]) for m in measured[0]}
        return x, (), (joined, kept)

    def _schedule(self, group: _Group, first: int, count: int) -> Schedule:
        rounds = np.arange(first, first + count, dtype=np.float64)
        local, effective, weights = [], [], []
        for p in group.prepared:
            size = step_size(p.plan.local_step_size, p.plan.step_decay, rounds)
            local.append(size)
            effective.append(size * (p.plan.server_step_size * p.steps))
            weights.append(np.broadcast_to(p.plan.blend(rounds), count))
        slots = np.full(count, -1, np.int32)
        looked = [r - first for r in self.evaluated if first <= r < first + count]
        slots[looked] = np.arange(len(looked))
        eta, effective_eta, blends = (np.array(values, np.float32).T for values in (local, effective, weights))
        there = self._attendance
        counted = None
        if there is not None:
            counted = there.weights(self.seeds, first, count)
            if any(p.plan.step_decay for p in group.prepared):
                taken = there.rounds_taken(self.seeds, first, count).astype(np.float64)
                own = [step_size(p.plan.local_step_size, p.plan.step_decay, taken) for p in group.prepared]
                eta = np.stack(own, axis=1).astype(np.float32)
        return Schedule(eta, effective_eta, blends, slots, counted)

    def _catch_up(self, leave: int) -> float | None:
        """Read the measurements of all blocks but the last ``leave``; returns the accuracy of the last one read."""
        accuracy = None
        while len(self._position.unread) > leave:
            here = self._position
            (first, blocks), *later = here.unread
            for group, (measured, kept) in zip(self._groups, blocks, strict=True):
                self._record(group, measured, first)
                self._evaluate(group, kept, first, later[0][0] if later else here.round)
            if self.task.classifies:
                main = self._main
                until = later[0][0] if later else here.round
                span = self.history["accuracy"][main, :, first:until]
                met = span[~np.isnan(span)]  # none where no client was there
                accuracy = float(met.mean()) if met.size else None
            if here.round == self.plan.learning.rounds and not later:
                for group, models in zip(self._groups, here.models, strict=True):
                    self._measure_held_out(group, models.average, len(self.evaluated) - 1)
            self._position = _Position(here.round, here.models, here.noise, tuple(later))
        return accuracy

    def _record(self, group: _Group, measured: dict[str, Any], first: int) -> None:
        for name in METRICS:
            values = np.moveaxis(np.asarray(measured[name]), 0, -1)
            span = slice(first, first + values.shape[-1])
            self.history[name][group.methods, :, span] = values
        if self.telemetry is not None:
            self.telemetry.record(group.methods, first, np.asarray(measured["telemetry"]))

    def _evaluate(self, group: _Group, kept: Any, first: int, until: int) -> None:
        """Held-out accuracy of the models published before the rounds of a block that are looked at."""
        columns = [column for column, r in enumerate(self.evaluated) if first <= r < until]
        for place, column in enumerate(columns):
            self._measure_held_out(group, kept[place], column)

    def _measure_held_out(self, group: _Group, published: Any, column: int) -> None:
        if self.task.classifies:
            accuracy = self._held_out.accuracy(published, self.evaluated[column])
            self.held_out_accuracy[group.methods, :, column] = accuracy

    def models(self) -> Float32s:
        """The models published last, (methods, seeds, d)."""
        shape = (len(self._prepared), len(self.seeds), self.task.dim)
        models: Float32s = np.empty(shape, np.float32)
        for group, held in zip(self._groups, self._position.models, strict=True):
            models[group.methods] = np.asarray(held.average)
        return models

    def state(self) -> BatchState:
        """Where it stands; `restore` continues from there to the same numbers."""
        self._catch_up(0)
        here = self._position
        return BatchState(
            here.round,
            self.block_rounds,
            self.noise_place,
            tuple(np.array(group.methods) for group in self._groups),
            tuple(ModelArrays(*map(np.asarray, models)) for models in here.models),
            self.history,
            self.held_out_accuracy,
            None if self.telemetry is None else self.telemetry.releases,
        )

    def restore(self, state: BatchState) -> None:
        """Continue from a checkpoint: noise is run forward to where it stood."""
        import jax.numpy as jnp

        if state.noise_place != self.noise_place:
            raise InputError(
                "run.noise",
                self.noise_place,
                f"{state.noise_place}, as the run was started",
                f'--set run.noise="{state.noise_place}" on this machine, or a new folder',
            )
        dim = state.models[0].current.shape[-1]
        if dim != self.task.dim:
            raise InputError(
                "task.dim",
                self.task.dim,
                f"{dim}, as the run was started",
                "resume with the task that it was started with, or name a new folder",
            )
        if self.noise_place == "device" and state.block_rounds != self.block_rounds:
            raise InputError(
                "run.memory_mib",
                self.block_rounds,
                f"blocks of {state.block_rounds} rounds",
                "resume with the memory and processes that the run was started with",
            )
        noise = tuple(
            group.noise.replay(state.round // self.block_rounds) if isinstance(group.noise, DeviceNoise) else ()
            for group in self._groups
        )
        self.held_out_accuracy[...] = state.held_out_accuracy
        for name in METRICS:
            self.history[name][...] = state.history[name]
        if self.telemetry is not None:
            self.telemetry.releases[...] = state.telemetry
        models = tuple(ModelArrays(*map(jnp.asarray, held)) for held in state.models)
        self._position = _Position(state.round, models, noise, ())

    def close(self) -> None:
        """End the noise threads."""
        for group in self._groups:
            if isinstance(group.noise, HostNoise):
                group.noise.close()


class _Joined:
    """Arrays of single rounds, joined when read, so that the device need not wait."""

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.concatenate([np.asarray(part) for part in self._parts])


def _twins(members: Sequence[Prepared]) -> tuple[int | None, ...]:
    """For each method, the one without noise that takes the same steps on the same gradients."""

    def steps(p: Prepared) -> object:
        plan = p.plan
        sizes = plan.step_size, plan.server_step_size, plan.step_decay
        return *sizes, plan.forgetting, p.rule

    free = {steps(p): i for i, p in reversed(list(enumerate(members))) if p.factorization is None}
    return tuple(free.get(steps(p)) for p in members)


def _with_device_noise(block: Block, noise: DeviceNoise) -> Callable[..., Any]:
    """The block of rounds, with its noise made in front of it, in one compiled function."""

    def run(state: Any, number: Any, models: ModelArrays, clients: Any, *fixed: Any) -> Any:
        import jax

        after, made = noise.block(noise.keys, state, number)
        count = jax.tree.leaves(clients)[0].shape[0]
        made = tuple(m[:count] for m in made)
        return after, *block.run(models, clients, made, *fixed)

    return run
