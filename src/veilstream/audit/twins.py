"""Two learners with the same draws, whose clients differ at one step."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.audit.deployed import Unkind, listen
from veilstream.audit.disposable import Twin
from veilstream.audit.statistics import Differencing, difference
from veilstream.audit.transcript import Transcript
from veilstream.deployment.learner import Learner
from veilstream.deployment.terms import Terms
from veilstream.learning.tasks import Task
from veilstream.mechanisms.keystream import KEY_BYTES
from veilstream.plans.plan import Plan

Float32s = NDArray[np.float32]


class Replaced(Unkind):
    """The same clients, but for one, who is as different as a record can be.

    Its gradient is the largest there is, this way or that; with telemetry, the prediction for it is
    right or wrong, and its gradient clipped or just not.
    """

    def __init__(self, terms: Terms, at: int, sign: float, *, seed: int = 0) -> None:
        super().__init__(terms, seed=seed)
        self._at, self._sign = at, sign

    def _raw(self, step: int, z: Float32s) -> Float32s:
        if step != self._at:
            return super()._raw(step, z)
        raw = np.zeros(self.dim, np.float32)
        raw[0] = 7.0 * self._sign * self._clip_norm
        if self._told is not None and self._gamma is None and self._sign < 0.0:
            raw[0] = -self._clip_norm * (1.0 - 2.0**-20)
        return raw

    def _right(self, step: int) -> bool:
        return self._sign > 0.0 if step == self._at else super()._right(step)


def twin_runs(
    plan: Plan,
    terms: Terms,
    at: int = 0,
    *,
    adaptive: bool = False,
    make: Callable[[Plan, Task, bytes], Learner] = Twin,
) -> Differencing:
    """Difference two runs whose client of step ``at`` has gradient -B_g or +B_g.

    With an adaptive server, or with several steps a round, later clients see models that differ, so
    later gradients differ too; the audit knows them in both worlds.
    """
    pair = secrets.token_bytes(KEY_BYTES)
    runs: list[Transcript] = []
    for sign in (-1.0, 1.0):

        def made(plan: Plan, _: Path, task: Any, **__: Any) -> Learner:
            return make(plan, task, pair)

        task = Replaced(terms, at, sign)
        runs.append(listen(plan, terms, task, adaptive=adaptive, make=made))
    first, second = runs
    alone = not adaptive and terms.local_steps == 1
    return difference(
        first.prefixes,
        second.prefixes,
        first.known,
        second.known,
        differing_steps=1 if alone else terms.rounds * terms.local_steps,
        sizes=(first.sizes, second.sizes),
    )
