"""What our part of a federated round costs beside the transport that carries it.

    python benchmarks/federation.py [--learners 3] [--rounds 30] [--dim 61482]

Two federations after one another in one session, over TLS and with keys, on loopback:

* *null*: the transport alone. The server's side sends a model to every node and waits for all
  replies; behind each node something answers at once with as many bytes as a release has. That is a process
  a learner, as in earnest.
* *ours*: `Coordinator`, and each `Daemon` a process, with real ledgers and noise; only the
  gradient is free.

With ``--signed`` the null round signs and checks every message as ours does. ``beside_cpu`` is our
round less what the learners' own CPU takes of it (its sum over the cores there are), over the null
round. Prints seconds a round (medians), CPU seconds of a learner's daemon a round, bytes a round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil

from veilstream.deployment.learner import Learner
from veilstream.deployment.release import HEADER_BYTES
from veilstream.federation.addresses import free_port
from veilstream.federation.direct import DirectServer
from veilstream.federation.keys.identity import LearnerKeys, ServerKeys
from veilstream.federation.keys.new_keys import make_keys
from veilstream.federation.learner.daemon import Daemon
from veilstream.federation.processes import Child
from veilstream.federation.protocol.messages import Reply, Request
from veilstream.federation.protocol.transport import Failure, Transport
from veilstream.federation.server.coordinator import Coordinator
from veilstream.learning.tasks import Sample
from veilstream.plans.plan import Plan
from veilstream.streams.intake import AlwaysReady


class Free:
    """A model of any size whose gradient costs nothing."""

    classifies = False

    def __init__(self, dim: int) -> None:
        self.dim, self.features_shape = dim, (1,)

    def host_gradient(self, z: np.ndarray, sample: Sample) -> np.ndarray:
        return np.zeros(self.dim, np.float32)


class Endless(AlwaysReady):
    """Clients who never end."""

    def serve(self, round_: int, observe, wanted) -> None:
        t = 0
        while wanted():
            observe([(f"{round_}/{t}", Sample(np.zeros(1, np.float32), 0.0))])
            t += 1


def plan_of(learners: int, rounds: int) -> Plan:
    return Plan(
        learning={"rounds": rounds, "local_steps": 4, "learners": learners, "task": "custom"},
        data={"kind": "custom"},
        privacy={"epsilon": 2.0, "delta": 1e-5},
        federation={"quorum": 1.0, "deadline_s": 120.0, "patience_s": 30.0},
        methods=[{"name": "ours", "mechanism": "buffered", "step_size": 0.1}],
    )


def daemon_process(
    root: Path, name: str, path: Path, port: int, asked: argparse.Namespace, stack: ExitStack, role: str = "--daemon"
) -> Child:
    """A learner's daemon as a process of its own."""
    command = [
        sys.executable,
        __file__,
        role,
        str(root),
        "--port",
        str(port),
        *(["--signed"] if asked.signed else []),
        "--name",
        name,
        "--socket",
        str(path),
        "--learners",
        str(asked.learners),
        "--rounds",
        str(asked.rounds),
        "--dim",
        str(asked.dim),
    ]
    child = Child(command, root / f"{name}.log")
    child.start()
    stack.callback(child.end)
    while not path.exists():
        time.sleep(0.05)
    return child


def be_daemon(asked: argparse.Namespace) -> None:
    """What `daemon_process` starts."""
    plan = plan_of(asked.learners, asked.rounds + 3)
    keys = LearnerKeys.load(asked.daemon / "keys/learners" / asked.name)
    learner = Learner(plan, asked.daemon / asked.name / "s.db", Free(asked.dim), create=True)
    daemon = Daemon(learner, keys, Endless(), replies="when done")  # the work alone, without the slots
    be_learner(asked, daemon.handle)


def be_null(asked: argparse.Namespace) -> None:
    """A learner over the direct transport that answers at once."""
    reply = bytes(300 + HEADER_BYTES + 8 * asked.dim)
    keys = LearnerKeys.load(asked.null / "keys/learners" / asked.name)

    def signed(request: bytes) -> bytes:
        Request.read(request, keys.server)
        return Reply("release", asked.name, "", {}, reply[:-300]).sign(keys.identity)

    asked.daemon = asked.null
    be_learner(asked, signed if asked.signed else lambda _: reply)


def be_learner(asked: argparse.Namespace, handle: Callable[[bytes], bytes]) -> None:
    """The direct transport's side of a learner, in this process."""
    from veilstream.federation.direct import DirectNode

    keys = asked.daemon / "keys/learners" / asked.name
    node = DirectNode(keys, handle, ("localhost", asked.port), dim=asked.dim)
    node.start()
    asked.socket.touch()
    while True:
        time.sleep(1.0)
        node.supervise()


def cpu_seconds(child: Child) -> float:
    """Of a child so far."""
    spent = psutil.Process(child.pid).cpu_times()
    return float(spent.user + spent.system)


def direct_server(root: Path, port: int, dim: int, stack: ExitStack) -> DirectServer:
    server = DirectServer(root / "keys/server", ("localhost", port), dim=dim)
    stack.callback(server.close)
    server.start()
    return server


def null_rounds(transport: Transport, learners: int, rounds: int, dim: int, keys: ServerKeys | None) -> list[float]:
    """Seconds of each, and last the server's CPU seconds a round.

    With keys every message is signed and checked.
    """
    model = bytes(400 + 4 * dim)
    while len(transport.nodes()) < learners:
        time.sleep(0.1)
    times, spent = [], time.process_time()
    for _ in range(rounds):
        began = time.perf_counter()
        waiting = transport.nodes()
        for node in waiting:
            if keys is not None:
                request = Request("round", "run", node, "nonce", body=bytes(4 * dim))
                model = request.sign(keys.identity)
            transport.send(node, model)
        while waiting:
            for node, what in transport.receive(5.0):
                if not isinstance(what, Failure):
                    if keys is not None:
                        Reply.read(what, keys.learners[Reply.claimed_learner(what)])
                    waiting.discard(node)
        times.append(time.perf_counter() - began)
    return [*times, (time.process_time() - spent) / rounds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learners", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--dim", type=int, default=61_482)
    parser.add_argument("--signed", action="store_true", help="sign in the null round as well")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    for hidden in ("--daemon", "--null", "--socket"):
        parser.add_argument(hidden, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.daemon:
        be_daemon(asked)
        return
    if asked.null:
        be_null(asked)
        return
    names = [f"learner-{i}" for i in range(asked.learners)]
    shown = ("learners", "rounds", "dim")
    figures: dict[str, object] = {key: getattr(asked, key) for key in shown}
    for kind in ("null", "ours"):
        with tempfile.TemporaryDirectory(prefix="fed-") as folder, ExitStack() as stack:
            root = Path(folder)
            port = free_port()
            make_keys(root / "keys", ["localhost", "127.0.0.1"], names)
            sockets = {name: root / f"{name}.sock" for name in names}
            figures |= measure(kind, asked, root, sockets, port, stack)
    null, ours = float(figures["null_s"]), float(figures["ours_s"])  # type: ignore[arg-type]
    figures["ours_over_null"] = round(ours / null, 2)
    cpu = float(figures["learner_cpu_s_a_round"])  # type: ignore[arg-type]
    cores = min(asked.learners, len(os.sched_getaffinity(0)))
    figures["beside_cpu"] = round((ours - cpu * asked.learners / cores) / null, 2)
    print(json.dumps(figures, indent=2))


def measure(kind, asked, root: Path, sockets: dict[str, Path], port: int, stack: ExitStack):
    daemons: list[Child] = []
    if kind == "ours":
        daemons = [daemon_process(root, n, path, port, asked, stack) for n, path in sockets.items()]
    else:
        for name, path in sockets.items():
            daemon_process(root, name, path, port, asked, stack, "--null")
    before = [cpu_seconds(daemon) for daemon in daemons]
    transport = direct_server(root, port, asked.dim, stack)
    figures = rounds_over(transport, kind, asked, root)
    if kind == "null":
        return figures
    spent = [cpu_seconds(d) - b for d, b in zip(daemons, before, strict=True)]
    return figures | {
        "learner_cpu_s_a_round": round(statistics.fmean(spent) / (asked.rounds + 3), 4),
        "bytes_up_a_learner": 300 + HEADER_BYTES + 8 * asked.dim,
        "bytes_of_a_float32_gradient": 4 * asked.dim,
    }


def rounds_over(transport: Transport, kind: str, asked: argparse.Namespace, root: Path) -> dict[str, float]:
    """The server's side of a measurement, wherever its transport lives."""
    keys = ServerKeys.load(root / "keys/server")
    if kind == "null":
        signed = keys if asked.signed else None
        times = null_rounds(transport, asked.learners, asked.rounds + 3, asked.dim, signed)
        cpu = times.pop()
        return {"null_s": round(statistics.median(times[3:]), 4), "null_server_cpu_s_a_round": round(cpu, 4)}
    plan = plan_of(asked.learners, asked.rounds + 3)
    coordinator = Coordinator(plan, np.zeros(asked.dim, np.float32), keys, root / "run")
    began, busy = time.monotonic(), time.process_time()
    coordinator.go(transport)
    total, busy = time.monotonic() - began, time.process_time() - busy
    rows = (root / "run/rounds.csv").read_text().splitlines()[1:]
    times = [float(row.split(",")[1]) for row in rows]
    return {
        "ours_s": round(statistics.median(times[3:]), 4),
        "ours_total_s": round(total, 1),
        "server_cpu_s_a_round": round(busy / len(times), 4),
    }


if __name__ == "__main__":
    main()
