"""One learner and its server in this process, one record at a time: for trying a model out.

**Protects no one**: its noise follows from a seed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.client_steps import ClientSteps
from veilstream.deployment.local_rounds import LocalRounds
from veilstream.deployment.release import Payload
from veilstream.deployment.terms import Terms
from veilstream.errors import HorizonExhausted, InputError
from veilstream.learning.algorithm import next_model, step_size
from veilstream.learning.tasks import Sample, Task, admission_of
from veilstream.mechanisms.keystream import NoiseKey, Row, noise_seed
from veilstream.plans.plan import Plan
from veilstream.plans.tasks import task_of
from veilstream.privacy.guarantee import Guarantee
from veilstream.records.admission import Answer
from veilstream.records.participation import VisitsInMemory

Float32s = NDArray[np.float32]


class _SeededRounds(LocalRounds):
    """Rounds whose draws follow from a seed, as a simulation's do; they protect no one."""

    def __init__(self, terms: Terms, seed: int) -> None:
        super().__init__(terms, epoch=0)
        self._key = NoiseKey.from_seed(noise_seed(seed, terms.mechanism.name))

    def row(self, step: int, secret: bytes) -> Row:
        return Row(self._key.secret, step)


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
        _check_plan(plan)
        self.plan, self.seed = plan, seed
        self.task = task_of(plan) if task is None else task
        self._terms = Terms.of(plan, self.task.dim, self.task)
        self._admission = admission_of(self.task)
        self._visits = VisitsInMemory(plan.participation)
        self._start: Float32s = np.asarray(self.task.init(seed), np.float32).copy()
        self._x, self._published = self._start, self._start
        self._before = np.zeros(self._terms.dim, np.int64)  # what was sent so far, in units of the grid
        self._set_up()
        self._local.pin(self._x, "")

    def _set_up(self) -> None:
        self._steps = ClientSteps(self.task, self._terms)
        self._local = _SeededRounds(self._terms, self.seed)

    @property
    def guarantee(self) -> Guarantee:
        """What the plan would promise if it were deployed; here it is kept to nobody."""
        return self._terms.guarantee

    @property
    def horizon(self) -> int:
        """How many clients it can take."""
        return self._terms.rounds * self._terms.local_steps

    @property
    def steps(self) -> int:
        """How many it has taken."""
        return self._local.step

    @property
    def round(self) -> int:
        """How many models have been released."""
        return self._local.round

    @property
    def model(self) -> Float32s:
        """The newest released one, read-only."""
        shown = self._published.view()
        shown.flags.writeable = False
        return shown

    def observe(self, client: bytes | str | None, sample: Sample | None) -> Answer:
        """Take one client, as a deployed learner does; None is someone who never returns.

        A sample that is None or is not admitted is refused, and takes its step with a zero gradient.

        Raises:
            HorizonExhausted: after the plan's last step.

        """
        admitted = self._admission.admitted(sample)
        answer = Answer.REFUSED if admitted is None else Answer.TAKEN
        if client is not None and self._visits.take(client, self.steps) is not None:
            return answer
        if self.steps == self.horizon:
            raise HorizonExhausted(self.horizon, self.steps)
        self._local.apply(self._steps.noisy(self._local, [admitted], b""))
        if not self._local.steps_wanted:
            self._close_round()
        return answer

    def _close_round(self) -> None:
        """What a server makes of the round's message, and the next model pinned."""
        method, r = self._terms.method, self.round
        self._local.seal(self._local.message())
        prefix = self._local.prefix[: self._terms.dim]
        direction = (prefix - self._before) * self._terms.grid.step
        size = step_size(method.local_step_size * method.server_step_size, method.step_decay, r)
        start = self._start.astype(np.float64) if method.forgets else None
        x = next_model(
            self._x.astype(np.float64),
            direction,
            size,
            self._terms.projection_radius,
            start=start,
            forgetting=method.forgetting,
        )
        self._x, self._before = x.astype(np.float32), prefix.copy()
        self._published = self._published + np.float32(method.blend(r)) * (self._x - self._published)
        if not self._local.horizon_reached:
            self._local.pin(self._x, "")

    def __getstate__(self) -> dict[str, Any]:
        """Without noise and compiled gradients, which cannot be copied: both are made again."""
        sealed = self._local.sealed
        kept = {"_sealed": None if sealed is None else sealed.payload, "_open": self._local.pack_open()}
        return {name: held for name, held in vars(self).items() if name not in ("_steps", "_local")} | kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        sealed: Payload | None = state.pop("_sealed")
        opened: bytes = state.pop("_open")
        self.__dict__.update(state)
        self._set_up()
        if sealed is not None:
            self._local.resume(sealed, None)
        if not self._local.horizon_reached:
            self._local.pin(self._x, "")
            self._local.restore_open(opened)
        for _ in range(self.steps):
            self._local.replay(b"")

    def __repr__(self) -> str:
        return f"SimulatedLearner(protects no one; {self.steps} of {self.horizon} steps)"


def _check_plan(plan: Plan) -> None:
    """Refuse what cannot be simulated record by record; `Terms.of` refuses the rest."""
    learning, data = plan.learning, plan.data
    for key, given in (("learners", learning.learners), ("clients_per_step", learning.clients_per_step)):
        if given != 1:
            raise InputError(
                f"learning.{key}",
                given,
                "1, to simulate record by record",
                f"{key} = 1; `veilstream run` simulates whole federations",
            )
    if data.partial_attendance:
        raise InputError(
            "data.missing",
            (data.missing, data.late, data.leaving),
            "0, and late and leaving too, for one learner: it misses what it is not given",
            "remove them",
        )
