"""What noise made for what is published gains: mean variance at sensitivity one, the table of docs/workloads.md.

    python -m experiments.workload_gains docs/results/workload_gains.json

Half a minute on one core.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from experiments.stored import store

from veilstream import mechanisms
from veilstream.mechanisms import Workload

SETTINGS: list[dict[str, Any]] = [
    {"horizon": 600, "averaging": 3.0},
    {"horizon": 1024, "newest_weight": 0.05},
    {"horizon": 1024, "forgetting": 0.999},
    {"horizon": 1024, "forgetting": 0.99},
    {"horizon": 1024, "step_decay": 0.5},
    {"horizon": 1024, "local_steps": 4},
]


def main(path: Path) -> None:
    """Compute and store."""
    rows = []
    for setting in SETTINGS:
        published, T = Workload(**setting), setting["horizon"]
        made = {
            "prefix": mechanisms.optimal(T),
            "toeplitz_normalised": mechanisms.toeplitz_normalised(T),
            "buffered": mechanisms.buffered(T, workload=published),
            "optimal": mechanisms.optimal(T, workload=published),
        }
        errors = {name: published.error(each).mean for name, each in made.items()}
        rows.append({"setting": setting, "gap": made["optimal"].duality_gap, **errors})
        print(rows[-1], file=sys.stderr, flush=True)
    store(path, "python -m experiments.workload_gains docs/results/workload_gains.json", {"rows": rows})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
