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


def mechanisms() -> Table:
    """What `veilstream plan demo` prints, as noise of one learner, and against independent noise."""
    stored = read_json("plan_demo.json")
    found = {(row["mechanism"], row["objective"]): row for row in stored["mechanisms"]}
    independent = found["independent", None]["error_round_ends"]
    shown = {
        ("buffered", None): "`buffered` (recommended)",
        ("optimal", "published"): '`optimal`, `objective = "published"`',
        ("optimal", None): "`optimal`",
        ("toeplitz_normalised", None): "`toeplitz_normalised`",
        ("toeplitz", None): "`toeplitz` (MF iii)",
        ("tree_full", None): "`tree_full`",
        ("tree_online", None): "`tree_online`",
        ("tree", None): "`tree` (MF i)",
        ("banded", None): "`banded` (for repeated visits)",
        ("independent", None): "`independent`",
    }
    rows = []
    for key, name in shown.items():
        row = found[key]
        errors = [f"{row[field]:.4g}" for field in ("error_max", "error_mean", "error_round_ends")]
        share = f"{row['error_round_ends'] / independent:.3g}x"
        rows.append([name, f"{row['sensitivity']:.4g}", f"{row['noise_std']:.4g}", *errors, share])
    header = ("mechanism", "sensitivity", "noise std V", "std max", "std mean", "std rounds", "vs independent")
    return Table(header, "lrrrrrr", rows)
