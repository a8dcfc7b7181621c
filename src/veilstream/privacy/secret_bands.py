"""Which C a secret order wants: banded, with as many bands as the accounting says.

Where nobody knows at which step a record is used, columns that overlap less hide it better, and those that overlap
more cost less error. The best number of bands falls with ε, so it is chosen by the accounting, not by
the plain error.
"""

from __future__ import annotations

import math

import numpy as np

from veilstream.mechanisms.banded import banded
from veilstream.mechanisms.factorization import Factorization
from veilstream.mechanisms.solution_cache import load_or_solve
from veilstream.mechanisms.workload import Workload
from veilstream.privacy.guarantee import Budget, Neighbours
from veilstream.privacy.mixture_bounds import Floats
from veilstream.privacy.secret_order import rough_secret_noise
from veilstream.progress import progress

_BANDS = (1, 2, 4, 8, 16, 32, 64)
_FIRST = 3  # of them: where the search begins
_METHOD = 4  # changes with anything that makes another choice


def banded_for_secret_order(
    budget: Budget, workload: Workload, neighbours: Neighbours, window: int | None = None
) -> Factorization:
    """`mechanisms.banded` with the number of bands, up to 64, that leaves the least noise in what is published."""
    return _made(workload.horizon, bands_for_secret_order(budget, workload, neighbours, window))


def bands_for_secret_order(
    budget: Budget, workload: Workload, neighbours: Neighbours, window: int | None = None
) -> int:
    """That number. It is found once and cached; no promise rests on it."""
    T = workload.horizon
    tried = [b for b in _BANDS if b <= max(1, T // 2)]
    recipe = {
        "mechanism": "secret-order-bands",
        "horizon": T,
        "method": _METHOD,
        "workload": workload.as_dict(),
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "neighbours": neighbours.value,
        "window": window,
    }

    def solve() -> dict[str, Floats]:
        noise: dict[int, float] = {}

        def of(place: int) -> float:
            if place not in noise:
                mechanism = _made(T, tried[place])
                each = rough_secret_noise(budget, mechanism, neighbours, window)
                noise[place] = each * math.sqrt(workload.error(mechanism).mean) / mechanism.sensitivity()
                tick(1)
            return noise[place]

        with progress("choosing bands for a secret order", len(tried)) as tick:
            here = min(_FIRST, len(tried) - 1)
            while True:
                around = [p for p in (here - 1, here, here + 1) if 0 <= p < len(tried)]
                best = min(around, key=of)
                if best == here:
                    return {"bands": np.array([float(tried[here])])}
                here = best

    return int(load_or_solve(recipe, {"bands": 1}, solve)["bands"][0])


def _made(horizon: int, bands: int) -> Factorization:
    return banded(horizon, bands)
