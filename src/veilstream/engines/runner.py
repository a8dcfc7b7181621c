"""Run a plan into a folder: guarantee first, then blocks of rounds, then what they show."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.engines.build import Prepared, main_method, prepare
from veilstream.engines.comparators import Comparators, comparators
from veilstream.engines.plan import Plan
from veilstream.engines.run_folder import Run, check_folder, history_csv, versions
from veilstream.engines.simulation import METRICS, Progress, Simulation
from veilstream.files import write_file
from veilstream.learning.regret import dynamic_regret, static_regret

__all__ = ["run"]

Floats = NDArray[np.float64]

_CHECKPOINT_EVERY_S = 10.0


def run(
    plan: Plan | Path | str,
    out: Path | str | None = None,
    *,
    resume: bool = False,
    on_prepared: Callable[[list[Prepared]], None] = lambda _: None,
    on_progress: Callable[[Progress], None] = lambda _: None,
    on_solving: Callable[[int], None] = lambda _: None,
) -> Run:
    """Run a plan; ``out`` becomes its folder (default: runs/NAME).

    Interrupting it (KeyboardInterrupt) leaves a usable partial run and a checkpoint from which
    ``resume=True`` goes on to the same numbers.
    """
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    folder = Path("runs") / plan.name if out is None else Path(out)
    check_folder(folder, plan, resume=resume)
    if resume and not (folder / "checkpoint.npz").exists() and (folder / "summary.json").exists():
        return Run(folder)
    prepared = [prepare(plan, method) for method in plan.methods]
    write_file(folder / "plan.toml", plan.to_toml())
    write_file(folder / "guarantee.json", _json(_guarantees(prepared)))
    write_file(folder / "versions.json", _json(versions()))
    on_prepared(prepared)

    seeds = list(range(plan.run.first_seed, plan.run.first_seed + plan.run.seeds))
    simulation = Simulation(plan, prepared, seeds)
    checkpoint = folder / "checkpoint.npz"
    if resume and checkpoint.exists():
        with np.load(checkpoint) as state:
            simulation.restore(state)
    began = saved = time.monotonic()
    try:
        while not simulation.done:
            on_progress(simulation.advance())
            if time.monotonic() - saved > _CHECKPOINT_EVERY_S and not simulation.done:
                _save(checkpoint, simulation)
                saved = time.monotonic()
        training_s = time.monotonic() - began
        solved: list[Comparators] = []
        if plan.run.regret:
            for seed in seeds:
                solved.append(comparators(plan, seed))
                on_solving(1)
    except KeyboardInterrupt:
        if simulation.round == 0:
            raise
        _save(checkpoint, simulation)
        _finish(folder, plan, prepared, simulation, [], complete=False, training_s=None)
        raise
    _finish(folder, plan, prepared, simulation, solved, complete=True, training_s=training_s)
    checkpoint.unlink(missing_ok=True)
    return Run(folder)


def _save(path: Path, simulation: Simulation) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, **simulation.state())
    write_file(path, buffer.getvalue())


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def _guarantees(prepared: list[Prepared]) -> dict[str, Any]:
    return {
        p.plan.name: {
            "source": p.plan.method.source,
            "protects": p.plan.method.protects,
            "guarantee": p.guarantee.as_dict() if p.guarantee else None,
            "simulated": True,
            "clients_per_step": p.clients,
            "clip_norm_per_client": p.rule.clip_norm,
        }
        for p in prepared
    }


def _finish(
    folder: Path,
    plan: Plan,
    prepared: list[Prepared],
    simulation: Simulation,
    solved: list[Comparators],
    *,
    complete: bool,
    training_s: float | None,
) -> None:
    names = [p.plan.name for p in prepared]
    seeds = list(simulation.seeds)
    done = simulation.round
    columns: dict[str, NDArray[Any]] = {m: simulation.history[m][..., :done] for m in METRICS}
    if solved:
        best = np.array([c.round_values for c in solved])
        columns["optimum"] = np.broadcast_to(best, columns["loss"].shape)
    rounds = list(range(done))
    write_file(folder / "history.csv", history_csv(names, seeds, columns, rounds))
    looked = [i for i, r in enumerate(simulation.evaluated) if r < done or (r == done and complete)]
    if simulation.task.classifies:
        accuracy = {"accuracy": simulation.held_out_accuracy[..., looked]}
        at = [simulation.evaluated[i] for i in looked]
        write_file(folder / "accuracy.csv", history_csv(names, seeds, accuracy, at))
    methods = {
        p.plan.name: _method_summary(plan, p, simulation, i, solved, looked)
        for i, p in enumerate(prepared)
    }
    main = names[main_method(prepared)]
    summary = {
        "name": plan.name,
        "complete": complete,
        "rounds": done,
        "seeds": seeds,
        "training_seconds": training_s,
        "main_method": main,
        "final": methods[main]["final"],
        "comparators": _comparator_summary(solved),
        "data": simulation.stream.provenance,
        "methods": methods,
    }
    write_file(folder / "summary.json", _json(summary))


def _method_summary(
    plan: Plan,
    prepared: Prepared,
    simulation: Simulation,
    index: int,
    solved: list[Comparators],
    looked: list[int],
) -> dict[str, Any]:
    done = simulation.round
    losses = simulation.history["loss"][index, :, :done].astype(np.float64)
    figures: dict[str, Any] = {
        "average_loss": _spread(losses.mean(axis=1)),
        "accuracy": None,
        "prequential_accuracy": None,
        "dynamic_regret": None,
        "static_regret": None,
        "distance_to_noise_free": _spread(simulation.history["distance"][index, :, done - 1]),
    }
    if simulation.task.classifies and looked:
        figures["accuracy"] = _spread(simulation.held_out_accuracy[index, :, looked[-1]])
        preq = simulation.history["accuracy"][index, :, :done].astype(np.float64)
        figures["prequential_accuracy"] = _spread(preq.mean(axis=1))
    diverged = np.flatnonzero(~np.isfinite(losses).all(axis=0))
    if len(diverged):
        figures["remark"] = f"diverged from round {diverged[0]}: try a smaller step size"
    if solved and not len(diverged):
        tau = plan.learning.local_steps
        each = [
            dynamic_regret(losses[s], c.round_values, local_steps=tau).per_step[-1]
            for s, c in enumerate(solved)
        ]
        figures["dynamic_regret"] = _spread(np.array(each))
        if all(c.offline_losses is not None for c in solved):
            each = [
                static_regret(losses[s], c.offline_losses, local_steps=tau).per_step[-1]
                for s, c in enumerate(solved)
                if c.offline_losses is not None
            ]
            figures["static_regret"] = _spread(np.array(each))
    return {
        "kind": prepared.plan.kind,
        "mechanism": prepared.plan.mechanism_name if prepared.guarantee else None,
        "protects": prepared.plan.method.protects,
        "guarantee": prepared.guarantee.as_dict() if prepared.guarantee else None,
        "step_size": prepared.plan.step_size,
        "server_step_size": prepared.plan.server_step_size,
        "effective_step_size": prepared.effective_step_size,
        "final": figures,
    }


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
