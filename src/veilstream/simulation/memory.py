"""Memory of a simulation, and the block length that fits it.

Per seed, in floats of four bytes, for M methods of one shape, n learners, d parameters, mechanisms
with k state vectors each and blocks of L steps:

    states      Σ k·n·d                       twice on the device: before a block and after it
    a block     Σ c·L·n·d                     c copies: made, handed over, used
    a product   2·k·n·d                       operand and result, where noise is made on the device
    a step      _STEP_COPIES·M·n·d            gradients, clipped gradients, noise, local models
    a client    `workspace` of the task       activations and gradient, for every client of a step
    published   _KEPT_COPIES·M·d              for every round that is looked at, and one more

The horizon T appears nowhere. If the budget cannot hold all seeds at once, they run in turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from veilstream.errors import InputError

_STEP_COPIES = 8
_KEPT_COPIES = 4  # in the loop, handed over, and of the blocks in flight
_DEVICE_STEPS = 128
_FIXED = 200 * 2**20  # interpreter, compiler, compiled code


@dataclass(frozen=True)
class GroupSize:
    """Methods of one shape, as far as memory is concerned."""

    methods: int
    steps: int
    clients_per_step: int
    states: tuple[int, ...]  # State vectors of each mechanism


@dataclass(frozen=True)
class MemoryPlan:
    """Seeds and rounds at once that fit the budget."""

    seeds_together: int
    rounds_per_block: int
    bytes: int  # Estimated peak of a process, besides the data set itself


def memory_plan(
    *,
    budget_bytes: int,
    groups: Sequence[GroupSize],
    seeds: int,
    learners: int,
    dim: int,
    rounds: int,
    evaluate_every: int = 1,
    workspace: int = 0,
    feature_floats: int = 0,
    pooled: bool = False,
    on_host: bool = False,
    processes: int = 1,
) -> MemoryPlan:
    """Seeds together and rounds in a block, per process; ``feature_floats`` is the size of a client's record."""
    width = learners * dim
    methods = sum(g.methods for g in groups)
    standing = (1 if on_host else 2) * sum(sum(g.states) for g in groups) * width
    standing += (3 + _KEPT_COPIES) * methods * dim
    records = [g.steps * g.clients_per_step * learners * feature_floats for g in groups]
    step = max(
        _STEP_COPIES * g.methods * width
        + g.methods * learners * g.clients_per_step * workspace
        + (met if pooled else 0)
        for g, met in zip(groups, records, strict=True)
    )
    product = 0 if on_host else 2 * max((k for g in groups for k in g.states), default=0) * width
    # Every group's noise is made ahead on the host; on the device one group runs after the other.
    together_or_in_turn = sum if on_host else max
    a_round = together_or_in_turn(
        (4 if on_host else 3) * len(g.states) * g.steps * width + (0 if pooled else 3 * met)
        for g, met in zip(groups, records, strict=True)
    )
    a_round += -(-_KEPT_COPIES * methods * dim // evaluate_every)
    fixed = 4 * (standing + step + product)
    room = budget_bytes // processes - _FIXED
    least = fixed + 4 * a_round
    if least > room:
        need = -(-processes * (least + _FIXED) // 2**20)
        each = f" in each of {processes} processes" if processes > 1 else ""
        fewer = ", or fewer processes" if processes > 1 else ""
        raise InputError(
            "run.memory_mib",
            budget_bytes // 2**20,
            f"at least {need} for one seed of this plan{each}",
            "raise it, or take fewer methods, fewer learners or a mechanism with less state" + fewer,
        )
    # Few long blocks cost less than many short ones, but all seeds at once save most.
    together = min(seeds, room // least)
    per_seed = room // together
    block = max(1, min(-(-rounds // 50), (per_seed - fixed) // max(1, 4 * a_round)))
    if not on_host:  # the matrices of a program in long blocks would take memory of their own
        block = max(1, min(block, _DEVICE_STEPS // max(g.steps for g in groups)))
    return MemoryPlan(int(together), int(block), int(_FIXED + together * (fixed + 4 * block * a_round)))
