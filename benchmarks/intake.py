"""How many clients a second a learner takes: one by one, in groups, in batches, and over its HTTP API.

    python benchmarks/intake.py [--dims 100 61482] [--seconds 5] [--dir DIRECTORY] [--http]

`observe`, `observe_many`, and `observe_many` with 64 clients a step (`clients_per_step`) take turns on
three learners in one process and on the same storage, as do bare fsyncs, of which a commit needs two;
the ratios are what groups and batches bring; clients a second of the processor's time are told too, since
they hold on a machine that is busy with other work. With ``--http`` callers
in a process of their own send records over connections that stay open, one record a request and
lists of them, to one long round; p50 and p99 are of a request, from its first byte to its answer.
Steps are durable before anything is answered, in all of these.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from veilstream.deployment.learner import Learner
from veilstream.learning.tasks import Logistic, Sample
from veilstream.plans.plan import Plan
from veilstream.streams.waiting_source import LiveSource

STEPS = 1 << 16
BATCH = 64
TOKEN = "benchmark"


def plan_of(dim: int, local_steps: int, clients_per_step: int = 1) -> Plan:
    """One learner, a mechanism with state."""
    return Plan(
        learning={
            "rounds": STEPS // local_steps,
            "local_steps": local_steps,
            "clients_per_step": clients_per_step,
            "learners": 1,
        },
        data={"dim": dim},
        privacy={"epsilon": 4.0, "delta": 1e-3},
        methods=[{"name": "ours", "mechanism": "buffered", "step_size": 0.1}],
    )


class Rounds:
    """A learner that is in a round, whose clients are new each time."""

    def __init__(self, folder: Path, dim: int, local_steps: int, clients_per_step: int = 1) -> None:
        plan = plan_of(dim, local_steps, clients_per_step)
        self.learner = Learner(plan, folder / "s.db", Logistic(dim), create=True)
        rng = np.random.default_rng(0)
        self._features = rng.standard_normal((16, dim)).astype(np.float32) / dim**0.5
        self._number = 0

    def clients(self, count: int) -> list[tuple[str, Sample]]:
        """So many new ones."""
        first, self._number = self._number, self._number + count
        return [(f"client {i}", Sample(self._features[i % 16], 1.0)) for i in range(first, first + count)]

    def go(self, seconds: float, *, groups: bool) -> tuple[float, float]:
        """Clients a second, of the clock and of the processor, rounds and their messages included."""
        learner, done, began, used = self.learner, 0, time.perf_counter(), time.process_time()
        while (took := time.perf_counter() - began) < seconds:
            if not learner.pinned:
                learner.begin_round(learner.round, np.zeros(learner.task.dim, np.float32))
            some = self.clients(min(256, learner.clients_wanted))
            if groups:
                done += len(learner.observe_many(some))
            else:
                for tag, sample in some[:16]:
                    learner.observe(tag, sample)
                done += min(16, len(some))
            if not learner.clients_wanted:
                learner.finish_round()
        return done / took, done / (time.process_time() - used)


def fsyncs_a_second(folder: Path, seconds: float = 1.0) -> float:
    """Of 4 KiB appended to a file."""
    with (folder / "bare").open("wb", buffering=0) as file:
        done, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < seconds:
            file.write(bytes(4096))
            os.fsync(file.fileno())
            done += 1
    return done / took


def in_process(folder: Path, dim: int, seconds: float) -> dict[str, Any]:
    """All ways in turns; medians."""
    ways = {"one_by_one": 1, "groups": 1, f"batches_of_{BATCH}": BATCH}
    learners = {}
    for way, clients in ways.items():
        (folder / way).mkdir()
        learners[way] = Rounds(folder / way, dim, 1024 // clients, clients)
    rates: dict[str, list[float]] = {way: [] for way in (*ways, "bare_fsyncs")}
    of_cpu: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(4):
        bare = fsyncs_a_second(folder, 0.5)
        both = {way: own.go(seconds / 3, groups=way != "one_by_one") for way, own in learners.items()}
        if not turn:  # for caches
            continue
        rates["bare_fsyncs"].append(bare)
        for way, (rate, cpu) in both.items():
            rates[way].append(rate)
            of_cpu[way].append(cpu)
    for own in learners.values():
        own.learner.close()
    found = {way: statistics.median(each) for way, each in rates.items()}
    one, groups, batches, _ = found.values()
    ratios = {"groups_over_one_by_one": round(groups / one, 1), "batches_over_groups": round(batches / groups, 1)}
    each_cpu = {way: round(statistics.median(each)) for way, each in of_cpu.items()}
    return {"dim": dim} | {way: round(rate) for way, rate in found.items()} | ratios | {"a_cpu_second": each_cpu}


# --- over HTTP ------------------------------------------------------------------------------------


class Asked:
    """As much of a daemon as the learner API asks for, in a round that does not end."""

    account = ended = None

    def __init__(self, rounds: Rounds, source: LiveSource) -> None:
        self.learner, self._source = rounds.learner, source
        self.learner.begin_round(0, np.zeros(self.learner.task.dim, np.float32))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        self._source.serve(0, self.learner.observe_many, lambda: self.learner.clients_wanted)

    def close(self) -> None:
        """End the round's wait."""
        self._source.close()
        self._thread.join()
        self.learner.close()


def over_http(folder: Path, dim: int, seconds: float) -> list[dict[str, Any]]:
    """One record a request, and lists, from a few callers."""
    from veilstream.federation.learner.learner_api import LearnerApi

    rows = []
    for callers, size in ((4, 1), (8, 1), (4, 16), (8, 16)):
        place = folder / f"http-{callers}-{size}"
        place.mkdir()
        source = LiveSource(3600.0)
        daemon: Any = Asked(Rounds(place, dim, STEPS), source)
        api = LearnerApi(daemon, source, ("127.0.0.1", 0), TOKEN)
        asked = json.dumps([api.port, callers, size, dim, seconds])
        command = [sys.executable, __file__, "--caller", asked]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append({"callers": callers, "records_a_request": size} | json.loads(done.stdout))
        stored = daemon.learner.ledger.chain.visits.value().count
        assert stored >= rows[-1]["taken"], "someone was told so and is not stored"
        api.close()
        daemon.close()
    return rows


def call(port: int, callers: int, size: int, dim: int, seconds: float) -> None:
    """The other process: as many threads as callers, each with one connection."""
    took: list[float] = []
    taken = [0] * callers
    features = [0.1234] * dim
    began = time.perf_counter()

    def caller(number: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as line:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            count = 0
            while time.perf_counter() - began < seconds:
                records = [{"client": f"{number}/{count + i}", "features": features, "target": 1} for i in range(size)]
                count += size
                body = json.dumps(records[0] if size == 1 else records).encode()
                head = (
                    f"POST /observe HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
                    f"Authorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"
                    f"Content-Length: {len(body)}\r\n\r\n"
                )
                asked = time.perf_counter()
                line.sendall(head.encode() + body)
                answer = b""
                while b"\r\n\r\n" not in answer or not answer.rstrip().endswith(b"}"):
                    answer += line.recv(65536)
                took.append(time.perf_counter() - asked)
                assert answer.startswith(b"HTTP/1.1 200"), answer[:300]
                taken[number] += answer.count(b'"taken"') - (size > 1)  # counts name it once more

    threads = [threading.Thread(target=caller, args=(number,)) for number in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took.sort()
    print(
        json.dumps(
            {
                "taken": sum(taken),
                "a_second": round(sum(taken) / (time.perf_counter() - began)),
                "p50_ms": round(1e3 * took[len(took) // 2], 1),
                "p99_ms": round(1e3 * took[int(0.99 * len(took))], 1),
            }
        )
    )


def main() -> None:
    """Print one table, or two."""
    parser = argparse.ArgumentParser(prog="benchmarks/intake.py", description=__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[100, 61482])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--http", action="store_true")
    parser.add_argument("--caller", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.caller:
        call(*json.loads(asked.caller))
        return
    for dim in asked.dims:
        with tempfile.TemporaryDirectory(dir=asked.dir) as folder:
            print(json.dumps(in_process(Path(folder), dim, asked.seconds)), flush=True)
    if asked.http:
        with tempfile.TemporaryDirectory(dir=asked.dir) as folder:
            for row in over_http(Path(folder), asked.dims[0], asked.seconds):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
