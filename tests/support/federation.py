"""A small federation for tests: real keys, stores, sockets and messages, over Loopback."""

from __future__ import annotations

import logging
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.support.known_secrets import NamedRounds
from veilstream.deployment.epochs import EpochLedger
from veilstream.deployment.learner import Learner
from veilstream.deployment.ledger.store import Ledger
from veilstream.deployment.release import decode
from veilstream.federation.keys.identity import LearnerKeys, ServerKeys
from veilstream.federation.keys.new_keys import make_keys
from veilstream.federation.learner.daemon import Daemon
from veilstream.federation.loopback import Loopback
from veilstream.federation.server.coordinator import Coordinator
from veilstream.federation.server.sum_coordinator import SumCoordinator
from veilstream.plans.data_source import PlanSource
from veilstream.plans.plan import Plan
from veilstream.plans.records import schema_of
from veilstream.streams.table_source import TableSource
from veilstream.streams.tables import RowsTable
from veilstream.streams.waiting_source import WaitingSource

DIM = 6


class Plain:
    """Logistic regression in NumPy: JAX is not loaded."""

    dim, features_shape, labels, classifies = DIM, (DIM,), (-1.0, 1.0), True

    def init(self, seed: int = 0) -> np.ndarray:
        return np.zeros(DIM, np.float32)

    def host_gradient(self, z, sample):
        margin = sample.target * (sample.features @ z)
        return (-sample.target / (1 + np.exp(margin)) * sample.features).astype(np.float32)

    def predict(self, params, features):
        return np.where(features @ params >= 0, 1.0, -1.0)


def plan_of(rounds: int = 6, learners: int = 3, **changes) -> Plan:
    federation = {"quorum": 1.0, "deadline_s": 20.0, "patience_s": 5.0, "min_clients": 1} | changes.pop(
        "federation", {}
    )
    method = {"name": "ours", "mechanism": "buffered", "step_size": 0.1, "server_step_size": 2.0}
    learning = {"rounds": rounds, "local_steps": 2, "learners": learners}
    return Plan(
        name="small",
        learning=learning | changes.pop("learning", {}),
        data={"dim": DIM},
        privacy={"epsilon": 4.0, "delta": 1e-3} | changes.pop("privacy", {}),
        federation=federation,
        methods=[method | changes.pop("method", {})],
    )


FEATURES = tuple(f"x{i}" for i in range(DIM))


def table_plan_of(rounds: int = 6, learners: int = 3, **changes) -> Plan:
    """`plan_of` with records of a table: person, label y (no, yes), numbers x0 to x5."""
    changed = changes.pop("data", {})
    plan = plan_of(rounds, learners, **changes)
    data = {
        "kind": "table",
        "client": "person",
        "label": "y",
        "labels": ("no", "yes"),
        "bias": False,
        "features": tuple({"name": name, "low": -1.0, "high": 1.0} for name in FEATURES),
    }
    parts = tomllib.loads(plan.to_toml()) | {"data": data | changed}
    return Plan(**parts)


def rows_of(people, label=lambda i: ("no", "yes")[i % 2]) -> list[dict[str, object]]:
    """A record for each."""
    rng = np.random.default_rng(7)
    return [
        {"person": person, "y": label(i)} | {name: round(rng.uniform(-1, 1), 3) for name in FEATURES}
        for i, person in enumerate(people)
    ]


def csv_of(rows: list[dict[str, object]], *, comma: str = ",") -> str:
    """As a file."""
    lines = [rows[0].keys(), *(row.values() for row in rows)]
    return "".join(comma.join(map(str, line)) + "\n" for line in lines)


def source_of(rows: list[dict[str, object]]) -> TableSource:
    """Rows in memory as a learner's source."""
    return TableSource(RowsTable(iter(rows)), schema_of(table_plan_of()))


class Lines(list[str]):
    """What a logger warns of from now on, until `end`."""

    def __init__(self, logger: str) -> None:
        super().__init__()
        self._handler = logging.Handler(logging.WARNING)
        self._handler.emit = lambda record: self.append(record.getMessage())
        self._logger = logging.getLogger(logger)
        self._logger.addHandler(self._handler)

    def end(self) -> None:
        self._logger.removeHandler(self._handler)


class World:
    """Server and learners in one folder; learners are threads behind sockets."""

    def __init__(self, root: Path, plan: Plan, names: tuple[str, ...] = ("a", "b", "c")) -> None:
        self.root, self.plan, self.names = root, plan, names
        make_keys(root / "keys", ["127.0.0.1"], list(names))
        self.notes = Lines("veilstream.federation.server.coordinator")
        self.daemons: dict[str, Daemon] = {}
        self.handlers: dict[str, Callable[[bytes], bytes]] = {}
        """What answers for each learner that runs."""

    def store(self, name: str) -> Path:
        return self.root / name / "store.db"

    def keys_of(self, name: str) -> LearnerKeys:
        return LearnerKeys.load(self.root / "keys/learners" / name)

    def start(self, name: str, plan: Plan | None = None, source=None, **options) -> Daemon:
        plan = self.plan if plan is None else plan
        learner = Learner(plan, self.store(name), Plain(), create=True)
        source = PlanSource(plan, self.names.index(name)) if source is None else source
        if not isinstance(source, WaitingSource):
            options.setdefault("replies", "when done")  # slots have tests of their own
        daemon = self.daemons[name] = Daemon(learner, self.keys_of(name), source, **options)
        self.handlers[name] = daemon.handle
        return daemon

    def stop(self, name: str) -> None:
        self.handlers.pop(name)
        self.daemons.pop(name).close()

    def start_all(self) -> World:
        for name in self.names:
            self.start(name)
        return self

    def transport(self) -> Loopback:
        return Loopback(self.handlers)

    def coordinator(self) -> Coordinator:
        keys = ServerKeys.load(self.root / "keys/server")
        kind = Coordinator if self.plan.trust is None else SumCoordinator
        return kind(self.plan, np.zeros(DIM, np.float32), keys, self.root / "run")

    def close(self) -> None:
        for name in list(self.daemons):
            self.stop(name)
        self.notes.end()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def model_by_ledgers(self) -> np.ndarray:
        """x after all rounds, from what the learners' ledgers hold: increments add up."""
        method = self.plan.methods[0]
        total = np.zeros(DIM)
        for name in self.names:
            with Ledger(self.store(name), create=True) as ledger:
                message = decode(ledger.blob("message"))
            total += message.prefix * message.grid
        size = method.step_size * method.server_step_size
        return -size * total / self.plan.learning.learners


class NodeHere:
    """A learner's connection within one process: its handler is in ``handlers`` while it is connected."""

    def __init__(self, handlers: dict[str, Callable[[bytes], bytes]], daemon: Daemon) -> None:
        self._handlers, self._daemon = handlers, daemon

    def start(self) -> None:
        self._handlers[self._daemon.name] = self._daemon.handle

    def supervise(self) -> None:
        return None

    def close(self) -> None:
        self._handlers.pop(self._daemon.name, None)


def connect_here(service, handlers: dict[str, Callable[[bytes], bytes]]):
    """A `LearnerService` that dials nobody."""
    service._node = lambda daemon, learner: NodeHere(handlers, daemon)
    return service


def options(**values: object) -> list[str]:
    """A command's options, as in ``new_store=True, data="live"``."""
    words = []
    for name, value in values.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def wait_for(condition, seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.01)


def seeds_by_name(monkeypatch) -> None:
    """The same draws in every world: from the store's name and the step. Tests only."""
    monkeypatch.setattr(
        EpochLedger, "new_rounds", lambda self, epoch: NamedRounds(self.terms, epoch, self.ledger.path.parent.name)
    )
