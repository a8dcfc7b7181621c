"""A whole federation on one machine, every part a process of its own, as between machines."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from veilstream.deployment.ledger.inspect import verify
from veilstream.deployment.terms import Terms
from veilstream.errors import InputError, VeilstreamError
from veilstream.federation.addresses import free_port
from veilstream.federation.demo_data import DemoData, Scores
from veilstream.federation.keys.new_keys import make_keys
from veilstream.federation.processes import Child
from veilstream.federation.server.checkpoint import ModelFile
from veilstream.files import write_file
from veilstream.learning.tasks import Task
from veilstream.plans.plan import Plan
from veilstream.plans.tasks import task_of
from veilstream.progress import progress
from veilstream.runs.released_model import ReleasedModel
from veilstream.runs.tables import read_rounds
from veilstream.wording import counted

_log = logging.getLogger(__name__)

_LOOK_S = 0.2
_PLAN = """
name = "federation-demo"
[learning]
rounds = 30
local_steps = 4
[data]
dim = 20
held_out = 2000
[privacy]
epsilon = 4.0
delta = 1e-5
[[methods]]
name = "ours"
mechanism = "buffered"
step_size = 0.05
"""


@dataclass(frozen=True)
class DemoResult:
    """What a demonstration measured."""

    learners: int
    rounds: int
    seconds: float
    seconds_per_round: float
    """Median, from announcing a model to the next."""
    scores: Scores | None
    """Of the first and the last model."""
    clients: int
    """Visits that were learned from, by the ledgers."""
    records: str
    """What became of the rows of files; empty for made-up data."""
    guarantee: str
    remarks: tuple[str, ...]
    """What is weak about the guarantee."""
    folder: str
    model: str

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON."""
        return dataclasses.asdict(self)

    def text(self) -> str:
        """The result for people."""
        lines = {
            "Guarantee": self.guarantee,
            "Note": "; ".join(self.remarks),
            "Records": self.records,
            "Federation": f"{counted(self.learners, 'learner')}, "
            f"{counted(self.rounds, 'round')}, {self.seconds_per_round:.2f} s each "
            f"({self.seconds:.1f} s with starting)",
        }
        if self.scores is not None:
            metric = "RMSE" if self.scores.metric == "rmse" else "Accuracy"
            lines[metric] = self.scores.text()
            lines["Does it learn?"] = "\n  try: ".join([self.scores.verdict.sentence, *self.scores.verdict.advice])
        lines["Ledgers"] = f"{self.learners} verified: {self.clients} clients, none more often than promised"
        lines["Model"] = self.model
        lines["Folder"] = self.folder
        return "\n".join(f"{name:<14} {text}" for name, text in lines.items() if text)


def demo_plan(learners: int, rounds: int, changes: dict[str, Any] | None = None) -> Plan:
    """Logistic regression on synthetic clients; ``changes`` maps dotted keys to values."""
    return Plan.parse(_PLAN, {"learning.learners": learners, "learning.rounds": rounds} | (changes or {}))


def run_demo(folder: Path, plan: Plan) -> DemoResult:
    """Make keys, run a server and learners to the end of the horizon, and check everything."""
    if folder.exists() and any(folder.iterdir()):
        raise InputError("out", str(folder), "a new or empty folder", "name another with --out")
    if plan.learning.unbounded:
        raise InputError("learning.unbounded", True, "false, since a demonstration ends", "use another plan")
    task = task_of(plan)
    Terms.of(plan, task.dim, task)  # refuse a plan that cannot be deployed before writing anything
    data = DemoData.of(plan)
    sources = dict(zip(data.names, data.deal(folder / "learners"), strict=True))
    # Each learner has a file of its records by now, and asks no database.
    deployed = dataclasses.replace(plan, data=dataclasses.replace(plan.data, query=None))
    make_keys(folder / "keys", ["127.0.0.1", "localhost"], list(data.names))
    write_file(folder / "plan.toml", deployed.to_toml())
    began = time.monotonic()
    _run_direct(folder, sources, plan.learning.rounds)
    return _result(data, task, folder, time.monotonic() - began)


def _run_direct(folder: Path, sources: Mapping[str, str], rounds: int) -> None:
    server, *learners = direct_processes(folder, sources, free_port())
    try:
        for child in (server, *learners):
            child.start()
        _log.info("a server and %s run; their logs are in %s", counted(len(learners), "learner"), folder / "logs")
        _watch(folder, rounds, learners, lambda: server.running)
        if server.exit_code:
            raise _failed(server)
    finally:
        for child in reversed(learners):
            child.end(5.0)
        server.end()


def direct_processes(folder: Path, sources: Mapping[str, str], port: int) -> list[Child]:
    """The server, then the learners, each with its ``--data``; none is started."""
    at = f"127.0.0.1:{port}"
    server = _veilstream(folder, "server", "server", keys="keys/server", out="run", listen=at)
    server.command.append("--exit-when-done")
    return [server, *(_learner(folder, name, source, "--server", at) for name, source in sources.items())]


def _veilstream(folder: Path, command: str, name: str, *, keys: str, **options: str) -> Child:
    """A veilstream command; options that name a file of the folder are relative to it."""
    paths = {"plan": "plan.toml", "keys": keys}
    arguments = [sys.executable, "-P", "-m", "veilstream", command]  # -P: no module of the current folder
    for option, value in {**paths, **options}.items():
        inside = option in ("plan", "keys", "out", "store")
        arguments += [f"--{option}", str(folder / value) if inside else value]
    return Child(arguments, folder / f"logs/{name}.log")


def _learner(folder: Path, name: str, source: str, *more: str) -> Child:
    keys, store = f"keys/learners/{name}", f"learners/{name}/store.db"
    child = _veilstream(folder, "learner", name, keys=keys, store=store, data=source)
    child.command += ["--new-store", *more]
    return child


def _watch(folder: Path, rounds: int, children: list[Child], running: Callable[[], bool]) -> None:
    with progress("rounds", rounds) as tick:
        shown = 0
        while running():
            if (ended := next((child for child in children if not child.running), None)) is not None:
                raise _failed(ended)
            done = _rounds_done(folder)
            tick(max(0, done - shown))
            shown = max(shown, done)
            time.sleep(_LOOK_S)


def _failed(child: Child) -> VeilstreamError:
    return VeilstreamError(f"a process ended with {child.exit_code} ({child.log}):\n{child.last_lines()}")


def _rounds_done(folder: Path) -> int:
    try:
        return (folder / "run/rounds.csv").read_bytes().count(b"\n") - 1
    except OSError:
        return 0


def _result(data: DemoData, task: Task, folder: Path, seconds: float) -> DemoResult:
    plan, rounds = data.plan, data.plan.learning.rounds
    models = ModelFile(folder / "run/models.f32", task.dim)
    ledgers = [verify(folder / "learners" / name / "store.db") for name in data.names]
    guarantee = Terms.of(plan, task.dim, task).guarantee
    run = json.loads((folder / "run/summary.json").read_text())["run"]
    toml = (folder / "run/plan.toml").read_text()
    released = ReleasedModel(models.read(rounds), rounds, rounds, run, toml, guarantee.as_dict())
    released.save(folder / "model.npz")
    return DemoResult(
        len(data.names),
        rounds,
        seconds,
        float(np.median([closed.seconds for closed in read_rounds(folder / "run").rounds])),
        data.scores(task, models.read(0), released.model),
        sum(ledger.clients for ledger in ledgers),
        data.text(),
        str(guarantee),
        guarantee.remarks,
        str(folder),
        str(folder / "model.npz"),
    )
