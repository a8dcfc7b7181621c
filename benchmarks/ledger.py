"""What keeping the promise through crashes costs: a round with the ledger and the same without.

    python benchmarks/ledger.py [--rounds 40] [--mechanism buffered] [--dir DIRECTORY]
    python benchmarks/ledger.py --growth 10000 100000 1000000

The paper's CNN (d = 61,482), four clients a round, T = 6000. Rounds with and without the ledger are
run in turns in one process; CPU time is the process's own, wall time is compared with that of as
many bare fsyncs of the same sizes in the same directory. Then a learner with a full horizon behind
it is started again.

With ``--growth``, something else: stores with so many steps behind them (four a round, d = 3; made
by a writer that goes round the syncs), and for each, in a process of its own: how
long it takes to open, to write a round, to find an old message and to verify, and how much memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from veilstream.deployment.epochs import LearnerParts
from veilstream.deployment.learner import Learner
from veilstream.deployment.ledger.archive import Row, fold_segment, pack, rows_from, segment_is_due
from veilstream.deployment.ledger.chain import Body, Chain, Record, digest, tag_key
from veilstream.deployment.ledger.database import open_sqlite
from veilstream.deployment.ledger.inspect import verify
from veilstream.deployment.ledger.store import Ledger
from veilstream.deployment.ledger.visits import visit_key
from veilstream.deployment.ledger.witness import Witness, entries_of
from veilstream.learning.cnn import Cnn
from veilstream.learning.tasks import Sample, Task
from veilstream.plans.plan import Plan
from veilstream.records.participation import PastVisits

TAU, STEPS = 4, 6000


class NoLedger:
    """The same interface, remembering in memory only: what a round costs by itself."""

    def __init__(self, *_: object, **__: object) -> None:
        self.chain = Chain()
        self.blobs: dict[str, bytes] = {}

    def write(
        self, kind: str, body: Body, *, keep: Any = None, destroy: Any = None, tag: object = None, tags: object = None
    ) -> None:
        for name in destroy or []:
            del self.blobs[name]
        self.blobs |= keep or {}
        if kind == "epoch":
            self.chain.follow(Record(0, kind, body, b""))

    def witness(self) -> None: ...
    def reached(self, point: str) -> None: ...
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

    def past_visits(self, tag: bytes) -> PastVisits | None:
        return None


class Bare(Learner):
    """A learner that would forget everything in a crash."""

    def __init__(self, plan: Plan, store: Path, task: Task, *, create: bool = False) -> None:
        parts = LearnerParts(ledger=NoLedger)  # type: ignore[arg-type]
        super().__init__(plan, store, task, create=create, parts=parts)


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
    parser.add_argument("--growth", type=int, nargs="+", metavar="STEPS")
    options = parser.parse_args()
    if options.growth:
        growth(options.growth, options.dir)
        return
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
            clients = [Sample(rng.uniform(0, 255, 784).astype(np.float32), int(rng.integers(10))) for _ in range(TAU)]
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
            print(
                f"Restart at the end of T = {STEPS}: {time.perf_counter() - wall:.2f} s, "
                f"store {store.stat().st_size / 2**20:.1f} MiB"
            )


# --- ledgers that have grown ---------------------------------------------------------------------


def growth(sizes: list[int], where: Path | None) -> None:
    print(
        f"{'steps':>9} {'store':>9} {'open':>8} {'its CPU':>8} {'4 steps':>8} {'message':>8} "
        f"{'verify':>8} {'memory: opened':>15} {'written':>8} {'verified':>9}"
    )
    for steps in sizes:
        with tempfile.TemporaryDirectory(dir=where) as directory:
            store = Path(directory) / "store.db"
            write_store(store, steps)
            size = f"{store.stat().st_size / 2**20:.0f} MiB"
            context = multiprocessing.get_context("spawn")
            results = []
            for look in (opened, verified):
                ours, theirs = context.Pipe()
                child = context.Process(target=look, args=(store, theirs))
                child.start()
                results.append(ours.recv())
                child.join()
            (wall, cpu, stepped, found, at_open, after), (checked, at_verify) = results
            print(
                f"{steps:>9,} {size:>9} {wall:>6.2f} s {cpu:>6.2f} s {1e3 * stepped:>5.0f} ms "
                f"{1e3 * found:>5.0f} ms {checked:>6.1f} s {at_open:>11.1f} MiB "
                f"{after:>4.1f} MiB {at_verify:>5.1f} MiB",
                flush=True,
            )


def write_store(path: Path, steps: int) -> None:
    """What a learner with τ = 4 writes in so many steps, one transaction a segment."""
    Ledger(path, create=True).close()
    path.with_suffix(".witness").unlink()
    db = open_sqlite(path)
    db.execute("PRAGMA synchronous=OFF")
    db.execute("PRAGMA cache_size=-400000")
    db.execute("BEGIN")
    key = tag_key(db)
    chain, rows, visits = Chain(key), [], []
    blobs: dict[str, bytes] = {}

    def write(kind: str, body: Body, keep: Any = None, destroy: Any = None) -> None:
        body = replace(
            body,
            kept={name: digest(content) for name, content in keep.items()} if keep else None,
            destroyed=destroy,
            tag_key=None if chain.length else digest(key),
        )
        if segment_is_due(len(rows), len(chain.kept)):
            first, content = rows[0].number, pack(rows)
            body = replace(body, before=chain.summary(fold_segment(chain.archive, first, content)))
            db.execute("INSERT INTO segments VALUES (?, ?)", (first, content))
            db.executemany("INSERT INTO visits VALUES (?)", visits)
            db.execute("COMMIT")
            db.execute("BEGIN")
            rows.clear()
            visits.clear()
        for name in destroy or []:
            del blobs[name]
        blobs.update(keep or {})
        record, text = chain.next(kind, body)
        chain.follow(record)
        rows.append(Row(record.number, kind, text, record.hash))

    write("epoch", Body(epoch=0, settings={"rounds": steps, "guarantee": {}}))
    for r in range(steps // TAU):
        x = os.urandom(12)
        write("pin", Body(epoch=0, round=r, x=digest(x)), {"x": x})
        for t in range(TAU):
            step, tag = r * TAU + t, os.urandom(32)
            body = Body(epoch=0, step=step, tag=tag.hex())
            secret = f"seed/0/{step:010d}"
            write("step", body, {secret: os.urandom(32), f"noisy/{t}": os.urandom(12)})
            visits.append((visit_key(tag, 0, step),))
        payload = os.urandom(64)
        sealed = Body(epoch=0, round=r, hash=_message(r), x=digest(x))
        write("message", sealed, {"message": payload})
        if r % 16 == 15:
            seeds = [name for name in blobs if name.startswith("seed/")]
            write("snapshot", Body(epoch=0, step=step), {"snapshot": os.urandom(200)}, seeds)
    db.executemany("INSERT INTO visits VALUES (?)", visits)
    db.executemany("INSERT INTO records VALUES (?, ?, ?, ?)", rows)
    db.executemany("INSERT INTO blobs VALUES (?, ?)", blobs.items())
    db.execute("COMMIT")
    records = (Record.read(row) for row in rows_from(db))
    entries = (entry for record in records for entry in entries_of(db, record))
    Witness.create(path.with_suffix(".witness"), key, entries).close()
    db.close()


def _message(r: int) -> str:
    return digest(b"%d" % r)


def _peak() -> float:
    """The most memory that this process has had since the last call, in MiB (Linux)."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def opened(store: Path, answer: Any) -> None:
    _peak()
    before = _peak()
    wall, cpu = time.perf_counter(), time.process_time()
    with Ledger(store) as ledger:
        opening = time.perf_counter() - wall, time.process_time() - cpu
        at_open = _peak() - before
        standing = ledger.chain.standing
        wall = time.perf_counter()
        for t in range(TAU):
            tag = ledger.keyed(os.urandom(8))
            assert ledger.past_visits(tag) is None
            ledger.write("step", Body(epoch=0, step=standing.steps), tag=tag, keep={f"noisy/{t}": os.urandom(12)})
            ledger.witness()
        stepping = time.perf_counter() - wall
        wall = time.perf_counter()
        assert ledger.knows_message(1, _message(1))
        finding = time.perf_counter() - wall
        for _ in range(3000):
            ledger.write("step", Body(epoch=0, step=standing.steps), keep={"a": os.urandom(12)})
            ledger.witness()
        answer.send((*opening, stepping, finding, at_open, _peak() - before))


def verified(store: Path, answer: Any) -> None:
    _peak()
    before = _peak()
    wall = time.perf_counter()
    verify(store)
    answer.send((time.perf_counter() - wall, _peak() - before))


if __name__ == "__main__":
    main()
