"""The tables of a simulation's folder: guarantees before it runs, results after it."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.files import write_file
from veilstream.learning.tasks import Task
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import Prepared, main_method
from veilstream.research.comparators import Comparators
from veilstream.research.regret import average_regret
from veilstream.runs.released_model import METHOD, ReleasedModel, packed
from veilstream.runs.tables import history_csv
from veilstream.simulation.baselines import label_means
from veilstream.simulation.block import METRICS
from veilstream.simulation.engine import evaluated_rounds
from veilstream.simulation.final_figures import spread
from veilstream.simulation.judgements import Judgements
from veilstream.simulation.seed_batches import Results
from veilstream.simulation.telemetry import telemetry_csv
from veilstream.streams.pool import Stream
from veilstream.streams.table_stream import TableStream

COLUMNS = {"accuracy": "prequential_accuracy"}  # What the engine's metrics are called in files


def write(path: Path, content: str | bytes) -> None:
    """Write a file that others may read: a simulation holds nobody's data."""
    write_file(path, content, shared=True)


def write_json(path: Path, value: Any) -> None:
    """The same, as JSON."""
    write(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


@dataclass(frozen=True)
class RunTables:
    """Writes the tables of one run."""

    folder: Path
    plan: Plan
    prepared: list[Prepared]
    task: Task
    stream: Stream

    @property
    def evaluated(self) -> list[int]:
        """Rounds before which held-out accuracy is measured, and the end."""
        return evaluated_rounds(self.plan)

    @property
    def holds_out(self) -> bool:
        """Whether there are clients who are measured on and never learned from."""
        return self.plan.data.kind != "table" or self.plan.data.held_out_share > 0.0

    def write_promises(self) -> None:
        """Every method's guarantee, and the noise that it was calibrated to."""
        write_json(self.folder / "guarantee.json", _guarantees(self.prepared))
        write(self.folder / "noise.csv", _noise_csv(self.plan, self.prepared))

    def write_results(
        self, results: Results, solved: list[Comparators], *, complete: bool, training_s: float | None
    ) -> None:
        """Histories, models and the summary of all rounds, or of those before an interrupt."""
        plan, prepared, seeds, done = self.plan, self.prepared, list(results.seeds), results.rounds
        names = [p.plan.name for p in prepared]
        columns: dict[str, NDArray[Any]] = {COLUMNS.get(m, m): results.history[m][..., :done] for m in METRICS}
        if solved:
            best = np.array([c.round_values for c in solved])
            columns["optimum"] = np.broadcast_to(best, columns["loss"].shape)
        rounds = list(range(done))
        write(self.folder / "history.csv", history_csv(names, seeds, columns, rounds))
        looked = [i for i, r in enumerate(self.evaluated) if r < done or (r == done and complete)]
        judged = Judgements.of(plan, prepared, self.task, self.stream, results)
        if self.task.classifies and self.holds_out:
            held_out = judged.with_final(results.held_out_accuracy) if complete else results.held_out_accuracy
            results = dataclasses.replace(results, held_out_accuracy=held_out)
            accuracy = {"held_out_accuracy": held_out[..., looked]}
            at = [self.evaluated[i] for i in looked]
            write(self.folder / "accuracy.csv", history_csv(names, seeds, accuracy, at))
        if results.telemetry is not None:
            ends = [r for r in self.evaluated if 0 < r <= done]
            told = telemetry_csv(plan, prepared, seeds, results.telemetry[:, :, :done], ends)
            write(self.folder / "telemetry.csv", told)
        methods = {
            p.plan.name: self._method_summary(p, results, i, solved, looked, judged) for i, p in enumerate(prepared)
        }
        chosen = main_method(prepared)
        main = names[chosen]
        summary = {
            "name": plan.name,
            "simulated": True,
            "complete": complete,
            "rounds": done,
            "seeds": seeds,
            "training_seconds": training_s,
            "main_method": main,
            "final": methods[main]["final"],
            **self._beside(judged.summary(chosen), seeds, complete=complete),
            "comparators": _comparator_summary(solved),
            "data": self.stream.provenance,
            "records": self.stream.report.as_dict() if isinstance(self.stream, TableStream) else None,
            "methods": methods,
        }
        if results.models is not None:
            write(self.folder / "models.npz", self._models(results.models, results))
        write_json(self.folder / "summary.json", summary)

    def _beside(self, judged: dict[str, Any], seeds: list[int], *, complete: bool) -> dict[str, Any]:
        """Judgements, with what labels alone say beside the baselines on held-out rows."""
        if not complete:
            return judged
        found = label_means(self.plan, self.task, self.stream, seeds)
        held_out: dict[str, dict[str, Any]] = judged["baselines"] or {}
        if "no_change" in held_out:  # elsewhere records have no order
            found["no_change"] = found.pop("last label", {})
        found.pop("last label", None)
        both = {name: held_out.get(name, {}) | found.get(name, {}) for name in dict.fromkeys([*held_out, *found])}
        return judged | {"baselines": both or judged["baselines"]}

    def _models(self, models: NDArray[np.float32], results: Results) -> bytes:
        """The main method's model of the first seed as in every model's file, and those of all methods and seeds."""
        names, main = [p.plan.name for p in self.prepared], main_method(self.prepared)
        promises = {p.plan.name: p.guarantee.as_dict() if p.guarantee else {} for p in self.prepared}
        plan = self.plan
        first = ReleasedModel(
            models[main, 0],
            results.rounds,
            plan.learning.rounds,
            plan.name,
            plan.to_toml(),
            promises[names[main]],
            simulated=True,
        )
        about = {"main": names[main], "seeds": list(results.seeds), "guarantees": promises}
        arrays = first.arrays() | {"methods": np.array(json.dumps(about, allow_nan=False))}
        return packed(arrays | {f"{METHOD}{name}": each for name, each in zip(names, models, strict=True)})

    def _method_summary(
        self,
        prepared: Prepared,
        results: Results,
        index: int,
        solved: list[Comparators],
        looked: list[int],
        judged: Judgements,
    ) -> dict[str, Any]:
        done = results.rounds
        losses = results.history["loss"][index, :, :done].astype(np.float64)
        nobody = _nobody(results)
        figures: dict[str, Any] = {
            "average_loss": spread(_over_rounds(losses, nobody)),
            "accuracy": None,
            "held_out_accuracy": None,
            "prequential_accuracy": None,
            "rmse": None,
            "explained": None,
            "dynamic_regret": None,
            "static_regret": None,
            "distance_to_noise_free": spread(results.history["distance"][index, :, done - 1]),
        }
        if self.task.classifies and looked:
            if self.holds_out:
                figures["held_out_accuracy"] = spread(results.held_out_accuracy[index, :, looked[-1]])
                figures["accuracy"] = figures["held_out_accuracy"]  # its name of before, still read
            preq = results.history["accuracy"][index, :, :done].astype(np.float64)
            figures["prequential_accuracy"] = spread(_over_rounds(preq, nobody))
        figures |= judged.final(index)
        diverged = np.flatnonzero(~(np.isfinite(losses) | nobody).all(axis=0))
        if len(diverged):
            figures["remark"] = f"diverged from round {diverged[0]}: try a smaller step size"
        if solved and not len(diverged):
            each = [average_regret(losses[s], c.round_values)[-1] for s, c in enumerate(solved)]
            figures["dynamic_regret"] = spread(np.array(each))
            if all(c.offline_losses is not None for c in solved):
                each = [
                    average_regret(losses[s], c.offline_losses)[-1]
                    for s, c in enumerate(solved)
                    if c.offline_losses is not None
                ]
                figures["static_regret"] = spread(np.array(each))
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
            "verdict": judged.sentence(index),
            "final": figures,
        }


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


def _noise_csv(plan: Plan, prepared: list[Prepared]) -> str:
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


def _nobody(results: Results) -> NDArray[np.bool_]:
    """Rounds of each seed without a client, (seeds, rounds). A diverged model still has an accuracy."""
    measured = results.history["accuracy"][:, :, : results.rounds]
    if np.isnan(measured).all():  # not a task that classifies
        measured = results.history["loss"][:, :, : results.rounds]
    return np.asarray(np.isnan(measured).all(axis=0), np.bool_)


def _over_rounds(values: NDArray[np.float64], nobody: NDArray[np.bool_]) -> NDArray[np.float64]:
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
        "path_variation": None if None in variations else spread(np.array(variations, float)),
        "remarks": remarks,
    }
