"""Check, before any client comes, that a task is a pure function of (model, record).

The promise counts what one client's record can move: its own gradient, at its own step. A gradient
that remembers (a running mean, a cache, a counter) carries one client's record into the next one's
step, wherever the memory is filled; one that draws random numbers is not the gradient that was
clipped when it is asked for again. Neither is covered by the promise.

Made-up records, small and large ones, asked for again and again in changing order and in that of a
step (the gradient, the others, the gradient again), must give the same bytes each time. A task that
changes later, or by too little to show here, is not found out: this is a check, not a proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.learning.tasks import Sample, Task, admission_of

_ROUTINES_APART = 0.05  # of a gradient's norm, by how float32 sums are ordered in two routines
_TURNS = 6
_TURNS_TOGETHER = 4
Asked = Callable[[NDArray[np.float32], Sample], Any]


def check_pure(task: Task, gradient: Asked, *others: Asked) -> None:
    """Refuse a task whose answers depend on what it was asked before (`InputError`).

    Args:
        task: says what a record looks like (`features_shape`, `labels`).
        gradient: the function that a learner calls with a model and an admitted record.
        others: what else it calls so, checked together with the gradient.

    """
    records = example_records(task)
    functions = (gradient, *others)
    order = np.random.default_rng(0)
    for model in _models(task.dim):
        before = model.copy()
        # Smallest first: what only ever grows (a largest value, a list of words) shows afterwards.
        first = [[_outcome(f, model, record) for f in functions] for record in records]
        for turn in range(_TURNS_TOGETHER if others else _TURNS):
            asked = model if turn % 2 else model.copy()
            for i, k in _calls(len(records), len(functions), turn, order):
                if _outcome(functions[k], asked, records[i]) != first[i][k]:
                    raise _not_pure(task, together=bool(others))
            if not np.array_equal(asked, before):
                raise _not_pure(task, together=bool(others))


def check_rows_apart(
    task: Task, gradient: Asked, gradients: Callable[[NDArray[np.float32], Sequence[Sample]], Any], places: int
) -> None:
    """Refuse gradients of a whole step that are not each client's own (`InputError`).

    The promise counts one client's own row; a mean over the step (a batch norm) would spread it over all.
    """
    records = example_records(task)
    step = [records[k % len(records)] for k in range(places)]
    for model in _models(task.dim):
        together = np.asarray(gradients(model, step))
        for k in range(min(places, len(records))):
            others = [each if k == place else records[(place + 1) % len(records)] for place, each in enumerate(step)]
            if not np.array_equal(np.asarray(gradients(model, others))[k], together[k], equal_nan=True):
                raise InputError(
                    "task",
                    type(task).__name__,
                    "gradients of a step's clients in which no row depends on another client's record",
                    "remove what mixes records (a batch norm), or leave host_gradients out",
                )
            if k > 1:  # large records: float32 scores of two routines may be far apart
                continue
            with np.errstate(all="ignore"):
                alone = np.asarray(gradient(model, step[k]), np.float64)
            if not np.linalg.norm(together[k] - alone) <= _ROUTINES_APART * np.linalg.norm(alone):
                raise InputError(
                    "task",
                    type(task).__name__,
                    "host_gradients that has in each row what host_gradient says of that record",
                    "mend one of them, or set host_gradients = None",
                )


def _calls(records: int, functions: int, turn: int, order: np.random.Generator) -> Iterator[tuple[int, int]]:
    """(record, function) of a turn: as a learner's steps ask, or all of them in any order."""
    if functions > 1 and turn % 2:
        for i in order.permutation(records):
            yield from ((int(i), k) for k in (*range(functions), 0))
        return
    for call in order.permutation(records * functions):
        yield int(call) // functions, int(call) % functions


def _not_pure(task: Task, *, together: bool) -> InputError:
    what = "a gradient that is a pure function"
    if together:
        what = "a gradient, predictions and losses that are pure functions, all together,"
    return InputError(
        "task",
        type(task).__name__,
        f"{what} of (model, record): the same record again must give the same bytes",
        "keep no state between records (running means or maxima, caches, counters), draw no random "
        "numbers, and leave the model that is passed in as it is",
    )


def example_records(task: Task) -> list[Sample]:
    """Made-up records that the task admits: one of zeros, then larger and larger ones."""
    admission = admission_of(task)
    # Not whole numbers, so that a task which numbers its records can tell these from real ones.
    targets = (-0.75, 0.25) if admission.labels is None else (admission.labels[0], admission.labels[-1])
    count = int(np.prod(admission.shape, dtype=np.int64))
    ramp = (np.linspace(0.1, 0.9, count) * (-1.0) ** np.arange(count)).reshape(admission.shape)
    # The largest come with either sign, so that a mean of what was seen changes its own.
    offers = [Sample(np.zeros(admission.shape), targets[0])]
    for k, size in enumerate((1.0, -3.0, 40.0, -1e3, 1e3)):
        offers.append(Sample(size * np.roll(ramp, k), targets[(k + 1) % 2]))
    admitted = (admission.admitted(offer) for offer in offers)
    return [record for record in admitted if record is not None]


def _models(dim: int) -> list[NDArray[np.float32]]:
    """Zero, where many tasks begin, and one that is nowhere zero."""
    ramp = np.linspace(0.05, 0.15, dim, dtype=np.float32)
    return [np.zeros(dim, np.float32), ramp]


def _outcome(function: Asked, model: NDArray[np.float32], record: Sample) -> tuple[Any, ...]:
    """What a learner would use: type, shape and bytes; or that nothing came, which counts as 0."""
    view = model.view()
    view.flags.writeable = False
    try:
        with np.errstate(all="ignore"):
            found = np.asarray(function(view, record))
        return found.dtype.str, found.shape, found.tobytes()
    except Exception as error:  # as in a learner's step, where it counts as a zero gradient
        return ("raised", type(error).__name__)
