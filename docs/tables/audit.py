"""Tables of audit.md."""

from __future__ import annotations

from tables.cells import Table, read_json


def jax_privacy() -> Table:
    """A dense privatizer at its horizon, and beyond it."""
    rows = []
    for row in read_json("audit_jax_privacy.json")["rows"]:
        least = row["mu_at_least"]
        mu = least if isinstance(least, str) else f"{least:.3f}"
        epsilon = row["epsilon_at_least"]
        shown = epsilon if isinstance(epsilon, str) else f"{epsilon:.3g}"
        kept = "more than claimed: the last steps differ by bare gradients" if row["violation"] else "kept"
        rows.append([f"{row['messages']} of 32", f"{row['claimed_mu']:.3f}", mu, shown, kept])
    return Table(("steps", "claimed μ", "μ at least", "ε at least", ""), "lllll", rows)
