"""A file as a newcomer might have it; made up, and nobody's data."""

from __future__ import annotations

import math
import random
from pathlib import Path

__all__ = ["write_visits"]


def write_visits(path: Path, rows: int = 1500) -> None:
    """Patients of three wards: whether they came back depends on how long they waited."""
    dice = random.Random(5)
    lines = ["patient,date,hour,ward,waited,came_back"]
    for row in range(rows):
        hour, ward = dice.uniform(8, 18), dice.choice("ABC")
        waited = min(max(0.0, dice.gauss(25 if ward == "A" else 45, 15)), 119.0)
        pull = 0.06 * (waited - 35) + (0.8 if ward == "C" else -0.4)
        day = f"2026-{1 + row // 125:02d}-{1 + row % 125 // 5:02d}"
        came_back = "yes" if dice.random() < 1 / (1 + math.exp(-pull)) else "no"
        lines.append(f"p{row:04d},{day},{hour:.1f},{ward},{waited:.0f},{came_back}")
    path.write_text("\n".join(lines) + "\n")
