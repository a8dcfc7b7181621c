"""Ten thousand learners in one simulation: time, and memory as the operating system counts it.

    python benchmarks/many_learners.py [--learners 10000 --dim 100 --rounds 1000] [--noise device]

Logistic regression on synthetic clients, one client a learner and step, `buffered` noise at
(2, 1e-3) beside the same without noise, one seed. Compiling and the first block are timed apart.
(Every synthetic learner has a model of its own, so that of ten thousand no shared one is good:
accuracies are not printed.)
On a GPU noise is made on the device, and peak memory is the allocator's; the host's is shown too.
"""

from __future__ import annotations

import argparse
import resource
import time

import jax

from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.simulation.engine import Simulation

_MIB = 2**20


def plan_of(learners: int, dim: int, rounds: int, memory_mib: int, noise: str) -> Plan:
    """Noise-free and buffered, with the step of the paper's figure."""
    server = learners**0.5
    step = {"step_size": 0.4 / server, "server_step_size": server}
    return Plan(
        learning={"rounds": rounds, "learners": learners},
        data={"dim": dim, "held_out": 2000},
        privacy={"epsilon": 2.0, "delta": 1e-3},
        run={"seeds": 1, "evaluate_every": rounds, "memory_mib": memory_mib, "noise": noise, "regret": False},
        methods=[
            {"name": "noise-free", "kind": "noise-free", **step},
            {"name": "buffered", "mechanism": "buffered", **step},
        ],
    )


def host_peak_mib() -> float:
    """Of this process, since it began."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--learners", type=int, default=10_000)
    parser.add_argument("--dim", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--memory-mib", type=int, default=2048, help="what the plan may hold")
    parser.add_argument("--noise", choices=("auto", "host", "device"), default="auto")
    options = parser.parse_args()
    plan = plan_of(options.learners, options.dim, options.rounds, options.memory_mib, options.noise)
    before = host_peak_mib()
    began = time.perf_counter()
    simulation = Simulation(plan, [prepare(plan, m) for m in plan.methods], [0])
    simulation.advance()
    simulation.state()  # waits for what is under way
    compiled, first = time.perf_counter(), simulation.round
    while not simulation.done:
        simulation.advance()
    simulation.state()
    ended = time.perf_counter()
    simulation.close()
    device = jax.devices()[0]
    held = (device.memory_stats() or {}).get("peak_bytes_in_use")
    on_device = "" if held is None else f", device's peak {held / _MIB:.0f} MiB"
    later = options.rounds - first
    pace = f"{1e3 * (ended - compiled) / later:.1f} ms a round" if later else "one block"
    print(
        f"{options.learners:,} learners, d = {options.dim}, {options.rounds} rounds of one step, "
        f"2 methods, one seed on {device.device_kind}, noise on the {simulation.noise_place}: "
        f"{ended - began:.1f} s in all, first block of {first} rounds with compiling "
        f"{compiled - began:.1f} s, then {pace}; host's peak {host_peak_mib():.0f} MiB "
        f"({before:.0f} MiB before it began){on_device}"
    )


if __name__ == "__main__":
    main()
