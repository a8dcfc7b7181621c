"""A whole federation on one machine, every part a process of its own, as between machines."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from veilstream.deployment.ledger.inspect import verify
from veilstream.deployment.terms import Terms
from veilstream.errors import InputError, VeilstreamError
from veilstream.federation.addresses import free_port
from veilstream.federation.demo_data import DemoData, Scores
from veilstream.federation.flower.carrier_socket import OWN_ACCOUNT
from veilstream.federation.keys.identity import make_keys
from veilstream.federation.processes import Child
from veilstream.federation.server.checkpoint import ModelFile
from veilstream.files import write_file
from veilstream.learning.tasks import Task
from veilstream.plans.plan import Plan
from veilstream.plans.tasks import task_of
from veilstream.progress import progress
from veilstream.runs.released_model import ReleasedModel
from veilstream.runs.tables import read_rounds

_log = logging.getLogger(__name__)

_LOOK_S = 0.2
_QUIET_S = 60.0
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
    """What came of it."""

    transport: str
    learners: int
    rounds: int
    seconds: float
    seconds_per_round: float
    """Median, from announcing a model to moving it."""
    scores: Scores | None
    """Of the first and the last model."""
    clients: int
    """Visits that were learned from, by the ledgers."""
    records: str
    """What became of the rows of files; empty where the data are made up."""
    guarantee: str
    folder: str
    model: str
    """The last model's file."""

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return dataclasses.asdict(self)

    def text(self) -> str:
        """For people."""
        lines = {
            "Guarantee": self.guarantee,
            "Records": self.records,
            "Federation": f"{self.learners} learners over {self.transport}, {self.rounds} rounds, "
            f"{self.seconds_per_round:.2f} s each ({self.seconds:.1f} s with starting)",
        }
        if self.scores is not None:
            lines[self.scores.metric.capitalize()] = self.scores.text()
        lines["Ledgers"] = f"{self.learners} verified: {self.clients} clients, none more often than promised"
        lines["Model"] = self.model
        lines["Folder"] = self.folder
        return "\n".join(f"{name:<11} {text}" for name, text in lines.items() if text)


def demo_plan(learners: int, rounds: int) -> Plan:
    """Logistic regression on synthetic clients."""
    return Plan.parse(_PLAN, {"learning.learners": learners, "learning.rounds": rounds})


def run_demo(
    folder: Path,
    transport: str,
    plan: Plan,
    *,
    insecure: bool = False,
    trust_carrier: bool = False,
    options: Sequence[str] = (),
) -> DemoResult:
    """Keys, a server, learners; to the end of the horizon, then everything is checked.

    Learners are those of the plan's files, with a file each without the people who are held out; or
    the plan's made-up ones. Flower's processes run under accounts of their own, for which this
    needs root; ``trust_carrier`` lets them run under this one. ``options`` go to every
    process.

    Raises:
        InputError: for a plan that cannot be deployed, or whose records do not last.

    """
    _check_accounts(transport, trusted=trust_carrier)
    if folder.exists() and any(folder.iterdir()):
        raise InputError("out", str(folder), "a new or empty folder", "name another with --out")
    if plan.learning.unbounded:
        raise InputError("learning.unbounded", True, "false: a demonstration ends", "--set, or another plan")
    task = task_of(plan)
    Terms.of(plan, task.dim, task)  # what cannot be deployed is refused before anything is written
    data = DemoData.of(plan)
    names, rounds = list(data.names), plan.learning.rounds
    sources = data.deal(folder / "learners")
    # Records are dealt already: each learner has a file, and asks no database.
    deployed = dataclasses.replace(plan, data=dataclasses.replace(plan.data, query=None))
    port = free_port()
    make_keys(folder / "keys", ["127.0.0.1", "localhost"], names)
    write_file(folder / "plan.toml", deployed.to_toml())
    if transport == "flower":
        seconds = _run_flower(
            folder, plan, dict(zip(names, sources, strict=True)), trusted=trust_carrier, options=list(options)
        )
        return _result(data, task, folder, transport, seconds)
    given = [*options, *(["--insecure"] if insecure else [])]
    children = _children(folder, port, dict(zip(names, sources, strict=True)), given)
    began = time.monotonic()
    try:
        for child in children:
            child.start()
        _log.info("a server and %d learners run; their logs are in %s", len(names), folder / "logs")
        _wait(children, folder / "run/rounds.csv", rounds)
    finally:
        for child in reversed(children[1:]):
            child.end(5.0)
        children[0].end()
    return _result(data, task, folder, transport, time.monotonic() - began)


def _check_accounts(transport: str, *, trusted: bool) -> None:
    if transport != "direct" and not trusted and os.geteuid() != 0:
        raise InputError(
            "--transport",
            transport,
            f"root, to start its processes under other accounts; as they are now, {OWN_ACCOUNT}",
            "leave --transport out, or add --trust-carrier where the data are made up",
        )


def _children(folder: Path, port: int, sources: dict[str, str], options: list[str]) -> list[Child]:
    """The server first, then the learners, each with its ``--data``."""
    veilstream = [sys.executable, "-m", "veilstream"]
    common = ["--plan", str(folder / "plan.toml"), *options]
    server = [
        *veilstream,
        "server",
        *common,
        "--keys",
        str(folder / "keys/server"),
        "--listen",
        f"127.0.0.1:{port}",
        "--out",
        str(folder / "run"),
        "--exit-when-done",
    ]
    children = [Child(server, folder / "logs/server.log")]
    for name, source in sources.items():
        learner = [
            *veilstream,
            "learner",
            *common,
            "--keys",
            str(folder / "keys/learners" / name),
            "--server",
            f"127.0.0.1:{port}",
            "--data",
            source,
            "--store",
            str(folder / "learners" / name / "store.db"),
            "--new-store",
        ]
        children.append(Child(learner, folder / f"logs/{name}.log"))
    return children


def _run_flower(folder: Path, plan: Plan, sources: dict[str, str], *, trusted: bool, options: list[str]) -> float:
    """With a SuperLink, SuperNodes and `flwr run` (`transports.flower.local`); seconds it took."""
    from veilstream.federation.flower.app_folder import write_app
    from veilstream.federation.flower.local import LocalFlower, socket_folder

    folder.chmod(0o711)  # what others may not read is closed below it
    began, rounds, names = time.monotonic(), plan.learning.rounds, list(sources)
    flower = LocalFlower(folder / "flower", folder / "keys", names, other_accounts=not trusted)
    shutil.copytree(folder / "keys/server", folder / "server-keys")
    flower.give_to_server(folder / "server-keys")
    flower.give_to_server(folder / "run")
    (folder / "plan.toml").chmod(0o644)
    write_app(folder / "app", plan=folder / "plan.toml", keys=folder / "server-keys", out=folder / "run")
    with ExitStack() as stack:
        stack.callback(flower.close)
        flower.start()
        learners = []
        for name, source in sources.items():
            at = socket_folder(folder / "sockets" / name, flower.accounts[name]) / "s"
            learner = [
                sys.executable,
                "-m",
                "veilstream",
                "learner",
                "--plan",
                str(folder / "plan.toml"),
                "--data",
                source,
                "--keys",
                str(folder / "keys/learners" / name),
                "--socket",
                str(at),
                "--store",
                str(folder / "learners" / name / "store.db"),
                "--new-store",
                *(["--trust-carrier"] if trusted else []),
                *options,
            ]
            child = Child(learner, folder / f"logs/{name}.log")
            stack.callback(child.end, 5.0)
            child.start()
            learners.append(child)
            flower.start_supernode(name, at)
        (folder / "sockets").chmod(0o711)
        run = flower.submit(folder / "app")
        _log.info("Flower's run %s has begun; logs are in %s and logs", run, folder / "flower")
        children = [flower.superlink, *flower.supernodes.values(), *learners]
        with progress("rounds", rounds) as tick:
            done = 0
            while (now := _lines(folder / "run/rounds.csv") - 1) < rounds:
                if (failed := next((c for c in children if not c.running), None)) is not None:
                    raise _failed(failed)
                if time.monotonic() - began > _QUIET_S and flower.status(run) == "finished:failed":
                    raise _failed(flower.superlink)
                tick(max(0, now - done))
                done = max(done, now)
                time.sleep(_LOOK_S)
        while not flower.status(run).startswith("finished"):
            time.sleep(_LOOK_S)
    return time.monotonic() - began


def _wait(children: list[Child], rounds_csv: Path, rounds: int) -> None:
    """Until the server has ended; a process that failed is an error with the end of its log."""
    with progress("rounds", rounds) as tick:
        done = 0
        while children[0].running:
            for child in children[1:]:
                if not child.running:
                    raise _failed(child)
            now = _lines(rounds_csv) - 1
            tick(max(0, now - done))
            done = max(done, now)
            time.sleep(_LOOK_S)
    if children[0].exit_code:
        raise _failed(children[0])


def _failed(child: Child) -> VeilstreamError:
    return VeilstreamError(f"a process ended with {child.exit_code} ({child.log}):\n{child.last_lines()}")


def _lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 1


def _result(data: DemoData, task: Task, folder: Path, transport: str, seconds: float) -> DemoResult:
    plan, rounds = data.plan, data.plan.learning.rounds
    models = ModelFile(folder / "run/models.f32", task.dim)
    ledgers = [verify(folder / "learners" / name / "store.db") for name in data.names]
    guarantee = Terms.of(plan, task.dim, task).guarantee
    run = json.loads((folder / "run/summary.json").read_text())["run"]
    released = ReleasedModel(
        models.read(rounds), rounds, rounds, run, (folder / "run/plan.toml").read_text(), guarantee.as_dict()
    )
    released.save(folder / "model.npz")
    return DemoResult(
        transport,
        len(data.names),
        rounds,
        seconds,
        float(np.median([closed.seconds for closed in read_rounds(folder / "run").rounds])),
        data.scores(task, models.read(0), released.model),
        sum(ledger.clients for ledger in ledgers),
        data.text(),
        str(guarantee),
        str(folder),
        str(folder / "model.npz"),
    )
