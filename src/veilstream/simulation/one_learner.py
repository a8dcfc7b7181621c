"""One learner and its server in this process, one record at a time: for trying a model out.

**Protects no one**: its noise comes from a seed, and anyone may look at its local model. Numbers
are those of `veilstream run` with one learner and the same seed, but for rounding. A deployed
learner (`veilstream.Learner`) draws from the operating system and keeps a ledger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import HorizonExhausted, InputError
from veilstream.learning.algorithm import moved, next_model, step_size
from veilstream.learning.tasks import Sample, Task, TaskDetails, admission_of
from veilstream.mechanisms.stream import NoiseStream
from veilstream.plans.plan import Plan
from veilstream.plans.plan_tables import MethodPlan
from veilstream.plans.prepare import prepare
from veilstream.plans.tasks import task_of
from veilstream.privacy.clipping import clip
from veilstream.records.admission import Answer
from veilstream.records.participation import VisitsInMemory
from veilstream.simulation.noise_source import noise_seed

Float32s = NDArray[np.float32]


class SimulatedLearner:
    """Algorithm 1 with one learner whose clients come one by one; it **protects no one**.

    Args:
        plan: the run; one learner, one private method, one client a step.
        task: what is learned; the plan's where it is left out.
        seed: of the noise and of x⁰.

    Raises:
        InputError: for a plan with several learners or methods, or several clients a step.

    """

    def __init__(self, plan: Plan, task: Task | None = None, seed: int = 0) -> None:
        self.plan, self.seed = plan, seed
        self.task = task_of(plan) if task is None else task
        self._admission = admission_of(self.task)
        self._prepared = prepare(plan, _one_method(plan))
        self._x: Float32s = np.asarray(self.task.init(seed), np.float32).copy()
        self._z, self._published = self._x.copy(), self._x.copy()
        self._sum = np.zeros_like(self._x)
        momentum, forgets = self._prepared.plan.memory
        self._velocity = np.zeros_like(self._x) if momentum else None
        self._start = self._x.copy() if forgets else None
        self._steps = 0
        self._visits = VisitsInMemory(plan.participation)
        self._noise: NoiseStream | None = None
        self._function: Callable[..., Any] | None = None

    @property
    def guarantee(self) -> Any:
        """What the plan would promise if it were deployed; here it is kept to nobody."""
        return self._prepared.guarantee

    @property
    def horizon(self) -> int:
        """How many records it can learn from."""
        return self.plan.learning.rounds * self._prepared.steps

    @property
    def steps(self) -> int:
        """How many it has learned from."""
        return self._steps

    @property
    def round(self) -> int:
        """How many models have been released."""
        return self._steps // self._prepared.steps

    @property
    def model(self) -> Float32s:
        """The newest released one, read-only."""
        shown = self._published.view()
        shown.flags.writeable = False
        return shown

    def observe(self, client: bytes | str | None, sample: Sample) -> Answer:
        """Take one client, as a deployed learner does; None is someone who never returns.

        Raises:
            HorizonExhausted: after the plan's last step.

        """
        admitted = self._admission.admitted(sample)
        if admitted is None:
            return Answer.REFUSED
        if client is not None and self._visits.take(client, self._steps) is not None:
            return Answer.TAKEN
        if self._steps == self.horizon:
            raise HorizonExhausted(self.horizon, self._steps)
        self._step(self._gradient(admitted))
        return Answer.TAKEN

    def _gradient(self, sample: Sample) -> Float32s:
        if self._function is None:
            self._function = TaskDetails.of(self.task).host_gradient
        if self._function is None:
            import jax

            self._function = jax.jit(self.task.gradient)
        with np.errstate(all="ignore"):
            return np.asarray(self._function(self._z, sample), np.float32)

    def _step(self, gradient: Float32s) -> None:
        prepared, method, plan = self._prepared, self._prepared.plan, self.plan.learning
        round_, radius = self.round, plan.projection_radius
        rule = prepared.rule
        clipped = clip(gradient, float(rule.clip_norm), gamma=rule.gamma)
        noisy = np.asarray(clipped, np.float32) + self._next_noise()
        size = np.float32(step_size(method.local_step_size, method.step_decay, round_))
        self._z = moved(self._z, noisy, size, radius)
        self._sum += noisy
        self._steps += 1
        if self._steps % prepared.steps:
            return
        both = np.float32(float(size) * method.server_step_size)
        self._x, self._velocity = next_model(
            self._x,
            self._sum,
            both,
            radius,
            velocity=self._velocity,
            momentum=np.float32(method.momentum),
            start=self._start,
            forgetting=np.float32(method.forgetting),
        )
        share = np.float32(method.blend(round_))
        self._published = self._published + share * (self._x - self._published)
        self._z, self._sum = self._x.copy(), np.zeros_like(self._x)

    def _next_noise(self) -> Float32s:
        factorization = self._prepared.factorization
        assert factorization is not None
        if self._noise is None:
            seed = noise_seed(self.seed, factorization.name)
            self._noise = factorization.noise(std=1.0, dim=self.task.dim, seed=seed)
            for _ in range(self._steps):  # a copy goes on where it stood
                self._noise.step()
        return self._noise.step() * np.float32(self._prepared.noise_std)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_noise": None, "_function": None}  # both are made again

    def __repr__(self) -> str:
        return f"SimulatedLearner(protects no one; {self._steps} of {self.horizon} steps)"


def _one_method(plan: Plan) -> MethodPlan:
    learning = plan.learning
    for key, given in (("learners", learning.learners), ("clients_per_step", learning.clients_per_step)):
        if given != 1:
            raise InputError(
                f"learning.{key}",
                given,
                "1, to simulate record by record",
                f"{key} = 1; `veilstream run` simulates whole federations",
            )
    if plan.data.partial_attendance:
        data = plan.data
        raise InputError(
            "data.missing",
            (data.missing, data.late, data.leaving),
            "0, and late and leaving too, for one learner: it misses what it is not given",
            "remove them",
        )
    private = [m for m in plan.methods if m.method.private]
    if len(private) != 1 or plan.steps_and_clients(private[0])[1] != 1:
        raise InputError(
            "methods", [m.name for m in plan.methods], "exactly one private method", "`veilstream run` compares several"
        )
    return private[0]
