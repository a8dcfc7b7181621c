"""Streams without an end: what not knowing the horizon costs, at every step up to a million.

    python -m studies.unbounded --out FOLDER

Four ways to go on without knowing when it ends, beside mechanisms that were told:

* *known horizon*: at each t, the largest error of `buffered` noise that was made for T = t; up to
  T = 4096 also that of the certified minimax optimum;
* *oversized*: `buffered` for T = 10^6 (and others) from the first step on;
* *doubling*: epochs of doubling length, the model handed on; and of sixteenfold length;
* *stationary*: with forgetting. What is published then forgets, so it is another quantity; its
  certified optimum at known horizons stands beside it.

All are variances at sensitivity one, of a prefix sum or, with forgetting, of what is published.
With `--run` the stationary noise is drawn for a million steps at d = 100, with time and memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream import mechanisms as m
from veilstream.files import write_file
from veilstream.research.error_figure import save_figure

FORGETTING = 0.999
CERTIFIED = 4096
STEP = 1_000
"""Where prices are quoted."""

Floats = NDArray[np.float64]


def steps_up_to(horizon: int, points: int) -> list[int]:
    """Log-spaced steps, the last one the horizon."""
    found = np.unique(np.geomspace(16, horizon, points).round().astype(int))
    return [int(t) for t in found]


def known_horizon(steps: list[int]) -> list[float]:
    """Largest error of mechanisms that were made for so many steps."""
    return [m.buffered(t, 8).max_error() for t in steps]


def certified(steps: list[int]) -> dict[int, float]:
    """Minimax optimum, with its certificate, where it is solved in reasonable time."""
    return {t: m.optimal(t, "max").max_error() for t in steps if t <= CERTIFIED}


def forgetting_errors(horizon: int) -> Floats:
    """Variance of what is published by the stationary mechanism after each step."""
    f = m.stationary(FORGETTING)
    until = f.until(horizon)
    workload = m.Workload(horizon=horizon, forgetting=FORGETTING)
    at_its_own = workload.error(until).variance
    return at_its_own * (f.sensitivity() / until.sensitivity()) ** 2


def forgetting_optimum(steps: list[int]) -> dict[int, float]:
    """Least mean error with forgetting at known horizons: the certificate's lower bound."""
    found = {}
    for t in (t for t in steps if t <= CERTIFIED):
        workload = m.Workload(horizon=t, forgetting=FORGETTING)
        found[t] = m.optimal(t, workload=workload).lower_bound
    return found


def study(horizon: int, points: int = 19) -> dict[str, Any]:
    """All curves at the same steps, and prices at step 1,000."""
    steps = steps_up_to(horizon, points)
    at = np.array(steps) - 1
    oversized = {T: m.buffered(T, 8).error_over_time() for T in (64_000, horizon) if horizon >= T}
    doubling = m.doubling(horizon).error_over_time()
    sixteenfold = m.doubling(horizon, growth=16).error_over_time()
    stationary = forgetting_errors(horizon)
    limit = m.stationary(FORGETTING).published_error(FORGETTING)
    price = {str(T): float(curve[STEP - 1]) for T, curve in oversized.items() if T >= STEP}
    return {
        "steps": steps,
        "known horizon": known_horizon(steps),
        "certified": certified(steps),
        "oversized": {str(T): curve[at[at < T]].tolist() for T, curve in oversized.items()},
        "doubling": doubling[at].tolist(),
        "sixteenfold": sixteenfold[at].tolist(),
        "forgetting": FORGETTING,
        "stationary": stationary[at].tolist(),
        "stationary limit": limit,
        "forgetting optimum": forgetting_optimum(steps),
        "at step 1000": {"1000": m.buffered(STEP, 8, normalise=False).max_error(), **price},
    }


def run_endless(steps: int, dim: int) -> dict[str, Any]:
    """Draw stationary noise and run the forgetting server on it: time, memory, and its variance."""
    f = m.stationary(FORGETTING)
    stream = f.noise(std=1.0, dim=dim, seed=0)
    x = np.zeros(dim)
    stream.next_block()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    squares, counted = 0.0, 0
    while stream.position < steps:
        for increment in stream.next_block():
            x = FORGETTING * x + increment
        squares, counted = squares + float(x @ x) / dim, counted + 1
    return {
        "steps": stream.position,
        "dim": dim,
        "seconds": time.perf_counter() - began,
        "memory grew by KiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before,
        "variance seen": squares / counted * f.sensitivity() ** 2,
        "variance promised": f.published_error(FORGETTING),
    }


def draw(found: dict[str, Any], path: Path) -> None:
    """The figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = found["steps"]
    axes.plot(steps, found["known horizon"], "k-", label="known horizon T = t (buffered)")
    known = found["certified"]
    axes.plot(list(map(int, known)), list(known.values()), "k.", label="the same, certified optimum")
    for T, curve in found["oversized"].items():
        axes.plot(steps[: len(curve)], curve, "--", label=f"oversized: made for T = {int(T):,}")
    axes.plot(steps, found["doubling"], "-.", label="epochs of doubling length")
    axes.plot(steps, found["sixteenfold"], ":", label="epochs of sixteenfold length")
    rho = found["forgetting"]
    (line,) = axes.plot(steps, found["stationary"], label=f"stationary, forgetting {rho:g}")
    optimum = found["forgetting optimum"]
    axes.plot(
        list(map(int, optimum)),
        list(optimum.values()),
        ".",
        color=line.get_color(),
        label=f"forgetting {rho:g}, known horizon: lower bound (mean)",
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("step t")
    axes.set_ylabel("variance after step t, at sensitivity one")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(fontsize="small")
    save_figure(figure, path, dpi=150)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder for figure and numbers")
    parser.add_argument("--horizon", type=int, default=1_000_000)
    parser.add_argument("--run", action="store_true", help="also draw so many steps at d = 100")
    options = parser.parse_args()
    found = study(options.horizon)
    if options.run:
        found["run"] = run_endless(options.horizon, 100)
    options.out.mkdir(parents=True, exist_ok=True)
    write_file(options.out / "unbounded.json", json.dumps(found, indent=1) + "\n")
    draw(found, options.out / "unbounded.png")
    print(
        json.dumps(
            {key: found[key] for key in ("at step 1000", "stationary limit")} | {"run": found.get("run")}, indent=1
        )
    )


if __name__ == "__main__":
    main()
