"""What a plan and a task need of a stream, checked before training and in every block.

A loss written for labels -1 and +1 silently learns something else from 0 and 1; a wrong shape would
end in an error of the compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.learning.tasks import Sample, Task, TaskDetails
from veilstream.plans.plan import Plan
from veilstream.streams.pool import PoolStream, Stream


@dataclass(frozen=True)
class ExpectedRecords:
    """The shape and labels of a round's clients."""

    learners: int
    local_steps: int
    clients_per_step: int
    details: TaskDetails

    @classmethod
    def of(cls, plan: Plan, task: Task) -> ExpectedRecords:
        """What this plan and this task need."""
        learning = plan.learning
        return cls(learning.learners, learning.local_steps, learning.clients_per_step, TaskDetails.of(task))

    @property
    def per_round(self) -> int:
        """Clients that a learner meets in a round."""
        return self.local_steps * self.clients_per_step

    def check_round(self, met: Sample, seed: int, round_: int) -> None:
        """Refuse a round of another shape, or with labels that the task is not written for (`InputError`)."""
        where = f"stream.round({seed}, {round_})"
        features, target = np.asarray(met.features), np.asarray(met.target)
        lead = (self.learners, self.per_round)
        each = f"{self.local_steps} steps a round"
        if self.clients_per_step > 1:
            each += f" of {self.clients_per_step} clients"
        for name, array in (("features", features), ("target", target), ("present", met.present)):
            if array is not None and np.shape(array)[:2] != lead:
                raise InputError(
                    f"{where}.{name}",
                    f"shape {np.shape(array)}",
                    f"{lead} first: {self.learners} learners, {each}",
                    "make the stream for this plan's learners, local_steps and clients_per_step",
                )
        if met.present is not None and np.shape(met.present) != lead:
            raise InputError(
                f"{where}.present",
                f"shape {np.shape(met.present)}",
                f"shape {lead}",
                "0 or 1 for each client, or None where everyone is there",
            )
        self._check_records(where, features.shape[2:], target, met.present)

    def check_held_out(self, held: Sample, seed: int, round_: int) -> None:
        """Refuse held-out clients of another shape, or with other labels (`InputError`)."""
        where = f"stream.held_out({seed}, ..., {round_})"
        features, target = np.asarray(held.features), np.asarray(held.target)
        if not len(target) or features.shape[:1] != target.shape[:1]:
            raise InputError(
                where,
                f"features {features.shape}, target {target.shape}",
                "one target for each of at least one client",
                "give both the same first axis",
            )
        self._check_records(where, features.shape[1:], target, None)

    def check_pool(self, pool: PoolStream, rounds: int) -> None:
        """Refuse a pool that was cut for another plan, or holds other records (`InputError`)."""
        wanted = {"learners": self.learners, "per_round": self.per_round}
        for name, value in wanted.items():
            found = pool.learners if name == "learners" else pool.per_round
            if found != value:
                raise InputError(
                    f"stream.{name}",
                    found,
                    f"{value}, as the plan has it",
                    "make the stream with learners = learning.learners and per_round = local_steps x clients_per_step",
                )
        if pool.rounds < rounds:
            raise InputError(
                "stream.rounds",
                pool.rounds,
                f"at least the plan's {rounds}",
                "make a stream of more rounds, or set learning.rounds",
            )
        self._check_records("stream", pool.features.shape[1:], pool.targets, None)
        self._check_records("stream.held_out", pool.held_features.shape[1:], pool.held_targets, None)

    def _check_records(self, where: str, shape: tuple[int, ...], target: NDArray[Any], present: Any) -> None:
        if not self.details.takes(shape):
            raise InputError(
                f"{where}.features",
                f"shape {shape} for one client",
                f"the task's features_shape {self.details.features_shape}",
                "a task for these features, or a stream for this task",
            )
        if self.details.labels is None:
            return
        # What is not finite is refused as such, with the features.
        known = np.isin(target, self.details.labels) | ~np.isfinite(target)
        if present is not None:  # an empty place has no label
            known |= np.asarray(present) == 0
        if not known.all():
            others = sorted({float(label) for label in target[~known]})[:4]
            listed = ", ".join(f"{label:g}" for label in self.details.labels)
            raise InputError(
                f"{where}.target",
                ", ".join(f"{label:g}" for label in others),
                f"one of the task's labels {listed}",
                "map the labels: a model trained on others is another model, and no error says so",
            )


def clients_of(stream: Stream, seeds: Sequence[int], first: int, count: int, expected: ExpectedRecords) -> Sample:
    """Clients of some rounds, as features (rounds, seeds, n, clients, ...) and targets."""
    drawn = [[stream.round(seed, r) for seed in seeds] for r in range(first, first + count)]
    for r, row in enumerate(drawn, start=first):
        for seed, met in zip(seeds, row, strict=True):
            expected.check_round(met, seed, r)
    features = np.array([[s.features for s in row] for row in drawn])
    targets = np.array([[s.target for s in row] for row in drawn])
    if not (np.isfinite(features).all() and np.isfinite(targets).all()):
        raise InputError(
            "data",
            f"rounds {first} to {first + count - 1}",
            "finite features and targets",
            "repair the stream; the run learned nothing from these rounds",
        )
    if all(s.present is None for row in drawn for s in row):
        return Sample(features, targets)
    everyone = np.ones(targets.shape[2:], np.float32)
    present = np.array([[everyone if s.present is None else s.present for s in row] for row in drawn], np.float32)
    if not ((present == 0.0) | (present == 1.0)).all():
        raise InputError(
            "data",
            f"rounds {first} to {first + count - 1}",
            "present = 0 or 1 for every client",
            "a client counts once or not at all: the guarantee rests on it",
        )
    return Sample(features, targets, present)


def check_stream(plan: Plan, task: Task, stream: Stream) -> Sample:
    """Check a stream against a plan and a task before anything is trained; returns one client's record."""
    expected = ExpectedRecords.of(plan, task)
    if isinstance(stream, PoolStream):
        expected.check_pool(stream, plan.learning.rounds)
        return Sample(stream.features[0], stream.targets[0])
    seed = plan.run.first_seed
    met = stream.round(seed, 0)
    expected.check_round(met, seed, 0)
    if task.classifies:
        expected.check_held_out(stream.held_out(seed, plan.data.held_out, 0), seed, 0)
    return Sample(np.asarray(met.features)[0, 0], np.asarray(met.target)[0, 0])


def check_task(task: Task, record: Sample) -> None:
    """Trace a task of one's own on the shape of a record; `InputError` where it does not take it."""
    import jax

    features, target = np.asarray(record.features), np.asarray(record.target)

    def spec(array: NDArray[Any], *lead: int) -> Any:
        kind = jax.dtypes.canonicalize_dtype(array.dtype)
        return jax.ShapeDtypeStruct((*lead, *array.shape), kind)

    params = jax.ShapeDtypeStruct((task.dim,), np.float32)
    one = Sample(spec(features), spec(target))
    _expect("loss", (), task.loss, params, one)
    _expect("gradient", (task.dim,), task.gradient, params, one)
    if task.classifies:
        _expect("predict", (3, *target.shape), task.predict, params, spec(features, 3))


def _expect(name: str, shape: tuple[int, ...], function: Any, *given: Any) -> None:
    import jax

    try:
        answer = jax.eval_shape(function, *given)
    except (TypeError, ValueError, IndexError) as error:
        if isinstance(error, InputError):
            raise
        record = jax.tree.leaves(given)[1]
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"task.{name}",
            f"features of shape {record.shape}",
            "a task that takes the stream's records",
            f"JAX says: {reason}",
        ) from error
    found = getattr(answer, "shape", None)
    if found != shape:
        raise InputError(
            f"task.{name}",
            f"shape {found}",
            f"shape {shape}",
            "one answer for each sample" if name == "predict" else "see veilstream.tasks.Task",
        )
