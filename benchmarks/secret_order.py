"""What a secret order costs: an index by step, and a learner's clients a second beside a known order.

    python benchmarks/secret_order.py [--rows 10000000] [--seconds 20] [--dir DIRECTORY]

A process of its own reads a CSV of so many people (client, label, five numbers), as `veilstream learner` does: the
index alone, and then every client's tag into ledger and witness. Peak memory is beyond what the open learner had.
Then two learners take turns in one process, on the same storage, with rounds of the same size from records in memory:
one in the order in which they come, in groups, one in a secret order. Both are durable at the end of each round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from veilstream.deployment.learner import Learner
from veilstream.learning.tasks import Logistic, Sample
from veilstream.plans.data_source import open_file
from veilstream.plans.plan import Plan

COLUMNS, ROUNDS = 5, 100


def table_plan(rows: int) -> Plan:
    """One learner beside a table, in a secret order; a small ε, since steps of so many need noise above the grid."""
    return Plan(
        learning={"rounds": ROUNDS, "learners": 1, "clients_per_step": -(-rows // ROUNDS)},
        data={
            "kind": "table",
            "client": "person",
            "label": "y",
            "labels": ("no", "yes"),
            "bias": False,
            "features": tuple({"name": f"x{i}", "low": -1.0, "high": 1.0} for i in range(COLUMNS)),
        },
        privacy={"epsilon": 0.01, "delta": 1e-3, "order": "secret"},
        methods=[{"name": "ours", "mechanism": "independent", "step_size": 0.1}],
    )


def write_rows(path: Path, rows: int) -> None:
    """A CSV of so many people."""
    rng = np.random.default_rng(0)
    with path.open("w", encoding="ascii") as file:
        file.write("person,y," + ",".join(f"x{i}" for i in range(COLUMNS)) + "\n")
        for first in range(0, rows, 100_000):
            numbers = rng.integers(-999, 1000, (min(100_000, rows - first), COLUMNS)) / 1000
            file.writelines(
                f"p{first + i},{'yes' if i % 2 else 'no'},{','.join(map(str, row))}\n"
                for i, row in enumerate(numbers.tolist())
            )


def memory_mib(name: str = "VmHWM") -> float:
    """Of this process: the most since `forget_peak`, or what it has now (VmRSS)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def forget_peak() -> float:
    """Begin anew; what the process has now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return memory_mib("VmRSS")


def index(folder: Path, data: Path, rows: int) -> dict[str, Any]:
    """One start of a learner beside the file; in a process of its own."""
    plan = table_plan(rows)
    with Learner(plan, folder / "index.db", Logistic(COLUMNS), create=True) as learner:
        before, began, used = forget_peak(), time.perf_counter(), time.process_time()
        told = learner.use_records(open_file(data, plan, whole=True))
        indexed, cpu = time.perf_counter(), time.process_time()
        memory = memory_mib() - before
        learner.write_down_clients()
        return {
            "clients": told.records,
            "index_s": round(indexed - began, 1),
            "index_cpu_s": round(cpu - used, 1),
            "index_mib": round(memory, 1),
            "file_mib": round(data.stat().st_size / 2**20, 1),
            "index_file_mib": round((folder / "index.order" / "records").stat().st_size / 2**20, 1),
            "written_down_s": round(time.perf_counter() - indexed, 1),
            "written_down_cpu_s": round(time.process_time() - cpu, 1),
            "peak_mib": round(memory_mib() - before, 1),
        }


def people(count: int, dim: int) -> list[tuple[str, Sample]]:
    """In memory."""
    rng = np.random.default_rng(1)
    features = rng.normal(size=(count, dim)).astype(np.float32) / dim**0.5
    return [(f"p{i}", Sample(features[i], float((-1) ** i))) for i in range(count)]


def turns(folder: Path, dim: int, clients_per_step: int, seconds: float) -> dict[str, Any]:
    """Both orders in turns: medians of clients a second, of the clock and of the processor."""
    rates: dict[str, list[float]] = {"known": [], "secret": []}
    of_cpu: dict[str, list[float]] = {"known": [], "secret": []}
    learners, records = {}, people(ROUNDS * clients_per_step, dim)
    for order in rates:
        plan = Plan(
            learning={"rounds": ROUNDS, "learners": 1, "clients_per_step": clients_per_step},
            data={"dim": dim},
            privacy={"epsilon": 2.0, "delta": 1e-3, "order": order},
            methods=[{"name": "ours", "mechanism": "independent", "step_size": 0.1}],
        )
        learners[order] = Learner(plan, folder / f"{order}-{dim}.db", Logistic(dim), create=True)
    began = time.perf_counter()
    learners["secret"].use_records(records)
    learners["secret"].write_down_clients()
    prepared = time.perf_counter() - began
    x, until = np.zeros(dim, np.float32), time.perf_counter() + seconds
    for r in range(ROUNDS):
        for order, learner in learners.items():
            some = records[r * clients_per_step : (r + 1) * clients_per_step] if order == "known" else None
            start, used = time.perf_counter(), time.process_time()
            learner.learn_round(r, x, some)
            if r >= 3:
                rates[order].append(clients_per_step / (time.perf_counter() - start))
                of_cpu[order].append(clients_per_step / (time.process_time() - used))
        if time.perf_counter() > until and r > 20:
            break
    for learner in learners.values():
        learner.close()
    found: dict[str, Any] = {"dim": dim, "clients_per_step": clients_per_step, "rounds": r + 1}
    found |= {order: round(statistics.median(each)) for order, each in rates.items()}
    found |= {f"{order}_of_cpu": round(statistics.median(each)) for order, each in of_cpu.items()}
    return found | {
        "secret_over_known": round(found["secret"] / found["known"], 2),
        "secret_prepared_s": round(prepared, 2),
    }


def main() -> None:
    """Print figures as JSON, a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--index", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.index is not None:
        print(json.dumps(index(asked.index, asked.index / "people.csv", asked.rows)))
        return
    with tempfile.TemporaryDirectory(dir=asked.dir) as name:
        folder = Path(name)
        for dim, clients in ((100, 60), (7850, 60)) if asked.seconds else ():
            print(json.dumps(turns(folder, dim, clients, asked.seconds)), flush=True)
        if asked.rows:
            write_rows(folder / "people.csv", asked.rows)
            command = [sys.executable, __file__, "--rows", str(asked.rows), "--index", str(folder)]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
