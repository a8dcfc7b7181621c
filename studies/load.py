"""A thousand learners on one server: seconds a round, memory, and whether the model is right.

    python -m studies.load --learners 1000 --dim 1000 --rounds 10
    python -m studies.load --learners 1000 --dim 61482 --rounds 10

A real `veilstream server` over the direct transport, and one process that holds a stream for every
learner: each with its own certificate and signing key, over mutual TLS, answering signed requests
with signed releases. Releases have the form and the size of a ledger's; their prefixes are rows of
random whole numbers, another one each round, as large as the plan's noise. Only clients, noise and
ledgers are missing: what is measured is the server and the wire.

Violations are counted as the run goes: a request whose model is not, to the bit, what the releases
so far imply; two models in one round; a released model that is not the implied one; a round that
was closed without somebody. A round lasts from its first request to the next round's.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from veilstream.deployment.release import encode
from veilstream.deployment.terms import Terms
from veilstream.federation.addresses import free_port
from veilstream.federation.direct import wire
from veilstream.federation.keys.identity import LearnerKeys
from veilstream.federation.keys.new_keys import make_keys
from veilstream.federation.processes import Child
from veilstream.federation.protocol.messages import Reply, Request, digest
from veilstream.federation.protocol.sizes import request_limit
from veilstream.federation.server.checkpoint import ModelFile
from veilstream.plans.plan import Plan
from veilstream.plans.tasks import task_of
from veilstream.privacy.gradient_types import Noised
from veilstream.progress import progress

import grpc  # isort: skip  # after wire, which says how loud it may be
import grpc.aio  # isort: skip

__all__ = ["Report", "study"]

_ROWS = 61  # of random numbers that prefixes are taken from
_WARM_UP = 2
"""Rounds that are not timed: connections are made in the first."""


@dataclass
class Report:
    """What it took, and what was wrong."""

    learners: int
    dim: int
    rounds: int
    keys_s: float = 0.0
    """To make all keys."""
    enrolled_s: float = 0.0
    """From the server's start to the first round's first request."""
    round_s: float = 0.0
    """Median."""
    round_p90_s: float = 0.0
    server_peak_mib: float = 0.0
    server_cpu_s: float = 0.0
    """A round, as the next."""
    load_cpu_s: float = 0.0
    kills: int = 0
    violations: Counter[str] = field(default_factory=Counter)


def plan_of(learners: int, dim: int, rounds: int) -> Plan:
    """Everyone in every round: what the model must be is then known beforehand."""
    return Plan(
        name="load",
        learning={"rounds": rounds, "local_steps": 2, "learners": learners},
        data={"dim": dim},
        privacy={"epsilon": 4.0, "delta": 1e-5},
        federation={"quorum": 1.0, "deadline_s": 300.0, "patience_s": 120.0},
        methods=[{"name": "ours", "mechanism": "buffered", "step_size": 0.1}],
    )


class Releases:
    """What every learner sends in every round, and the models that follow from it."""

    def __init__(self, plan: Plan) -> None:
        task = task_of(plan)
        x0 = np.asarray(task.init(plan.run.first_seed), np.float32)
        self.plan, self.terms = plan, Terms.of(plan, len(x0), task)
        self.settings = self.terms.settings
        rng = np.random.default_rng(7)
        scale = self.terms.noise_std / self.terms.grid.step / 8  # well inside what noise may be
        rows = rng.normal(0.0, scale, (_ROWS, self.terms.dim))
        self._rows = np.rint(rows).astype(np.int64)
        self._x = x0.astype(np.float64)
        self.models = [x0]

    def _row(self, learner: int, round_: int) -> int:
        return (learner + 17 * round_) % _ROWS

    def payload(self, learner: int, round_: int) -> bytes:
        """The same for the same round, as a ledger would have it."""
        prefix = Noised(self._rows[self._row(learner, round_)])
        steps = self.terms.local_steps * (round_ + 1)
        return encode(0, round_, steps, self.terms.grid.step, prefix)

    def _sum(self, round_: int) -> np.ndarray[Any, Any]:
        if round_ < 0:
            return np.zeros(self.terms.dim, np.int64)
        rows = [self._row(i, round_) for i in range(self.terms.learners)]
        times = np.bincount(rows, minlength=_ROWS)
        return np.asarray(times @ self._rows)

    def model(self, round_: int) -> np.ndarray[Any, Any]:
        """x^r by eq-comp-alg, from the sums of all prefixes: no message is looked at."""
        while len(self.models) <= round_:
            r = len(self.models) - 1
            method = self.terms.method
            mean = (self._sum(r) - self._sum(r - 1)) / self.terms.learners * self.terms.grid.step
            self._x = self._x - method.step_size * method.server_step_size * mean
            self.models.append(self._x.astype(np.float32))
        return self.models[round_]


class Fleet:
    """All learners, in one event loop."""

    def __init__(self, keys: Path, names: Sequence[str], releases: Releases) -> None:
        self._keys, self._names, self.releases = keys, names, releases
        self._implied: dict[int, bytes] = {}
        self._next = [0] * len(names)
        self.first_request: list[float] = []
        """When each round's first request came."""
        self.violations: Counter[str] = Counter()

    async def run(self, port: int) -> None:
        """Hold all streams until cancelled."""
        async with asyncio.TaskGroup() as group:
            for index, name in enumerate(self._names):
                group.create_task(self._live(index, name, port))

    async def _live(self, index: int, name: str, port: int) -> None:
        folder = self._keys / "learners" / name
        keys = LearnerKeys.load(folder)
        pem = [(folder / file).read_bytes() for file in ("ca.pem", "tls.key", "tls.pem")]
        options = wire.options(1 + request_limit(self.releases.terms.dim))
        metadata = ((wire.LEARNER, name), (wire.INSTANCE, name))
        while True:
            credentials = grpc.ssl_channel_credentials(*pem)
            where = wire.target("127.0.0.1", port)
            async with grpc.aio.secure_channel(where, credentials, options=options) as channel:
                call = channel.stream_stream(wire.PATH)(metadata=metadata)
                try:
                    await self._answer_all(index, keys, call)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    pass  # the server is not there yet, or was killed
                finally:
                    call.cancel()
            await asyncio.sleep(0.5)

    async def _answer_all(self, index: int, keys: LearnerKeys, call: Any) -> None:
        while (frame := await call.read()) is not grpc.aio.EOF:
            if frame == wire.PING:
                await call.write(wire.PING)
            elif frame[:1] == wire.REQUEST:
                await call.write(wire.REPLY + self._answer(index, keys, frame[1:]))
            del frame  # else a thousand models would be held

    def _answer(self, index: int, keys: LearnerKeys, data: bytes) -> bytes:
        request = Request.read(data, keys.server)
        if request.kind == "enrol":
            facts = {
                "epoch": 0,
                "round": self._next[index],
                "daemon": keys.name,
                "settings": self.releases.settings,
                "time": int(time.time()),
            }
            return Reply("enrolled", keys.name, digest(data), facts).sign(keys.identity)
        if request.kind == "end":
            facts = {"epoch": 0, "round": self._next[index]}
            return Reply("ended", keys.name, digest(data), facts).sign(keys.identity)
        self._look_at(request)
        self._next[index] = max(self._next[index], request.round + 1)
        body = self.releases.payload(index, request.round)
        return Reply("release", keys.name, digest(data), {}, body).sign(keys.identity)

    def _look_at(self, request: Request) -> None:
        r = request.round
        if r == len(self.first_request):
            self.first_request.append(time.monotonic())
        if r not in self._implied:
            self._implied = {r: self.releases.model(r).astype("<f4").tobytes()}
        if request.body != self._implied[r]:
            self.violations["a request with another model than the releases imply"] += 1


def study(
    learners: int, dim: int, rounds: int, root: Path, keys: Path | None = None, limit_s: float = 900.0, kills: int = 0
) -> Report:
    """Run the load.

    ``keys`` is where keys are kept for the next time; ``kills`` how often the server is
    killed while the rounds go on.
    """
    plan = plan_of(learners, dim, rounds + _WARM_UP)
    report = Report(learners, dim, rounds)
    root.mkdir(parents=True, exist_ok=True)
    (root / "plan.toml").write_text(plan.to_toml())
    names = [f"l{i:04d}" for i in range(learners)]
    keys = keys or root / "keys"
    began = time.monotonic()
    if not keys.exists():
        make_keys(keys, ["127.0.0.1"], names)
    report.keys_s = round(time.monotonic() - began, 1)
    fleet = Fleet(keys, names, Releases(plan))
    with ExitStack() as stack:
        port = free_port()
        server = _server(root, keys / "server", port)
        stack.callback(server.end)
        watch = _Watch(fleet, root / "run", server, kills)
        asyncio.run(asyncio.wait_for(_until_done(fleet, port, watch), limit_s))
        report.kills = watch.killed
    report.enrolled_s = round(fleet.first_request[0] - began, 1)
    _sum_up(report, fleet, watch)
    _check_models(report, fleet, root / "run", names)
    return report


def _server(root: Path, keys: Path, port: int) -> Child:
    options = ["--plan", root / "plan.toml", "--keys", keys, "--out", root / "run", "--listen", f"127.0.0.1:{port}"]
    words = [sys.executable, "-m", "veilstream", "server", *map(str, options), "--log-level", "warning"]
    child = Child(words, root / "server.log")
    child.start()
    return child


async def _until_done(fleet: Fleet, port: int, watch: _Watch) -> None:
    """Hold the streams until the last model is released."""
    rounds, done = fleet.releases.terms.rounds, 0
    streams = asyncio.create_task(fleet.run(port))
    try:
        with progress("rounds", rounds) as tick:
            while not watch.finished():
                await asyncio.sleep(0.1)
                watch.look()
                tick(len(fleet.first_request) - done)
                done = len(fleet.first_request)
                if streams.done():
                    await streams  # a defect of ours
    finally:
        streams.cancel()
        await asyncio.gather(streams, return_exceptions=True)


class _Watch:
    """CPU seconds and memory of the server and of the load, while the rounds go on."""

    def __init__(self, fleet: Fleet, run: Path, server: Child, kills: int) -> None:
        self._fleet, self._run, self._server, self._kills, self.killed = fleet, run, server, kills, 0
        self.peak_mib = 0.0
        self.used_s: dict[str, list[tuple[int, float]]] = {"server": [], "load": []}
        """By side: (rounds begun, CPU seconds so far)."""

    def finished(self) -> bool:
        return (self._run / "summary.json").exists()

    def look(self) -> None:
        begun, server = len(self._fleet.first_request), self._server
        self.used_s["load"].append((begun, time.process_time()))
        if server.pid is None:
            if server.exit_code != -signal.SIGKILL or not self._kills:
                raise RuntimeError(f"the server has ended: {server.last_lines()}")
            server.start()
            return
        process = psutil.Process(server.pid)
        times = process.cpu_times()
        self.used_s["server"].append((begun, times.user + times.system))
        self.peak_mib = max(self.peak_mib, process.memory_info().rss / 2**20)
        if begun > _WARM_UP + 2 * self.killed and self.killed < self._kills:
            os.kill(server.pid, signal.SIGKILL)
            self.killed += 1

    def cpu_a_round(self, side: str) -> float:
        """After the warm-up."""
        later = [(begun, used) for begun, used in self.used_s[side] if begun > _WARM_UP]
        if len(later) < 2 or later[-1][0] == later[0][0]:
            return 0.0
        return (later[-1][1] - later[0][1]) / (later[-1][0] - later[0][0])


def _sum_up(report: Report, fleet: Fleet, watch: _Watch) -> None:
    times = np.diff(fleet.first_request[_WARM_UP:])
    report.round_s = round(float(np.median(times)), 4)
    report.round_p90_s = round(float(np.quantile(times, 0.9)), 4)
    report.server_cpu_s = round(watch.cpu_a_round("server"), 3)
    report.load_cpu_s = round(watch.cpu_a_round("load"), 3)
    report.server_peak_mib = round(watch.peak_mib, 1)


def _check_models(report: Report, fleet: Fleet, run: Path, names: Sequence[str]) -> None:
    """What was released against what the releases imply; and who was in each round."""
    report.violations += fleet.violations
    releases = fleet.releases
    released = ModelFile(run / "models.f32", releases.terms.dim)
    for r in range(releases.terms.rounds + 1):
        if released.read(r).tobytes() != releases.model(r).tobytes():
            report.violations["a released model that the releases do not imply"] += 1
    with (run / "releases.csv").open() as file:
        listed = Counter((row["round"], row["learner"]) for row in csv.DictReader(file))
    asked = {(str(r), name) for r in range(releases.terms.rounds) for name in names}
    # A server that is killed before its checkpoint lists the round once more.
    most = 1 + report.kills
    report.violations["releases that were not counted once"] += sum(
        not 1 <= listed[key] <= most for key in asked | set(listed)
    )


def main() -> None:
    """Run it, print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learners", type=int, default=1000)
    parser.add_argument("--dim", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kills", type=int, default=0, help="of the server")
    parser.add_argument("--keep", type=Path, help="folder to leave everything in")
    asked = parser.parse_args()
    kept = f"veilstream-load-keys-{os.getuid()}-{asked.learners}"
    keys = Path(tempfile.gettempdir()) / kept
    with tempfile.TemporaryDirectory(prefix="load-") as temporary:
        folder = asked.keep or Path(temporary)
        report = study(asked.learners, asked.dim, asked.rounds, folder, keys, kills=asked.kills)
    print(json.dumps(vars(report), indent=2))
    sys.exit(1 if any(report.violations.values()) else 0)


if __name__ == "__main__":
    main()
