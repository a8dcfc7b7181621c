"""Peers on the same work: the same mechanism, budget, records, model and steps, in one program.

    python -m benchmarks.peers docs/results/peers.json

Logistic regression (d = 100, gradients of norm one at most), 10 learners that meet 1,000 clients each, a
release after every step, (2, 1e-3), one record a client, replace-one; buffered Toeplitz noise, which each library
tunes for itself with five buffers. Two trusts that both libraries have: *local* (every learner adds its own noise) and
*central* (one curator sees all records and adds noise to the sum of a step's ten gradients). Others (a server that
opens only sums; an order of records that nobody knows) are ours alone, and run where this version accepts them.

Each row is a process of its own: seconds are its processor's time for five seeds, with solving, calibrating and
compiling, on one thread; memory is its peak. Error is the root mean square of the noise in the mean running sum,
from draws with zero gradients. The peers' noise is counted by dp-accounting, ours by its own accounting. opake needs
PyTorch; a library that is not installed is left out, and said so. Half an hour on two busy cores.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

LEARNERS, STEPS, DIM, BUFFERS, SEEDS = 10, 1000, 100, 5, (0, 1, 2, 3, 4)
EPSILON, DELTA, HELD_OUT = 2.0, 1e-3, 2000
WINDOW = 100  # steps among which a record's is secret
HONEST = 5  # learners who must be honest where only sums are opened
MOVES = {"none": 6.4, "local": 0.2, "central": 0.8, "sum": 0.4, "secret order": 0.4}
"""Step size by trust, for all libraries: the best of ten by our loss on seeds 100 and 101 (--search)."""


@dataclass(frozen=True)
class Records:
    """The same records for every library: a stream of the synthetic recipe, as arrays."""

    provenance: str = "benchmarks/peers.py"

    def arrays(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Features (steps, learners, d) of norm one, labels (steps, learners); every learner has both labels."""
        rng = np.random.default_rng([seed, 1])
        model = np.random.default_rng([seed, 0]).standard_normal(DIM)
        raw = rng.standard_normal((STEPS, LEARNERS, DIM)) * np.arange(1, DIM + 1) ** -0.6
        labels = np.where(raw @ model >= 0, 1.0, -1.0) * np.where(rng.random((STEPS, LEARNERS)) < 0.05, -1.0, 1.0)
        features = raw / np.linalg.norm(raw, axis=-1, keepdims=True)
        return features.astype(np.float32), labels.astype(np.float32)


@dataclass(frozen=True)
class Met:
    """What our simulation reads: a round's clients, spread over learners as the trust says."""

    learners: int
    provenance: str = "benchmarks/peers.py"

    def round(self, seed: int, round_: int) -> Any:
        """One step's ten clients."""
        from veilstream.learning.tasks import Sample

        features, labels = _arrays(seed)
        return Sample(features[round_].reshape(self.learners, -1, DIM), labels[round_].reshape(self.learners, -1))

    def held_out(self, seed: int, count: int, round_: int) -> Any:
        """The first clients of another seed with the same model are not needed: prequential figures are reported."""
        from veilstream.learning.tasks import Sample

        features, labels = _arrays(seed)
        return Sample(features.reshape(-1, DIM)[:count], labels.reshape(-1)[:count])


_KEPT: dict[int, tuple[np.ndarray, np.ndarray]] = {}


def _arrays(seed: int) -> tuple[np.ndarray, np.ndarray]:
    if seed not in _KEPT:
        _KEPT[seed] = Records().arrays(seed)
    return _KEPT[seed]


def ours(trust: str, move: float, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Our simulation, all seeds at once."""
    (found,) = simulated(trust, (move,), seeds)
    return found


def simulated(trust: str, moves: tuple[float, ...], seeds: tuple[int, ...]) -> list[dict[str, Any]]:
    """Our simulation with several steps at once."""
    from veilstream.plans.plan import Plan
    from veilstream.plans.prepare import prepare
    from veilstream.simulation.engine import Simulation

    learners = 1 if trust == "central" else LEARNERS
    privacy: dict[str, Any] = {"epsilon": EPSILON, "delta": DELTA}
    if trust == "sum":
        privacy |= {"trust": "sum", "honest": HONEST}
    if trust == "secret order":
        privacy |= {"order": "secret", "window": WINDOW}
    kind = {"kind": "noise-free"} if trust == "none" else {"mechanism": "buffered"}
    plan = Plan(
        learning={"rounds": STEPS, "learners": learners, "clients_per_step": LEARNERS // learners, "task": "logistic"},
        data={"dim": DIM, "held_out": 10},
        privacy=privacy,
        run={"seeds": len(seeds), "evaluate_every": STEPS, "regret": False},
        methods=[{"name": f"step {move:g}", "step_size": move, **kind} for move in moves],
    )
    prepared = [prepare(plan, method) for method in plan.methods]
    made = prepared[0]
    simulation = Simulation(plan, prepared, seeds, stream=Met(learners))
    while not simulation.done:
        simulation.advance()
    loss = np.nanmean(simulation.history["loss"].astype(float), axis=2)
    right = np.nanmean(simulation.history["accuracy"].astype(float), axis=2)
    simulation.close()
    error = 0.0
    if made.factorization is not None:
        dim = 2000
        draws = np.cumsum(list(made.factorization.noise(std=made.noise_std, dim=dim, seed=7)), axis=0)
        error = float(np.sqrt((draws.astype(float) ** 2).mean()) / learners**0.5)
    both = zip(loss, right, strict=True)
    return [{"loss": own.tolist(), "accuracy": accuracy.tolist(), "error": error} for own, accuracy in both]


def multiplier_of_budget() -> float:
    """dp-accounting's noise for sensitivity one, as the peers' users take it."""
    import dp_accounting

    return float(
        dp_accounting.calibrate_dp_mechanism(
            dp_accounting.pld.PLDAccountant,
            dp_accounting.GaussianDpEvent,
            EPSILON,
            DELTA,
            dp_accounting.LowerEndpointAndGuess(0.1, 4.0),
        )
    )


def jax_privacy(trust: str, move: float, seeds: tuple[int, ...]) -> dict[str, Any]:
    """The same loop with jax-privacy's clipping, mechanism and privatizer, and dp-accounting's calibration."""
    import jax
    import jax.numpy as jnp
    from jax_privacy import clipping, noise_addition
    from jax_privacy.matrix_factorization import buffered_toeplitz

    with jax.enable_x64(True):
        blt = buffered_toeplitz.optimize(n=STEPS, min_buffers=BUFFERS, max_buffers=BUFFERS)
        sensitivity = float(np.sqrt(buffered_toeplitz.sensitivity_squared(blt, STEPS)))
        noising = blt.inverse_as_streaming_matrix()
    sources = 1 if trust == "central" else LEARNERS  # of noise, each as large as one record can move it
    std = 2.0 * sensitivity * multiplier_of_budget()

    def loss(x: Any, a: Any, y: Any) -> Any:
        return jnp.log1p(jnp.exp(-y * (a @ x)))

    gradient = clipping.clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2), keep_batch_dim=False)

    privatizer = noise_addition.matrix_factorization_privatizer(
        noising, stddev=std, prng_key=jax.random.key(0), dtype=jnp.float32
    )
    like = jnp.zeros((sources, DIM), jnp.float32)

    def step(carry: Any, met: Any) -> Any:
        x, state = carry
        a, y = met
        losses = jnp.log1p(jnp.exp(-y * (a @ x)))
        right = (y * (a @ x) > 0).mean()
        total = gradient(x, a, y)  # the sum of the step's clipped gradients
        noise, state = privatizer.update(like, state)
        x = x - move * (total + noise.sum(axis=0)) / LEARNERS
        return (x, state), (losses.mean(), right)

    @jax.jit
    def whole(features: Any, labels: Any, key: Any) -> Any:
        _, state = privatizer.init(like)
        _, (losses, right) = jax.lax.scan(step, (jnp.zeros(DIM), (key, state)), (features, labels))
        return losses.mean(), right.mean()

    found = [whole(*_arrays(seed), jax.random.key(seed)) for seed in seeds]
    dim = 2000
    errors, zero = (
        noise_addition.matrix_factorization_privatizer(
            noising, stddev=std, prng_key=jax.random.key(9), dtype=jnp.float32
        ),
        jnp.zeros(dim, jnp.float32),
    )

    def draw(carry: Any, _: Any) -> Any:
        total, state = carry
        noise, state = errors.update(zero, state)
        return (total + noise, state), ((total + noise) ** 2).mean()

    _, squares = jax.lax.scan(draw, (zero, errors.init(zero)), None, length=STEPS)
    # `noise` is that of the sum of ten gradients; ours is stated for their mean.
    scale = sources**0.5 / LEARNERS
    return {
        "loss": [float(each[0]) for each in found],
        "accuracy": [float(each[1]) for each in found],
        "error": float(jnp.sqrt(squares.mean())) * scale,
    }


def opake(trust: str, move: float, seeds: tuple[int, ...]) -> dict[str, Any]:
    """The same loop with opake's clipping, mechanism and noise, and dp-accounting's multiplier."""
    import torch
    from opake import dpftrl, random, types

    strategy = dpftrl.blt_strategy(max_buffers=BUFFERS)
    once: dict[str, Any] = {"n_steps": STEPS, "min_sep": STEPS, "max_participations": 1}
    multiplier = 2.0 * float(strategy.sensitivity(**once)) * multiplier_of_budget()  # replace-one moves a sum by two
    sources = 1 if trust == "central" else LEARNERS

    def noise(dim: tuple[int, int], seed: int) -> Iterator[Any]:
        zero = types.clipped(torch.zeros(dim), max_norm=1.0)
        made, state = dpftrl.mf_gaussian_noise(
            torch.zeros(dim), strategy, **once, noise_multiplier=multiplier, key=random.key(seed)
        )
        for _ in range(STEPS):
            noised, state = made(zero, state)
            yield noised.pytree

    def loss(x: Any, a: Any, y: Any) -> Any:
        return torch.nn.functional.softplus(-y * (a @ x)).mean()

    losses, rights = [], []
    for seed in seeds:
        gradient, clip = dpftrl.clipped_grad(loss, clipping_norm=1.0, batch_argnums=(1, 2))
        features, labels = (torch.from_numpy(each) for each in _arrays(seed))
        x, kept, right = torch.zeros(DIM), 0.0, 0.0
        for a, y, drawn in zip(features, labels, noise((sources, DIM), seed), strict=True):
            margins = y * (a @ x)
            kept += float(torch.nn.functional.softplus(-margins).mean())
            right += float((margins > 0).float().mean())
            total, clip = gradient(x, a, y, state=clip)
            x = x - move * (total.pytree + drawn.sum(dim=0)) / LEARNERS
        losses.append(kept / STEPS)
        rights.append(right / STEPS)
    squares, running = 0.0, torch.zeros(1, 2000)
    for drawn in noise((1, 2000), 9):
        running = running + drawn
        squares += float((running**2).mean())
    error = (squares / STEPS) ** 0.5 * sources**0.5 / LEARNERS
    return {"loss": losses, "accuracy": rights, "error": error}


LIBRARIES = {"veilstream": ours, "jax-privacy": jax_privacy, "opake": opake}


def row(library: str, trust: str, move: float | None, seeds: tuple[int, ...]) -> dict[str, Any]:
    """One row, in a process of its own."""
    given = [sys.executable, "-m", "benchmarks.peers", "--row", library, trust, str(move or MOVES[trust])]
    with tempfile.TemporaryDirectory() as empty:  # nothing is solved beforehand
        environment = os.environ | {"VEILSTREAM_CACHE": empty}
        done = subprocess.run([*given, *map(str, seeds)], capture_output=True, text=True, env=environment)
    if done.returncode:
        return {"library": library, "trust": trust, "refused": done.stderr.strip().splitlines()[-1][:300]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def one(library: str, trust: str, move: float, seeds: tuple[int, ...]) -> dict[str, Any]:
    """What the row's process measures."""
    for seed in seeds:
        _arrays(seed)
    began, began_cpu = time.perf_counter(), time.process_time()
    found = LIBRARIES[library](trust, move, seeds)
    spread = stdev if len(seeds) > 1 else lambda _: 0.0
    return {
        "library": library,
        "trust": trust,
        "step_size": move,
        "error": found["error"],
        "loss": fmean(found["loss"]),
        "loss_std": spread(found["loss"]),
        "accuracy": fmean(found["accuracy"]),
        "accuracy_std": spread(found["accuracy"]),
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - began_cpu,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    """Run all rows and store them; or one; or look for steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--row", nargs="+")
    parser.add_argument("--search", nargs="+", metavar="TRUST")
    options = parser.parse_args()
    if options.row:
        library, trust, move, *seeds = options.row
        print(json.dumps(one(library, trust, float(move), tuple(map(int, seeds)))))
        return
    if options.search:
        moves = tuple(0.1 * 2.0**k for k in range(10))
        for trust in options.search:
            found = simulated(trust, moves, (100, 101))
            print(
                trust,
                {move: round(fmean(each["loss"]), 4) for move, each in zip(moves, found, strict=True)},
                flush=True,
            )
        return
    rows = []
    for library, trust in (
        ("veilstream", "none"),
        ("veilstream", "local"),
        ("jax-privacy", "local"),
        ("opake", "local"),
        ("veilstream", "secret order"),
        ("veilstream", "sum"),
        ("veilstream", "central"),
        ("jax-privacy", "central"),
        ("opake", "central"),
    ):
        rows.append(row(library, trust, None, SEEDS))
        print(rows[-1], file=sys.stderr, flush=True)
    assert options.out is not None
    from experiments.stored import store

    store(options.out, "python -m benchmarks.peers docs/results/peers.json", {"rows": rows}, ", shared with other work")


if __name__ == "__main__":
    main()
