"""Simulation on a host that has only Python, JAX and NumPy: no command line packages, no figures.

    python -m veilstream.simulation run PLAN OUT [--set KEY=VALUE ...]
    python -m veilstream.simulation reproduce FIGURE OUT [--set KEY=VALUE ...]

Run folders are the same as `veilstream run` makes; `veilstream` draws them elsewhere.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from veilstream.errors import VeilstreamError
from veilstream.plans.experiments import figure_of, plan_path
from veilstream.plans.plan import Plan, parse_override
from veilstream.simulation.runner import run
from veilstream.simulation.seed_batches import RunProgress

_SAY_EVERY_S = 10.0


def main() -> int:
    """Run a plan or all plans of a figure."""
    parser = argparse.ArgumentParser(
        prog="python -m veilstream.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("run", "reproduce"))
    parser.add_argument("name", help="a plan (file or shipped name), or a figure")
    parser.add_argument("out", type=Path, help="where run folders go")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="override a key of the plan: learning.rounds=200")  # fmt: skip
    parser.add_argument("--smoke", action="store_true", help="the figure in small")
    parser.add_argument("--resume", action="store_true", help="go on with an unfinished run")
    parser.add_argument("--processes", type=int, default=1, help="spread seeds over processes")
    given = parser.parse_args()
    try:
        changes = dict(map(parse_override, given.set))
        if given.what == "run":
            plans = [("", Plan.load(plan_path(Path(given.name)), changes))]
        else:
            plans = list(figure_of(given.name).plans(changes, smoke=given.smoke))
        for folder, plan in plans:
            began = time.monotonic()
            out = given.out / folder if folder else given.out
            finished = run(
                plan, out, resume=given.resume, processes=given.processes,
                on_progress=_say(plan.name),
            )  # fmt: skip
            print(f"{finished.path}: {time.monotonic() - began:.1f} s", flush=True)
            for name, method in finished.summary["methods"].items():
                if accuracy := method["final"]["accuracy"]:
                    print(f"  {name}: {accuracy['mean']:.4f} ± {accuracy['std']:.4f}", flush=True)
    except VeilstreamError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; --resume goes on from the last checkpoint", file=sys.stderr)
        return 130
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _say(name: str) -> Any:
    said = time.monotonic()

    def say(progress: RunProgress) -> None:
        nonlocal said
        if time.monotonic() - said > _SAY_EVERY_S:
            said = time.monotonic()
            shown = "" if progress.accuracy is None else f", accuracy {progress.accuracy:.3f}"
            share = f"{progress.done}/{progress.total} rounds"
            print(f"{name}: {share}{shown}", file=sys.stderr, flush=True)

    return say


if __name__ == "__main__":
    sys.exit(main())
