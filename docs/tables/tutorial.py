"""The table of tutorial.md."""

from __future__ import annotations

from tables.cells import Table, read_json


def trees() -> Table:
    """The run at ε = 2; without noise all three seeds are the same."""
    rows = []
    for row in read_json("tutorial.json")["rows"]:
        if row["epsilon"] != 2:
            continue
        noisy = row["method"] != "noise-free"
        cells = []
        for name in ("accuracy", "average_loss"):
            spread = f" ± {row[f'{name}_std']:.3f}" if noisy else ""
            cells.append(f"{row[name]:.3f}{spread}")
        rows.append([row["method"], "(2, 1e-6)" if noisy else "nothing", *cells])
    return Table(("method", "protects (ε, δ)", "accuracy", "average loss"), "llrr", rows)
