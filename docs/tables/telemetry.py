"""The table of telemetry.md that follows from its formula."""

from __future__ import annotations

from math import sqrt

from tables.cells import Table


def costs() -> Table:
    """√(B_g² + m·(w/2)²) / B_g - 1, for m metrics of width w = scale·B_g."""
    shown = {("one metric", 0.3): 1, ("three metrics", 0.3): 3, ("one metric", 1): 1}
    rows = [
        [f"{name}, `scale = {scale:g}`", f"{sqrt(1 + count * (scale / 2) ** 2) - 1:.1%}"]
        for (name, scale), count in shown.items()
    ]
    return Table(("", "more noise than without"), "lr", rows)
