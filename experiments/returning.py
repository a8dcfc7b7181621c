"""Noise for people who return: every mechanism made for them, beside the certified dense optimum.

    python -m experiments.returning docs/results/returning.csv

Mean variance of a running sum at sensitivity one, for at most k visits at least b steps apart; ``bound`` is what no
C with b bands can be below, and ``bands`` the width that `banded` chose. Five minutes on one core.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from veilstream import mechanisms
from veilstream.mechanisms.optimal import RETURNING_LIMIT

SHORT = [(64, 8, 8), (128, 5, 8), (256, 4, 32), (400, 10, 4), (400, 5, 80), (1000, 20, 16)]
LONG = [(1000, 4, 32), (5000, 10, 16), (5000, 50, 8), (5000, 6, 700)]
COLUMNS = ("horizon", "visits", "separation", "usual", "banded", "bands", "inverse", "buffered", "optimal", "bound")


def row(T: int, k: int, b: int) -> dict[str, object]:
    """One line of the table."""
    part = (k, b)
    tuned = mechanisms.banded(T, participation=part)
    best = mechanisms.optimal(T, participation=part) if T <= RETURNING_LIMIT else None
    errors = {
        "usual": mechanisms.banded(T).mean_error(part),
        "banded": tuned.mean_error(part),
        "inverse": mechanisms.banded_inverse(T, 8, participation=part).mean_error(part),
        "buffered": mechanisms.buffered(T, objective="mean", participation=part).mean_error(part),
        "optimal": None if best is None else best.mean_error(part),
        "bound": None if best is None else best.lower_bound,
    }
    shown = {name: "" if error is None else f"{error:.4f}" for name, error in errors.items()}
    return {"horizon": T, "visits": k, "separation": b, "bands": tuned.bandwidth, **shown}


def main(path: Path) -> None:
    """Write the table, a line as soon as it is known."""
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        out.writeheader()
        for setting in (*SHORT, *LONG):
            found = row(*setting)
            out.writerow(found)
            file.flush()
            sys.stderr.write(f"{found}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
