"""What a simulation really holds, beside what the plan of its memory said.

    python benchmarks/memory.py            the paper's CNN, then a network of 10 million parameters

On a GPU: the allocator's peak. On a CPU: the process's peak resident memory (one case a process:
--case cnn or --case large), which includes the data set, the compiler and the interpreter.
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from veilstream.learning.cnn import Cnn
from veilstream.learning.models.pytree import PytreeTask
from veilstream.plans.clients import stream_of
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.simulation.engine import Simulation, memory_of

HIDDEN = 12_800


def network_init(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "in": np.float32(rng.standard_normal((784, HIDDEN)) * 0.02),
        "bias": np.zeros(HIDDEN, np.float32),
        "out": np.float32(rng.standard_normal((HIDDEN, 10)) * 0.01),
    }


def scores(params: Any, pixels: Any) -> Any:
    hidden = jax.nn.relu((pixels.astype(jnp.float32) / 255.0) @ params["in"] + params["bias"])
    return hidden @ params["out"]


def network_loss(params: Any, pixels: Any, digit: Any) -> Any:
    out = scores(params, pixels)
    return jax.nn.logsumexp(out) - out[digit]


def case(name: str) -> None:
    step = {"step_size": 0.003, "server_step_size": 2.0}
    large = name == "large"
    plan = Plan(
        learning={
            "rounds": 100,
            "local_steps": 2,
            "learners": 4 if large else 10,
            "task": "custom" if large else "cnn",
        },
        data={"kind": "mnist", "split": "even", "held_out": 500},
        privacy={"epsilon": 8.0, "delta": 1e-3},
        run={"seeds": 1 if large else 4, "evaluate_every": 100, "memory_mib": 10240 if large else 4096},
        methods=[
            {"name": "noise-free", "kind": "noise-free", **step},
            {"name": "buffered", "mechanism": "buffered", "averaging": 3.0, **step},
        ],
    )
    task: Any = Cnn()
    if large:
        task = PytreeTask(
            network_loss, network_init, lambda params, x: scores(params, x).argmax(axis=-1), classifies=True
        )
    prepared = [prepare(plan, m) for m in plan.methods]
    stream = stream_of(plan)
    wanted = memory_of(plan, prepared, plan.run.seeds, task, stream)
    seeds = list(range(plan.run.seeds))
    simulation = Simulation(plan, prepared, seeds, task=task, stream=stream)
    simulation.advance()
    began, first = time.monotonic(), simulation.round
    while not simulation.done:
        simulation.advance()
    a_step = (time.monotonic() - began) / ((100 - first) * 2)
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    peak = stats.get("peak_bytes_in_use") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"{name}: d = {task.dim:,}, {plan.learning.learners} learners, {len(seeds)} seeds, "
        f"2 methods on {device.device_kind}, noise on the {simulation.noise_place}: "
        f"blocks of {simulation.block_rounds} rounds; planned {wanted.bytes / 2**30:.2f} GiB of "
        f"{plan.run.memory_mib / 1024:.0f}, peak {peak / 2**30:.2f} GiB; {1e3 * a_step:.2f} ms a "
        f"step; accuracy {simulation.held_out_accuracy[:, :, -1].mean(axis=1).round(3)}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=("cnn", "large"), action="append")
    for name in parser.parse_args().case or ("cnn", "large"):
        case(name)


if __name__ == "__main__":
    main()
