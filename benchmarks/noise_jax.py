"""The JAX path on whatever device JAX finds: agreement with the dense product, and cost per step.

python benchmarks/noise_jax.py [--dims 61482 1000000]
"""

from __future__ import annotations

import argparse
import time

import jax
import numpy as np

import veilstream.mechanisms as m
from veilstream.mechanisms.jax_noise import JaxNoise

HORIZON = 1000


def largest_error(f: m.Factorization, noise: JaxNoise, key: jax.Array) -> float:
    """Relative to the largest increment, against the float64 product of the same draws."""
    dim = 8
    draws = np.concatenate([np.asarray(noise.draws(key, b, dim)) for b in range(f.program.blocks)])
    expected = f.noising_matrix() @ draws[:HORIZON]
    seen = np.asarray(noise.all_increments(key, dim))
    return float(np.abs(seen - expected).max() / np.abs(expected).max())


def seconds_per_step(noise: JaxNoise, key: jax.Array, dim: int, blocks: int = 20) -> float:
    step = jax.jit(lambda state, b: noise.block(key, state, b, 1.0), donate_argnums=0)
    state, out = step(noise.initial_state(dim), 0)
    out.block_until_ready()
    began = time.perf_counter()
    for b in range(1, blocks + 1):
        state, out = step(state, b)
    out.block_until_ready()
    return (time.perf_counter() - began) / (blocks * noise.program.block_length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[61_482, 1_000_000])
    options = parser.parse_args()
    key = jax.random.key(3)
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}, T = {HORIZON}")
    for name in m.MECHANISMS:
        f = m.build(name, HORIZON)
        noise = JaxNoise(f.program)
        cells = [f"{name:20} k = {f.program.state_size:2}  error {largest_error(f, noise, key):.0e}"]
        for dim in options.dims:
            seconds = seconds_per_step(noise, key, dim)
            cells.append(f"d = {dim}: {seconds / dim * 1e9:.3f} ns/coordinate")
        print("  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
