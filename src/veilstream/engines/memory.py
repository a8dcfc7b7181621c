"""How much a simulation holds at once, and what follows for its block length.

Per seed, in floats of four bytes, for M methods of one shape, n learners, d parameters, mechanisms
with k state vectors each and blocks of L steps:

    states      Σ k·n·d                       whatever the horizon
    a block     Σ c·L·n·d                     c copies: made, handed over, used
    a product   2·k·n·d                       operand and result, where noise is made on the device
    a step      _STEP_COPIES·M·n·d            gradients, clipped gradients, noise, local models
    a client    `workspace` of the task       activations, for every client of a step

The horizon T appears nowhere. Where the budget cannot hold all seeds at once they run in turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from veilstream.errors import InputError

__all__ = ["GroupSize", "MemoryPlan", "memory_plan"]

_STEP_COPIES = 8
_FIXED = 200 * 2**20  # interpreter, compiler, compiled code


@dataclass(frozen=True)
class GroupSize:
    """Methods of one shape, as far as memory is concerned."""

    methods: int
    steps: int
    clients_per_step: int
    states: tuple[int, ...]
    """State vectors of each mechanism."""


@dataclass(frozen=True)
class MemoryPlan:
    """How a run is cut to fit."""

    seeds_together: int
    rounds_per_block: int
    bytes: int
    """Estimated peak, besides the data set itself."""


def memory_plan(
    *,
    budget_bytes: int,
    groups: Sequence[GroupSize],
    seeds: int,
    learners: int,
    dim: int,
    rounds: int,
    workspace: int = 0,
    feature_floats: int = 0,
    on_host: bool = False,
) -> MemoryPlan:
    """Seeds that run together and rounds in a block.

    ``feature_floats`` is the size of one client's record where records travel with the block (0
    where they are looked up in a pool); ``on_host`` says where noise is made.
    """
    width = learners * dim
    standing = sum(sum(g.states) for g in groups) * width
    standing += 3 * sum(g.methods for g in groups) * dim
    step = max(
        _STEP_COPIES * g.methods * width + g.methods * learners * g.clients_per_step * workspace
        for g in groups
    )
    product = 0 if on_host else 2 * max((k for g in groups for k in g.states), default=0) * width
    a_round = max(
        (4 if on_host else 3) * len(g.states) * g.steps * width
        + 3 * g.steps * g.clients_per_step * learners * feature_floats
        for g in groups
    )
    fixed = 4 * (standing + step + product)
    room = budget_bytes - _FIXED
    least = fixed + 4 * a_round
    if least > room:
        need = -(-(least + _FIXED) // 2**20)
        raise InputError(
            "run.memory_mib", budget_bytes // 2**20, f"at least {need} for one seed of this plan",
            "raise it, or take fewer methods, fewer learners or a mechanism with less state",
        )  # fmt: skip
    # Few long blocks cost less than many short ones, but all seeds at once save most.
    together = min(seeds, room // least)
    per_seed = room // together
    block = max(1, min(-(-rounds // 50), (per_seed - fixed) // max(1, 4 * a_round)))
    return MemoryPlan(
        int(together), int(block), int(_FIXED + together * (fixed + 4 * block * a_round))
    )
