"""A task's gradient of one client's record, whatever the record does to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from veilstream.learning.purity import Asked, check_pure
from veilstream.learning.tasks import Sample, Task
from veilstream.privacy.gradient_types import Hidden, RawGradient

Float32s = NDArray[np.float32]


class ClientGradients:
    """Raw gradients of one task, which is checked to be pure before its first client."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._function = _gradient_of(task)
        self._checked = False

    def check_pure(self) -> None:
        """That gradients are pure by themselves."""
        check_pure(self._task, self._function)

    def check_pure_with(self, *others: Asked) -> None:
        """Once a process: that they are, and also with all else that is asked of the task.

        With JAX only when a gradient is needed, so that a restart is quick.

        Raises:
            InputError: for a task that remembers what it was asked before.

        """
        if not self._checked:
            check_pure(self._task, self._function, self._prediction, *others)
            self._checked = True

    def _prediction(self, z: Float32s, sample: Sample) -> Any:
        """Asked of every task, since a learner's own score asks it of clients' records."""
        return self._task.predict(cast(Any, z), cast(Any, sample.features[None]))

    def raw(self, model: Hidden[Float32s], sample: Sample) -> RawGradient:
        """Never raises: what cannot be used becomes zero, and uses up its step."""
        zero = np.zeros(self._task.dim, np.float32)
        try:
            with np.errstate(all="ignore"):
                z = model.reveal().view()
                z.flags.writeable = False  # a task that wrote to it would carry data along
                raw = np.asarray(self._function(z, sample))
                usable = raw.shape == zero.shape and raw.dtype.kind == "f"
                return RawGradient(raw.astype(np.float32) if usable else zero)
        except Exception:  # a client's data must not be able to stop or steer a learner
            return RawGradient(zero)


def _gradient_of(task: Task) -> Callable[[Float32s, Sample], Any]:
    """The task's own NumPy gradient if it has one (`host_gradient`), else JAX's, compiled."""
    host: Callable[[Float32s, Sample], Any] | None = getattr(task, "host_gradient", None)
    if host is not None:
        return host
    compiled: list[Any] = []

    def gradient(z: Float32s, sample: Sample) -> Any:
        if not compiled:  # a restart need not wait for JAX
            import jax

            compiled.append(jax.jit(task.gradient))
        return compiled[0](z, sample)

    return gradient
