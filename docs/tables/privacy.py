"""The table of privacy.md that follows from the promise itself."""

from __future__ import annotations

import math
from statistics import NormalDist

import veilstream as vs
from tables.cells import Table


def choose_epsilon() -> Table:
    """What a guess about one person is worth at each ε, and the noise that it takes."""
    steps, rows = 1000, []
    made = (vs.mechanisms.buffered(steps), vs.mechanisms.independent(steps))
    for epsilon in (0.1, 0.5, 1, 2, 4, 8):
        row = [f"{epsilon:g}", f"{math.exp(epsilon):.2g}" if epsilon < 8 else f"{math.exp(epsilon):.0f}"]
        for mechanism in made:
            std, guarantee = vs.calibrate(vs.Budget(epsilon, 1e-6), mechanism, clip_norm=1.0)
            mu = guarantee.curve.mu
            if len(row) == 2:
                row.append(f"{NormalDist().cdf(mu / 2):.1%}")
            noise = std * math.sqrt(mechanism.mean_error())
            row.append(f"{noise:.2g}" if noise < 10 else f"{noise:.0f}")
        rows.append(row)
    header = (
        "ε (δ = 1e-6)",
        "odds change by at most (except for δ)",
        "best guess is right",
        "noise of a learner, `buffered`",
        "independent",
    )
    return Table(header, "rrrrr", rows)
