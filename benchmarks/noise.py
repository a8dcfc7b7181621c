"""Cost of noise, side by side in one run: ratios of CPU time, never seconds alone.

    .venv/bin/python benchmarks/noise.py [--dims 61482 1000000] [--repeats 7] [--json FILE]

The baseline is NumPy's PCG64 drawing iid float32 normals. Deployed noise (`GridNoise`, float64
draws, every cell decided exactly) is shown beside it, against PCG64's float64 normals.
Candidates and baseline take turns, so that other work on the machine meets them alike; medians are
compared. CPU time of all threads is counted. jax-privacy 2.0.0 is measured on its own noise for the
same kind of mechanism.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

import veilstream.mechanisms as m
from veilstream.mechanisms.keystream import Row, fresh_secret
from veilstream.privacy.grid import grid_for
from veilstream.privacy.grid_noise import GridNoise

HORIZON = 4000
MECHANISMS = {
    "secure iid (independent)": lambda: m.independent(HORIZON),
    "tree": lambda: m.tree(HORIZON),
    "tree_online": lambda: m.tree_online(HORIZON),
    "tree_full": lambda: m.tree_full(HORIZON),
    "buffered, 5 buffers": lambda: m.buffered(HORIZON, buffers=5),
    "toeplitz": lambda: m.toeplitz(HORIZON),
    "toeplitz_normalised": lambda: m.toeplitz_normalised(HORIZON),
    "optimal": lambda: m.optimal(HORIZON),
    "banded, 16 bands": lambda: m.banded(HORIZON, bands=16),
}
AIMS = {"secure iid (independent)": 0.4, "tree": 0.7, "buffered, 5 buffers": 0.7, "optimal": 1.0}

DEPLOYED_AIMS = {"buffered, 5 buffers": 1.5}

Turn = Callable[[], int]
"""Does some work and says how many steps it was."""


def ours(factorization: m.Factorization, dim: int) -> Turn:
    stream = factorization.noise(dim=dim)

    def turn() -> int:
        nonlocal stream
        if stream.position + stream.program.block_length > HORIZON:
            stream = factorization.noise(dim=dim)
        return len(stream.next_block())

    return turn


def deployed(factorization: m.Factorization, dim: int) -> Turn:
    program, std = factorization.with_block_length(1).program, 2.9
    grid = grid_for(1.0, std)
    noise = GridNoise(program, std=std, grid=grid, dim=dim)

    def turn() -> int:
        nonlocal noise
        if noise.position == HORIZON:
            noise = GridNoise(program, std=std, grid=grid, dim=dim)
        noise.step(Row(fresh_secret(), noise.position))
        return 1

    return turn


def pcg64(dim: int, dtype: type = np.float32) -> Turn:
    rng = np.random.Generator(np.random.PCG64(1))
    out = np.empty(dim, dtype)

    def turn() -> int:
        for _ in range(8):
            rng.standard_normal(dtype=dtype, out=out)
        return 8

    return turn


def jax_privacy_turns(dim: int) -> dict[str, Turn]:
    try:
        import jax
        import jax.numpy as jnp
        from jax_privacy import noise_addition
        from jax_privacy.matrix_factorization import banded, buffered_toeplitz, streaming_matrix
    except ImportError:
        print("jax-privacy is not installed: that part is left out", file=sys.stderr)
        return {}

    ours = m.buffered(HORIZON, buffers=5, normalise=False).steps
    with jax.enable_x64(True):
        noising = buffered_toeplitz.BufferedToeplitz.build(
            buf_decay=list(ours.transition.diagonal()), output_scale=list(-ours.output * ours.entry)
        )
        # Only the shape of the recurrence matters for time: five buffers, either way round.
        five = noising.as_streaming_matrix()
        sixteen = banded.ColumnNormalizedBanded.default(HORIZON, 16).inverse_as_streaming_matrix()
    matrices = {
        "secure iid (independent)": streaming_matrix.identity(),
        "buffered, 5 buffers": five,
        "banded, 16 bands": sixteen,
    }
    # Its float64 coefficients are cut to float32, as we want them; it warns of that at length.
    warnings.filterwarnings("ignore", message="Explicitly requested dtype float64")
    turns = {}
    for name, matrix in matrices.items():
        privatizer = noise_addition.matrix_factorization_privatizer(
            matrix, stddev=1.0, prng_key=jax.random.key(0), dtype=jnp.float32
        )
        zero = jnp.zeros(dim, jnp.float32)
        update = jax.jit(privatizer.update, donate_argnums=1)
        box = {"state": privatizer.init(zero)}

        def turn(update=update, zero=zero, box=box) -> int:
            for _ in range(4):
                noise, box["state"] = update(zero, box["state"])
            jax.block_until_ready(noise)
            return 4

        turns[name] = turn
    return turns


def take_turns(turns: dict[str, Turn], dim: int, repeats: int, at_least_s: float) -> dict[str, float]:
    """Median CPU nanoseconds per coordinate and step."""
    seen: dict[str, list[float]] = {name: [] for name in turns}
    for turn in turns.values():
        turn()
    for repeat in range(repeats):
        for name, turn in turns.items():
            began, steps = time.process_time(), 0
            while time.process_time() - began < at_least_s:
                steps += turn()
            seen[name].append((time.process_time() - began) / steps / dim * 1e9)
        print(f"  d = {dim}: {repeat + 1}/{repeats}", end="\r", file=sys.stderr)
    print(file=sys.stderr)
    return {name: statistics.median(values) for name, values in seen.items()}


def peak_memory(factorization: m.Factorization, dim: int) -> tuple[float, float]:
    """Peak and allowance, in vectors of d floats."""
    program = factorization.program
    tracemalloc.start()
    stream = factorization.noise(dim=dim)
    for _ in range(program.block_length + 1):
        stream.step()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / (4 * dim), program.state_size + program.block_length + 3


def cpu_seconds(action: Callable[[], object]) -> float:
    began = time.process_time()
    action()
    return time.process_time() - began


def import_seconds() -> float:
    code = "import time; t = time.process_time(); import veilstream; print(time.process_time() - t)"
    runs = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout) for _ in range(5)
    ]
    return statistics.median(runs)


def _line(name: object, *cells: object) -> str:
    widths = (5, 4, 10, 7, 16, 14)
    return f"{name:26}" + "".join(f"{c!s:>{w}}" for c, w in zip(cells, widths, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[61_482, 1_000_000])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--at-least-s", type=float, default=0.15, help="CPU time per turn")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    record: dict[str, object] = {"machine": platform.processor() or platform.machine()}

    factorizations = {name: build() for name, build in MECHANISMS.items()}
    for dim in options.dims:
        turns = {"PCG64": pcg64(dim)} | {n: ours(f, dim) for n, f in factorizations.items()}
        turns |= {"PCG64 float64": pcg64(dim, np.float64)}
        turns |= {f"deployed: {n}": deployed(f, dim) for n, f in factorizations.items()}
        turns |= {f"jax-privacy: {n}": turn for n, turn in jax_privacy_turns(dim).items()}
        cost = take_turns(turns, dim, options.repeats, options.at_least_s)
        base = cost["PCG64"]
        print(f"\nd = {dim}, T = {HORIZON}: CPU time per coordinate and step")
        print(f"PCG64 iid float32: {base:.2f} ns = 1.00x\n")
        print(_line("mechanism", "k", "L", "vs PCG64", "aim", "vs jax-privacy", "memory/d"))
        rows = {}
        for name, f in factorizations.items():
            theirs = cost.get(f"jax-privacy: {name}")
            peak, allowed = peak_memory(f, dim)
            print(
                _line(
                    name,
                    f.program.state_size,
                    f.program.block_length,
                    f"{cost[name] / base:.2f}x",
                    f"<={AIMS[name]}" if name in AIMS else "-",
                    f"{theirs / cost[name]:.1f}x faster" if theirs else "-",
                    f"{peak:.1f} of {allowed}",
                )
            )
            rows[name] = {
                "vs_pcg64": cost[name] / base,
                "faster_than_jax_privacy": theirs / cost[name] if theirs else None,
                "peak_memory": peak,
                "allowed_memory": allowed,
            }
        double = cost["PCG64 float64"]
        print(f"\nDeployed, against PCG64 iid float64 ({double:.2f} ns = 1.00x):")
        for name in factorizations:
            ratio = cost[f"deployed: {name}"] / double
            rows[name]["deployed_vs_pcg64_float64"] = ratio
            aim = f"   aim <={DEPLOYED_AIMS[name]}" if name in DEPLOYED_AIMS else ""
            print(f"{name:26}{ratio:>8.2f}x{aim}")
        record[f"d={dim}"] = rows

    print("\nCPU seconds (one run, this machine):")
    for T in (1024, 4000):
        seconds = cpu_seconds(lambda T=T: m.optimal(T, cache=False).duality_gap)
        print(f"  optimal({T}) solved and certified: {seconds:.1f}")
        record[f"optimal({T})"] = seconds
    record["import"] = import_seconds()
    print(f"  import veilstream: {record['import']:.2f}")
    if options.json:
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
