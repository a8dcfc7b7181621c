"""Cells of real messages: many learners of many coordinates, their bytes read and counted.

The learner is the deployed one. Its clients say nothing but known telemetry, which is taken off.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.audit.deployed import WRONG, TelemetryTask, vector_by_hand
from veilstream.audit.disposable import in_memory
from veilstream.audit.statistics.cells import CellCounts
from veilstream.audit.transcript import law_of_terms
from veilstream.deployment.learner import Learner
from veilstream.deployment.release import decode
from veilstream.deployment.terms import Terms
from veilstream.errors import InputError, PrivacyError
from veilstream.learning.tasks import Sample
from veilstream.plans.plan import Plan

Integers = NDArray[np.int64]

DRAWS = 100_000_000
"""Of each message, by default: finds an error of 1.2% in every cell (η² = 1.5e-4), whatever its
pattern; `veilstream.audit.statistics.cells.power` says how surely."""
DIM = 1 << 20
_MOST_WORKERS = 4


class Silent(TelemetryTask):
    """A task whose gradients are zero."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._zero = np.zeros(dim, np.float32)

    def host_gradient(self, z: NDArray[np.float32], sample: Sample) -> NDArray[np.float32]:
        """Nothing."""
        return self._zero


def later_message(rounds: int) -> int:
    """The second message that is looked at, from 0: the tenth, or the last if there are fewer."""
    return min(9, rounds - 1)


def cell_std(terms: Terms, message: int) -> float:
    """σ of one coordinate of a message, in units of the grid: V·‖b_s‖ from the published law."""
    covariance = law_of_terms(terms).covariance
    assert covariance is not None
    return float(np.sqrt(covariance[message, message])) / terms.grid.step


def learner_cells(
    plan: Plan,
    terms: Terms,
    draws: int,
    *,
    messages: Sequence[int] | None = None,
    dim: int = DIM,
    workers: int | None = None,
    make: Callable[[Plan, Any], Learner] = in_memory,
    tick: Callable[[int], None] = lambda _: None,
) -> dict[int, CellCounts]:
    """Counts of some messages (from 0; the first and the tenth), at least ``draws`` of each."""
    wanted = sorted({0, later_message(terms.rounds)} if messages is None else set(messages))
    if draws < 1 or not wanted or not 0 <= wanted[0] <= wanted[-1] < terms.rounds:
        raise InputError("messages", wanted, f"from 0 to {terms.rounds - 1}", "and draws > 0")
    dim = min(dim, draws)
    counts = {message: CellCounts(cell_std(terms, message)) for message in wanted}
    one_at_a_time = threading.Lock()
    runs = -(-draws // dim)

    def run(_: int) -> None:
        with make(plan, Silent(dim)) as learner:
            for message, cells in _messages(learner, terms, wanted):
                with one_at_a_time:
                    counts[message].add(cells)
        with one_at_a_time:
            tick(wanted[-1] + 1)

    most = min(_MOST_WORKERS, os.cpu_count() or 1) if workers is None else workers
    with ThreadPoolExecutor(max_workers=max(1, min(most, runs))) as pool:
        for _ in pool.map(run, range(runs)):
            pass
    return counts


def _messages(learner: Learner, terms: Terms, wanted: Sequence[int]) -> list[tuple[int, Integers]]:
    """Noise in the prefixes of the wanted rounds, read from the bytes, in every coordinate."""
    said = vector_by_hand(terms, np.zeros(learner.task.dim), right=False)  # telemetry alone
    found: list[tuple[int, Integers]] = []
    x = np.zeros(learner.task.dim, np.float32)
    nothing = np.zeros((), np.float32)
    clients = terms.local_steps * terms.clients_per_step
    for r in range(wanted[-1] + 1):
        learner.begin_round(r, x)
        learner.take_many((f"client {r}/{t}", Sample(nothing, WRONG)) for t in range(clients))
        payload = learner.finish_round().payload
        if r in wanted:
            message = decode(payload)
            if message.grid != terms.grid.step:
                raise PrivacyError(f"a message on grid {message.grid:g} where the terms say {terms.grid.step:g}")
            found.append((r, message.prefix - (r + 1) * clients * said))
    return found
