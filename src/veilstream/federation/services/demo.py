"""A whole federation on one machine, every part a process of its own, as between machines."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.ledger.inspect import verify
from veilstream.errors import InputError, VeilstreamError
from veilstream.federation.addresses import free_port
from veilstream.federation.identity import make_keys
from veilstream.federation.processes import Child
from veilstream.federation.services.carrier_socket import OWN_ACCOUNT
from veilstream.federation.services.checkpoint import ModelFile
from veilstream.files import write_file
from veilstream.plans.clients import stream_of
from veilstream.plans.plan import Plan
from veilstream.plans.tasks import task_of
from veilstream.progress import progress

if TYPE_CHECKING:
    from veilstream.federation.transports.flare.local import LocalFlare

__all__ = ["DemoResult", "demo_plan", "run_demo"]

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

    engine: str
    learners: int
    rounds: int
    seconds: float
    seconds_per_round: float
    """Median, from announcing a model to moving it."""
    accuracy_before: float
    accuracy_after: float
    clients: int
    """Who took part, by the ledgers."""
    guarantee: str
    folder: str

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)

    def text(self) -> str:
        """For people."""
        return (
            f"Guarantee   {self.guarantee}\n"
            f"Federation  {self.learners} learners over {self.engine}, {self.rounds} rounds, "
            f"{self.seconds_per_round:.2f} s each ({self.seconds:.1f} s with starting)\n"
            f"Accuracy    {self.accuracy_before:.3f} before, {self.accuracy_after:.3f} after, "
            "on clients who did not take part\n"
            f"Ledgers     {self.learners} verified: {self.clients} clients, each taken once\n"
            f"Folder      {self.folder}"
        )


def demo_plan(learners: int, rounds: int) -> Plan:
    """Logistic regression on synthetic clients."""
    return Plan.parse(_PLAN, {"learning.learners": learners, "learning.rounds": rounds})


def run_demo(
    folder: Path, engine: str, learners: int, rounds: int, *, insecure: bool = False,
    trust_engine: bool = False, options: Sequence[str] = (),
) -> DemoResult:  # fmt: skip
    """Keys, a server, learners; to the end of the horizon, then everything is checked.

    An engine's processes beside the learners run under accounts of their own, for which this needs
    root; ``trust_engine`` lets them run under this one. ``options`` go to every process.
    """
    _check_accounts(engine, trusted=trust_engine)
    if folder.exists() and any(folder.iterdir()):
        raise InputError("out", str(folder), "a new or empty folder", "name another with --out")
    plan = demo_plan(learners, rounds)
    names = [f"learner-{i}" for i in range(learners)]
    port = free_port()
    make_keys(folder / "keys", ["127.0.0.1", "localhost"], names)
    if engine == "flare":
        from veilstream.federation.transports.flare import provision

        provision(folder / "keys", "localhost", port)
    write_file(folder / "plan.toml", plan.to_toml())
    if engine == "flower":
        return _run_flower(folder, plan, names, trusted=trust_engine, options=list(options))
    given = [*options, *(["--insecure"] if insecure else [])]
    flare = _flare(folder, names, trusted=trust_engine) if engine == "flare" else None
    children = _children(folder, engine, port, names, given, flare, trusted=trust_engine)
    began = time.monotonic()
    try:
        if flare is not None:
            flare.start()
        for child in children:
            child.start()
        _log.info("a server and %d learners run; their logs are in %s", learners, folder / "logs")
        _wait(children, folder / "run/rounds.csv", rounds)
    finally:
        for child in reversed(children[1:]):
            child.end(5.0)
        children[0].end()
        if flare is not None:
            flare.close()
    seconds = time.monotonic() - began
    return _result(plan, folder, engine, names, seconds)


def _check_accounts(engine: str, *, trusted: bool) -> None:
    if engine != "direct" and not trusted and os.geteuid() != 0:
        raise InputError(
            "--engine", engine,
            f"root, to start its processes under other accounts; as they are now, {OWN_ACCOUNT}",
            "use --engine direct, or add --trust-engine: the demo's data are synthetic",
        )  # fmt: skip


def _flare(folder: Path, names: list[str], *, trusted: bool) -> LocalFlare:
    """FLARE's own processes; what the accounts may not read is closed below the folder."""
    from veilstream.federation.transports.flare.local import LocalFlare

    folder.chmod(0o711)
    return LocalFlare(folder / "flare", folder / "keys", names, other_accounts=not trusted)


def _children(
    folder: Path, engine: str, port: int, names: list[str], options: list[str],
    flare: LocalFlare | None = None, *, trusted: bool = False,
) -> list[Child]:  # fmt: skip
    """The server first."""

    def at(name: str) -> list[str]:
        trust = ["--trust-engine"] if trusted and name != "server" else []
        return [] if flare is None else ["--socket", str(flare.socket(name)), *trust]

    host = "localhost" if engine == "flare" else "127.0.0.1"
    veilstream = [sys.executable, "-m", "veilstream"]
    common = ["--plan", str(folder / "plan.toml"), "--engine", engine, *options]
    server = [
        *veilstream, "server", *common, "--keys", str(folder / "keys/server"),
        "--listen", f"{host}:{port}", "--out", str(folder / "run"), "--exit-when-done",
        *at("server"),
    ]  # fmt: skip
    children = [Child(server, folder / "logs/server.log")]
    for index, name in enumerate(names):
        learner = [
            *veilstream, "learner", *common, "--keys", str(folder / "keys/learners" / name),
            "--server", f"{host}:{port}", "--data", f"plan:{index}",
            "--store", str(folder / "learners" / name / "store.db"),
            "--new-store", *at(name),
        ]  # fmt: skip
        children.append(Child(learner, folder / f"logs/{name}.log"))
    return children


def _run_flower(
    folder: Path, plan: Plan, names: list[str], *, trusted: bool, options: list[str]
) -> DemoResult:
    """With a SuperLink, SuperNodes and `flwr run`; see `transports.flower.local`."""
    from veilstream.federation.transports.flower.app_folder import write_app
    from veilstream.federation.transports.flower.local import LocalFlower, socket_folder

    folder.chmod(0o711)  # what others may not read is closed below it
    began, rounds = time.monotonic(), plan.learning.rounds
    flower = LocalFlower(folder / "flower", folder / "keys", names, other_accounts=not trusted)
    shutil.copytree(folder / "keys/server", folder / "server-keys")
    flower.give_to_server(folder / "server-keys")
    flower.give_to_server(folder / "run")
    (folder / "plan.toml").chmod(0o644)
    write_app(
        folder / "app", plan=folder / "plan.toml", keys=folder / "server-keys", out=folder / "run"
    )
    with ExitStack() as stack:
        stack.callback(flower.close)
        flower.start()
        learners = []
        for place, name in enumerate(names):
            at = socket_folder(folder / "sockets" / name, flower.accounts[name]) / "s"
            learner = [
                sys.executable, "-m", "veilstream", "learner", "--engine", "flower",
                "--plan", str(folder / "plan.toml"), "--data", f"plan:{place}",
                "--keys", str(folder / "keys/learners" / name), "--socket", str(at),
                "--store", str(folder / "learners" / name / "store.db"), "--new-store",
                *(["--trust-engine"] if trusted else []), *options,
            ]  # fmt: skip
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
    return _result(plan, folder, "flower", names, time.monotonic() - began)


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
    return VeilstreamError(
        f"a process ended with {child.exit_code} ({child.log}):\n{child.last_lines()}"
    )


def _lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 1


def _result(plan: Plan, folder: Path, engine: str, names: list[str], seconds: float) -> DemoResult:
    task, stream = task_of(plan), stream_of(plan)
    held_out = stream.held_out(plan.run.first_seed, plan.data.held_out, plan.learning.rounds - 1)
    features = np.asarray(held_out.features).reshape(-1, plan.data.dim)
    target = np.asarray(held_out.target).ravel()
    models = ModelFile(folder / "run/models.f32", task.dim)

    def accuracy(model: NDArray[np.float32]) -> float:
        return float((np.asarray(task.predict(model, features)) == target).mean())

    ledgers = [verify(folder / "learners" / name / "store.db") for name in names]
    rows = (folder / "run/rounds.csv").read_text().splitlines()[1:]
    from veilstream.deployment.terms import Terms

    return DemoResult(
        engine, len(names), plan.learning.rounds, seconds,
        float(np.median([float(row.split(",")[1]) for row in rows])),
        accuracy(models.read(0)), accuracy(models.read(plan.learning.rounds)),
        sum(ledger.clients for ledger in ledgers), str(Terms.of(plan, task.dim).guarantee),
        str(folder),
    )  # fmt: skip
