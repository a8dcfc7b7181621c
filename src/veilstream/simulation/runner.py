"""Run a plan into a folder: guarantees first, then blocks of rounds, then their results."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from veilstream.errors import InputError, MissingExtra
from veilstream.learning.tasks import Task, check_members
from veilstream.mechanisms.checks import positive_integer
from veilstream.plans.clients import stream_of
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import Prepared, prepare
from veilstream.plans.tasks import task_of
from veilstream.research.comparators import Comparators, comparators, has_comparators
from veilstream.runs.folder import Run, check_folder, latest_folder, new_folder, versions
from veilstream.runs.start import kept_start, starting_model
from veilstream.simulation.engine import memory_of
from veilstream.simulation.final_figures import FinalFigures
from veilstream.simulation.noise_source import noise_place_of
from veilstream.simulation.records import check_stream, check_task
from veilstream.simulation.run_tables import RunTables, write, write_json
from veilstream.simulation.secret_order import check_enough_records
from veilstream.simulation.seed_batches import (
    Results,
    RunProgress,
    SeedBatches,
    pickle_or_refuse,
    run_seed_batches,
    together,
)
from veilstream.streams.pool import Stream
from veilstream.streams.table_stream import TableStream

_log = logging.getLogger(__name__)


def _log_notices(notices: list[str]) -> None:
    for notice in notices:
        _log.warning("%s", notice)


def simulate(
    plan: Plan | Path | str,
    out: Path | str | None = None,
    *,
    task: Task | None = None,
    stream: Stream | None = None,
    resume: bool = False,
    processes: int = 1,
    on_notices: Callable[[list[str]], None] = _log_notices,
    on_prepared: Callable[[list[Prepared]], None] = lambda _: None,
    on_baselines: Callable[[Mapping[str, Any]], None] | None = None,
    on_progress: Callable[[RunProgress], None] = lambda _: None,
    on_solving: Callable[[int], None] = lambda _: None,
    on_written: Callable[[Run], object] = lambda _: None,
) -> Run:
    """Simulate a plan into a run folder.

    A simulation: its noise comes from seeds and protects no one. Each guarantee in the folder is
    what a deployed learner with these settings would give, beside ``"simulated": true``.

    Interrupting it (KeyboardInterrupt) leaves a usable partial run and a checkpoint from which
    ``resume=True`` goes on to the same numbers.

    Args:
        plan: what to run, or the path of a TOML file that says it.
        out: the run's folder, new or empty; where it is left out runs/NAME, or runs/NAME-2 and so
            on, the first that is free (with ``resume`` the last that is not).
        task: a model of your own, for plans with learning.task = "custom".
        stream: data of your own, for plans with data.kind = "custom".
        resume: go on with an interrupted run of the same plan in that folder.
        processes: spread seeds over this many processes.
        on_notices: called before anything runs with what to know of the records, as that they do
            not last for the horizon; logged as warnings where it is left out.
        on_prepared: called with the calibrated methods before anything runs.
        on_baselines: called with summary.json's ``baselines``, of the first seed, before anything runs.
        on_progress: called with a `RunProgress` after every block of rounds.
        on_solving: called with 1 for each seed whose regret has been worked out.
        on_written: called with the folder once its tables are written, also of a run that was
            interrupted; `veilstream.run` makes report.html then.

    Returns:
        The folder, read: `Run.summary`, `Run.history`, `Run.model`.

    Raises:
        InputError: for a plan, folder, task, stream or checkpoint that cannot be used; nothing is
            begun then, unless a stream goes wrong on its way.
        MissingExtra: without JAX.

    """
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    positive_integer("processes", processes, "try 1")
    _check_custom("task", task, plan.learning.task == "custom")
    _check_custom("stream", stream, plan.data.kind == "custom")
    if out is None:
        folder = latest_folder(plan.name) if resume else new_folder(plan.name)
    else:
        folder = Path(out)
    check_folder(folder, plan, resume=resume)
    if resume and _finished(folder):
        return Run(folder)
    if find_spec("jax") is None:
        raise MissingExtra("jax", "jax", "a simulation")
    prepared = [prepare(plan, method) for method in plan.methods]
    own_task = task_of(plan) if task is None else task
    own_stream = stream_of(plan) if stream is None else stream
    # Validate before creating the folder.
    if task is not None:
        check_members(task)
    record = check_stream(plan, own_task, own_stream)
    check_enough_records(plan, own_stream)
    if task is not None:
        check_task(task, record)
    start = None if kept_start(folder) is not None else starting_model(plan, own_task.dim)
    at_once = min(processes, plan.run.seeds)
    memory_of(plan, prepared, 1, own_task, own_stream, at_once)
    if at_once > 1:
        pickle_or_refuse((task, stream))
    write(folder / "plan.toml", plan.to_toml())
    if start is not None:
        start.keep(folder)
    write_json(folder / "versions.json", versions() | _where(plan))
    tables = RunTables(folder, plan, prepared, own_task, own_stream)
    tables.write_promises()
    if isinstance(own_stream, TableStream) and own_stream.report.notices:
        on_notices(own_stream.report.notices)
    on_prepared(prepared)
    if on_baselines is not None:
        figures = FinalFigures.of(plan, own_task, own_stream, [plan.run.first_seed])
        on_baselines({} if figures is None else figures.baselines())
    batches = SeedBatches.of(folder, plan, prepared, own_task, own_stream, processes)
    made: dict[int, Results] = {}
    began = time.monotonic()
    try:
        run_seed_batches(
            batches,
            plan,
            prepared,
            *((task, stream) if processes > 1 else (own_task, own_stream)),
            processes=processes,
            on_progress=on_progress,
            made=made,
        )
        training_s = time.monotonic() - began
        solved: list[Comparators] = []
        if plan.run.regret and has_comparators(plan):
            for seed in range(plan.run.first_seed, plan.run.first_seed + plan.run.seeds):
                solved.append(_solved(folder, plan, seed))
                on_solving(1)
    except KeyboardInterrupt:
        partial = together(batches, made, plan)
        if partial is not None:
            tables.write_results(partial, [], complete=False, training_s=None)
            on_written(Run(folder))
        raise
    results = together(batches, made, plan)
    assert results is not None
    tables.write_results(results, solved, complete=True, training_s=training_s)
    batches.clear()
    for kept in folder.glob("regret-*.npz"):
        kept.unlink()
    finished = Run(folder)
    on_written(finished)
    return finished


def _solved(folder: Path, plan: Plan, seed: int) -> Comparators:
    kept = folder / f"regret-{seed}.npz"
    found = Comparators.load(kept, plan.learning.rounds)
    if found is None:
        found = comparators(plan, seed)
        found.save(kept)
    return found


def _finished(folder: Path) -> bool:
    if any(folder.glob("checkpoint*.npz")) or not (folder / "summary.json").exists():
        return False
    return bool(Run(folder).summary["complete"])


def _where(plan: Plan) -> dict[str, str]:
    import jax

    device = jax.devices()[0]
    return {"device": f"{device.platform}: {device.device_kind}", "noise": noise_place_of(plan)}


def _check_custom(name: str, given: object, wanted: bool) -> None:
    if (given is not None) != wanted:
        key = "learning.task" if name == "task" else "data.kind"
        way_out = f"run(plan, {name}=...)" if wanted else f'{key} = "custom", or leave {name} out'
        raise InputError(
            name, None if given is None else type(given).__name__, f'one exactly where {key} is "custom"', way_out
        )
