"""Tables of benchmarks.md."""

from __future__ import annotations

from tables.cells import Table, read_json

TRUSTS = {
    "none": "without noise: protects no one",
    "local": "each learner by itself; order known",
    "secret order": "each learner by itself; order secret among 100 steps",
    "sum": "a server that opens only sums; 5 of 10 learners honest",
    "central": "one curator sees every record",
}


def peers() -> Table:
    """Every library at every trust that it has."""
    rows = []
    stored = read_json("peers.json")["rows"]
    for trust, shown in TRUSTS.items():
        for row in (each for each in stored if each["trust"] == trust):
            error = f"{row['error']:.2f}" if trust != "none" else ""
            rows.append(
                [
                    shown,
                    row["library"],
                    error,
                    f"{row['accuracy']:.3f} ± {row['accuracy_std']:.3f}",
                    f"{row['loss']:.3f} ± {row['loss_std']:.3f}",
                    f"{row['cpu_seconds']:.0f}",
                    f"{row['peak_mib']:.0f}",
                ]
            )
    header = ("whom people trust", "library", "noise in the mean sum", "accuracy", "loss", "seconds", "MiB")
    return Table(header, "llrrrrr", rows)
