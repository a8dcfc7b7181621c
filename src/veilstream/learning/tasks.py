"""What is learned: a loss on a flat parameter vector, with its per-client gradient by JAX.

A client's data is a `Sample`. A task sees one sample at a time; simulations and learners vectorise.

    Task             what every task has
    DetailedTask     what a task may have besides
    TaskDetails      what a task has besides, or what stands in for it: all that others read
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError, MissingExtra
from veilstream.lazy import names_from
from veilstream.records.admission import Admission
from veilstream.records.sample import Sample

if TYPE_CHECKING:
    from jax import Array

    from veilstream.learning.linear_tasks import Huber, LeastSquares, Logistic, Poisson, Softmax
    from veilstream.learning.ripple import Ripple
    from veilstream.learning.task_kind import Margins, Target, TaskKind, TaskSetting

Floats = NDArray[np.floating[Any]]

__all__ = [
    "DetailedTask",
    "FromLoss",
    "Huber",
    "LeastSquares",
    "Logistic",
    "Margins",
    "Poisson",
    "Ripple",
    "Sample",
    "Softmax",
    "Target",
    "Task",
    "TaskDetails",
    "TaskKind",
    "TaskSetting",
    "check_members",
    "jax_numpy",
]

_LATER = {
    "veilstream.learning.linear_tasks": ("Huber", "LeastSquares", "Logistic", "Poisson", "Softmax"),
    "veilstream.learning.ripple": ("Ripple",),
    "veilstream.learning.task_kind": ("Margins", "Target", "TaskKind", "TaskSetting"),
}
__getattr__ = names_from(__name__, {name: module for module, names in _LATER.items() for name in names})


def __dir__() -> list[str]:
    return sorted(__all__)


@runtime_checkable
class Task(Protocol):
    """A loss and what follows from it: what every task has. See `DetailedTask` for the rest."""

    dim: int  # Parameters of a model, as one flat vector
    classifies: bool  # Whether predictions are labels, right or wrong

    def init(self, seed: int = 0) -> Array:
        """x⁰: public, independent of any data; drawn from the seed where it is drawn at all."""

    def loss(self, params: Array, sample: Sample) -> Array:
        """Loss of one client."""

    def gradient(self, params: Array, sample: Sample) -> Array:
        """Gradient of `loss`, before clipping."""

    def predict(self, params: Array, features: Array) -> Array:
        """What the model says of a batch (first axis)."""


class DetailedTask(Task, Protocol):
    """What a task may have besides. Every member is optional; `TaskDetails` fills in the others."""

    features_shape: tuple[int, ...]  # Shape of one client's features. Left out: that of `example`, if there is one.
    labels: tuple[float, ...] | None
    """Targets that the loss is written for; records with others are refused. Left out: any."""
    example: Sample | None
    """A made-up record, never a client's. A task that has one takes features of its size in any
    shape."""
    workspace: int  # Floats that one client's gradient needs while it is computed. Left out: twice `dim`.

    def host_gradient(self, params: Floats, sample: Sample) -> Floats:
        """`gradient` in NumPy, for a deployed learner. Left out: `gradient`, compiled by JAX."""

    def host_gradients(self, params: Floats, samples: Sample) -> Floats:
        """`host_gradient` of many clients, a row each (first axis). Left out: one call for each."""

    def logits(self, params: Array, features: Array) -> Array:
        """What `predict` decides by, for a batch: (n,) of two labels, where more means the second, or (n, labels).

        Left out: no area under the curve, log loss or probabilities.
        """


@dataclass(frozen=True)
class TaskDetails:
    """What `DetailedTask` lists, for any task: its own, or what stands in for it."""

    features_shape: tuple[int, ...] | None  # None where nobody says
    labels: tuple[float, ...] | None
    reshapes: bool  # Whether features of the right size are taken in any shape
    workspace: int
    host_gradient: Callable[[Floats, Sample], Any] | None
    host_gradients: Callable[[Floats, Sample], Any] | None
    logits: Callable[[Any, Any], Any] | None

    @classmethod
    def of(cls, task: Task) -> TaskDetails:
        """Read a task; the only place that asks what it has."""
        example: Sample | None = getattr(task, "example", None)
        shape = getattr(task, "features_shape", None)
        if shape is None and example is not None:
            shape = np.shape(example.features)
        labels = getattr(task, "labels", None)
        return cls(
            None if shape is None else tuple(shape),
            None if labels is None else tuple(labels),
            example is not None,
            getattr(task, "workspace", 2 * task.dim),
            getattr(task, "host_gradient", None),
            getattr(task, "host_gradients", None),
            getattr(task, "logits", None),
        )

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether one client's features may have this shape."""
        if self.features_shape is None or shape == self.features_shape:
            return True
        same_size = np.prod(shape, dtype=np.int64) == np.prod(self.features_shape, dtype=np.int64)
        return self.reshapes and bool(same_size)


def admission_of(task: Task) -> Admission:
    """Which records a deployed learner takes; `InputError` for a task without `features_shape` and `example`."""
    details = TaskDetails.of(task)
    if details.features_shape is None:
        raise InputError(
            "task",
            type(task).__name__,
            "a task with features_shape or an example",
            "say what one client's features look like: task.features_shape = (d,)",
        )
    return Admission(details.features_shape, details.labels)


def check_members(task: object) -> None:
    """Refuse what is not a `Task`, by the members that it lacks (`InputError`)."""
    wanted = ("dim", "classifies", "init", "loss", "gradient", "predict")
    missing = [name for name in wanted if not hasattr(task, name)]
    if missing:
        raise InputError(
            "task",
            type(task).__name__,
            f"a task with {', '.join(wanted)}",
            f"it lacks {', '.join(missing)}; veilstream.tasks.Task says what each is",
        )


class FromLoss(ABC):
    """Gradient by automatic differentiation, start at zero."""

    dim: int

    def init(self, seed: int = 0) -> Array:
        """Zero, whatever the seed. A server calls it, and has no JAX."""
        return np.zeros(self.dim, np.float32)

    def gradient(self, params: Array, sample: Sample) -> Array:
        """Gradient of `loss`, before clipping."""
        import jax

        gradient: Array = jax.grad(self.loss)(params, sample)
        return gradient

    @abstractmethod
    def loss(self, params: Array, sample: Sample) -> Array:
        """Loss of one client."""


def jax_numpy() -> Any:
    """`jax.numpy`, or what to install."""
    try:
        import jax.numpy as jnp
    except ImportError as error:
        raise MissingExtra("jax", "jax", "computing losses and gradients") from error
    return jnp
