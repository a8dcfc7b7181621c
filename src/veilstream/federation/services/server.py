"""The server's long-lived process: transport, coordinator and the model API.

Nothing here imports noise or clients' data.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from veilstream.errors import UnknownName
from veilstream.federation.identity import ServerKeys
from veilstream.federation.services.coordinator import Coordinator, Standing
from veilstream.federation.services.model_api import ModelApi
from veilstream.federation.services.run_lock import RunLock
from veilstream.federation.services.supervision import ENGINES, Address, Engine, supervised
from veilstream.learning.tasks import Task
from veilstream.plans.plan import Plan
from veilstream.plans.tasks import task_of

__all__ = ["ServerService", "server_engine"]

_log = logging.getLogger(__name__)


def server_engine(
    name: str, keys: Path, state: Path, address: Address, *, dim: int,
    answer_within_s: float = 600.0, insecure: bool = False,
) -> Engine:  # fmt: skip
    """The engine of this name, for models of this dimension."""
    if name == "direct":
        from veilstream.federation.transports.direct import DirectServer

        return DirectServer(
            keys, address, dim=dim, answer_within_s=answer_within_s, insecure=insecure
        )
    if name == "flower":
        from veilstream.federation.transports.flower import FlowerServer

        return FlowerServer(keys, state, address, insecure=insecure)
    if name == "flare":
        from veilstream.federation.transports.flare import FlareServer

        return FlareServer(keys, state, address, insecure=insecure)
    raise UnknownName("engine", name, ENGINES)


@dataclass
class ServerService:
    """`veilstream server`: engine, coordinator and the page of models."""

    plan: Plan
    keys: Path
    folder: Path
    address: Address
    engine: str = "direct"
    model_api: Address | None = None
    insecure: bool = False
    task: Task | None = None
    roll_back: int | None = None
    """Go on from the model that was published after so many rounds."""
    void: tuple[str, ...] = ()
    """Learners that are never asked again."""
    reset: tuple[str, ...] = ()
    """Learners that are taken at their next enrolment as they are."""

    def run(self, watch: Callable[[Standing], None] = lambda _: None) -> Coordinator:
        """Run to the end of the horizon; started again after a kill, go on."""
        keys = ServerKeys.load(self.keys)
        task = task_of(self.plan) if self.task is None else self.task
        x0 = np.asarray(task.init(self.plan.run.first_seed), np.float32)
        with ExitStack() as stack:
            stack.callback(RunLock(self.folder).close)
            coordinator = Coordinator(
                self.plan, x0, keys, self.folder, engine=self.engine, task=task, watch=watch
            )
            self._operate(coordinator)
            _log.info("guarantee: %s", coordinator.terms.guarantee)
            if self.model_api is not None:
                tls = None if self.insecure else (self.keys / "tls.pem", self.keys / "tls.key")
                page = ModelApi(coordinator, self.model_api, tls)
                stack.callback(page.close)
                scheme = "http" if tls is None else "https"
                at = f"{scheme}://{self.model_api[0]}:{page.port}"
                _log.info("models are published at %s/model/latest", at)
            if not coordinator.finished:
                engine = server_engine(
                    self.engine, self.keys, self.folder / "engine", self.address,
                    dim=len(x0), answer_within_s=self.plan.federation.deadline_s,
                    insecure=self.insecure,
                )  # fmt: skip
                stack.callback(engine.close)
                engine.start()
                _log.info("run %s waits for learners at %s:%d", coordinator.run, *self.address)
                with supervised([engine]) as check:
                    coordinator.go(engine, look=check)
        return coordinator

    def _operate(self, coordinator: Coordinator) -> None:
        """What the operator has decided, before anyone is asked."""
        if self.roll_back is not None:
            coordinator.roll_back(self.roll_back)
        for learner in self.void:
            coordinator.void(learner)
        for learner in self.reset:
            coordinator.reset(learner)
