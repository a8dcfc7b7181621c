"""Run a plan into a folder: guarantee first, then blocks of rounds, then what they show."""

from __future__ import annotations

import io
import json
import logging
import math
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError, MissingExtra
from veilstream.files import write_file
from veilstream.learning.tasks import Task, check_members
from veilstream.mechanisms.checks import positive_integer
from veilstream.plans.clients import stream_of
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import Prepared, main_method, prepare
from veilstream.plans.records import label_unit
from veilstream.plans.tasks import task_of
from veilstream.research.comparators import Comparators, comparators, has_comparators
from veilstream.research.regret import average_regret
from veilstream.runs.folder import Run, check_folder, latest_folder, new_folder, versions
from veilstream.runs.start import kept_start, starting_model
from veilstream.runs.tables import history_csv
from veilstream.simulation.block import METRICS
from veilstream.simulation.engine import evaluated_rounds, memory_of
from veilstream.simulation.noise_source import noise_place_of
from veilstream.simulation.records import check_stream, check_task
from veilstream.simulation.seed_batches import (
    Results,
    RunProgress,
    SeedBatches,
    pickle_or_refuse,
    run_seed_batches,
    together,
)
from veilstream.simulation.telemetry import telemetry_csv
from veilstream.streams.pool import Stream
from veilstream.streams.table_stream import TableStream

COLUMNS = {"accuracy": "prequential_accuracy"}
"""What the engine's metrics are called in files."""

_log = logging.getLogger(__name__)

Floats = NDArray[np.float64]


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
    _need_jax()
    prepared = [prepare(plan, method) for method in plan.methods]
    own_task = task_of(plan) if task is None else task
    own_stream = stream_of(plan) if stream is None else stream
    # What cannot run claims no folder.
    if task is not None:
        check_members(task)
    record = check_stream(plan, own_task, own_stream)
    if task is not None:
        check_task(task, record)
    start = None if kept_start(folder) is not None else starting_model(plan, own_task.dim)
    at_once = min(processes, plan.run.seeds)
    memory_of(plan, prepared, 1, own_task, own_stream, at_once)
    if at_once > 1:
        pickle_or_refuse((task, stream))
    _write(folder / "plan.toml", plan.to_toml())
    if start is not None:
        start.keep(folder)
    _write(folder / "guarantee.json", _json(_guarantees(prepared)))
    _write(folder / "versions.json", _json(versions() | _where(plan)))
    _write(folder / "noise.csv", _noise_csv(plan, prepared))
    if isinstance(own_stream, TableStream) and own_stream.report.notices:
        on_notices(own_stream.report.notices)
    on_prepared(prepared)
    batches = SeedBatches.of(folder, plan, prepared, own_task, own_stream, processes)
    look = _Look(plan, prepared, own_task, own_stream)
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
            _finish(folder, look, partial, [], complete=False, training_s=None)
            on_written(Run(folder))
        raise
    results = together(batches, made, plan)
    assert results is not None
    _finish(folder, look, results, solved, complete=True, training_s=training_s)
    batches.clear()
    for kept in folder.glob("regret-*.npz"):
        kept.unlink()
    finished = Run(folder)
    on_written(finished)
    return finished


def _solved(folder: Path, plan: Plan, seed: int) -> Comparators:
    """A seed's comparators, as an interrupted run left them or worked out and kept."""
    kept = folder / f"regret-{seed}.npz"
    found = Comparators.load(kept, plan.learning.rounds)
    if found is None:
        found = comparators(plan, seed)
        found.save(kept)
    return found


def _write(path: Path, content: str | bytes) -> None:
    """A simulation holds nobody's data: whoever may read the folder may read its files."""
    write_file(path, content, shared=True)


def _noise_csv(plan: Plan, prepared: list[Prepared]) -> str:
    """Noise in the average of all learners' sums after each round, as it was calibrated."""
    noisy = [p for p in prepared if p.round_end_noise is not None]
    rows = ["method,round,std"]
    for p in noisy:
        learners = 1 if p.plan.method.one_machine else plan.learning.learners
        assert p.round_end_noise is not None
        name = _cell(p.plan.name)
        rows += [f"{name},{r},{std / math.sqrt(learners):.7g}" for r, std in enumerate(p.round_end_noise)]
    return "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if any(c in text for c in ',"\n') else text


def _finished(folder: Path) -> bool:
    if any(folder.glob("checkpoint*.npz")) or not (folder / "summary.json").exists():
        return False
    return bool(Run(folder).summary["complete"])


def _need_jax() -> None:
    if find_spec("jax") is None:
        raise MissingExtra("jax", "jax", "a simulation")


def _where(plan: Plan) -> dict[str, str]:
    """What computes, and where noise is made."""
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


@dataclass(frozen=True)
class _Look:
    """What a summary is about."""

    plan: Plan
    prepared: list[Prepared]
    task: Task
    stream: Stream

    @property
    def evaluated(self) -> list[int]:
        return evaluated_rounds(self.plan)

    @property
    def holds_out(self) -> bool:
        """Whether there are clients who are measured on and never learned from."""
        return self.plan.data.kind != "table" or self.plan.data.held_out_share > 0.0


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def _npz(arrays: dict[str, NDArray[Any]]) -> bytes:
    """As `numpy.savez`, which takes a method that is called "file" for its own argument."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
    return buffer.getvalue()


def _guarantees(prepared: list[Prepared]) -> dict[str, Any]:
    return {
        p.plan.name: {
            "source": p.plan.method.source,
            "protects": p.plan.method.protects,
            "guarantee": p.guarantee.as_dict() if p.guarantee else None,
            "simulated": True,
            "clients_per_step": p.clients,
            "clip_norm_per_client": p.rule.clip_norm,
            **({"auto": p.auto.as_dict()} if p.auto else {}),
        }
        for p in prepared
    }


def _finish(
    folder: Path, look: _Look, results: Results, solved: list[Comparators], *, complete: bool, training_s: float | None
) -> None:
    plan, prepared, seeds, done = look.plan, look.prepared, list(results.seeds), results.rounds
    names = [p.plan.name for p in prepared]
    columns: dict[str, NDArray[Any]] = {COLUMNS.get(m, m): results.history[m][..., :done] for m in METRICS}
    if solved:
        best = np.array([c.round_values for c in solved])
        columns["optimum"] = np.broadcast_to(best, columns["loss"].shape)
    rounds = list(range(done))
    _write(folder / "history.csv", history_csv(names, seeds, columns, rounds))
    looked = [i for i, r in enumerate(look.evaluated) if r < done or (r == done and complete)]
    if look.task.classifies and look.holds_out:
        accuracy = {"held_out_accuracy": results.held_out_accuracy[..., looked]}
        at = [look.evaluated[i] for i in looked]
        _write(folder / "accuracy.csv", history_csv(names, seeds, accuracy, at))
    if results.telemetry is not None:
        ends = [r for r in look.evaluated if 0 < r <= done]
        told = telemetry_csv(plan, prepared, seeds, results.telemetry[:, :, :done], ends)
        _write(folder / "telemetry.csv", told)
    methods = {p.plan.name: _method_summary(look, p, results, i, solved, looked) for i, p in enumerate(prepared)}
    main = names[main_method(prepared)]
    summary = {
        "name": plan.name,
        "simulated": True,
        "complete": complete,
        "rounds": done,
        "seeds": seeds,
        "training_seconds": training_s,
        "main_method": main,
        "final": methods[main]["final"],
        "comparators": _comparator_summary(solved),
        "data": look.stream.provenance,
        "records": look.stream.report.as_dict() if isinstance(look.stream, TableStream) else None,
        "methods": methods,
    }
    if results.models is not None:
        _write(folder / "models.npz", _npz(dict(zip(names, results.models, strict=True))))
    _write(folder / "summary.json", _json(summary))


def _method_summary(
    look: _Look, prepared: Prepared, results: Results, index: int, solved: list[Comparators], looked: list[int]
) -> dict[str, Any]:
    done = results.rounds
    losses = results.history["loss"][index, :, :done].astype(np.float64)
    nobody = _nobody(results)
    figures: dict[str, Any] = {
        "average_loss": _spread(_over_rounds(losses, nobody)),
        "accuracy": None,
        "held_out_accuracy": None,
        "prequential_accuracy": None,
        "rmse": None,
        "explained": None,
        "dynamic_regret": None,
        "static_regret": None,
        "distance_to_noise_free": _spread(results.history["distance"][index, :, done - 1]),
    }
    if look.task.classifies and looked:
        if look.holds_out:
            figures["held_out_accuracy"] = _spread(results.held_out_accuracy[index, :, looked[-1]])
            figures["accuracy"] = figures["held_out_accuracy"]  # its name of before, still read
        preq = results.history["accuracy"][index, :, :done].astype(np.float64)
        figures["prequential_accuracy"] = _spread(_over_rounds(preq, nobody))
    if not look.task.classifies and look.holds_out and results.models is not None:
        figures |= _regression(look, results.models[index], list(results.seeds))
    diverged = np.flatnonzero(~(np.isfinite(losses) | nobody).all(axis=0))
    if len(diverged):
        figures["remark"] = f"diverged from round {diverged[0]}: try a smaller step size"
    if solved and not len(diverged):
        each = [average_regret(losses[s], c.round_values)[-1] for s, c in enumerate(solved)]
        figures["dynamic_regret"] = _spread(np.array(each))
        if all(c.offline_losses is not None for c in solved):
            each = [
                average_regret(losses[s], c.offline_losses)[-1]
                for s, c in enumerate(solved)
                if c.offline_losses is not None
            ]
            figures["static_regret"] = _spread(np.array(each))
    return {
        "kind": prepared.plan.kind,
        "mechanism": prepared.plan.mechanism_name if prepared.factorization else None,
        "noise_std": prepared.noise_std,
        "protects": prepared.plan.method.protects,
        "guarantee": prepared.guarantee.as_dict() if prepared.guarantee else None,
        "simulated": True,
        "step_size": prepared.plan.step_size,
        "server_step_size": prepared.plan.server_step_size,
        "effective_step_size": prepared.effective_step_size,
        **({"auto": prepared.auto.as_dict()} if prepared.auto else {}),
        "final": figures,
    }


def _regression(look: _Look, models: NDArray[Any], seeds: list[int]) -> dict[str, Any]:
    """Root mean square error on held-out clients, in the label's units, and the share explained."""
    plan = look.plan
    errors, explained = [], []
    for seed, model in zip(seeds, models, strict=True):
        held = look.stream.held_out(seed, plan.data.held_out, plan.learning.rounds - 1)
        target = np.asarray(held.target, np.float64)
        try:
            predicted = np.asarray(look.task.predict(model, held.features), np.float64)
        except InputError:
            return {}  # a task that was given no way to predict
        if predicted.shape != target.shape:
            return {}  # no number for each client
        error = float(np.mean((predicted - target) ** 2))
        errors.append(np.sqrt(error) * label_unit(plan))
        explained.append(1.0 - error / max(float(np.var(target)), 1e-300))
    return {"rmse": _spread(np.array(errors)), "explained": _spread(np.array(explained))}


def _nobody(results: Results) -> NDArray[np.bool_]:
    """Rounds of each seed in which no client was met, (seeds, rounds).

    Accuracy is a number whenever someone was, also of a model that has diverged.
    """
    measured = results.history["accuracy"][:, :, : results.rounds]
    if np.isnan(measured).all():  # not a task that classifies
        measured = results.history["loss"][:, :, : results.rounds]
    return np.asarray(np.isnan(measured).all(axis=0), np.bool_)


def _over_rounds(values: NDArray[np.float64], nobody: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Mean of each seed over the rounds in which someone was met."""
    met = np.maximum((~nobody).sum(axis=1), 1)
    mean: NDArray[np.float64] = np.where(nobody, 0.0, values).sum(axis=1) / met
    return mean


def _comparator_summary(solved: list[Comparators]) -> dict[str, Any] | None:
    if not solved:
        return None
    variations = [c.path_variation for c in solved]
    remarks = sorted({c.remark for c in solved if c.remark})
    separable = float(np.mean([c.separable for c in solved]))
    if separable > 0:
        remarks.insert(
            0,
            f"{100 * separable:.4g}% of rounds are linearly separable: there the least loss is 0, "
            "not attained, and dynamic regret is the loss itself",
        )
    return {
        "separable_rounds": separable,
        "path_variation": None if None in variations else _spread(np.array(variations, float)),
        "remarks": remarks,
    }


def _spread(values: NDArray[Any]) -> dict[str, Any] | None:
    """Mean, standard deviation and every seed."""
    each = np.asarray(values, np.float64)
    if not np.isfinite(each).all():
        return None
    std = float(each.std(ddof=1)) if len(each) > 1 else 0.0
    return {"mean": float(each.mean()), "std": std, "seeds": [float(v) for v in each]}
