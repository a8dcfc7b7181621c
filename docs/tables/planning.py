"""Tables of planning.md: auto beside the best tuned setting."""

from __future__ import annotations

from tables.cells import Table, read_json

NAMES = {
    "logistic": "synthetic logistic (n = 20, τ = 4, T = 4000, d = 100)",
    "small": "small logistic (n = 10, T = 500, d = 30)",
    "least_squares": "least squares (n = 10, T = 500, d = 30)",
    "covertype": "covertype (7 classes)",
}


def auto() -> Table:
    """Average prequential loss and accuracy, and what the plan alone let expect."""
    stored = read_json("auto.json")
    rows = []
    for row in stored["rows"]:
        tuned, ours = row["tuned_loss"], row["auto_loss"]
        above = ours / tuned - 1.0
        labels = "shares_loss" in row
        wrong = ["above tuned"] if above > stored["failure"] - 1.0 else []
        wrong += ["above the shares"] if labels and ours > row["shares_loss"] else []
        warned = labels and row["expected_loss"] >= row["stated_entropy"]
        wrong += ["says so"] if warned else []
        name = NAMES.get(row["task"], row["task"])
        rows.append(
            [
                name if row["seen_before"] else f"**{name}**",
                f"{row['epsilon']:g}",
                f"{tuned:.3f}",
                f"{ours:.3f}",
                f"{above:+.1%}",
                f"{row['shares_loss']:.3f}" if labels else "",
                f"{row['tuned_accuracy']:.3f}, {row['auto_accuracy']:.3f}" if labels else "",
                f"{row['shares_accuracy']:.3f}" if labels else "",
                ", ".join(wrong),
            ]
        )
    return Table(
        (
            "task",
            "ε",
            "tuned loss",
            "auto loss",
            "above",
            "label shares: loss",
            "accuracy tuned, auto",
            "label shares",
            "",
        ),
        "lrrrrrrrl",
        rows,
    )
