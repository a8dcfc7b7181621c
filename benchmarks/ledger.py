"""What keeping the promise through crashes costs: a round with the ledger and the same without.

    python benchmarks/ledger.py [--rounds 40] [--mechanism buffered] [--dir DIRECTORY]

The paper's CNN (d = 61,482), four clients a round, T = 6000. Rounds with and without the ledger are
run in turns in one process; CPU time is the process's own, wall time is compared with that of as
many bare fsyncs of the same sizes in the same directory. Then a learner with a full horizon behind
it is started again.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from veilstream.deployment.learner import Learner
from veilstream.deployment.ledger.chain import Chain, Record, Visit
from veilstream.learning.cnn import Cnn
from veilstream.learning.tasks import Sample
from veilstream.plans.plan import Plan

TAU, STEPS = 4, 6000


class NoLedger:
    """The same interface, remembering in memory only: what a round costs by itself."""

    def __init__(self, *_: object, **__: object) -> None:
        self.chain = Chain()
        self.blobs: dict[str, bytes] = {}

    def write(self, kind: str, body: dict[str, Any], *, keep: Any = None, destroy: Any = None,
              tag: object = None) -> None:  # fmt: skip
        for name in destroy or []:
            del self.blobs[name]
        self.blobs |= keep or {}
        if kind == "epoch":
            self.chain.follow(Record(0, kind, body, b""))

    def witness(self) -> None: ...
    def check(self) -> None: ...
    def close(self) -> None: ...

    def forget(self) -> bool:
        return True

    def blob(self, name: str) -> bytes:
        return self.blobs[name]

    def names(self, prefix: str) -> list[str]:
        return [name for name in self.blobs if name.startswith(prefix)]

    def keyed(self, client: bytes) -> bytes:
        return client

    def visit(self, tag: bytes) -> Visit | None:
        return None


class Bare(Learner):
    """A learner that would forget everything in a crash."""

    _open_ledger = staticmethod(NoLedger)  # type: ignore[assignment]


def plan_of(mechanism: str) -> Plan:
    return Plan(
        learning={"rounds": STEPS // TAU, "local_steps": TAU, "learners": 10, "task": "cnn"},
        data={"kind": "mnist"},
        privacy={"epsilon": 2.0, "delta": 1e-3},
        methods=[{"name": "ours", "mechanism": mechanism, "step_size": 0.01}],
    )


def one_round(learner: Learner, x: np.ndarray, clients: list[Sample]) -> tuple[float, float]:
    """CPU and wall seconds."""
    r = learner.round
    cpu, wall = time.process_time(), time.perf_counter()
    learner.learn_round(r, x, ((f"{r}/{t}", c) for t, c in enumerate(clients)))
    return time.process_time() - cpu, time.perf_counter() - wall


def bare_syncs(directory: Path, sizes: list[int]) -> float:
    """Wall seconds of writing and syncing as many bytes as often, and nothing else."""
    data = os.urandom(max(sizes))
    handle = os.open(directory / "bare", os.O_RDWR | os.O_CREAT)
    wall = time.perf_counter()
    at = 0
    for size in sizes:
        os.pwrite(handle, data[:size], at)
        os.fsync(handle)
        at = (at + size) % (16 << 20)
    wall = time.perf_counter() - wall
    os.close(handle)
    return wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--mechanism", default="buffered")
    parser.add_argument("--dir", type=Path, default=None)
    options = parser.parse_args()
    plan, task = plan_of(options.mechanism), Cnn()
    rng = np.random.default_rng(0)
    x = np.asarray(task.init(0))
    with tempfile.TemporaryDirectory(dir=options.dir) as where:
        directory = Path(where)
        store = directory / "store.db"
        kept, bare = Learner(plan, store, task, create=True), Bare(plan, store, task, create=True)
        times: dict[str, list[tuple[float, float]]] = {"kept": [], "bare": []}
        syncs = []
        # A pin, four steps, a message: each is written to the log and then witnessed.
        big, step = 4 * task.dim, 4 * task.dim
        sizes = [big, 96, *[step, 96] * TAU, 8 * task.dim, 96]
        for r in range(options.rounds + 3):
            clients = [
                Sample(rng.uniform(0, 255, 784).astype(np.float32), int(rng.integers(10)))
                for _ in range(TAU)
            ]
            pair = one_round(kept, x, clients), one_round(bare, x, clients)
            if r >= 3:  # after compilation
                times["kept"].append(pair[0])
                times["bare"].append(pair[1])
                syncs.append(bare_syncs(directory, sizes))
        report(times, syncs)
        kept.close()
        restart(plan, store, task)
    full_horizon(options.mechanism, options.dir)


def report(times: dict[str, list[tuple[float, float]]], syncs: list[float]) -> None:
    cpu = {name: 1e3 * statistics.median(t[0] for t in rows) for name, rows in times.items()}
    wall = {name: 1e3 * statistics.median(t[1] for t in rows) for name, rows in times.items()}
    mean = {name: statistics.fmean(t[0] for t in rows) for name, rows in times.items()}
    sync = 1e3 * statistics.median(syncs)
    print(
        f"CPU of a round    with {cpu['kept']:.1f} ms, without {cpu['bare']:.1f} ms: "
        f"{cpu['kept'] / cpu['bare']:.2f}x (means {mean['kept'] / mean['bare']:.2f}x)\n"
        f"Wall of a round   with {wall['kept']:.1f} ms, without {wall['bare']:.1f} ms, "
        f"bare syncs {sync:.1f} ms\n"
        f"Beyond the syncs  {wall['kept'] - wall['bare'] - sync:.1f} ms of wall a round, "
        f"{cpu['kept'] - cpu['bare']:.1f} ms of CPU"
    )


def restart(plan: Plan, store: Path, task: Cnn) -> None:
    wall = time.perf_counter()
    with Learner(plan, store, task, create=True) as learner:
        print(f"Restart           {time.perf_counter() - wall:.2f} s at round {learner.round}")


def full_horizon(mechanism: str, where: Path | None) -> None:
    """All but the last round of T = 6000 at d = 61,482, with a gradient that costs nothing."""

    class Still(Cnn):
        def host_gradient(self, z: np.ndarray, sample: Sample) -> np.ndarray:
            return np.zeros(self.dim, np.float32)

    plan, task = plan_of(mechanism), Still()
    x = np.asarray(task.init(0))
    client = Sample(np.zeros(784, np.float32), 0)
    with tempfile.TemporaryDirectory(dir=where) as directory:
        store = Path(directory) / "store.db"
        with Learner(plan, store, task, create=True) as learner:
            for r in range(plan.learning.rounds - 1):
                learner.learn_round(r, x, ((f"{r}/{t}", client) for t in range(TAU)))
        wall = time.perf_counter()
        with Learner(plan, store, task, create=True):
            print(f"Restart at the end of T = {STEPS}: {time.perf_counter() - wall:.2f} s, "
                  f"store {store.stat().st_size / 2**20:.1f} MiB")  # fmt: skip


if __name__ == "__main__":
    main()
