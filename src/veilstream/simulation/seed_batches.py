"""A run in batches: seeds that fit into memory together, one after the other or in processes.

Results pass in memory within a process; checkpoints serve --resume and other processes. Which seeds
run together is kept in the run's folder, so a resumed run gives the same numbers in any number of
processes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError, VeilstreamError
from veilstream.files import write_file
from veilstream.learning.tasks import Task
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import Prepared, prepare
from veilstream.runs.start import kept_start
from veilstream.simulation.block import METRICS
from veilstream.simulation.engine import Simulation, evaluated_rounds, memory_of
from veilstream.simulation.run_checkpoint import (
    BatchState,
    StateShape,
    read_checkpoint,
    read_seed_batches,
    write_checkpoint,
)
from veilstream.streams.pool import Stream

_Number = TypeVar("_Number", np.float32, np.float64)

_CHECKPOINT_EVERY_S = 10.0
_MODELS_BYTES = 64 * 2**20  # models of one batch that are worth keeping in a run's folder


@dataclass(frozen=True)
class Measured:
    """Measurements of some rounds and seeds; arrays (methods, seeds, rounds)."""

    seeds: tuple[int, ...]
    first: int  # The first of these rounds
    loss: NDArray[np.float32]
    looked_at: tuple[int, ...]  # Rounds before which held-out accuracy was measured; one for each of its last axis
    held_out_accuracy: NDArray[np.float32]

    @classmethod
    def of(
        cls,
        seeds: tuple[int, ...],
        first: int,
        last: int,
        loss: NDArray[np.float32],
        held_out: NDArray[np.float32],
        looks: Sequence[int],
    ) -> Measured:
        """Of rounds from ``first`` to before ``last``, out of a whole run's arrays."""
        end = loss.shape[-1]
        columns = [i for i, r in enumerate(looks) if first <= r < last or r == last == end]
        return cls(seeds, first, loss[..., first:last].copy(), tuple(looks[i] for i in columns), held_out[..., columns])


@dataclass(frozen=True)
class RunProgress:
    """Where a run stands, over all its batches."""

    done: int
    total: int
    accuracy: float | None
    measured: Measured | None = None  # Measurements since the last report


OnProgress = Callable[[RunProgress], None]


@dataclass(frozen=True)
class SeedBatches:
    """Which seeds run together, and in what blocks."""

    folder: Path
    seeds: tuple[tuple[int, ...], ...]
    block_rounds: int
    processes: int = 1  # As many as fit the budget at once

    @classmethod
    def of(
        cls, folder: Path, plan: Plan, prepared: Sequence[Prepared], task: Task, stream: Stream, processes: int
    ) -> SeedBatches:
        """As the folder says, or new ones."""
        stored = folder / "seed_batches.json"
        seeds = range(plan.run.first_seed, plan.run.first_seed + plan.run.seeds)
        if stored.exists():
            return cls(folder, *read_seed_batches(stored, list(seeds)))
        processes = min(processes, len(seeds))
        most = -(-len(seeds) // processes)
        fits = memory_of(plan, prepared, most, task, stream, processes)
        count = max(processes, -(-len(seeds) // fits.seeds_together))
        cut = [tuple(int(s) for s in batch) for batch in np.array_split(seeds, count)]
        batches = cls(folder, tuple(cut), fits.rounds_per_block, processes)
        content = {"seeds": batches.seeds, "block_rounds": batches.block_rounds, "processes": processes}
        write_file(stored, json.dumps(content) + "\n", shared=True)
        return batches

    def checkpoint(self, index: int) -> Path:
        """Path of a batch's checkpoint."""
        name = "checkpoint.npz" if len(self.seeds) == 1 else f"checkpoint-{index}.npz"
        return self.folder / name

    def clear(self) -> None:
        """Remove the files that only an unfinished run needs."""
        for index in range(len(self.seeds)):
            self.checkpoint(index).unlink(missing_ok=True)
        (self.folder / "seed_batches.json").unlink(missing_ok=True)


@dataclass(frozen=True)
class Results:
    """What some seeds have measured so far, (methods, seeds, rounds) each."""

    seeds: tuple[int, ...]
    rounds: int
    history: dict[str, NDArray[np.float32]]
    held_out_accuracy: NDArray[np.float32]
    models: NDArray[np.float32] | None  # Published last, (methods, seeds, d); None where they are many
    telemetry: NDArray[np.float64] | None
    """As released, (methods, seeds, rounds, metrics); None where the plan has none."""

    @classmethod
    def of(cls, seeds: tuple[int, ...], state: BatchState) -> Results:
        """What one batch has measured."""
        methods, count = state.held_out_accuracy.shape[:2]
        many = 4 * methods * count * state.models[0].average.shape[-1] > _MODELS_BYTES
        published = None if many else state.published()
        return cls(seeds, state.round, state.history, state.held_out_accuracy, published, state.telemetry)


def together(batches: SeedBatches, made: Mapping[int, Results], plan: Plan) -> Results | None:
    """Join the results of the batches that have started; None where none has. `InputError` for a damaged checkpoint."""
    parts = []
    for index, seeds in enumerate(batches.seeds):
        if index in made:
            parts.append(made[index])
        elif batches.checkpoint(index).exists():
            parts.append(Results.of(seeds, _stored(batches, index, plan)))
    if not parts:
        return None
    return Results(
        tuple(seed for part in parts for seed in part.seeds),
        min(part.rounds for part in parts),
        {m: np.concatenate([part.history[m] for part in parts], axis=1) for m in METRICS},
        np.concatenate([part.held_out_accuracy for part in parts], axis=1),
        _joined([part.models for part in parts]),
        _joined([part.telemetry for part in parts]),
    )


def _joined(arrays: list[NDArray[_Number] | None]) -> NDArray[_Number] | None:
    there = [array for array in arrays if array is not None]
    return np.concatenate(there, axis=1) if len(there) == len(arrays) else None


def _stored(batches: SeedBatches, index: int, plan: Plan) -> BatchState:
    shape = StateShape(
        methods=len(plan.methods),
        seeds=len(batches.seeds[index]),
        rounds=plan.learning.rounds,
        looks=len(evaluated_rounds(plan)),
        metrics=len(plan.telemetry.metrics) if plan.telemetry else 0,
    )
    return read_checkpoint(batches.checkpoint(index), shape)


def run_seed_batches(
    batches: SeedBatches,
    plan: Plan,
    prepared: Sequence[Prepared],
    task: Task | None,
    stream: Stream | None,
    *,
    processes: int,
    on_progress: OnProgress,
    made: dict[int, Results],
) -> None:
    """Run every batch to its last checkpoint; ``made`` takes this process's results, also of an interrupted batch."""
    total = plan.learning.rounds * len(batches.seeds)
    rounds = dict.fromkeys(range(len(batches.seeds)), 0)

    def advanced(index: int, done: int, accuracy: float | None, measured: Measured | None) -> None:
        rounds[index] = done
        on_progress(RunProgress(sum(rounds.values()), total, accuracy, measured))

    processes = min(processes, batches.processes)
    if processes == 1 or len(batches.seeds) == 1:
        for index in range(len(batches.seeds)):
            _run_seed_batch(batches, index, plan, prepared, task, stream, advanced, made)
    else:
        _in_processes(batches, plan, task, stream, min(processes, len(batches.seeds)), advanced)


Advanced = Callable[[int, int, float | None, Measured | None], None]


def _run_seed_batch(
    batches: SeedBatches,
    index: int,
    plan: Plan,
    prepared: Sequence[Prepared],
    task: Task | None,
    stream: Stream | None,
    advanced: Advanced,
    made: dict[int, Results],
) -> None:
    path, seeds = batches.checkpoint(index), batches.seeds[index]
    state = None
    if path.exists():
        state = _stored(batches, index, plan)
        if state.round == plan.learning.rounds:
            made[index] = Results.of(seeds, state)
            looks = evaluated_rounds(plan)
            everything = Measured.of(seeds, 0, state.round, state.history["loss"], state.held_out_accuracy, looks)
            advanced(index, state.round, None, everything)
            return
    simulation = Simulation(
        plan,
        prepared,
        seeds,
        task=task,
        stream=stream,
        block_rounds=batches.block_rounds,
        start=kept_start(batches.folder),
    )
    try:
        if state is not None:
            simulation.restore(state)
        saved, shown = time.monotonic(), 0

        def news() -> Measured:
            nonlocal shown
            first, shown = shown, simulation.measured
            loss, held_out = simulation.history["loss"], simulation.held_out_accuracy
            return Measured.of(seeds, first, shown, loss, held_out, simulation.evaluated)

        while True:
            progress = simulation.advance()
            if simulation.done:
                break
            advanced(index, progress.round, progress.accuracy, news())
            if time.monotonic() - saved > _CHECKPOINT_EVERY_S:
                write_checkpoint(path, simulation.state())
                saved = time.monotonic()
    except KeyboardInterrupt:
        if simulation.round:
            with _no_further_interrupts():
                state = simulation.state()
                write_checkpoint(path, state)
                made[index] = Results.of(seeds, state)
        raise
    finally:
        simulation.close()
    state = simulation.state()
    write_checkpoint(path, state)
    made[index] = Results.of(seeds, state)
    advanced(index, progress.round, progress.accuracy, news())  # reported after the checkpoint is on disk


@contextmanager
def _no_further_interrupts() -> Iterator[None]:
    """A second Ctrl-C, or the parent's after the terminal's, must not cost the checkpoint."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _in_processes(
    batches: SeedBatches, plan: Plan, task: Task | None, stream: Stream | None, processes: int, advanced: Advanced
) -> None:
    context = multiprocessing.get_context("spawn")
    work = pickle_or_refuse((batches, plan.to_toml(), task, stream))
    workers: list[Any] = []
    left: dict[Any, int] = {}
    try:
        for place in range(processes):
            # One pipe each: a killed worker could leave a shared one locked.
            inbox, outbox = context.Pipe(duplex=False)
            share = list(range(len(batches.seeds)))[place::processes]
            worker = context.Process(target=_worker, args=(work, share, place, processes, outbox), daemon=True)
            worker.start()
            outbox.close()
            workers.append(worker)
            left[inbox] = len(share)
        while left:
            for ready in connection.wait(list(left)):
                index, done, accuracy, measured, error = _message(ready)
                if error is not None:
                    raise error
                advanced(index, done, accuracy, measured)
                left[ready] -= done == plan.learning.rounds
                if not left[ready]:
                    del left[ready]
    except BaseException:
        for worker in workers:  # a terminal interrupts them too; nothing else does
            if worker.is_alive() and worker.pid is not None:
                os.kill(worker.pid, signal.SIGINT)
        raise
    finally:
        for worker in workers:
            worker.join(timeout=30.0)
            if worker.is_alive():
                worker.terminate()


_Message = tuple[int, int, float | None, Measured | None, VeilstreamError | None]


def _message(inbox: Any) -> _Message:
    try:
        message: _Message = inbox.recv()
    except (EOFError, OSError):
        raise VeilstreamError("a process of this run was killed; --resume goes on from its checkpoint") from None
    return message


def pickle_or_refuse(work: Any) -> bytes:
    """Pickle the work for other processes; `InputError` if it cannot be."""
    try:
        return pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            "processes",
            "more than 1",
            "a task and a stream that can be pickled",
            f"define them in a module of their own, or take processes = 1 ({error})",
        ) from error


def _worker(work: bytes, share: list[int], place: int, processes: int, outbox: Any) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    _take_cores(place, processes)
    try:
        batches, text, task, stream = pickle.loads(work)
        plan = Plan.parse(text)
        prepared = [prepare(plan, method) for method in plan.methods]
        for index in share:
            _run_seed_batch(batches, index, plan, prepared, task, stream, lambda *news: outbox.send((*news, None)), {})
    except KeyboardInterrupt:
        pass
    except Exception as error:
        known = isinstance(error, VeilstreamError)
        with suppress(OSError):  # the parent may have ended
            outbox.send((0, 0, None, None, error if known else VeilstreamError(f"{error!r}")))
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _take_cores(place: int, processes: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        own = cores[place::processes]
        if own:
            os.sched_setaffinity(0, own)
